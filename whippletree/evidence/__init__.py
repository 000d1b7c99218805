"""Evidence: `async (rollouts, Batch, Services) -> {column: Tensor}`, what is read besides rewards."""

from whippletree.evidence.scored import reference_logps, returns, trainer_logps, values

__all__ = ["reference_logps", "returns", "trainer_logps", "values"]
