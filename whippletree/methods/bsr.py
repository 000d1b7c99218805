"""BSR: the policy compares its own failed rollouts of a task, and that orders them (Behavioral Self-Rewarding, 2026).

evidence  of the failed rollouts of a group, pairs are shown to the judge, which is the policy: which behaves better?
    s_ij = (said of (i, j) + 1 - said of (j, i)) / 2          1: the first of the two, 1/2: a tie, 0: the second
    b_i  = mean of s_ij and 1 - s_ji over the pairs of i;  0 if truncated, 1/2 if there is no pair with an answer
           all pairs of up to 4 rollouts, else of each with 3 others drawn at random
R_i  = 1 if passed, else beta b_i                            beta = 0.3 < 1: no failure is worth a success
A_i  = R_i - mean of the other R of the group                equal on all tokens (LOOP)
loss = -min(rho_t A_i, clip(rho_t, 1 - 0.2, 1 + 0.2) A_i), averaged over all tokens
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from random import Random
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whippletree import credit, objective
from whippletree.evidence import better, judge_of
from whippletree.toys.chains import chain, favour
from whippletree.toys.exact import chance
from whippletree.toys.learning import learn
from whippletree.toys.oracles import first_wrong
from whippletree.toys.played import Array
from whippletree.toys.table import Table
from whippletree.types import Batch, Claim, Method, Paper, Rollout, Services, Turn
from whippletree.update.averages import constant, token_mean

PASSES = 0.5  # a reward from here on is a success
LIMIT = 2 * 24_000  # characters of both rollouts, about 6,000 tokens of each

CRITERIA = """Both had the same outcome, so do not judge that. Better is who reproduced the failure, found its cause,
changed the place that matters and checked the change, without destroying or repeating anything. Length is no merit."""

Compare = Callable[[int, int], Awaitable[float | None]]  # 1: the first is better, 0: the second; None: missing


async def behaviour(
    rollouts: Sequence[Rollout], batch: Batch, services: Services, *, passed_too: bool = False
) -> Mapping[str, Tensor]:
    """`behaviour_R`: b_i of each failed rollout, from 0 to 1; NaN where no comparison has an answer.

    With `passed_too` those that passed are compared with each other as well; never across outcomes.
    """
    judge, passed_R = judge_of(services.asker("judge")), batch.reward_R >= PASSES
    shown = [replace(rollout, turns=tuple(map(without_reasoning, rollout.turns))) for rollout in rollouts]
    cut_R = torch.tensor([r.ending == "truncated" for r in rollouts])
    found_R = torch.where(cut_R & ~passed_R, 0.0, torch.nan)

    async def compare(i: int, j: int) -> float | None:
        return await better(shown[i], shown[j], judge, criteria=CRITERIA, limit=LIMIT)

    for group in batch.group_R.unique():
        for passed in (False, True)[: 1 + passed_too]:
            members = ((batch.group_R == group) & (passed_R == passed) & (passed_R | ~cut_R)).nonzero()[:, 0].tolist()
            found_R[members] = torch.tensor(await scores(members, compare, Random(f"{group}/{members}")))
    return {"behaviour_R": found_R}


def without_reasoning(turn: Turn) -> Turn:
    """The turn as a judge is to see it: what was said and done."""
    message = {name: x for name, x in turn.reply.get("message", turn.reply).items() if name != "reasoning_content"}
    parts = [part for part in turn.info.get("parts", ()) if part["kind"] != "reasoning"]
    return replace(turn, reply=message, info={"parts": parts})


async def scores(members: Sequence[int], compare: Compare, random: Random, *, others: int = 3) -> list[float]:
    """The mean score of each member over its comparisons, NaN without any: with all others up to 4, else with some."""
    few = len(members) <= 4
    drawn = [(i, j) for i in members for j in random.sample([m for m in members if m != i], 0 if few else others)]
    pairs = list(combinations(members, 2)) if few else sorted({(min(pair), max(pair)) for pair in drawn})
    said: dict[int, list[float]] = {member: [] for member in members}
    for (i, j), score in zip(pairs, await asyncio.gather(*(compare(*pair) for pair in pairs)), strict=True):
        if score is not None:
            said[i].append(score)
            said[j].append(1 - score)
    return [fmean(found) if found else torch.nan for found in said.values()]


def self_rewarded(batch: Batch, *, beta: float = 0.3, beta_passed: float = 0.0, anneal: bool = False) -> Tensor:
    """[N] leave-one-out over R above; passed rollouts have R = 1 + beta_passed (b - 1/2). It reads `behaviour_R`.

    With `anneal`, beta is multiplied by the share of the group that failed.

    Raises:
        ValueError: a failure could outrank a success, a rollout is alone in its group, or a reward is missing.
    """
    if not 0 <= beta < 1 - beta_passed / 2 <= 1:
        raise ValueError(
            f"a failure may not outrank a success, so 0 <= beta < 1 - beta_passed / 2 <= 1, but beta is "
            f"{beta} and beta_passed is {beta_passed}"
        )
    passed_R, b_R = credit.known_reward(batch) >= PASSES, batch.column("behaviour_R").nan_to_num(0.5)
    share_R = 1 - credit.mean_within(passed_R, batch.group_R) if anneal else 1.0
    reward_R = torch.where(passed_R, 1 + beta_passed * (b_R - 0.5), beta * share_R * b_R).float()
    return credit.leave_one_out(replace(batch, reward_RC=reward_R[:, None], channels=("R",), weight_C=torch.ones(1)))


METHOD = Method(
    paper=Paper("Behavioral Self-Rewarding for Software Engineering Agents", year=2026, source="reconstructed"),
    evidence=(behaviour,),
    credit=partial(self_rewarded, beta=0.3),
    objective=partial(objective.clipped_ratio, low=0.2, high=0.2),
    average=token_mean,
    needs=("judge",),
    excused=("equal rewards teach nothing",),
    differs="only the set-up and numbers of the paper are known; all else is the page's reconstruction. A judge sees "
    "the whole rollout without its reasoning, up to 6,000 tokens, of which the longest texts lose their middle, where "
    "the page summarises. That it is the policy itself is the run's choice (`evidence.Itself`); its replies are not "
    "trained. A pair that two failures draw is compared once. A failure without an answer has b = 1/2. A reward from "
    "0.5 on passes. The clip range is PPO's. CLAIM's judge knows the truth and errs on 15 % of pairs. Excused: where "
    "all failed alike, the better behaviour is still better. Costs beyond GRPO: two questions a pair, each of two "
    "rollouts; of n failures n (n - 1) / 2 pairs up to 4, else at most 3 n (on the toy, groups of 8: about 19)",
)


def judged(seed: int, *, flip: float = 0.15, beta: float = 0.3, better: Callable[[Any], Array] = first_wrong) -> Method:
    """With a judge that knows how far each word is right and is wrong of a pair with probability `flip`; losses are
    sums over tokens, as in the page's trial."""
    random, draw = np.random.default_rng(seed), Random(seed)

    async def known(rollouts: Any, batch: Batch, services: Services) -> Mapping[str, Tensor]:
        good_R, found_R = better(rollouts), torch.full((batch.rollouts,), torch.nan)

        async def compare(i: int, j: int) -> float | None:
            score = (1 + np.sign(good_R[i] - good_R[j])) / 2
            return float(1 - score if random.random() < flip else score)

        members = (batch.reward_R < PASSES).nonzero()[:, 0].tolist()
        found_R[members] = torch.tensor(await scores(members, compare, draw))
        return {"behaviour_R": found_R}

    settings = partial(self_rewarded, beta=beta)
    return METHOD.but(evidence=(known,), credit=settings, average=partial(constant, tokens=1))


def solved(arm: Callable[[int], Method], seed: int, *, start: float = 1.0, updates: int = 100) -> float:
    """The exact probability that a word of 6 symbols is all right after some updates of 8 rollouts each.

    `start` is the logit of the right symbol of 4 at first.
    """
    world = chain()
    table = Table.of(world, favour(world, start))
    learn(arm(seed), world, table, seed=seed, updates=updates, groups=1, rate=0.5)
    return chance(world)(table)


CLAIM = Claim(
    says="where failures dominate, ordering them by the policy's own comparisons learns a word sooner than tests alone",
    baseline=partial(judged, beta=0.0),
    method=partial(judged),
    measure=solved,
    better="higher",
    seeds=20,
    arms={"judged at random": partial(judged, flip=0.5), "judged without error": partial(judged, flip=0.0)},
)
