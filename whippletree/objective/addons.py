"""What is added to an objective: each is itself an objective, with the one it adds to as the keyword `objective`.

`partial(with_kl, objective=partial(clipped_ratio, high=0.28), kind="k3", beta=0.04)` is an objective.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from whippletree.objective.ratios import log_ratio, masked
from whippletree.types import Batch, Forward, Objective

Kind = Literal["k1", "k2", "k3"]


def kl_penalty(logp_N: Tensor, ref_logp_N: Tensor, batch: Batch, *, kind: Kind) -> Tensor:
    """[N] an estimate of KL(pi || ref) from the sampled token, with x = log pi(t) - log ref(t).

        k1 = x          k2 = x^2 / 2          k3 = exp(-x) - 1 + x

    k1 is unbiased as a number, but as a loss its gradient has expectation 0: it belongs into the reward
    (`credit.reward_to_go`). k2 has the gradient of the KL on policy. k3 is never negative.

    Source: Schulman 2020, Approximating KL Divergence (joschu.net/blog/kl-approx.html).
    """
    x_N = log_ratio(logp_N, ref_logp_N, batch)
    estimates = {"k1": lambda: x_N, "k2": lambda: x_N.square() / 2, "k3": lambda: torch.expm1(-x_N) + x_N}
    if kind not in estimates:
        raise ValueError(f"the estimate of the KL is one of {sorted(estimates)}, but got {kind!r}")
    return estimates[kind]()


def with_kl(
    forward: Forward, advantage_N: Tensor, batch: Batch, *, objective: Objective, kind: Kind, beta: float
) -> Tensor:
    """[N] the objective plus `beta` times the KL to the reference, from the evidence `ref_logp_N`.

        loss_t = objective_t + beta * KL_t

    Raises:
        ValueError: there is no `ref_logp_N`, or `kind` is unknown.

    Source: Shao et al. 2024, DeepSeekMath (arXiv:2402.03300), eq. 3-4, with k3.
    """
    penalty_N = kl_penalty(forward.logp_N, batch.column("ref_logp_N"), batch, kind=kind)
    return objective(forward, advantage_N, batch) + beta * penalty_N


def with_entropy(forward: Forward, advantage_N: Tensor, batch: Batch, *, objective: Objective, bonus: float) -> Tensor:
    """[N] the objective less `bonus` times the entropy (nats) of the distribution each token was sampled from.

        loss_t = objective_t - bonus * H_t

    Source: Mnih et al. 2016, A3C (arXiv:1602.01783); in PPO (arXiv:1707.06347) eq. 9.
    """
    return objective(forward, advantage_N, batch) - bonus * masked(forward.entropy_N, batch)


def with_value(
    forward: Forward,
    advantage_N: Tensor,
    batch: Batch,
    *,
    objective: Objective,
    coefficient: float,
    clip: float | None = None,
) -> Tensor:
    """[N] the objective plus the squared error of the value head, from the evidence `return_N`.

        loss_t = objective_t + coefficient * (V_t - G_t)^2
        with `clip`: the larger of that error and the one of V_t held within `clip` of the evidence `value_N`

    Raises:
        ValueError: there is no `return_N`, or no `value_N` to clip around.

    Source: Schulman et al. 2017, PPO (arXiv:1707.06347), eq. 9; the clip as in Engstrom et al. 2020 (arXiv:2005.12729).
    """
    value_N, return_N = masked(forward.value_N, batch), masked(batch.column("return_N"), batch)
    error_N = (value_N - return_N).square()
    if clip is not None:
        old_N = masked(batch.column("value_N"), batch)
        near_N = old_N + (value_N - old_N).clamp(-clip, clip)
        error_N = torch.maximum(error_N, (near_N - return_N).square())
    return objective(forward, advantage_N, batch) + coefficient * error_N
