from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.collecting import Play, Runs, ask
from whippletree.collect import Runner
from whippletree.endings import CAPPED, capped, quiet_end
from whippletree.engine.scripted import ScriptedEngine
from whippletree.gateway.store import Store
from whippletree.harness.outcome import Outcome
from whippletree.models.tiny import tiny_tokenizer
from whippletree.types import Rollout, Task, Turn

YES = lambda group: True  # noqa: E731


def turn(name: str, finish_reason: str = "stop", thread: str = "main", **info: Any) -> Turn:
    return Turn(name, (1,), (2, 3), (-1.0, -1.0), 0, finish_reason, thread=thread, info=info)


# ---- what a run ended on ----------------------------------------------------------------------------------------


def test_a_run_that_ends_on_a_whole_answer_is_done() -> None:
    assert quiet_end([turn("a", "length"), turn("b")]) == ""


def test_a_run_that_ends_on_a_call_is_done_as_many_agents_hand_in_by_one() -> None:
    assert quiet_end([turn("a", "tool_calls")]) == ""


def test_a_run_that_ends_on_a_cut_reply_is_not_unless_its_agent_copes() -> None:
    assert "cut after 2 tokens" in quiet_end([turn("a"), turn("b", "length")])
    assert quiet_end([turn("a"), turn("b", "length")], takes_cut_replies=True) == ""


def test_a_run_that_ends_on_a_call_that_is_none_is_not() -> None:
    assert "cannot be read" in quiet_end([turn("a", malformed=1)])
    assert "wipe, which the harness does not have" in quiet_end([turn("a", "tool_calls", unknown_tools=["wipe"])])


def test_what_the_harness_answered_is_no_end() -> None:
    assert quiet_end([turn("a", malformed=1), turn("b", "tool_calls", unknown_tools=["wipe"]), turn("c")]) == ""


def test_side_threads_and_replies_that_nobody_read_end_nothing() -> None:
    aside = [turn("b", "length", "title/1"), turn("c", "abandoned")]
    assert quiet_end([turn("a"), *aside]) == ""
    assert "no reply" in quiet_end(aside)


# ---- what it then gets ------------------------------------------------------------------------------------------


def test_channels_of_a_truncated_rollout_are_capped_and_penalties_and_gaps_stay() -> None:
    rollout = Rollout("r", Task("t"), "g", rewards={"a": 1.0, "b": -2.0, "c": None}, ending="truncated")
    found = capped(rollout, 0.0)
    assert found.rewards == {"a": 0.0, "b": -2.0, "c": None}
    assert found.info[CAPPED] == {"a": 1.0}
    assert capped(rollout, 1.0) is rollout


def test_a_finished_rollout_keeps_its_reward() -> None:
    rollout = Rollout("r", Task("t"), "g", rewards={"a": 1.0})
    assert capped(rollout, 0.0) is rollout


# ---- through the gateway ----------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Callable[..., Runs]]:
    stores: list[Store] = []

    def make(play: Play, replies: Any = lambda prompt: "yes", **engine: Any) -> Runs:
        stores.append(Store(tmp_path / f"{len(stores)}.sqlite"))
        return Runs(stores[-1], ScriptedEngine(replies, tiny_tokenizer(tools=True), **engine), play)

    yield make
    for store in stores:
        store.close()


async def step(made: Runs, **sampling: Any) -> list[Rollout]:
    sizes = {"tasks_per_step": 1, "rollouts_per_task": 2, "unfinished_reward": 0.0, **sampling}
    return (await made.collector(**sizes).step(0, 0, lambda n: Task(str(n)), YES)).rollouts


async def test_an_answer_that_was_cut_for_length_is_not_rewarded_as_one(runs: Callable[..., Runs]) -> None:
    async def once(made: Runs, task: Task, client: httpx.AsyncClient) -> Outcome:
        await ask(client, task.id)
        return Outcome()

    for rollout in await step(runs(once), reply_tokens=2):
        assert (rollout.ending, rollout.rewards, rollout.info[CAPPED]) == ("truncated", {"length": 0.0}, {"length": 2})
    copes = runs(once)
    copes.harnesses = {"copes": Runner(copes, takes_cut_replies=True)}
    for rollout in await step(copes, reply_tokens=2):
        assert (rollout.ending, rollout.rewards) == ("done", {"length": 2.0})


async def test_a_harness_that_hides_a_refused_call_did_not_finish(runs: Callable[..., Runs]) -> None:
    async def quiet(made: Runs, task: Task, client: httpx.AsyncClient) -> Outcome:
        for _ in range(3):
            with _ignored():
                await ask(client, task.id)
        return Outcome()

    for rollout in await step(runs(quiet), turns=2):
        assert (rollout.ending, rollout.rewards) == ("truncated", {"length": 0.0})
        assert "may take 2 turns" in rollout.reason


async def test_a_harness_that_made_room_after_a_full_window_did_finish(runs: Callable[..., Runs]) -> None:
    async def compacts(made: Runs, task: Task, client: httpx.AsyncClient) -> Outcome:
        await ask(client, task.id)
        with _ignored():
            await ask(client, "x" * 100)
        await ask(client, "in short: " + task.id)
        return Outcome()

    for rollout in await step(runs(compacts, context=70)):
        assert (rollout.ending, rollout.rewards) == ("done", {"length": 8.0})


@pytest.mark.parametrize(
    ("limit", "why"),
    [
        ({"tokens": 5}, "may sample 5 tokens"),
        ({"seconds": 1e-9}, "without a single"),
        ({"calls_per_second": 0.2}, "is in a loop"),
    ],
)
async def test_every_cap_of_the_recipe_ends_an_endless_run(
    runs: Callable[..., Runs], limit: dict[str, float], why: str
) -> None:
    async def endless(made: Runs, task: Task, client: httpx.AsyncClient) -> Outcome:
        for _ in range(20):
            with _ignored():
                await ask(client, task.id)
        return Outcome()

    made = runs(endless)
    collector = made.collector(tasks_per_step=1, rollouts_per_task=1, retries=0, **limit)
    found = await collector.step(0, 0, lambda n: Task(str(n)), YES)
    if "seconds" in limit:  # nothing was ever sampled, so there is nothing to score
        assert (found.rollouts, found.failed_under) == ([], {"scripted": 1})
        assert "seconds" in found.reasons[0]
    else:
        assert found.rollouts[0].ending == "truncated"
        assert why in found.rollouts[0].reason


class _ignored:  # noqa: N801 - reads as a word
    """A harness that takes an error for an answer."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is httpx.HTTPStatusError
