"""What a rollout is worth, in named channels: `async (Rollout) -> {channel: number, or None: does not apply}`."""

from whippletree.reward.adapters import from_rubric, from_trl, from_verifiers
from whippletree.reward.channels import error_counts, score
from whippletree.reward.exact import exact_answer
from whippletree.reward.from_harness import from_harness
from whippletree.reward.gym import reasoning_gym_score
from whippletree.reward.math import math_equal
from whippletree.reward.text import assistant_texts, final_text

__all__ = [
    "assistant_texts",
    "error_counts",
    "exact_answer",
    "final_text",
    "from_harness",
    "from_rubric",
    "from_trl",
    "from_verifiers",
    "math_equal",
    "reasoning_gym_score",
    "score",
]
