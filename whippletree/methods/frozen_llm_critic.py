"""A frozen LLM as critic of finished rollouts, in place of a trained value (Zhu et al. 2026).

evidence   one question a rollout: how likely, 0 to 100, was success before each turn and after the last, judged only
           by what had happened by then; the answer is a JSON list of T + 1 numbers -> V_0 .. V_T
V_t        held within [0.02, 0.98];   V_T := r in [0, 1];   V_0 := mean of the group's r, if anchored
A_t      = delta_t + lam A_{t+1},   delta_t = V_{t+1} - V_t,   lam 0.95            over turns; A_T = 0
A'_t     = (A_t - mean(A)) / std(A)                                 over the turns of the batch; or, as the safe form,
           A_i + alpha A'_t, with A_i of GRPO
           A_i of GRPO alone, where the answer has not T + 1 numbers, is no JSON or says the same everywhere
loss     = the clipped ratio loss with A'_t on all tokens of turn t; no loss of a value

Cost beyond GRPO: one call of a judge a rollout, which reads it once and writes T + 1 numbers; with mode="prefix" T
calls, which together read it (T + 1) / 2 times. Labels of turns and how good chances are: `analysis.chances`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from whippletree import credit, objective
from whippletree.evidence import judge_of, numbered, question
from whippletree.evidence.judged import LIMIT, Form
from whippletree.methods import _corridor, grpo, ppo
from whippletree.types import Batch, Claim, Method, Paper, Rollout, Services

FINISHED = """A finished run of an agent is quoted. Before each of its turns and after the last, how likely was it to
succeed in the end? Judge each moment only by what had happened by then. Give {count} chances from 0 to 100, in order.
The run ended with a reward of {reward:g} out of 1."""
BEGUN = """The beginning of a run of an agent is quoted, up to what comes before the reply of its last turn. How likely
is it to succeed in the end? Give one chance from 0 to 100."""


class Chances(Form):
    chances: list[Annotated[float, Field(ge=0, le=100)]]


async def chances(
    rollouts: Sequence[Rollout],
    batch: Batch,
    services: Services,
    *,
    mode: Literal["hindsight", "prefix"] = "hindsight",
    limit: int = LIMIT,
) -> Mapping[str, Tensor]:
    """`chance_K`: how likely success was before each turn (0 to 1), as the judge has it, which sees no reasoning.

    NaN on all turns of a rollout whose answer cannot be relied upon. `limit` is of characters quoted in a question.
    """
    judge = judge_of(services.asker("judge"))

    async def ask(about: Rollout, asked: str, count: int) -> list[float]:
        shown = question(asked, numbered(about, limit=limit, reasoning=False))
        told = (await judge.answer(shown, Chances)).value
        return [x / 100 for x in told.chances] if told and len(told.chances) == count else [math.nan] * count

    async def ask_all(rollout: Rollout, reward: float) -> list[float]:
        turns, n = rollout.turns, len(rollout.turns)
        if mode == "hindsight" and n:
            return await ask(rollout, FINISHED.format(count=n + 1, reward=reward), n + 1)
        asked = [(*turns[:t], replace(turns[t], reply={}, info={})) for t in range(n)]
        found = await asyncio.gather(*(ask(replace(rollout, turns=begun), BEGUN, 1) for begun in asked))
        return [x for (x,) in found] + [reward]

    told = await asyncio.gather(*map(ask_all, rollouts, batch.reward_R.tolist()))
    sound = [v[:-1] if len(set(v)) > 1 else [math.nan] * (len(v) - 1) for v in told]
    return {"chance_K": torch.tensor([x for found in sound for x in found], dtype=torch.float32)}


def critic_advantage(batch: Batch, *, lam: float = 0.95, anchor: bool = False, alpha: float | None = None) -> Tensor:
    """[N] the z-score over turns of `turn_advantage`, of evidence `chance_K`.

    With `alpha` it is added, so many times, to GRPO's. A rollout with a chance that is NaN has GRPO's advantage alone.

    Raises:
        ValueError: a reward is missing, or lies outside of 0 to 1, so that it is no chance.
    """
    advantage_K = turn_advantage(batch, lam=lam, anchor=anchor)
    lost_K = (torch.bincount(batch.rollout_K[advantage_K.isnan()], minlength=batch.rollouts) > 0)[batch.rollout_K]
    trains_K = torch.bincount(batch.turn_N[batch.trainable_N], minlength=batch.turns) > 0
    z_N = torch.where(batch.trainable_N, credit.whiten(advantage_K, trains_K & ~lost_K)[batch.turn_N], 0.0)
    group_N = credit.group_mean(batch, scale="std")
    return torch.where(lost_K[batch.turn_N], group_N, z_N) if alpha is None else group_N + alpha * z_N


def turn_advantage(batch: Batch, *, lam: float, anchor: bool = False) -> Tensor:
    """[K] how the chance of success changes from each turn on: advantage estimation over a table of turns."""
    reward_R = credit.known_reward(batch)
    if ((reward_R < 0) | (reward_R > 1)).any():
        raise ValueError(
            f"chances of success end in the reward, so rewards must be 0 to 1, but are {reward_R.tolist()}: scale them"
        )
    chance_K = batch.column("chance_K").clamp(0.02, 0.98)
    begins_K = batch.rollout_K.diff(prepend=torch.tensor([-1])) != 0
    if anchor:
        mean_K = credit.mean_within(reward_R, batch.group_R).float()[batch.rollout_K]
        chance_K = torch.where(begins_K & ~chance_K.isnan(), mean_K, chance_K)
    one_K, extra = torch.arange(batch.turns), {"value_N": chance_K}
    turns = replace(batch, turn_N=one_K, id_N=one_K, version_N=one_K, logp_old_N=0.0 * one_K, extra=extra)
    return credit.gae(turns, gamma=1.0, lam=lam)


METHOD = Method(
    paper=Paper(
        "A frozen LLM as critic", authors="Zhu et al.", year=2026, source="reconstructed", also_called=("LLM critic",)
    ),
    evidence=(chances,),
    credit=critic_advantage,
    objective=grpo.METHOD.objective,
    average=grpo.METHOD.average,
    needs=("judge",),
    excused=("equal rewards teach nothing",),
    differs="title, prompt, lam, clipping of chances, z-score, the clip range 0.2 and the filter are filled in, as the "
    "paper is not known. The judge is told the reward of a run; whether it keeps to what had happened by then is its "
    "own. No windows: of a long run the longest texts lose their middle. Chances are not read off logits of yes and "
    "no. V_T is always the reward, so mode='prefix' asks T times, not T + 1. Excused: where rewards are equal it still "
    "learns from how chances changed. CLAIM's critic knows the share of the way",
)

# the safe form: GRPO's advantage, and the critic's on top
ADDED = METHOD.but(credit=partial(critic_advantage, alpha=1.0))


def learned(arm: tuple[Method, _corridor.Guess], seed: int) -> float:
    """Updates until the corridor is walked, by a method and with what its critic says; at most 150."""
    judge = _corridor.critic(arm[1], seed)
    return _corridor.updates(arm[0].but(average=_corridor.SUMMED), seed, askers={"judge": judge})


TRAINED = ppo.METHOD.but(objective=partial(objective.with_value, objective=grpo.METHOD.objective, coefficient=0.05))

CLAIM = Claim(
    says="a frozen critic that roughly knows the way makes for fewer updates than GRPO",
    baseline=(grpo.METHOD, _corridor.noisy),
    method=(METHOD, _corridor.noisy),
    measure=learned,
    better="lower",
    seeds=8,
    arms={
        "added to GRPO's": (ADDED, _corridor.noisy),
        "anchored": (METHOD.but(credit=partial(critic_advantage, anchor=True)), _corridor.noisy),
        "lam 0": (METHOD.but(credit=partial(critic_advantage, lam=0.0)), _corridor.noisy),
        "noise 0.3": (METHOD, partial(_corridor.noisy, noise=0.3)),
        "noise 1": (METHOD, partial(_corridor.noisy, noise=1.0)),
        "knows the end all along": (METHOD, _corridor.all_along),
        "random chances": (METHOD, _corridor.at_random),
        "shuffled chances": (METHOD, _corridor.shuffled),
        "a trained value": (TRAINED, _corridor.noisy),
    },
)
