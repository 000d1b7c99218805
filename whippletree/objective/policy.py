"""Objectives that move the policy along an advantage. With advantage 0 each gives loss 0 and gradient 0.

rho_t = exp(log pi(t) - log pi_old(t)), with log-ratios held within +-20.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from whippletree.objective.ratios import log_ratio, masked, mean_over
from whippletree.types import Batch, Forward


def policy_gradient(forward: Forward, advantage_N: Tensor, batch: Batch) -> Tensor:
    """[N] the plain score-function loss: its gradient is the policy gradient where the sampler is the policy.

        loss_t = -A_t * log pi(t)

    Source: Williams 1992, Simple Statistical Gradient-Following Algorithms (REINFORCE).
    """
    return -masked(advantage_N, batch) * masked(forward.logp_N, batch)


def clipped_ratio(
    forward: Forward,
    advantage_N: Tensor,
    batch: Batch,
    *,
    low: float = 0.2,  # PPO, section 6.1
    high: float = 0.2,
    dual: float | None = None,
) -> Tensor:
    """[N] the smaller of the plain and the clipped ratio times the advantage, negated.

        loss_t = -min(rho_t * A_t, clip(rho_t, 1 - low, 1 + high) * A_t)
        loss_t = -max(that min, dual * A_t)      where A_t < 0, if `dual` is given (above 1; 3 in the source)

    `low=inf, high=inf` clips nothing.

    Source: Schulman et al. 2017, PPO (arXiv:1707.06347) eq. 7; separate bounds Yu et al. 2025, DAPO
    (arXiv:2503.14476); dual clip Ye et al. 2020 (arXiv:1912.09729).
    """
    ratio_N = log_ratio(forward.logp_N, batch.logp_old_N, batch).exp()
    return _clipped(ratio_N, masked(advantage_N, batch), low=low, high=high, dual=dual)


def sequence_ratio(
    forward: Forward,
    advantage_N: Tensor,
    batch: Batch,
    *,
    low: float = 3e-4,  # GSPO, section 5.1
    high: float = 4e-4,
    level: Literal["turn", "rollout"] = "turn",
) -> Tensor:
    """[N] the clipped objective with one length-normalised ratio for all tokens of a turn (or of a rollout).

        s = exp(mean_t (log pi(t) - log pi_old(t)))                  over the trainable tokens of the turn
        s_t = sg(s) * pi(t) / sg(pi(t))                              value s, gradient through each token
        loss_t = -min(s_t * A_t, clip(s_t, 1 - low, 1 + high) * A_t)

    The paper's sequence is one reply to one query, which is a turn here. The bounds were measured on such means; a mean
    over a long rollout draws every ratio towards 1, and one turn sampled by an older version would clip its fresh
    neighbours. `level="rollout"` takes the unit that is rewarded instead. With one turn both are the paper.

    Source: Zheng et al. 2025, GSPO (arXiv:2507.18071), eq. 5-7, with the token form of section 4.3.
    """
    log_N = log_ratio(forward.logp_N, batch.logp_old_N, batch)
    mean_N = mean_over(log_N, batch, level=level)
    ratio_N = (mean_N.detach() + log_N - log_N.detach()).exp()
    return _clipped(ratio_N, masked(advantage_N, batch), low=low, high=high, dual=None)


def clipped_weight(
    forward: Forward,
    advantage_N: Tensor,
    batch: Batch,
    *,
    low: float = float("inf"),  # the paper tunes the upper bound alone
    high: float = 4.0,
) -> Tensor:
    """[N] the policy gradient with a clipped ratio as a fixed weight, so that no token loses its gradient.

        loss_t = -sg(clip(rho_t, 1 - low, 1 + high)) * A_t * log pi(t)

    The paper states no `high`; 4 gives the largest weight of 5 that later practice uses (arXiv:2510.13786).

    Source: MiniMax 2025, MiniMax-M1 (arXiv:2506.13585), eq. 4-5.
    """
    ratio_N = log_ratio(forward.logp_N, batch.logp_old_N, batch).exp()
    return ratio_N.clamp(1 - low, 1 + high).detach() * policy_gradient(forward, advantage_N, batch)


def _clipped(ratio_N: Tensor, advantage_N: Tensor, *, low: float, high: float, dual: float | None) -> Tensor:
    gain_N = torch.minimum(ratio_N * advantage_N, ratio_N.clamp(1 - low, 1 + high) * advantage_N)
    if dual is not None:
        if dual <= 1:
            raise ValueError(
                f"dual clip bounds the ratio of bad tokens from above, so it must exceed 1, but got {dual}"
            )
        gain_N = torch.where(advantage_N < 0, torch.maximum(gain_N, dual * advantage_N), gain_N)
    return -gain_N
