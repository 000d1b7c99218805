"""Credit: `(Batch) -> advantage_N`, who earned the reward. Every part gives 0 on tokens that may not train."""

from whippletree.credit.baselines import batch_mean, group_mean, leave_one_out
from whippletree.credit.groups import group_size, known_reward, mean_within, on_tokens, std_within
from whippletree.credit.temporal import gae, reward_to_go
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
    "reward_to_go",
    "std_within",
    "whiten",
    "whitened",
]
