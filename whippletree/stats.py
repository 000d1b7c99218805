"""What a step says of itself, under the names that people already search for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from whippletree.collect import HARNESS, Collected
from whippletree.credit.groups import std_within
from whippletree.tree.fidelity import drift
from whippletree.tree.grow import metrics as merges
from whippletree.types import Batch, Rollout


def collected_metrics(found: Collected, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Failures, missing rewards and groups that did not enter."""
    missing = Counter(channel for rollout in rollouts for channel in rollout.info.get("reward_errors", {}))
    return {
        "rollouts/failed": found.failed.total(),
        **{f"rollouts/failed/{blame}": count for blame, count in found.failed.items()},
        "rollouts/truncated": sum(rollout.ending == "truncated" for rollout in rollouts),
        "groups/dropped": found.dropped,
        "groups/refused": found.refused,
        **{f"rewards/{channel}/missing": count for channel, count in missing.items()},
    }


def batch_metrics(rollouts: Sequence[Rollout], batch: Batch) -> dict[str, float]:
    """Rewards, lengths, merging and the sampler's entropy.

    `entropy` is the mean of -log p over the sampled tokens, which estimates the entropy of the sampling policy in nats.
    """
    reward_R, length_R = batch.reward_R, batch.lengths_R.double()
    spread_R = std_within(reward_R, batch.group_R)
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    cut_K = torch.tensor([turn.finish_reason == "length" for turn in turns])
    channels: dict[str, float] = {}
    for name, reward_r in zip(batch.channels, batch.reward_RC.T, strict=True):
        known_r = reward_r[~reward_r.isnan()]
        if len(known_r):
            channels |= {
                f"rewards/{name}/mean": float(known_r.mean()),
                f"rewards/{name}/std": float(known_r.std(correction=0)),
            }
    merged = merges([(turn.prompt_ids, turn.reply_ids) for turn in turns], batch.group_R[batch.rollout_K].tolist())
    return {
        "reward": float(reward_R.mean()),
        "reward_std": float(spread_R.mean()),
        "frac_reward_zero_std": float((spread_R < 1e-6).double().mean()),
        **channels,
        "completions/mean_length": float(length_R.mean()),
        "completions/min_length": float(length_R.min()),
        "completions/max_length": float(length_R.max()),
        "completions/clipped_ratio": float(cut_K.double().mean()) if turns else 0.0,
        "turns/mean": len(turns) / len(rollouts),
        "entropy": float(-batch.logp_old_N[batch.trainable_N].mean()) if batch.trainable_N.any() else 0.0,
        "frac_untrainable_tokens": float((~batch.trainable_N).double().mean()) if batch.tokens else 0.0,
        **{f"tree/{name}": value for name, value in merged.items()},
    }


def harness_metrics(
    rollouts: Sequence[Rollout], rewards: Sequence[float | None], failed: Mapping[str, int]
) -> dict[str, float]:
    """Of each harness in the step: rollouts, failures, truncations, turns and total reward on average."""
    under = [rollout.info[HARNESS] for rollout in rollouts]
    told: dict[str, float] = {}
    for name in dict.fromkeys([*under, *failed]):
        mine = [rollout for rollout, other in zip(rollouts, under, strict=True) if other == name]
        known = [x for x, other in zip(rewards, under, strict=True) if other == name and x is not None]
        told |= {
            f"harness/{name}/rollouts": len(mine),
            f"harness/{name}/failed": failed.get(name, 0),
            f"harness/{name}/truncated": sum(rollout.ending == "truncated" for rollout in mine),
        }
        if mine:
            told[f"harness/{name}/turns"] = sum(len(rollout.turns) for rollout in mine) / len(mine)
        if known:
            told[f"harness/{name}/reward"] = sum(known) / len(known)
    return told


def fidelity_metrics(logp_N: Tensor, batch: Batch) -> dict[str, float]:
    """Mean and largest |log-prob at training - at sampling| over the tokens that went through the forward.

    The others are NaN in `logp_N`; as gaps of 0 they would hide a drift behind however many groups taught nothing.
    """
    return drift(logp_N, replace(batch, logp_old_N=torch.where(logp_N.isnan(), torch.nan, batch.logp_old_N)))
