"""Rollouts of one step: each task a group of runs of the harness, scored, and found again on resume.

A rollout's name fixes its random numbers and its place in the store. What is in the store is not run again: after a
kill the same step takes the finished rollouts as they are and runs only those that were cut off.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from whippletree.config import SamplingSection
from whippletree.endings import capped, judged
from whippletree.gateway.budget import Budget
from whippletree.gateway.sessions import SamplingDefaults, Sessions
from whippletree.gateway.store import Store
from whippletree.harness.outcome import Harness
from whippletree.reward.channels import score
from whippletree.tree.fidelity import FidelityError
from whippletree.types import Json, Reward, Rollout, Task

T = TypeVar("T")
# in a rollout's info
SCORED = "whippletree/scored"  # these rewards are final, so a resumed run does not score again
HARNESS = "whippletree/harness"  # the name of the harness that ran it
DIGESTS = "whippletree/digests"  # of what made its prompts: the template, the tokenizer, the tools of each call


@dataclass(frozen=True)
class Runner:
    """A harness of a run: how many rollouts of it run at once, and whether a cut reply may be its last word."""

    harness: Harness
    limit: int = 64
    takes_cut_replies: bool = False


@dataclass
class Collected:
    """What came of a step's rollouts: whole groups only, and a count of what is missing and why."""

    groups: list[list[Rollout]] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)  # rollouts that failed, by blame
    failed_under: Counter[str] = field(default_factory=Counter)  # the same, by harness
    reasons: list[str] = field(default_factory=list)
    dropped: int = 0  # groups that did not become whole
    cursor: int = 0  # tasks handed out so far
    refused: int = 0  # groups that the method did not accept

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group]


