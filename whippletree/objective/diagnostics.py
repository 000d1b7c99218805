"""What a pass says about the step: how far the policy moved from its sampler, and how much was clipped."""

from __future__ import annotations

import torch
from torch import Tensor

from whippletree.objective.ratios import log_ratio
from whippletree.types import Batch


def diagnose(logp_N: Tensor, advantage_N: Tensor, batch: Batch, *, low: float, high: float) -> dict[str, float]:
    """Means over the trainable tokens, under the names people search for; empty if no token may train.

    clip_ratio/low_mean     share with rho < 1 - low and A < 0          (the clipped side of a bad token)
    clip_ratio/high_mean    share with rho > 1 + high and A > 0         (the clipped side of a good token)
    clip_ratio/region_mean  share with either
    kl                      mean of rho - 1 - log rho, an estimate (k3) of KL(pi_old || pi) in nats
    ratio_mean, ratio_max   of rho
    """
    if not batch.trainable_N.any():
        return {}
    log_ = log_ratio(logp_N.detach(), batch.logp_old_N, batch)[batch.trainable_N]
    ratio, advantage = log_.exp(), advantage_N[batch.trainable_N]
    low_, high_ = (ratio < 1 - low) & (advantage < 0), (ratio > 1 + high) & (advantage > 0)
    shares = {"low": low_, "high": high_, "region": low_ | high_}
    return {
        **{f"clip_ratio/{name}_mean": share.float().mean().item() for name, share in shares.items()},
        "kl": (torch.expm1(log_) - log_).mean().item(),
        "ratio_mean": ratio.mean().item(),
        "ratio_max": ratio.max().item(),
    }
