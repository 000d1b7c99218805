"""Credit: `(Batch) -> advantage_N`, who earned the reward. Every part gives 0 on tokens that may not train."""

from whippletree.credit.baselines import batch_mean, group_mean, leave_one_out
from whippletree.credit.groups import group_size, known_reward, mean_within, on_tokens, std_within
from whippletree.credit.temporal import gae, reward_to_go
from whippletree.credit.tree import tree_advantage
from whippletree.credit.turns import (
    proportional,
    redistributed,
    redistributed_over_tokens,
    shuffled,
    softmax_within,
    top_turns,
    turn_baseline,
    turn_count,
    turn_mean,
    turn_position,
    turn_returns,
    turn_sum,
    turn_to_tokens,
    turn_tokens,
    uniform,
)
from whippletree.credit.whitening import whiten, whitened

__all__ = [
    "batch_mean",
    "gae",
    "group_mean",
    "group_size",
    "known_reward",
    "leave_one_out",
    "mean_within",
    "on_tokens",
    "proportional",
    "redistributed",
    "redistributed_over_tokens",
    "reward_to_go",
    "shuffled",
    "softmax_within",
    "std_within",
    "top_turns",
    "tree_advantage",
    "turn_baseline",
    "turn_count",
    "turn_mean",
    "turn_position",
    "turn_returns",
    "turn_sum",
    "turn_to_tokens",
    "turn_tokens",
    "uniform",
    "whiten",
    "whitened",
]
