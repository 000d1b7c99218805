"""Training on a toy: the slots of a method in the order of a run, on episodes that take microseconds."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from whippletree.toys.played import Array, Played, Policy
from whippletree.types import Asker, Batch, Method, Rollout, Scorer, Services


class Toy(Protocol):
    """What can be learned: it plays one episode for each entry of `groups`."""

    def play(
        self, policy: Any, groups: Sequence[int], random: np.random.Generator, *, version: int = 0
    ) -> Sequence[Rollout]: ...

    def counts(self, rollouts: Sequence[Rollout]) -> Mapping[str, Array]:
        """[R] of each channel and measure: what every rollout got."""
        ...


@dataclass
class Curve:
    """What happened: the mean of each channel and measure by update, exact numbers where they were asked for."""

    mean: dict[str, list[float]] = field(default_factory=dict)  # of the episodes of each update
    exact: dict[str, list[float]] = field(default_factory=dict)  # before each update
    episodes: int = 0

    def updates_to(self, level: float, *, name: str = "reward", over: int = 10, exact: bool = False) -> float:
        """The first update after which the mean over the last `over` is at least `level`; infinite if none is."""
        numbers = np.array((self.exact if exact else self.mean).get(name, []))
        sums = np.concatenate([[0.0], numbers.cumsum()])
        reached = np.flatnonzero((sums[over:] - sums[:-over]) / over >= level - 1e-9)
        return float(reached[0] + over) if len(reached) else math.inf

    def last(self, name: str = "reward", *, over: int = 10) -> float:
        """The mean over the last updates."""
        return float(np.mean(self.mean[name][-over:]))


Ask = Callable[[Any], Services]  # of the policy as it is now
Revise = Callable[[Any, np.random.Generator], Sequence[Rollout]]  # more, fewer or other rollouts than were played


def learn(
    method: Method,
    toy: Toy,
    policy: Any,
    *,
    seed: int,
    updates: int,
    groups: int = 2,
    size: int = 8,
    rate: float = 0.3,
    optimizer: Literal["sgd", "adam"] = "sgd",
    passes: int = 1,
    sync: int = 1,
    scorers: Mapping[str, Scorer] | None = None,
    askers: Mapping[str, Asker] | None = None,
    revise: Revise | None = None,
    exact: Mapping[str, Callable[[Any], float]] | None = None,
    until: Callable[[Curve], bool] | None = None,
) -> Curve:
    """Train `policy` on `toy` with `method`, and tell what happened; the same seed gives the same run.

    Each update plays `groups` groups of `size` episodes, on tasks in turn, under the policy of at most `sync - 1`
    updates ago, and takes `passes` steps. Scorers are "policy", "reference" (the policy as given) and "value" (its own,
    if it has one), and those given. `revise` may change what was played before anything is computed. `exact` are
    numbers of the policy to be noted before each update; `until` ends the run early.
    """
    random, curve = np.random.default_rng(seed), Curve()
    steps = (torch.optim.SGD if optimizer == "sgd" else torch.optim.Adam)(policy.parameters(), lr=rate)
    fixed = {"reference": deepcopy(policy), **(scorers or {})}
    sampler = policy
    with asyncio.Runner() as runner:
        for update in range(updates):
            for name, number in (exact or {}).items():
                curve.exact.setdefault(name, []).append(number(policy))
            if sync > 1 and update % sync == 0:
                sampler = deepcopy(policy)
            chosen = [g for g in range(update * groups, (update + 1) * groups) for _ in range(size)]
            rollouts = toy.play(sampler, chosen, random, version=update - update % sync)
            curve.episodes += len(rollouts)
            for name, count_R in toy.counts(rollouts).items():
                curve.mean.setdefault(name, []).append(float(count_R.mean()))
            rollouts = _chosen(method, rollouts if revise is None else revise(rollouts, random))
            if len(rollouts):
                services = Services({**_own(policy), **fixed}, askers or {})
                _update(method, policy, rollouts, runner, services, steps, passes)
            if until is not None and until(curve):
                break
    return curve


def reached(level: float, *, name: str = "reward", over: int = 10, exact: bool = False) -> Callable[[Curve], bool]:
    """For `until`: the mean over the last `over` updates is at least `level`."""

    def now(curve: Curve) -> bool:
        numbers = (curve.exact if exact else curve.mean)[name][-over:]
        return len(numbers) == over and sum(numbers) / over >= level - 1e-9

    return now


def negated(method: Method) -> Method:
    """The same method with the sign of its credit turned: what was good is now bad."""
    return method.but(credit=partial(_minus, credit=method.credit))


def _minus(batch: Batch, *, credit: Callable[[Batch], Tensor]) -> Tensor:
    return -credit(batch)


def _update(
    method: Method,
    policy: Policy,
    rollouts: Sequence[Rollout],
    runner: asyncio.Runner,
    services: Services,
    steps: torch.optim.Optimizer,
    passes: int,
) -> None:
    batch = batch_of(rollouts)
    for evidence in method.evidence:
        batch = batch.with_extra(**runner.run(_found(evidence(rollouts, batch, services))))
    advantage_N, weight_N = method.credit(batch).detach(), method.average(batch)
    for _ in range(passes):
        steps.zero_grad()
        (weight_N * method.objective(policy.forward(rollouts, batch), advantage_N, batch)).sum().backward()
        steps.step()


def batch_of(rollouts: Sequence[Rollout]) -> Batch:
    """The table of these rollouts, without making them first where they were played in a world."""
    return rollouts.batch if isinstance(rollouts, Played) else Batch.of(rollouts)


def _chosen(method: Method, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
    """The groups that the method accepts, with the turns that it keeps."""
    if method.accept is not None:
        batch = batch_of(rollouts)
        taken = [bool(method.accept(batch.reward_R[batch.group_R == g])) for g in range(int(batch.group_R.max()) + 1)]
        index = [r for r, group in enumerate(batch.group_R.tolist()) if taken[group]]
        rollouts = rollouts.select(index) if isinstance(rollouts, Played) else [rollouts[r] for r in index]
    if method.keep is not None:
        rollouts = [replace(rollout, turns=method.keep(rollout).turns) for rollout in rollouts]
    return rollouts


def _own(policy: Any) -> dict[str, Scorer]:
    return {"policy": policy, **({"value": policy.values()} if hasattr(policy, "values") else {})}


async def _found(columns: Any) -> dict[str, Tensor]:
    return dict(await columns)
