"""Averages: `(Batch) -> weight_N`, how much each sampled token counts; the loss of a step is sum(weight_N * loss_N).

Weights depend on the batch alone and are taken from the whole of it, so micro-batches add up to its gradient exactly.
Untrainable tokens weigh 0 and count in no denominator; a turn or rollout without a trainable token counts as if it
were not there. A batch without any has weights 0. Except for `constant`, weights sum to 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whippletree.types import Batch


def token_mean(batch: Batch) -> Tensor:
    """[N] every trainable token of the batch has the same share, so long replies count more.

        w_t = 1 / (trainable tokens)

    Source: Yu et al. 2025, DAPO (arXiv:2503.14476), section 3.3.
    """
    return _shares(torch.zeros_like(batch.turn_N), 1, batch)


def turn_mean(batch: Batch) -> Tensor:
    """[N] every turn has the same share, so rollouts with many turns count more.

    w_t = 1 / (turns * trainable tokens of the turn)
    """
    return _shares(batch.turn_N, batch.turns, batch)


def rollout_mean(batch: Batch) -> Tensor:
    """[N] every rollout has the same share; its turns share it, a token of one weighing as a token of another.

        w_t = 1 / (rollouts * trainable tokens of the rollout)

    Source: Shao et al. 2024, DeepSeekMath (arXiv:2402.03300), eq. 3, where a rollout is one reply.
    """
    return _shares(batch.rollout_N, batch.rollouts, batch)


def constant(batch: Batch, *, tokens: float) -> Tensor:
    """[N] a sum over the tokens of each rollout, divided by the same number for all, so length shifts no weight.

        w_t = 1 / (rollouts * tokens)

    Source: Liu et al. 2025, Dr. GRPO (arXiv:2503.20783), section 3.2.
    """
    rollouts = (_count(batch.rollout_N, batch.rollouts, batch) > 0).sum().clamp(min=1)
    return batch.trainable_N.float() / (rollouts * tokens)


def _shares(owner_N: Tensor, owners: int, batch: Batch) -> Tensor:
    """[N] one over (owners with trainable tokens * trainable tokens of this owner), 0 on untrainable tokens."""
    count = _count(owner_N, owners, batch)
    weight = 1.0 / (count.clamp(min=1) * (count > 0).sum().clamp(min=1))
    return torch.where(batch.trainable_N, weight[owner_N], 0.0)


def _count(owner_N: Tensor, owners: int, batch: Batch) -> Tensor:
    return torch.bincount(owner_N[batch.trainable_N], minlength=owners)
