"""Statistics within groups by scatter, and the way from a number a rollout to a number a token.

The letter G here: the groups of the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whippletree.types import Batch


def group_size(group_R: Tensor) -> Tensor:
    """[R] how many rollouts stand in each rollout's group."""
    index_R, size_G = _groups(group_R)
    return size_G[index_R]


def mean_within(x_R: Tensor, group_R: Tensor) -> Tensor:
    """[R] float64: the mean of `x_R` over each rollout's group.

    In float64 the sum of equal float32 numbers is exact, so equal rewards are exactly their mean.
    """
    index_R, size_G = _groups(group_R)
    total_G = torch.zeros(len(size_G), dtype=torch.float64).index_add_(0, index_R, x_R.double())
    return (total_G / size_G)[index_R]


def std_within(x_R: Tensor, group_R: Tensor) -> Tensor:
    """[R] float64: the sample standard deviation (divisor G - 1) over each rollout's group; 0 in a group of one."""
    square_R = (x_R.double() - mean_within(x_R, group_R)).square()
    size_R = group_size(group_R)
    return (mean_within(square_R, group_R) * size_R / (size_R - 1).clamp(min=1)).sqrt()


def known_reward(batch: Batch) -> Tensor:
    """[R] the reward of each rollout, checked to be known.

    Raises:
        ValueError: a rollout has no reward (NaN), and a missing reward is not a reward of 0.
    """
    missing = batch.reward_R.isnan().nonzero()[:, 0].tolist()
    if missing:
        raise ValueError(
            f"credit needs the reward of every rollout, but rollouts {missing} have none (channels "
            f"{list(batch.channels)} are all NaN). Missing is not zero: drop these rollouts, or score them again."
        )
    return batch.reward_R


def on_tokens(advantage_R: Tensor, batch: Batch) -> Tensor:
    """[N] float32: the number of each token's rollout, 0 on tokens that may not train."""
    advantage_N = advantage_R.float()[batch.rollout_N]
    return torch.where(batch.trainable_N, advantage_N, 0.0)


def _groups(group_R: Tensor) -> tuple[Tensor, Tensor]:
    """Each rollout's group numbered from 0 [R], and the size of each group [G]."""
    _, index_R, size_G = torch.unique(group_R, return_inverse=True, return_counts=True)
    return index_R, size_G
