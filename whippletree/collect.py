"""Rollouts of one step: each task a group of runs of the harness, scored, and found again on resume.

A rollout's name fixes its random numbers and its place in the store. What is in the store is not run again: after a
kill the same step takes the finished rollouts as they are and runs only those that were cut off.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from whippletree.config import SamplingSection
from whippletree.gateway.budget import Budget
from whippletree.gateway.sessions import SamplingDefaults, Session, Sessions
from whippletree.gateway.store import Store, StoreError
from whippletree.harness.outcome import Harness, Outcome, failure
from whippletree.reward.channels import score
from whippletree.types import Reward, Rollout, Task

T = TypeVar("T")
SCORED = "whippletree/scored"  # in a rollout's info: these rewards are final, so a resumed run does not score again


@dataclass
class Collected:
    """What came of a step's rollouts: whole groups only, and a count of what is missing and why."""

    groups: list[list[Rollout]] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)  # rollouts that failed, by blame
    reasons: list[str] = field(default_factory=list)
    dropped: int = 0  # groups that did not become whole
    cursor: int = 0  # tasks handed out so far
    refused: int = 0  # groups that the method did not accept

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group]


class Collector:
    """Runs harnesses against the gateway. `limit` rollouts run at once; `progress(done, total)` is told of each."""

    def __init__(
        self,
        *,
        harness: Harness,
        store: Store,
        sessions: Sessions,
        server: str,
        rewards: Mapping[str, Reward] | Sequence[Reward],
        reward_timeout: float,
        sampling: SamplingSection,
        limit: int,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.harness, self.store, self.sessions, self.server = harness, store, sessions, server
        self.rewards, self.reward_timeout, self.sampling, self.progress = rewards, reward_timeout, sampling, progress
        self.places = asyncio.Semaphore(limit)
        self._ran = False  # whether anything was run in this step
        self._again = False  # whether rollouts that failed are run again

    async def step(
        self,
        step: int,
        cursor: int,
        task_at: Callable[[int], Task],
        accept: Callable[[Sequence[Rollout]], bool],
    ) -> Collected:
        """`tasks_per_step` whole accepted groups, from task number `cursor` on.

        Where the method refuses groups, further tasks are run until the step is full, ten times over at most. Where an
        earlier start lost every group, and ended for it, what failed then is run again.
        """
        self._ran = False
        found = await self._step(step, cursor, task_at, accept)
        if found.failed and not found.groups and not self._ran:
            self._again = True
            found = await self._step(step, cursor, task_at, accept)
            self._again = False
        return found

    async def _step(
        self, step: int, cursor: int, task_at: Callable[[int], Task], accept: Callable[[Sequence[Rollout]], bool]
    ) -> Collected:
        wanted = self.sampling.tasks_per_step
        found = Collected(cursor=cursor)
        for _ in range(10):
            missing = wanted - len(found.groups) - found.dropped
            if missing <= 0:
                break
            numbers = range(found.cursor, found.cursor + missing)
            names = [f"train/{step:06d}/{number - cursor:03d}" for number in numbers]
            await self._groups(found, names, [task_at(number) for number in numbers], accept)
            found.cursor += missing
        return found

    async def evaluate(self, name: str, tasks: Sequence[Task], *, temperature: float) -> list[Rollout]:
        """One rollout a task; a rollout that failed is in the list, with no reward."""
        self._begin(len(tasks))
        runs = [self._rollout(f"{name}/{i:04d}", task, f"{name}/{i:04d}", temperature) for i, task in enumerate(tasks)]
        return list(await gather([self._counted(run) for run in runs]))

    async def _groups(
        self, found: Collected, names: list[str], tasks: list[Task], accept: Callable[[Sequence[Rollout]], bool]
    ) -> None:
        self._begin(len(tasks) * self.sampling.rollouts_per_task)
        pairs = zip(names, tasks, strict=True)
        for runs in await gather([self._group(name, task, found) for name, task in pairs]):
            lost = len(runs) < self.sampling.rollouts_per_task
            # of a group that lost some, a lone rollout has nothing to be compared with
            if lost and (self.sampling.on_failure != "keep" or len(runs) < 2):
                found.dropped += 1
            elif not accept(runs):
                found.refused += 1
            else:
                found.groups.append(runs)

    async def _group(self, name: str, task: Task, found: Collected) -> list[Rollout]:
        size = range(self.sampling.rollouts_per_task)
        runs = [self._persistent(f"{name}/{i:02d}", task, name, found) for i in size]
        return [run for run in await gather([self._counted(run) for run in runs]) if run is not None]

    async def _persistent(self, name: str, task: Task, group: str, found: Collected) -> Rollout | None:
        """A rollout that did not fail and has a reward, run again as often as the settings allow."""
        tries = 1 + (self.sampling.retries if self.sampling.on_failure == "resample" else 0)
        for number in range(tries):
            run = await self._rollout(f"{name}.{number}" if number else name, task, group, self.sampling.temperature)
            if run.ending != "failed" and any(reward is not None for reward in run.rewards.values()):
                return run
            blame = run.blame or "reward"
            found.failed[blame] += 1
            found.reasons.append(
                f"{run.id}: {blame}: {run.reason or run.info.get('reward_errors', 'no reward applies')}"
            )
        return None

    async def _rollout(self, name: str, task: Task, group: str, temperature: float) -> Rollout:
        """One rollout: out of the store where it has ended before, else run now."""
        async with self.places:
            kept = self.store.rollout(name)
            if kept is None or (self._again and kept.ending == "failed"):
                kept = await self._run(name, task, group, temperature)
        rollout = kept
        if rollout.ending != "failed" and SCORED not in rollout.info:
            scored = await score(rollout, self.rewards, timeout=self.reward_timeout)
            rollout = replace(scored, info={**scored.info, SCORED: True})
            await self.store.set_rewards(name, rollout.rewards, info=rollout.info)
        return rollout

    async def _run(self, name: str, task: Task, group: str, temperature: float) -> Rollout:
        defaults = SamplingDefaults(temperature=temperature, max_tokens=self.sampling.reply_tokens)
        self._ran = True
        session = await self.sessions.open(
            name, group=group, task=task, stream=name, defaults=defaults, budget=Budget(turns=self.sampling.turns)
        )
        try:
            outcome = await self.harness.run(task, base_url=f"{self.server}/v1", api_key=session.secret)
        finally:
            await self.sessions.close(name)
        outcome = judged(outcome, session, calls=len(self.store.turns(name)))
        await self.store.end_rollout(name, **vars(outcome))
        rollout = self.store.rollout(name)
        assert rollout is not None, name
        return rollout

    async def _counted(self, run: Coroutine[Any, Any, T]) -> T:
        """The result of a run, with `progress` told of it."""
        result = await run
        self._done += 1
        self.progress(self._done, self._total)
        return result

    def _begin(self, total: int) -> None:
        self._done, self._total = 0, total
        self.progress(0, total)


def judged(outcome: Outcome, session: Session, *, calls: int) -> Outcome:
    """What a harness said of its run, with what the gateway knows of it: whose fault a failure was, if anyone's.

    Raises:
        StoreError: it failed as the disk did not take a reply. That is no fault of the rollout, which stays open, so
            that a resumed run begins it anew.
    """
    if outcome.ending == "failed" and StoreError.__name__ in session.failure:
        raise StoreError(session.failure)
    if outcome.ending == "failed" and session.truncated and calls:  # a limit of ours, not a fault of the harness
        return replace(outcome, ending="truncated", blame=None, reason=session.truncated)
    if outcome.ending == "failed" and session.failure:
        return replace(outcome, blame="engine", reason=session.failure)
    if outcome.ending == "failed" and not session.truncated:
        return outcome
    if not calls:
        why = session.truncated or "the harness ended without a single call to the policy"
        return failure(why, info=outcome.info)
    try:
        json.dumps(outcome.info)
    except (TypeError, ValueError) as error:
        return failure(f"what the harness found must be JSON, as it is kept in the store, but {error}")
    return outcome


async def gather(runs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; the first error ends the others and is raised."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run) for run in runs]
    return [task.result() for task in tasks]


def rewards_of(rollouts: Sequence[Rollout], weights: Mapping[str, float]) -> list[float | None]:
    """The weighted total of each rollout's channels; None where none applies."""
    totals: list[float | None] = []
    for rollout in rollouts:
        known = [weights.get(name, 1.0) * value for name, value in rollout.rewards.items() if value is not None]
        totals.append(sum(known) if known else None)
    return totals
