"""Log-ratios of the sampled tokens, safe where they may not train, and their sums over turns or rollouts."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from whippletree.types import Batch

LARGEST = 20.0  # log-ratios are held to +-20 (a factor of 4.9e8), so that their exponential times 0 is 0


def masked(x_N: Tensor, batch: Batch) -> Tensor:
    """[N] `x_N` on trainable tokens, 0 elsewhere; the choice is on the input, so no NaN passes into a gradient."""
    return torch.where(batch.trainable_N, x_N, 0.0)


def log_ratio(new_N: Tensor, old_N: Tensor, batch: Batch) -> Tensor:
    """[N] `new_N - old_N` within +-20 on trainable tokens, 0 elsewhere."""
    return (masked(new_N, batch) - masked(old_N, batch)).clamp(-LARGEST, LARGEST)


def sum_over(x_N: Tensor, batch: Batch, *, level: Literal["turn", "rollout"]) -> Tensor:
    """[N] the sum of `x_N` over the turn or rollout of each token."""
    owner_N, owners = (batch.turn_N, batch.turns) if level == "turn" else (batch.rollout_N, batch.rollouts)
    return torch.zeros(owners, dtype=x_N.dtype).index_add(0, owner_N, x_N)[owner_N]


def mean_over(x_N: Tensor, batch: Batch, *, level: Literal["turn", "rollout"]) -> Tensor:
    """[N] the mean of `x_N` over the trainable tokens of each token's turn or rollout; `x_N` is 0 elsewhere."""
    count_N = sum_over(batch.trainable_N.to(x_N.dtype), batch, level=level)
    return sum_over(x_N, batch, level=level) / count_N.clamp(min=1)
