from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field

import pytest

from whippletree.harness import Outcome, run_all
from whippletree.types import Task


@dataclass
class Scripted:
    """A harness whose runs end when the test says so."""

    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    raises: str = ""

    async def run(self, task: Task, *, base_url: str, api_key: str) -> Outcome:
        self.running.append(task.id)
        try:
            if task.id == self.raises:
                raise RuntimeError("a bug of the harness")
            await self.gates.setdefault(task.id, asyncio.Event()).wait()
        except asyncio.CancelledError:
            self.cancelled.append(task.id)
            raise
        finally:
            self.running.remove(task.id)
        return Outcome(info={"task": task.id, "at": f"{base_url} {api_key}"})

    async def end(self, name: str) -> None:
        while name not in self.running:
            await asyncio.sleep(0)
        self.gates[name].set()


RUNS = [(Task(name), "http://g/v1", f"key-{name}") for name in "abcd"]


async def test_outcomes_come_as_they_finish_under_the_limit():
    harness, seen = Scripted(), []
    runs = run_all(harness, RUNS, concurrency=2, progress=lambda done, total, _: seen.append((done, total)))
    order = []
    for name in "badc":  # c starts only when b has made room, d when a has
        first = asyncio.ensure_future(anext(runs))
        await harness.end(name)
        index, outcome = await first
        assert outcome.info == {"task": name, "at": f"http://g/v1 key-{name}"}
        assert len(harness.running) <= 2
        order.append(index)
    assert order == [1, 0, 3, 2]
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    with pytest.raises(StopAsyncIteration):
        await anext(runs)


async def test_leaving_early_ends_the_runs_that_are_left():
    harness = Scripted()
    async with aclosing(run_all(harness, RUNS, concurrency=3)) as runs:
        first = asyncio.ensure_future(anext(runs))
        await harness.end("b")
        await first
        while "d" not in harness.running:
            await asyncio.sleep(0)
    assert (harness.running, sorted(harness.cancelled)) == ([], ["a", "c", "d"])


async def test_cancelling_ends_every_run_and_waits_for_it():
    harness = Scripted()

    async def everything() -> list[tuple[int, Outcome]]:
        return [pair async for pair in run_all(harness, RUNS, concurrency=2)]

    whole = asyncio.create_task(everything())
    while len(harness.running) < 2:
        await asyncio.sleep(0)
    whole.cancel()
    with pytest.raises(asyncio.CancelledError):
        await whole
    assert (harness.running, sorted(harness.cancelled)) == ([], ["a", "b"])


async def test_a_bug_of_a_harness_rises_and_ends_the_others():
    harness = Scripted(raises="b")
    with pytest.raises(RuntimeError, match="a bug of the harness"):
        await anext(run_all(harness, RUNS, concurrency=4))
    assert (harness.running, sorted(harness.cancelled)) == ([], ["a", "c", "d"])


async def test_no_runs_give_no_outcomes_and_no_place_is_refused():
    assert [pair async for pair in run_all(Scripted(), [], concurrency=1)] == []
    with pytest.raises(ValueError, match="concurrency is 0"):
        await anext(run_all(Scripted(), RUNS, concurrency=0))
