from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.collecting import Play, Runs, ask, fails, once
from whippletree.collect import gather, rewards_of
from whippletree.engine.scripted import ScriptedEngine
from whippletree.gateway.store import Store, StoreError
from whippletree.harness.outcome import Outcome
from whippletree.models.tiny import tiny_tokenizer
from whippletree.types import Rollout, Task

YES = lambda group: True  # noqa: E731


def task_at(number: int) -> Task:
    return Task(str(number))


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Callable[..., Runs]]:
    """Makes runs on one store: `runs(play, **fields)`; each call stands for a new process."""
    stores: list[Store] = []

    def make(play: Play = once, *, engine: dict[str, Any] | None = None, max_pages: int | None = None, **other: Any):
        stores.append(Store(tmp_path / "turns.sqlite", max_pages=max_pages))
        scripted = ScriptedEngine(lambda prompt: "yes", tiny_tokenizer(), **(engine or {}))
        return Runs(stores[-1], scripted, play, **other)

    yield make
    for store in stores:
        store.close()


# ---- what is in the store is not run again ----------------------------------------------------------------------


async def test_a_step_gives_whole_groups_in_the_order_of_their_tasks(runs):
    made = runs()
    found = await made.collector().step(7, 10, task_at, YES)
    assert [[r.id for r in group] for group in found.groups] == [
        [f"train/000007/{group:03d}/{i:02d}" for i in range(3)] for group in range(2)
    ]
    assert [r.task.id for r in found.rollouts] == ["10"] * 3 + ["11"] * 3
    assert (found.cursor, found.dropped, found.refused, found.failed) == (12, 0, 0, Counter())
    # "yes" and the end of the turn
    assert all(r.rewards == {"length": 4.0} and r.ending == "done" for r in found.rollouts)
    assert made.progress == [(done, 6) for done in range(7)]


async def test_a_finished_rollout_is_not_run_again(runs):
    before = await runs().collector().step(0, 0, task_at, YES)
    again = runs()
    after = await again.collector().step(0, 0, task_at, YES)
    assert again.ran == []
    assert [r.to_json() for r in after.rollouts] == [r.to_json() for r in before.rollouts]
    assert again.progress[-1] == (6, 6)


async def test_an_interrupted_rollout_is_run_again_and_only_it(runs):
    hangs = asyncio.Event()

    async def third_hangs(runs: Runs, task: Task, client: httpx.AsyncClient) -> Outcome:
        await ask(client, task.id)
        if len(runs.ran) > 2:
            hangs.set()
            await asyncio.Event().wait()
        return Outcome()

    first = runs(third_hangs, limit=1)
    step = asyncio.create_task(first.collector(tasks_per_step=1, rollouts_per_task=4).step(0, 0, task_at, YES))
    await hangs.wait()
    step.cancel()
    await asyncio.gather(step, return_exceptions=True)
    second = runs()
    found = await second.collector(tasks_per_step=1, rollouts_per_task=4).step(0, 0, task_at, YES)
    assert len(second.ran) == 2  # the third, which had made a call, and the fourth, which had not begun
    assert [len(r.turns) for r in found.rollouts] == [1, 1, 1, 1]  # the call of the cut attempt is not in it
    assert second.streams()[0] == first.streams()[2]  # and samples what the first would have


async def test_a_reward_that_was_stored_is_not_asked_again_and_one_that_was_not_is(runs):
    asked: list[str] = []

    async def dies_at_the_second(rollout: Rollout) -> dict[str, float | None]:
        asked.append(rollout.id)
        if len(asked) == 2:
            raise asyncio.CancelledError
        return {"length": 1.0}

    first = runs(reward=dies_at_the_second, limit=1).collector(tasks_per_step=1, rollouts_per_task=2)
    with pytest.raises(asyncio.CancelledError):
        await first.step(0, 0, task_at, YES)
    second = runs(reward=dies_at_the_second)
    found = await second.collector(tasks_per_step=1, rollouts_per_task=2).step(0, 0, task_at, YES)
    assert second.ran == []
    assert [name[-2:] for name in asked] == ["00", "01", "01"]
    assert [r.rewards for r in found.rollouts] == [{"length": 1.0}] * 2


