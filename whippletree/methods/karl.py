"""KARL: search agents trained by OAPL, regression on large stale batches (arXiv:2603.05218, OAPL: arXiv:2602.19362).

accept     groups whose task is solved sometimes: 0 < mean(r) < 1 for rewards of 0 to 1
A_i  = r_i - V,    V = beta_v ln( (1/G) sum_j exp(r_j / beta_v) )          over a group sampled by one policy pi_0
u_i  = sum_t [ log pi(t) - log pi_0(t) ]      over all sampled tokens of a rollout; log pi_0 as the engine gave it
loss = (beta u_i - A_i)^2, averaged over rollouts

The best pi with a penalty of beta KL(pi || pi_0) has beta log(pi / pi_0) = r - V exactly. So whatever pi is by now, the
loss is least there: nothing is clipped and nothing weighed by a ratio, however long ago pi_0 sampled.
"""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whippletree import credit, objective
from whippletree.methods import grpo
from whippletree.objective.ratios import log_ratio, masked, sum_over
from whippletree.toys.bandits import bandit
from whippletree.toys.chains import chain, favour
from whippletree.toys.exact import chance, tilted
from whippletree.toys.learning import learn
from whippletree.toys.table import Table
from whippletree.types import Batch, Claim, Forward, Method, Paper
from whippletree.update.averages import constant, rollout_mean


def sometimes_solved(reward_R: Tensor, *, low: float = 0.0, high: float = 1.0) -> bool:
    """Whether the mean reward of a group lies strictly between the two; rewards are 0 to 1."""
    return low < float(reward_R.mean()) < high


def above_value(batch: Batch, *, beta_v: float = 1.0) -> Tensor:
    """[N] how far each rollout's reward lies above the soft value of its group: the target of the regression.

        A_i = r_i - beta_v * log mean_j exp(r_j / beta_v)

    Towards `beta_v` of infinity V is the group's mean, towards 0 its largest reward.

    Raises:
        ValueError: `beta_v` is not positive, a reward is missing, or a group was sampled by several versions.
    """
    if beta_v <= 0:
        raise ValueError(f"beta_v is a temperature, so it must be positive, but got {beta_v}")
    reward_R, (_, index_R) = credit.known_reward(batch), torch.unique(batch.group_R, return_inverse=True)
    if mixed := [
        int(g) for g in batch.group_R.unique() if len(batch.version_N[batch.group_R[batch.rollout_N] == g].unique()) > 1
    ]:
        raise ValueError(
            f"the value of a group is that of one policy, but groups {mixed} were sampled by several versions: change "
            f"weights between groups only"
        )
    most_R = torch.full((len(reward_R),), -torch.inf).scatter_reduce(0, index_R, reward_R, "amax")[index_R]
    # exp of the distance to the largest is at most 1, so nothing overflows
    mean_R = credit.mean_within(((reward_R - most_R) / beta_v).double().exp(), batch.group_R)
    return credit.on_tokens(reward_R - (most_R + beta_v * mean_R.log()), batch)


def regression(forward: Forward, advantage_N: Tensor, batch: Batch, *, beta: float = 0.05) -> Tensor:
    """[N] the squared error of a rollout on each of its tokens: (beta * sum of log-ratios - A)^2.

    It is a sum over the rollout: with the mean in its place, another policy would be the best.
    """
    moved_N = sum_over(log_ratio(forward.logp_N, batch.logp_old_N, batch), batch, level="rollout")
    return masked((beta * moved_N - advantage_N).square(), batch)


