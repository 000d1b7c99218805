"""Credit from comparison: each rollout's reward against those of its group or batch, equal on all its tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from whippletree.credit.groups import group_size, known_reward, mean_within, on_tokens, std_within
from whippletree.types import Batch

FLAT = 1e-6  # a standard deviation below this is rounding, not a difference


def group_mean(batch: Batch, *, scale: Literal["std", "none"] = "std", eps: float = 0.0) -> Tensor:
    """[N] reward minus the mean of its group, over the group's standard deviation (divisor G - 1) if so scaled.

        A_i = (r_i - mean(r)) / (std(r) + eps)        scale="std"
        A_i =  r_i - mean(r)                          scale="none"

    A group of equal rewards (std below 1e-6) or of a single rollout gives exactly 0, so no `eps` is needed; common
    trainers add 1e-4 or 1e-9.

    Raises:
        ValueError: a rollout's reward is missing.

    Source: Shao et al. 2024, DeepSeekMath (arXiv:2402.03300); without std Liu et al. 2025 (arXiv:2503.20783).
    """
    reward_R = known_reward(batch)
    std_R = std_within(reward_R, batch.group_R)
    divisor_R = std_R + eps if scale == "std" else torch.ones_like(std_R)
    centred_R = reward_R - mean_within(reward_R, batch.group_R)
    return on_tokens(torch.where(std_R < FLAT, 0.0, centred_R / divisor_R), batch)


def leave_one_out(batch: Batch) -> Tensor:
    """[N] reward minus the mean reward of the *other* rollouts of the group.

        A_i = r_i - (1 / (G - 1)) * sum_{j != i} r_j

    Raises:
        ValueError: a group has a single rollout, so it has no others to compare with; or a reward is missing.

    Source: Kool et al. 2019; for language models Ahmadian et al. 2024, Back to Basics (arXiv:2402.14740).
    """
    size_R = group_size(batch.group_R)
    if (size_R == 1).any():
        raise ValueError(
            f"leave_one_out needs two or more rollouts in each group, but groups "
            f"{batch.group_R[size_R == 1].tolist()} have one. Sample more per task, or use credit.batch_mean."
        )
    reward_R = known_reward(batch)
    # r - mean(others) == (r - mean(all)) * G / (G - 1)
    return on_tokens((reward_R - mean_within(reward_R, batch.group_R)) * size_R / (size_R - 1), batch)


def batch_mean(batch: Batch) -> Tensor:
    """[N] reward minus the batch's mean, over the batch's standard deviation; statistics over *rollouts*.

        A_i = (r_i - mean_batch(r)) / std_batch(r)

    Every rollout counts once, however long; `whitened` takes its statistics over tokens instead.

    Raises:
        ValueError: a rollout's reward is missing.

    Source: Hu et al. 2025, REINFORCE++ (arXiv:2501.03262), global normalisation.
    """
    reward_R, whole_R = known_reward(batch), torch.zeros_like(batch.group_R)
    std_R = std_within(reward_R, whole_R)
    centred_R = reward_R - mean_within(reward_R, whole_R)
    return on_tokens(torch.where(std_R < FLAT, 0.0, centred_R / std_R), batch)
