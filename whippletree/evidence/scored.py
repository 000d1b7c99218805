"""Evidence from models that give one number for each sampled token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from whippletree.types import Batch, Credit, Rollout, Scorer, Services


async def reference_logps(rollouts: Sequence[Rollout], batch: Batch, services: Services) -> Mapping[str, Tensor]:
    """`ref_logp_N`: log-probs of the sampled tokens under the scorer "reference", a frozen copy of the policy."""
    return {"ref_logp_N": await _score(services.scorer("reference"), rollouts)}


async def trainer_logps(rollouts: Sequence[Rollout], batch: Batch, services: Services) -> Mapping[str, Tensor]:
    """`logp_train_N`: log-probs under the scorer "policy", the trainer's own weights before this update."""
    return {"logp_train_N": await _score(services.scorer("policy"), rollouts)}


async def values(rollouts: Sequence[Rollout], batch: Batch, services: Services) -> Mapping[str, Tensor]:
    """`value_N`: the value before each sampled token, in units of reward, from the scorer "value".

    That scorer's `logps` gives the outputs of the value head, one a sampled token, in place of log-probs.
    """
    return {"value_N": await _score(services.scorer("value"), rollouts)}


async def returns(
    rollouts: Sequence[Rollout], batch: Batch, services: Services, *, credit: Credit
) -> Mapping[str, Tensor]:
    """`return_N`: what the value head is to predict, from an advantage over `value_N` that is not whitened.

        G_t = A_t + V_t                              0 on untrainable tokens

    Raises:
        ValueError: there is no `value_N`; list `values` before this.

    Source: Schulman et al. 2016, GAE (arXiv:1506.02438).
    """
    value_N = torch.where(batch.trainable_N, batch.column("value_N"), 0.0)
    return {"return_N": credit(batch) + value_N}


async def _score(scorer: Scorer, rollouts: Sequence[Rollout]) -> Tensor:
    """[N] the numbers of every turn, in the order of the batch."""
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    scores = await scorer.logps([(turn.prompt_ids, turn.reply_ids) for turn in turns])
    got, wanted = [len(score) for score in scores], [len(turn.reply_ids) for turn in turns]
    if got != wanted:
        raise ValueError(f"a scorer gives one number for each sampled token, {wanted} a turn, but it gave {got}")
    return torch.cat([torch.zeros(0), *scores])