class Collector:
    """Runs harnesses against the gateway; `progress(done, total)` is told of each rollout.

    Args:
        harnesses: by name. Each task is run under all of them, in a group for each.
        digests: of what makes prompts here; a rollout of an earlier start that has others is refused.
    """

    def __init__(
        self,
        *,
        harnesses: Mapping[str, Runner],
        store: Store,
        sessions: Sessions,
        server: str,
        rewards: Mapping[str, Reward] | Sequence[Reward],
        reward_timeout: float,
        sampling: SamplingSection,
        digests: Json | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.harnesses = harnesses
        self.places = {name: asyncio.Semaphore(runner.limit) for name, runner in harnesses.items()}
        self.store, self.sessions, self.server, self.digests = store, sessions, server, digests or {}
        self.rewards, self.reward_timeout, self.sampling, self.progress = rewards, reward_timeout, sampling, progress
        self._ran = False  # whether anything was run in this step
        self._again = False  # whether rollouts that failed are run again

    async def step(
        self,
        step: int,
        cursor: int,
        task_at: Callable[[int], Task],
        accept: Callable[[Sequence[Rollout]], bool],
    ) -> Collected:
        """`tasks_per_step` whole accepted groups of each harness, from task number `cursor` on.

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
        wanted = self.sampling.tasks_per_step * len(self.harnesses)
        found = Collected(cursor=cursor)
        for _ in range(10):
            missing = -((found.dropped + len(found.groups) - wanted) // len(self.harnesses))  # tasks, rounded up
            if missing <= 0:
                break
            numbers = range(found.cursor, found.cursor + missing)
            names = [f"train/{step:06d}/{number - cursor:03d}" for number in numbers]
            await self._groups(found, names, [task_at(number) for number in numbers], accept)
            found.cursor += missing
        return found

    async def evaluate(self, name: str, tasks: Sequence[Task], *, temperature: float) -> list[Rollout]:
        """One rollout a task and harness; a rollout that failed is in the list, with no reward."""
        self._begin(len(tasks) * len(self.harnesses))
        names = [self._name(f"{name}/{i:04d}", under) for i in range(len(tasks)) for under in self.harnesses]
        each = [(task, under) for task in tasks for under in self.harnesses]
        runs = [self._rollout(x, task, x, temperature, under) for x, (task, under) in zip(names, each, strict=True)]
        return list(await gather([self._counted(run) for run in runs]))

    async def _groups(
        self, found: Collected, names: list[str], tasks: list[Task], accept: Callable[[Sequence[Rollout]], bool]
    ) -> None:
        self._begin(len(tasks) * len(self.harnesses) * self.sampling.rollouts_per_task)
        pairs = [(*pair, under) for pair in zip(names, tasks, strict=True) for under in self.harnesses]
        for runs in await gather([self._group(name, task, found, under) for name, task, under in pairs]):
            lost = len(runs) < self.sampling.rollouts_per_task
            # of a group that lost some, a lone rollout has nothing to be compared with
            if lost and (self.sampling.on_failure != "keep" or len(runs) < 2):
                found.dropped += 1
            elif not accept(runs):
                found.refused += 1
            else:
                found.groups.append(runs)

    def _name(self, place: str, under: str) -> str:
        """Of a rollout or group under a harness; a lone harness needs no name."""
        return f"{place}/{under}" if len(self.harnesses) > 1 else place

    async def _group(self, place: str, task: Task, found: Collected, under: str) -> list[Rollout]:
        name, size = self._name(place, under), range(self.sampling.rollouts_per_task)
        runs = [self._persistent(f"{name}/{i:02d}", task, name, found, under) for i in size]
        return [run for run in await gather([self._counted(run) for run in runs]) if run is not None]

    async def _persistent(self, name: str, task: Task, group: str, found: Collected, under: str) -> Rollout | None:
        """A rollout that did not fail and has a reward, run again as often as the settings allow."""
        tries = 1 + (self.sampling.retries if self.sampling.on_failure == "resample" else 0)
        for number in range(tries):
            this = f"{name}.{number}" if number else name
            run = await self._rollout(this, task, group, self.sampling.temperature, under)
            if run.ending != "failed" and any(reward is not None for reward in run.rewards.values()):
                return run
            blame = run.blame or "reward"
            found.failed[blame] += 1
            found.failed_under[under] += 1
            found.reasons.append(
                f"{run.id}: {blame}: {run.reason or run.info.get('reward_errors', 'no reward applies')}"
            )
        return None

    async def _rollout(self, name: str, task: Task, group: str, temperature: float, under: str) -> Rollout:
        """One rollout: out of the store where it has ended before, else run now.

        Raises:
            FidelityError: the one in the store was made with another template or tokenizer.
        """
        async with self.places[under]:
            kept = self.store.rollout(name)
            if kept is None or (self._again and kept.ending == "failed"):
                kept = await self._run(name, task, group, temperature, under)
        rollout = kept
        self._same_prompts(rollout)
        if rollout.ending != "failed" and SCORED not in rollout.info:
            scored = await score(rollout, self.rewards, timeout=self.reward_timeout)
            scored = capped(scored, self.sampling.unfinished_reward)
            rollout = replace(scored, info={**scored.info, SCORED: True})
            await self.store.set_rewards(name, rollout.rewards, info=rollout.info)
        return rollout

    async def _run(self, name: str, task: Task, group: str, temperature: float, under: str) -> Rollout:
        sampling, runner = self.sampling, self.harnesses[under]
        self._ran = True
        session = await self.sessions.open(
            name,
            group=group,
            task=task,
            stream=name,
            defaults=SamplingDefaults(temperature=temperature),
            budget=Budget(
                turns=sampling.turns,
                tokens=sampling.tokens,
                reply_tokens=sampling.reply_tokens,
                seconds=sampling.seconds,
                calls_per_second=sampling.calls_per_second,
            ),
        )
        try:
            outcome = await runner.harness.run(task, base_url=f"{self.server}/v1", api_key=session.secret)
        finally:
            await self.sessions.close(name)
        turns = self.store.turns(name)
        outcome = judged(outcome, session, turns, takes_cut_replies=runner.takes_cut_replies)
        tools = sorted({turn.info["tools"] for turn in turns if turn.info.get("tools")})
        info = {**outcome.info, HARNESS: under, DIGESTS: {**self.digests, "tools": tools}}
        await self.store.end_rollout(name, **vars(replace(outcome, info=info)))
        rollout = self.store.rollout(name)
        assert rollout is not None, name
        return rollout

    def _same_prompts(self, rollout: Rollout) -> None:
        then = rollout.info.get(DIGESTS, {})
        other = [name for name, digest in self.digests.items() if then.get(name, digest) != digest]
        if other:
            raise FidelityError(
                f"what is trained must be what was sampled, but {rollout.id} was made with another "
                f"{' and '.join(other)} than this model has now: put the old one back, or begin the run anew (--fresh)"
            )

    async def _counted(self, run: Coroutine[Any, Any, T]) -> T:
        """The result of a run, with `progress` told of it."""
        result = await run
        self._done += 1
        self.progress(self._done, self._total)
        return result

    def _begin(self, total: int) -> None:
        self._done, self._total = 0, total
        self.progress(0, total)


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