async def test_a_note_of_the_harness_never_passes_for_a_score(runs):
    async def notes(runs: Runs, task: Task, client: httpx.AsyncClient) -> Outcome:
        await ask(client, task.id)
        return Outcome(rewards={"own": 9.0}, info={"scored": True})

    found = await runs(notes).collector().step(0, 0, task_at, YES)
    assert all(r.rewards == {"length": 4.0} and r.info["scored"] is True for r in found.rollouts)


# ---- what failed is missing, counted, and never a 0 -------------------------------------------------------------


async def test_a_failed_rollout_is_sampled_again_with_other_random_numbers(runs):
    made = runs(fails(0), limit=1)
    found = await made.collector(tasks_per_step=1).step(0, 0, task_at, YES)
    assert [r.id[13:] for r in found.rollouts] == ["000/00.1", "000/01", "000/02"]
    assert (found.failed, found.dropped) == (Counter(harness=1), 0)
    assert found.reasons == ["train/000000/000/00: harness: the tool broke"]
    assert len(set(made.streams())) == 4
    # a group is whole when each of its rollouts is there, however often one was tried
    assert made.progress[-1] == (3, 3)
    again = runs(fails())
    assert [r.id for r in (await again.collector(tasks_per_step=1).step(0, 0, task_at, YES)).rollouts] == [
        r.id for r in found.rollouts
    ]
    assert again.ran == []


async def test_a_group_is_dropped_once_its_retries_are_used(runs):
    found = await runs(fails(0, 3, 4), limit=1).collector(tasks_per_step=1, retries=2).step(0, 0, task_at, YES)
    assert (found.groups, found.dropped, found.failed) == ([], 1, Counter(harness=3))


async def test_a_step_that_an_earlier_start_lost_wholly_is_tried_again(runs):
    sizes = {"tasks_per_step": 1, "on_failure": "drop"}
    assert (await runs(fails(0, 1, 2)).collector(**sizes).step(0, 0, task_at, YES)).groups == []
    again = runs(fails())
    found = await again.collector(**sizes).step(0, 0, task_at, YES)
    assert (len(found.groups), len(again.ran), found.failed, found.dropped) == (1, 3, Counter(), 0)


async def test_on_failure_drop_gives_up_the_group_at_once(runs):
    made = runs(fails(1), limit=1)
    found = await made.collector(on_failure="drop").step(0, 0, task_at, YES)
    assert (len(found.groups), found.dropped, len(made.ran)) == (1, 1, 6)


async def test_on_failure_keep_goes_on_with_the_rest_of_the_group(runs):
    found = await runs(fails(1), limit=1).collector(on_failure="keep").step(0, 0, task_at, YES)
    assert ([len(group) for group in found.groups], found.dropped, found.failed) == ([2, 3], 0, Counter(harness=1))


async def test_on_failure_keep_does_not_keep_a_lone_rollout_which_nothing_compares_with(runs):
    found = await runs(fails(0, 1), limit=1).collector(on_failure="keep").step(0, 0, task_at, YES)
    assert ([len(group) for group in found.groups], found.dropped) == ([3], 1)


async def test_groups_of_one_are_whole_with_one(runs):
    found = await runs().collector(on_failure="keep", rollouts_per_task=1).step(0, 0, task_at, YES)
    assert [len(group) for group in found.groups] == [1, 1]


async def test_a_rollout_without_any_reward_is_blamed_on_the_reward(runs):
    async def cannot(rollout: Rollout) -> dict[str, float | None]:
        raise ValueError("unreadable")

    found = await runs(reward=cannot).collector(tasks_per_step=1, retries=0).step(0, 0, task_at, YES)
    assert (found.dropped, found.failed) == (1, Counter(reward=3))
    assert "ValueError: unreadable" in found.reasons[0]


async def test_an_engine_failure_is_blamed_on_the_engine(runs):
    made = runs(engine={"failure": RuntimeError("out of memory")})
    found = await made.collector(tasks_per_step=1, retries=0).step(0, 0, task_at, YES)
    assert found.failed == Counter(engine=3)
    assert "out of memory" in found.reasons[0]


