"""The engine that sampled is not quite the policy that trains: other kernels, other number types, older weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from whippletree.objective.ratios import log_ratio, mean_over, sum_over
from whippletree.types import Batch, Forward, Objective

Level = Literal["token", "rollout", "rollout_mean"]
Mode = Literal["trunc", "clip", "mask"]


def engine_weight(batch: Batch, *, level: Level, mode: Mode, low: float, high: float) -> Tensor:
    """[N] how much each sampled token counts, from u_t = pi_trainer(t) / pi_engine(t); 1 on untrainable tokens.

        trunc   min(u_t, high)                 the lower tail is left alone
        clip    u_t held within [low, high]
        mask    u_t where the gate is within [low, high], else 0

    The gate is u_t itself (`token`), or the product (`rollout`) or geometric mean (`rollout_mean`) of u over the
    rollout; the latter two only choose which rollouts stay, so they exist with `mask` alone.

    Raises:
        ValueError: `logp_train_N` is missing, or unknown on a trainable token; or level and mode do not fit.

    Source: Molt (arXiv:2607.21653); truncation Yao et al. 2025 (fengyao.notion.site/off-policy-rl).
    """
    if level != "token" and mode != "mask":
        raise ValueError(f"level {level!r} only chooses which rollouts stay, so it needs mode 'mask', but got {mode!r}")
    log_N = log_ratio(_trainer_logps(batch), batch.logp_old_N, batch)
    weight_N = log_N.exp()
    if mode != "mask":
        return weight_N.clamp(low if mode == "clip" else 0.0, high)
    over = {"rollout": sum_over, "rollout_mean": mean_over}.get(level)
    gate_N = weight_N if over is None else over(log_N, batch, level="rollout").exp()
    return torch.where((gate_N >= low) & (gate_N <= high), weight_N, 0.0)


def truncated_importance(
    forward: Forward,
    advantage_N: Tensor,
    batch: Batch,
    *,
    objective: Objective,
    level: Level = "token",
    mode: Mode = "trunc",
    low: float = 0.0,
    high: float = 2.0,
) -> Tensor:
    """[N] the objective with its ratios against the *trainer's* own log-probs, times the weight of the engine's sample.

        loss_t = w_t * objective_t       w_t = engine_weight, no gradient;  objective: rho_t = pi(t) / pi_trainer(t)

    It reads the evidence `logp_train_N`: log-probs under the trainer before the update.

    Raises:
        ValueError: as `engine_weight`.

    Source: Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training
    (fengyao.notion.site/off-policy-rl); Molt (arXiv:2607.21653).
    """
    weight_N = engine_weight(batch, level=level, mode=mode, low=low, high=high)
    logp_N = torch.where(batch.trainable_N, _trainer_logps(batch), torch.nan)
    return weight_N * objective(forward, advantage_N, replace(batch, logp_old_N=logp_N))


def _trainer_logps(batch: Batch) -> Tensor:
    logp_N = batch.column("logp_train_N")
    if logp_N[batch.trainable_N].isnan().any():
        raise ValueError(
            "the correction needs the trainer's log-prob of every trainable token, but logp_train_N has NaN there; "
            "such tokens would silently stop training: score them again"
        )
    return logp_N
