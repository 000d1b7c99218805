"""Cliff: process credit from the first mistake of each failed rollout (Han et al. 2026, arXiv:2609.02817).

evidence  a judge solves the task itself; where its solution passes the verifier, it is asked, with that solution in
          view, for the first wrong step of each failed rollout of the group
    sound_N     the token stands before the first mistake; at no token of a rollout without a readable answer, of one
                in which the judge finds none, and of a truncated one
    trusted_R   the judge's solution passed; else the group is plain GRPO
A_cor = (1 - mu) / sigma,  A_inc = -mu / sigma        mu = share of the group that passed, sigma = sqrt(mu (1 - mu))
A_t   = A_cor - b              passed
      = lambda A_cor - b       failed, before its first mistake         lambda = 0
      = A_inc - b              failed, from its first mistake on
        b = mean over all tokens of the group of the same without b, so that advantages of a group sum to 0
        a group that all passed or all failed has A = 0; with all_fail="unit" one that failed has A_cor, A_inc = 1, -1
loss  = -min(rho_t A_t, clip(rho_t, 1 - 0.2, 1 + 0.2) A_t), averaged over all tokens
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, StrictInt
from torch import Tensor

from whippletree import credit, objective
from whippletree.evidence import Judge, judge_of, question, quoted
from whippletree.evidence.quoting import FENCE
from whippletree.reward import exact_answer
from whippletree.reward.text import conversation, reply_message, text_of
from whippletree.toys.chains import chain, favour
from whippletree.toys.exact import chance
from whippletree.toys.learning import learn, reached
from whippletree.toys.oracles import first_wrong, misplaced
from whippletree.toys.table import Table
from whippletree.types import Batch, Claim, Method, Paper, Reward, Rollout, Services, Turn
from whippletree.update.averages import constant, token_mean

PASSES = 0.5  # a reward from here on is a success

FIND = """A task, a right solution of it and the numbered steps of an attempt that failed are quoted. Give the number of
the first step that is wrong, or null if none is."""


class Solution(BaseModel):
    text: str


class Pitfall(BaseModel):
    step: StrictInt | None


async def pitfalls(
    rollouts: Sequence[Rollout], batch: Batch, services: Services, *, verify: Reward = exact_answer, every: bool = False
) -> Mapping[str, Tensor]:
    """`sound_N`, `trusted_R`, and `pitfall_R`: sampled tokens before the first mistake, NaN where none is known.

    The judge is asked about groups in which some failed and some passed; with `every`, where all failed as well.
    """
    judge, passed_R = judge_of(services.asker("judge")), batch.reward_R >= PASSES
    trusted_R, pitfall_R = torch.zeros_like(passed_R), torch.full((batch.rollouts,), torch.nan)

    async def judged(in_R: Tensor) -> None:
        failed = (in_R & ~passed_R).nonzero()[:, 0].tolist()
        if not failed or not (every or passed_R[in_R].any()):
            return
        task = "\n".join(map(text_of, conversation(rollouts[failed[0]])[0]))
        solved = (await judge.answer(question("Solve the task that is quoted.", quoted(task)), Solution)).value
        said = Turn("", (), (), (), 0, "stop", reply={"content": solved.text if solved else None})
        scores = await verify(replace(rollouts[failed[0]], turns=(said,), rewards={}))
        if solved and sum(x or 0.0 for x in scores.values()) >= PASSES:
            trusted_R[in_R] = True
            found = (first_mistake(judge, rollouts[r], quoted(task), quoted(solved.text)) for r in failed)
            pitfall_R[failed] = torch.tensor(await asyncio.gather(*found), dtype=torch.float32)

    await asyncio.gather(*(judged(batch.group_R == group) for group in batch.group_R.unique()))
    sound_N = torch.arange(batch.tokens) < (batch.lengths_R.cumsum(0) - batch.lengths_R + pitfall_R)[batch.rollout_N]
    return {"sound_N": sound_N, "trusted_R": trusted_R, "pitfall_R": pitfall_R}


async def first_mistake(judge: Judge, rollout: Rollout, *shown: str) -> float:
    """How many sampled tokens stand before the first step that the judge calls wrong; NaN where that is not known."""
    found = steps(rollout)
    if rollout.ending == "truncated" or not found or rollout.turns[-1].finish_reason == "length":
        return torch.nan
    numbered = "\n".join(f"#{FENCE} step {n}\n{quoted(text)}" for n, (text, _) in enumerate(found, 1))
    answer = (await judge.answer(question(FIND, *shown, numbered), Pitfall)).value
    step = answer.step if answer and answer.step else 0
    return found[step - 1][1] if 1 <= step <= len(found) else torch.nan


def steps(rollout: Rollout) -> list[tuple[str, int]]:
    """The sentences and tool calls of all replies in order, each with the sampled tokens that stand before it."""
    found, before = [], 0
    for turn in rollout.turns:
        message, size = reply_message(turn), len(turn.reply_ids)
        said = re.split(r"(?<=[.!?])\s+|\n", f"{message.get('reasoning_content', '')}\n{text_of(message)}")
        parts = [part for part in (*said, *map(json.dumps, message.get("tool_calls", ()))) if part.strip()]
        ends = np.cumsum([0, *map(len, parts)]).tolist()
        # rounded down, so that no token of a mistake is sound
        found += [(part, before + size * at // ends[-1]) for part, at in zip(parts, ends, strict=False)]
        before += size
    return found


def from_the_mistake(batch: Batch, *, bonus: float = 0.0, all_fail: Literal["skip", "unit"] = "skip") -> Tensor:
    """[N] the advantage above; `bonus` is its lambda. It reads the evidence `sound_N` and `trusted_R`.

    Raises:
        ValueError: a reward is missing, or the evidence is.
    """
    passed_R, trusted_R = credit.known_reward(batch) >= PASSES, batch.column("trusted_R")
    mu_R = credit.mean_within(passed_R, batch.group_R)
    scale_R = torch.where((mu_R > 0) & (mu_R < 1), (mu_R * (1 - mu_R)).rsqrt(), 0.0)
    unit_R = (trusted_R & (mu_R == 0) & (all_fail == "unit")).double()
    good_R, bad_R = (1 - mu_R) * scale_R + unit_R, -mu_R * scale_R - unit_R
    row_N, group_N = batch.rollout_N, batch.group_R[batch.rollout_N]
    failed_N = torch.where(batch.column("sound_N") & trusted_R[row_N], bonus * good_R[row_N], bad_R[row_N])
    raw_N = torch.where(passed_R[row_N], good_R[row_N], failed_N) * batch.trainable_N
    shift_N = credit.mean_within(raw_N, group_N) / credit.mean_within(batch.trainable_N, group_N)
    return torch.where(batch.trainable_N, raw_N - shift_N * trusted_R[row_N], 0.0).float()


METHOD = Method(
    paper=Paper("Cliff: Learning Process Rewards from the First Mistake", "Han et al.", 2026, "2609.02817", "summary"),
    evidence=(pitfalls,),
    credit=partial(from_the_mistake, bonus=0.0, all_fail="skip"),
    objective=partial(objective.clipped_ratio, low=0.2, high=0.2),
    average=token_mean,
    needs=("judge",),
    differs="steps are sentences and tool calls; as no offsets are kept, one begins at the token that has the same "
    "share of its reply as its first character. `verify` reads the judge's solution; nothing runs a harness for it. An "
    "answer that is no step's number leaves all tokens after the mistake, and groups that all failed are skipped (the "
    "page's filling-in; UNIT is its other choice). A reward from 0.5 on passes. The clip range is PPO's. Costs: of the "
    "judge, a solution for each mixed group, and a number for each failure in it, from task, solution and rollout",
)

# where all failed, longer sound beginnings are better, so equal rewards do teach
UNIT = METHOD.but(evidence=(partial(pitfalls, every=True),), credit=partial(from_the_mistake, all_fail="unit"))


def taught(seed: int, *, method: Method = METHOD, wrong: float = 0.0, trusted: bool = True) -> Method:
    """With an oracle for a judge, which with probability `wrong` names a step at random; losses are sums over tokens,
    as in the page's trial."""
    random = np.random.default_rng(seed)

    async def oracle(rollouts: Any, batch: Batch, services: Services) -> Mapping[str, Tensor]:
        sound_RT = np.arange(6) < misplaced(first_wrong(rollouts), rollouts.length_R, wrong, random)[:, None]
        return {"sound_N": rollouts.flat(sound_RT), "trusted_R": torch.full((batch.rollouts,), trusted)}

    return method.but(evidence=(oracle,), average=partial(constant, tokens=1))


def updates(arm: partial[Method], seed: int, *, start: float = 1.0, most: int = 600) -> float:
    """Updates until a word of 6 symbols is right with probability 0.9; `most` where that is not reached.

    `start` is the logit of the right symbol of 4 at first; each update is of 8 rollouts.
    """
    world = chain()
    end, exact = reached(0.9, name="solved", over=1, exact=True), {"solved": chance(world)}
    table = Table.of(world, favour(world, start))
    curve = learn(arm(seed), world, table, seed=seed, updates=most, groups=1, rate=0.5, exact=exact, until=end)
    return min(float(most), curve.updates_to(0.9, name="solved", over=1, exact=True))


CLAIM = Claim(
    says="told the first mistake of each failure, a word is learned in fewer updates than with the outcome alone",
    baseline=partial(taught, trusted=False),
    method=partial(taught),
    measure=updates,
    better="lower",
    seeds=24,
    arms={
        "3 of 10 places at random": partial(taught, wrong=0.3),
        "all places at random": partial(taught, wrong=1.0),
        "failed groups teach too": partial(taught, method=UNIT),
    },
)