async def test_a_harness_that_makes_no_call_failed(runs):
    async def idle(runs: Runs, task: Task, client: httpx.AsyncClient) -> Outcome:
        return Outcome(rewards={"length": 1.0})

    found = await runs(idle).collector(tasks_per_step=1, retries=0).step(0, 0, task_at, YES)
    assert found.failed == Counter(harness=3)
    assert "without a single call" in found.reasons[0]


async def test_info_that_is_no_json_is_the_harness_failing_and_not_the_run(runs):
    async def notes(runs: Runs, task: Task, client: httpx.AsyncClient) -> Outcome:
        await ask(client, task.id)
        return Outcome(info={"socket": object()})

    found = await runs(notes).collector(tasks_per_step=1, retries=0).step(0, 0, task_at, YES)
    assert found.failed == Counter(harness=3)
    assert "JSON" in found.reasons[0]


# ---- limits of ours ---------------------------------------------------------------------------------------------


async def test_a_limit_of_turns_truncates_and_what_was_said_is_scored(runs):
    async def forever(runs: Runs, task: Task, client: httpx.AsyncClient) -> Outcome:
        while True:
            await ask(client, task.id)

    found = await runs(forever).collector(turns=2).step(0, 0, task_at, YES)
    assert {r.ending for r in found.rollouts} == {"truncated"}
    assert all(r.blame is None and "2 turns" in r.reason for r in found.rollouts)
    assert {r.rewards["length"] for r in found.rollouts} == {8.0}  # two replies of four tokens
    assert found.failed == Counter()


async def test_a_reply_has_as_many_tokens_as_the_recipe_says_whatever_the_agent_asks_for(runs):
    async def asks_for_more(runs: Runs, task: Task, client: httpx.AsyncClient) -> Outcome:
        for asked in ({"max_tokens": 999}, {"max_tokens": 1}, {}):
            fields = {"model": "m", "messages": [{"role": "user", "content": "x"}], **asked}
            (await client.post("/chat/completions", json=fields)).raise_for_status()
        return Outcome()

    made = runs(asks_for_more)
    await made.collector(reply_tokens=3, tasks_per_step=1, rollouts_per_task=1).step(0, 0, task_at, YES)
    assert [sampling.max_tokens for _, sampling in made.engine.calls] == [3, 1, 3]


async def test_a_full_window_truncates_and_what_was_said_is_scored(runs):
    async def grows(runs: Runs, task: Task, client: httpx.AsyncClient) -> Outcome:
        for length in (1, 100):
            await ask(client, "x" * length)
        return Outcome()

    found = await runs(grows, engine={"context": 50}).collector().step(0, 0, task_at, YES)
    assert {(r.ending, len(r.turns), r.rewards["length"]) for r in found.rollouts} == {("truncated", 1, 4.0)}


async def test_a_first_prompt_that_does_not_fit_leaves_nothing_to_score_and_failed(runs):
    async def too_long(runs: Runs, task: Task, client: httpx.AsyncClient) -> Outcome:
        await ask(client, "x" * 100)
        return Outcome()

    found = await runs(too_long, engine={"context": 50}).collector(retries=0).step(0, 0, task_at, YES)
    assert (found.groups, found.failed) == ([], Counter(harness=6))
    assert "maximum context length is 50" in found.reasons[0]


@pytest.mark.parametrize("limit", [1, 3])
async def test_no_more_rollouts_run_at_once_than_the_limit(runs, limit):
    seen: list[int] = []

    async def counted(runs: Runs, task: Task, client: httpx.AsyncClient) -> Outcome:
        with running(seen):
            await ask(client, task.id)
            await asyncio.sleep(0.002)
        return Outcome()

    await runs(counted, limit=limit).collector().step(0, 0, task_at, YES)
    assert (len(seen), max(seen)) == (6, limit)


