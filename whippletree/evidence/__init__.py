"""Evidence: `async (rollouts, Batch, Services) -> {column: Tensor}`, what is read besides rewards."""

from whippletree.evidence.judge import Answer, Itself, Judge, Scripted, Server, judge_of
from whippletree.evidence.judged import better, first_mistake, turn_scores
from whippletree.evidence.quoting import numbered, question, quoted
from whippletree.evidence.scored import reference_logps, returns, trainer_logps, values

__all__ = [
    "Answer",
    "Itself",
    "Judge",
    "Scripted",
    "Server",
    "better",
    "first_mistake",
    "judge_of",
    "numbered",
    "question",
    "quoted",
    "reference_logps",
    "returns",
    "trainer_logps",
    "turn_scores",
    "values",
]
