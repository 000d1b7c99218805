"""Evidence: `async (rollouts, Batch, Services) -> {column: Tensor}`, what is read besides rewards."""

from whippletree.evidence.judge import Answer, Itself, Judge, Scripted, Server, judge_of
from whippletree.evidence.judged import better, first_mistake, turn_scores
from whippletree.evidence.quoting import numbered, question, quoted
from whippletree.evidence.scored import logp_under, reference_logps, returns, trainer_logps, values
from whippletree.evidence.scoring import ServedScorer, forward_kl, jensen_shannon, outcomes, outcomes_of, reverse_kl

__all__ = [
    "Answer",
    "Itself",
    "Judge",
    "Scripted",
    "ServedScorer",
    "Server",
    "better",
    "first_mistake",
    "forward_kl",
    "jensen_shannon",
    "judge_of",
    "logp_under",
    "numbered",
    "outcomes",
    "outcomes_of",
    "question",
    "quoted",
    "reference_logps",
    "returns",
    "reverse_kl",
    "trainer_logps",
    "turn_scores",
    "values",
]