@contextmanager
def running(seen: list[int], now: list[int] = []) -> Iterator[None]:  # noqa: B006 - one count for all
    now.append(1)
    seen.append(len(now))
    try:
        yield
    finally:
        now.pop()


# ---- groups that the method refuses -----------------------------------------------------------------------------


def odd_tasks(group: Sequence[Rollout]) -> bool:
    return int(group[0].task.id) % 2 == 1


async def test_a_refused_group_is_replaced_until_the_step_is_full(runs):
    # tasks 4, 5 | 6 | 7: two are odd after the fourth
    found = await runs().collector().step(3, 4, task_at, odd_tasks)
    assert [group[0].task.id for group in found.groups] == ["5", "7"]
    assert (found.refused, found.cursor) == (2, 8)
    assert [group[0].group for group in found.groups] == ["train/000003/001", "train/000003/003"]


async def test_a_resumed_step_hands_out_the_same_tasks(runs):
    before = await runs().collector().step(3, 4, task_at, odd_tasks)
    again = runs()
    after = await again.collector().step(3, 4, task_at, odd_tasks)
    assert (again.ran, after.cursor, after.refused) == ([], before.cursor, before.refused)
    assert [r.to_json() for r in after.rollouts] == [r.to_json() for r in before.rollouts]


async def test_after_ten_rounds_a_step_goes_on_with_what_it_has(runs):
    made = runs()
    found = await made.collector(rollouts_per_task=1).step(0, 0, task_at, lambda group: group[0].task.id == "3")
    # 2 tasks in each of the rounds 0 and 1, of which task 3 is taken; then one in each of the other 8
    assert [group[0].task.id for group in found.groups] == ["3"]
    assert (found.cursor, found.refused, len(made.ran)) == (12, 11, 12)


# ---- evaluation -------------------------------------------------------------------------------------------------


async def test_an_evaluation_has_every_task_and_a_failed_one_has_no_reward(runs):
    made = runs(fails(1), limit=1)
    found = await made.collector().evaluate("eval/000000", [task_at(n) for n in range(3)], temperature=0.0)
    assert [r.rewards for r in found] == [{"length": 4.0}, {}, {"length": 4.0}]
    assert {sampling.temperature for _, sampling in made.engine.calls} == {0.0}
    assert made.progress[-1] == (3, 3)


def test_the_total_counts_what_applies_by_its_weight_and_none_where_nothing_does():
    rewards: list[dict[str, float | None]] = [{"a": 1.0, "b": 0.5}, {"a": None, "b": 0.5}, {"a": None}, {}]
    rollouts = [Rollout("r", Task("t"), "g", rewards=each) for each in rewards]
    # 2 * 1 + 0.5 (a weight that is not given is 1); 0.5; nothing; nothing
    assert rewards_of(rollouts, {"a": 2.0}) == [2.5, 0.5, None, None]


async def test_the_first_error_ends_the_other_runs():
    ended: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("waits")

    async def breaks() -> None:
        await asyncio.sleep(0)
        raise ValueError("broke")

    with pytest.raises(ExceptionGroup, match="TaskGroup"):
        await gather([waits(), breaks()])
    assert ended == ["waits"]


# ---- a full disk ------------------------------------------------------------------------------------------------


async def test_a_reply_that_the_disk_did_not_take_stops_the_run_and_fails_no_rollout(runs):
    """A small note may still fit where a reply did not: it must not write the rollout off."""

    async def much(runs: Runs, task: Task, client: httpx.AsyncClient) -> Outcome:
        await ask(client, "x" * 3000, "x" * 3000)
        return Outcome()

    full = runs(much, max_pages=16, limit=1, engine={"context": 9000})
    with pytest.raises(ExceptionGroup) as raised:
        await full.collector(tasks_per_step=1).step(0, 0, task_at, YES)
    error: BaseException = raised.value
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, StoreError)
    assert "full" in str(error)
    assert all(r.ending == "done" for r in full.store.finished())
    roomy = runs(much, engine={"context": 9000})
    found = await roomy.collector(tasks_per_step=1).step(0, 0, task_at, YES)
    assert ([len(group) for group in found.groups], found.failed) == ([3], Counter())
