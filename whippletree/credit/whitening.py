"""Whitening of any credit over the sampled tokens of the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from whippletree.credit.baselines import FLAT
from whippletree.types import Batch, Credit


def whiten(advantage_N: Tensor, trainable_N: Tensor) -> Tensor:
    """[N] advantages with mean 0 and variance 1 (divisor N) over trainable tokens; 0 elsewhere, and 0 if all are equal.

    A'_t = (A_t - mean(A)) / std(A)
    """
    if not trainable_N.any():
        return torch.zeros_like(advantage_N)
    known = advantage_N[trainable_N].double()
    std = known.std(correction=0)
    white_N = torch.zeros_like(advantage_N)
    if std >= FLAT:
        white_N[trainable_N] = ((known - known.mean()) / std).to(advantage_N.dtype)
    return white_N


def whitened(batch: Batch, *, credit: Credit) -> Tensor:
    """[N] the advantages of `credit`, whitened over the trainable *tokens* of the batch, so long rollouts count more.

    Source: Hu et al. 2025, REINFORCE++ (arXiv:2501.03262), equation of the normalised advantage; also the usual
    practice of PPO, e.g. Ouyang et al. 2022 (arXiv:2203.02155).
    """
    return whiten(credit(batch), batch.trainable_N)
