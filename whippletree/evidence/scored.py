"""Evidence from models that give numbers for each sampled token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from whippletree.types import Batch, Credit, Kind, Reader, Rollout, Scored, Scorer, Services

Ids = Sequence[int]
Prompts = Callable[[Sequence[Rollout], Batch, Services], Sequence[Ids | None]]


async def logp_under(
    rollouts: Sequence[Rollout],
    batch: Batch,
    services: Services,
    *,
    name: str,
    prompts: Prompts | None = None,
    kind: int | str = "sampled",
    column: str = "",
) -> Mapping[str, Tensor]:
    """What the scorer `name` says of the sampled tokens, each turn at its own temperature, perhaps after other prompts.

    `prompts` gives the ids of a prompt for each turn, or None for a turn to leave out. `column` (the scorer's name,
    unless given) stands in the names of what is found:

        "sampled"         logp_{column}_N
        "full"            also logp_{column}_NV
        a number M        also top_id_{column}_NM and top_logp_{column}_NM of the likeliest tokens, log_tail_{column}_N
        "top_id_X_NM"     the same at the ids of that column, which an earlier evidence found
        always            missing_{column}_K, bool: the scorer failed on this turn

    What is missing or left out is NaN, its ids 0. `outcomes` reads a distribution, `outcomes_of` gives a student's.

    Raises:
        ValueError: the scorer is not there or cannot do it, or there is not one prompt or number for each.
    """
    turns, column = [turn for rollout in rollouts for turn in rollout.turns], column or name
    prompt_K = list(prompts(rollouts, batch, services)) if prompts else [turn.prompt_ids for turn in turns]
    if len(prompt_K) != len(turns):
        raise ValueError(f"prompts are one for each of {len(turns)} turns, or None, but there are {len(prompt_K)}")
    asked = {k: prompt for k, prompt in enumerate(prompt_K) if prompt is not None}
    triples = [(prompt, turns[k].reply_ids, turns[k].temperature) for k, prompt in asked.items()]
    found = dict(zip(asked, await _read(services.scorer(name), triples, _kind(batch, kind, asked)), strict=True))
    width = next((scored.logp_NM.shape[1] for scored in found.values() if scored), 0)
    parts = [found.get(k) or _nothing(len(turn.reply_ids), width) for k, turn in enumerate(turns)]
    missing = [k in found and found[k] is None for k in range(len(turns))]
    columns = {
        f"logp_{column}_N": torch.cat([torch.zeros(0), *(part.logp_N for part in parts)]),
        f"missing_{column}_K": torch.tensor(missing, dtype=torch.bool),
    }
    if kind == "sampled":
        return columns
    logp_NM = torch.cat([torch.zeros(0, width), *(part.logp_NM for part in parts)])
    if kind == "full":
        return {**columns, f"logp_{column}_NV": logp_NM}
    return {
        **columns,
        f"top_id_{column}_NM": torch.cat([torch.zeros(0, width, dtype=torch.int64), *(part.id_NM for part in parts)]),
        f"top_logp_{column}_NM": logp_NM,
        f"log_tail_{column}_N": torch.cat([torch.zeros(0), *(part.tail_N for part in parts)]),
    }


async def reference_logps(rollouts: Sequence[Rollout], batch: Batch, services: Services) -> Mapping[str, Tensor]:
    """`ref_logp_N`: log-probs of the sampled tokens under the scorer "reference", a frozen copy of the policy."""
    found = await logp_under(rollouts, batch, services, name="reference")
    return {"ref_logp_N": found["logp_reference_N"]}


async def trainer_logps(rollouts: Sequence[Rollout], batch: Batch, services: Services) -> Mapping[str, Tensor]:
    """`logp_train_N`: log-probs under the scorer "policy", the trainer's own weights before this update."""
    found = await logp_under(rollouts, batch, services, name="policy")
    return {"logp_train_N": found["logp_policy_N"]}


async def values(rollouts: Sequence[Rollout], batch: Batch, services: Services) -> Mapping[str, Tensor]:
    """`value_N`: the value before each sampled token, in units of reward, from the scorer "value".

    That scorer's `logps` gives the outputs of the value head, one a sampled token, in place of log-probs.
    """
    turns = [(turn.prompt_ids, turn.reply_ids) for rollout in rollouts for turn in rollout.turns]
    return {"value_N": torch.cat([torch.zeros(0), *await _numbers(services.scorer("value"), turns)])}


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


async def _read(scorer: Scorer, turns: Sequence[tuple[Ids, Ids, float]], kind: Kind) -> Sequence[Scored | None]:
    """What is asked for, from a `Reader`, or from a scorer that only knows the sampled tokens."""
    if isinstance(scorer, Reader):
        return await scorer.score(turns, kind)
    if kind != "sampled":
        raise ValueError(f"{type(scorer).__name__} gives the sampled tokens' log-probs alone, but kind is {kind!r}")
    nothing = torch.zeros(0, dtype=torch.int64)
    numbers = await _numbers(scorer, [turn[:2] for turn in turns])
    return [Scored(x, nothing.expand(len(x), 0), x.new_zeros(len(x), 0), torch.zeros_like(x)) for x in numbers]


async def _numbers(scorer: Scorer, turns: Sequence[tuple[Ids, Ids]]) -> list[Tensor]:
    """The numbers of every turn."""
    scores = await scorer.logps(turns)
    got, wanted = [len(score) for score in scores], [len(reply) for _, reply in turns]
    if got != wanted:
        raise ValueError(f"a scorer gives one number for each sampled token, {wanted} a turn, but it gave {got}")
    return scores


def _kind(batch: Batch, kind: int | str, asked: Mapping[int, Ids]) -> Kind:
    """The same for a scorer: of a column, its ids for the turns that are asked for."""
    spelled: dict[str, Kind] = {"sampled": "sampled", "full": "full"}
    if isinstance(kind, int):
        return kind
    if kind in spelled:
        return spelled[kind]
    id_NM = batch.column(kind).split(batch.lengths_K.tolist())
    return [id_NM[k] for k in asked]


def _nothing(length: int, width: int) -> Scored:
    unknown = torch.full((length, width + 2), torch.nan)
    return Scored(unknown[:, 0], torch.zeros(length, width, dtype=torch.int64), unknown[:, 2:], unknown[:, 1])