METHOD = Method(
    paper=Paper(
        "KARL: Knowledge Agents via Reinforcement Learning",
        authors="Chang et al., Databricks",
        year=2026,
        arxiv="2603.05218",
        source="summary",
        also_called=("OAPL", "off-policy RL with optimal advantage regression"),
    ),
    credit=partial(above_value, beta_v=1.0),
    objective=partial(regression, beta=0.05),
    average=rollout_mean,
    accept=sometimes_solved,
    excused=("equal rewards teach nothing",),
    differs="the mean over rollouts where the paper sums; log-ratios of a token are held within 20. Two temperatures, "
    "1 and 0.05, are the page's filling-in. Groups are left out where all have reward 0 or all 1, as the paper says; "
    "the page's thresholds of 0.1 and 0.9 are the same for rewards of 0 and 1 and up to 9 rollouts, and low= and high= "
    "set them. Of the pipeline only this is here: what is asked, how contexts are compressed, nuggets as reward, "
    "answers joined at test time and the search guided by a value are not parts of an update. Weights are synced as "
    "the recipe says, and a group of several versions is refused. Excused: a group of equal rewards is drawn back to "
    "the policy that sampled it. Costs nothing beyond GRPO: no reference, no judge. CLAIM's arms learn a word of six "
    "symbols, as sums took a transformer too long",
)


def learned(arm: tuple[Method, int], seed: int, *, updates: int = 200) -> float:
    """The exact chance (0 to 1) of a word of 6 right symbols, 0.13 at first, on average over updates of 4 groups of 8.

    An arm is a method and after how many updates the sampler gets the weights.
    """
    method, lag = arm
    world = chain(one_turn=True)
    table, solved = Table.of(world, favour(world, 2.0)), {"solved": chance(world)}
    run = partial(learn, seed=seed, updates=updates, groups=4, rate=0.3, optimizer="adam")
    return float(np.mean(run(method, world, table, sync=lag, exact=solved).exact["solved"]))


def off_target(arm: Method, seed: int, *, lag: int = 50, updates: int = 400) -> float:
    """Total variation (0 to 1) to pi_0 exp(r) / Z after learning a bandit of 10 actions from samples of pi_0 alone.

    Each sample of 16 groups of 64 is used for `lag` updates.
    """
    random = torch.Generator().manual_seed(seed)
    reward_PV, start_PV, sampler_PV = torch.rand(1, 10, generator=random), *torch.randn(2, 1, 10, generator=random)
    world = bandit(reward_PV)
    table, sampler, calls, kept = Table.of(world, start_PV), Table.of(world, sampler_PV), count(), list[Any]()

    def stale(played: Any, random: np.random.Generator) -> Any:
        if next(calls) % lag == 0:
            kept[:] = [world.play(sampler, played.group_R, random)]
        return kept[0]

    learn(arm, world, table, seed=seed, updates=updates, groups=16, size=64, rate=0.03, optimizer="adam", revise=stale)
    target_PV = tilted(sampler.logp_PV(), reward_PV, beta=1.0)
    return float((table.logp_PV().exp() - target_PV.exp()).abs().sum().detach() / 2)


CLIPPED = grpo.METHOD.but(average=partial(constant, tokens=6))
WEIGHED = CLIPPED.but(objective=partial(objective.clipped_ratio, low=float("inf"), high=float("inf")))

CLAIM = Claim(
    says="where the sampler gets new weights every 50 updates, regression learns sooner than GRPO with clipped ratios",
    baseline=(CLIPPED, 50),
    method=(METHOD, 50),
    measure=learned,
    better="higher",
    seeds=6,
    arms={
        "GRPO, every update": (CLIPPED, 1),
        "GRPO, every 200": (CLIPPED, 200),
        "GRPO, no clip": (WEIGHED, 50),
        "GRPO, no clip, every 200": (WEIGHED, 200),
        "regression, every update": (METHOD, 1),
        "regression, every 200": (METHOD, 200),
        "regression, one temperature of 1": (METHOD.but(objective=partial(regression, beta=1.0)), 50),
    },
)

# the best policy near the one that sampled is found, however long its samples are used; beta and beta_v are 1
NEAR = METHOD.but(objective=partial(regression, beta=1.0))
TARGET = Claim(
    says="the tilted policy is found", baseline=WEIGHED, method=NEAR, measure=off_target, better="lower", seeds=6
)
