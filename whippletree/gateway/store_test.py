"""What every store does, asked of both: a SQLite file, and a database of a real PostgreSQL."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.postgres import postgres  # noqa: F401 - a fixture
from whippletree.gateway.rows import SessionRow, stamp
from whippletree.gateway.store import Store, StoreError, open_store
from whippletree.types import Rollout, Task, Turn

TASK = Task(id="t", messages=({"role": "user", "content": "hi"},), columns={"answer": 7})


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a store that is not there yet."""
    if request.param == "sqlite":
        return str(tmp_path / "turns.sqlite")
    return str(request.getfixturevalue("postgres").address())


@pytest.fixture
def make(place: str) -> Iterator[Callable[[], Store]]:
    """Opens the store once more, as another process would."""
    stores: list[Store] = []

    def make() -> Store:
        stores.append(open_store(place))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def store(make: Callable[[], Store]) -> Store:
    return make()


def turn(name: str, *, tokens: int = 2, finish_reason: str = "stop") -> Turn:
    return Turn(
        id=name,
        prompt_ids=(5, 2**31 - 1),
        reply_ids=tuple(range(tokens)),
        reply_logps=tuple(-1 / 3 / (place + 1) for place in range(tokens)),
        version=3,
        finish_reason=finish_reason,
        temperature=0.7,
        top_p=0.9,
        request={"messages": [{"role": "user", "content": "h\u00e9\u2028\ud800"}]},
        reply={"message": {"content": None}},
        thread="sub-agent/1",
        link="fork",
        versions=tuple(range(tokens)),
        info={"api": "chat", "parent": "x"},
    )


def said(number: int, *, name: str = "") -> Turn:
    """Turn `number` of a conversation: its prompt is the one before, that one's reply of 10 tokens, and 20 tokens."""
    start = 30 * number + 20
    messages = [{"role": "user", "content": f"message {n:09}"} for n in range(number + 1)]
    return replace(
        turn(name or str(number), tokens=10),
        prompt_ids=tuple(range(start)),
        reply_ids=tuple(range(start, start + 10)),
        request={"messages": messages, "tools": ["t" * 1000]},
        link="append" if number else "root",
    )


async def opened(store: Store, rollout_id: str = "r", *, group: str = "g", secret: str = "0" * 64) -> int:
    return await store.open_rollout(rollout_id, group=group, task=TASK, secret_hash=secret)


def states(store: Store) -> list[str]:
    return [state for (state,) in store._read("SELECT state FROM rollouts ORDER BY id, attempt", ())]


# ---- rollouts and their turns -----------------------------------------------------------------------------------


async def test_a_rollout_comes_back_exactly(make: Callable[[], Store]):
    store = make()
    attempt = await opened(store)
    kept = (turn("a"), turn("b", tokens=0, finish_reason="abandoned"), turn("c", tokens=5))
    await store.add_turn("r", attempt, kept[0])
    await store.add_turns("r", attempt, kept[1:])
    await store.end_rollout("r", ending="failed", blame="harness", reason="exit 1", info={"stderr": "x"})
    await store.set_rewards("r", {"correct": 1 / 3, "style": None})
    assert make().rollout("r") == Rollout(
        id="r",
        task=TASK,
        group="g",
        turns=kept,
        rewards={"correct": 1 / 3, "style": None},
        ending="failed",
        blame="harness",
        reason="exit 1",
        info={"stderr": "x"},
    )


async def test_an_unknown_log_probability_stays_unknown(store: Store):
    row = {**turn("a").to_json(), "reply_logps": [None, -math.inf]}
    await store.add_turn("r", await opened(store), Turn.from_json(row))
    assert store.turns("r")[0].to_json() == row


async def test_a_new_attempt_hides_the_turns_of_the_earlier_one(store: Store):
    first = await opened(store)
    await store.add_turn("r", first, turn("old"))
    await store.end_rollout("r", ending="done", rewards={"x": 1.0})
    second = await opened(store)
    assert second == first + 1
    assert store.rollout("r") is None  # the second attempt is open
    await store.add_turn("r", second, turn("new"))
    await store.end_rollout("r", ending="done")
    found = store.rollout("r")
    assert found is not None
    assert [t.id for t in found.turns] == ["new"]
    assert found.rewards == {}
    assert [t.id for t in store.turns("r", attempt=first)] == ["old"]  # kept
    assert states(store) == ["abandoned", "ended"]
    assert [r.id for r in store.finished()] == ["r"]


async def test_finished_gives_ended_rollouts_by_group_and_prefix(store: Store):
    for name, group in (("s1/b", "g1"), ("s1/a", "g2"), ("s10/a", "g1"), ("s1%c", "g1")):
        await opened(store, name, group=group)
        await store.end_rollout(name, ending="done")
    await opened(store, "s1/open", group="g1")
    assert [r.id for r in store.finished()] == ["s1%c", "s1/a", "s1/b", "s10/a"]
    assert [r.id for r in store.finished(prefix="s1/")] == ["s1/a", "s1/b"]
    assert [r.id for r in store.finished(group="g1", prefix="s1")] == ["s1%c", "s1/b", "s10/a"]
    assert store.finished(prefix="%") == []


async def test_a_rollout_that_ended_elsewhere_is_kept_once(store: Store):
    other = Rollout("r", TASK, "g", turns=(said(0), said(1)), rewards={"x": None}, ending="truncated", reason="long")
    assert [await store.add_rollout(other) for _ in range(2)] == [True, False]
    assert store.finished() == [other]
    with pytest.raises(ValueError, match="has another one named 'r'"):
        await store.add_rollout(replace(other, rewards={"x": 1.0}))
    with pytest.raises(StoreError, match=r"(?is)an id is used once, but .*unique"):  # the ids of its turns
        await store.add_rollout(replace(other, id="s"))
    assert store.finished() == [other]


# ---- what is not written twice ----------------------------------------------------------------------------------


async def test_a_long_conversation_takes_space_for_what_was_said(store: Store):
    attempt = await opened(store)
    sizes = "SELECT SUM(length(prompt_ids)), SUM(length(request)) FROM turns"
    (empty,) = store._read("SELECT COUNT(*) FROM turns", ())
    assert empty == (0,)
    seen = {}
    for number in range(200):
        await store.add_turn("r", attempt, said(number))
        if number in (99, 199):
            (seen[number],) = store._read(sizes, ())
    # 20 tokens of 4 bytes are new in each prompt
    assert [seen[n][0] for n in (99, 199)] == [100 * 20 * 4, 200 * 20 * 4]
    # a message is ', {"role": "user", "content": "message 000000000"}', 51 bytes, and zlib adds 11 at most; the first
    # request has its tools besides, 1000 letters in a row, which zlib takes to less than 100 bytes
    assert seen[199][1] - seen[99][1] <= 100 * (51 + 11)
    assert seen[199][1] <= 200 * (51 + 11) + 100
    assert store.turns("r") == tuple(map(said, range(200)))


async def test_several_processes_write_one_attempt(make: Callable[[], Store]):
    stores = [make() for _ in range(3)]
    attempt = await opened(stores[0])
    writes = (stores[n % 3].add_turn("r", attempt, said(n)) for n in range(60))
    await asyncio.gather(*writes)
    for number in range(60, 90):  # each finds turns of the others between its own
        await stores[number % 3].add_turn("r", attempt, said(number))
    numbers = [number for (number,) in stores[0]._read("SELECT number FROM turns ORDER BY number", ())]
    assert numbers == list(range(90))
    turns = make().turns("r")
    assert sorted(turns, key=lambda t: int(t.id)) == [said(n) for n in range(90)]
    assert turns[60:] == tuple(said(n) for n in range(60, 90))


async def test_the_later_turns_are_read_without_the_earlier_ones(make: Callable[[], Store]):
    store = make()
    attempt = await opened(store)
    await store.add_turns("r", attempt, [said(n) for n in range(5)])
    for after in range(6):  # turn 4 refers to 3, that one to 2, and so on
        assert make().turns("r", after=after) == tuple(said(n) for n in range(after, 5))


async def test_a_write_that_failed_is_nothing_to_refer_to(store: Store):
    attempt = await opened(store)
    with pytest.raises(StoreError, match=r"(?i)unique"):
        await store.add_turns("r", attempt, [said(0), said(1), said(1)])
    await store.add_turn("r", attempt, said(2))  # it would take 50 tokens of turn 1
    assert store.turns("r") == (said(2),)


# ---- sessions ---------------------------------------------------------------------------------------------------


async def test_a_session_is_found_by_its_secret_and_says_how_it_stands(make: Callable[[], Store]):
    store, other = make(), make()
    settings = {"stream": "s", "budget": {"turns": 3}}
    first = await store.open_rollout("r", group="g", task=TASK, secret_hash="one", settings=settings)
    found = other.session_of("one")
    assert found == SessionRow("r", first, "g", TASK, settings, "open", found.active if found else "")
    second = await opened(store, secret="two")
    rows = [other.session_of(secret) for secret in ("one", "two", "three")]
    assert [row and (row.attempt, row.settings, row.state) for row in rows] == [
        (first, settings, "abandoned"),
        (second, {}, "open"),
        None,
    ]
    await store.end_rollout("r", ending="done")
    assert [row.state for row in map(other.session_of, ("one", "two")) if row] == ["abandoned", "ended"]


async def test_what_happens_last_to_a_session_is_its_activity(store: Store):
    for name in ("a", "b", "c"):
        await opened(store, name, secret=name)
    began = [row.active for row in store.open_rollouts()]
    assert began <= [stamp()] * 3
    await asyncio.sleep(0.01)  # times are in milliseconds
    between = stamp()
    await asyncio.sleep(0.01)
    await store.add_turn("a", 0, turn("a"))
    await store.add_event("b", 0, "note", {})
    assert [row.rollout_id for row in store.open_rollouts(idle_since=between)] == ["c"]
    assert [row.rollout_id for row in store.open_rollouts(idle_since=stamp(time.time() + 1))] == ["a", "b", "c"]
    await store.end_rollout("b", ending="done")
    assert [row.rollout_id for row in store.open_rollouts()] == ["a", "c"]


async def test_a_summary_counts_the_turns_and_tokens_of_the_latest_attempt(store: Store):
    for name in ("a", "a", "b"):
        attempt = await opened(store, name)
        await store.add_turns(name, attempt, [turn(f"{name}{attempt}{n}", tokens=n) for n in (2, 3)])
    found = [(row["id"], row["attempt"], row["turns"], row["tokens"]) for row in store.summaries(limit=9)]
    assert (found, store.summaries(after="b")) == ([("a", 1, 2, 5), ("b", 0, 2, 5)], [])


async def test_a_turn_is_undelivered_until_it_is_marked(make: Callable[[], Store]):
    store = make()
    attempt = await opened(store)
    await store.add_turns("r", attempt, [turn(name) for name in "abc"])
    assert store.undelivered("r", attempt) == {"a", "b", "c"}
    store.mark_delivered(["a"])
    store.mark_delivered([])
    await store.add_turn("r", attempt, turn("d"))  # the mark waits for a write, and is committed with it
    assert store.undelivered("r", attempt) == {"b", "c", "d"}
    store.mark_delivered(("b", "d"))
    store.close()
    assert make().undelivered("r", attempt) == {"c"}


async def test_a_mark_is_kept_though_nothing_else_is_written(make: Callable[[], Store]):
    store, other = make(), make()
    attempt = await opened(store)
    await store.add_turn("r", attempt, turn("a"))
    store.mark_delivered(["a"])
    async with asyncio.timeout(30):
        while other.undelivered("r", attempt):
            await asyncio.sleep(0.01)


async def test_events_stand_in_their_order(store: Store):
    first = await opened(store)
    await asyncio.gather(*(store.add_event("r", first, "call", {"n": n, "text": "\x00\ud800"}) for n in range(5)))
    assert [(e["kind"], e["data"]["n"]) for e in store.events("r")] == [("call", n) for n in range(5)]
    assert store.events("r")[0]["data"]["text"] == "\x00\ud800"
    assert all(e["time"] <= stamp() for e in store.events("r"))
    await store.add_event("r", await opened(store), "other", {})
    assert [e["kind"] for e in store.events("r")] == ["other"]
    assert len(store.events("r", attempt=first)) == 5


# ---- writing ----------------------------------------------------------------------------------------------------


async def test_waiting_writes_share_commits_and_one_bad_write_spoils_no_other(store: Store):
    attempt = await opened(store)
    names = [*(f"t{n}" for n in range(50)), "t7"]  # the last is there already
    results = await asyncio.gather(
        *(store.add_turn("r", attempt, turn(name)) for name in names), return_exceptions=True
    )
    assert [type(r) for r in results] == [type(None)] * 50 + [StoreError]
    assert sorted(t.id for t in store.turns("r")) == sorted(names[:-1])


async def test_the_turns_of_one_call_are_kept_together_or_not_at_all(store: Store):
    attempt = await opened(store)
    with pytest.raises(StoreError, match=r"(?i)unique"):
        await store.add_turns("r", attempt, [turn("a"), turn("a")])
    assert store.turns("r") == ()


async def test_a_cancelled_caller_does_not_undo_its_write(store: Store):
    attempt = await opened(store)
    write = asyncio.create_task(store.add_turn("r", attempt, turn("a")))
    await asyncio.sleep(0)
    write.cancel()
    await store.add_turn("r", attempt, turn("b"))  # written after it
    assert [t.id for t in store.turns("r")] == ["a", "b"]


async def test_a_rollout_that_was_never_opened_is_refused(store: Store):
    with pytest.raises(ValueError, match="'r' was never opened"):
        await store.end_rollout("r", ending="done")
    with pytest.raises(ValueError, match="'r' was never opened"):
        await store.add_turn("r", 0, turn("a"))
    with pytest.raises(ValueError, match="'r' was never opened"):
        await store.add_event("r", 0, "x", {})
    assert (store.rollout("r"), store.turns("r"), store.events("r")) == (None, (), [])


WRITER = """
import asyncio, sys
from whippletree.gateway.store import open_store
from whippletree.gateway.store_test import said

async def write(store, lane):
    for number in range(100_000):
        name = f"{sys.argv[2]}.{lane}.{number}"
        await store.add_turn("r", 0, said(number, name=name))
        store.mark_delivered([name])
        print(name, flush=True)

async def main():
    store = open_store(sys.argv[1])
    await asyncio.gather(*(write(store, lane) for lane in range(8)))

asyncio.run(main())
"""


async def test_every_acknowledged_turn_survives_kill_9_exactly_once(place: str, make: Callable[[], Store]):
    await opened(make())
    acknowledged: list[str] = []
    for life in range(3):
        with subprocess.Popen([sys.executable, "-c", WRITER, place, str(life)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(100)]
            os.kill(process.pid, signal.SIGKILL)
            lines += process.stdout.read().split(b"\n")[:-1]  # the last line may be half
        acknowledged += [line.decode().strip() for line in lines]
    kept = {t.id: t for t in make().turns("r")}
    assert "" not in acknowledged
    assert set(acknowledged) <= set(kept)
    assert len(make().turns("r")) == len(kept)
    assert all(t == said(int(name.split(".")[2]), name=name) for name, t in kept.items())


# ---- places that cannot be written -------------------------------------------------------------------------------


async def test_a_newer_schema_is_refused(place: str, store: Store):
    await store._submit("", lambda db: db.execute("UPDATE schema SET version = 99"))
    with pytest.raises(ValueError, match="store schema 99, but this version reads up to 2"):
        open_store(place)


async def test_on_a_full_disk_a_write_is_refused_and_what_was_written_stays(tmp_path: Path):
    store = Store(tmp_path / "turns.sqlite", max_pages=30)
    attempt = await opened(store)
    kept = []
    with pytest.raises(StoreError, match=r"full. Nothing of it was kept; free space there"):
        for number in range(1000):
            await store.add_turn("r", attempt, turn(str(number), tokens=1000))
            kept.append(str(number))
    assert [t.id for t in store.turns("r")] == kept
    assert kept
    store.close()


def test_a_file_that_is_no_store_is_refused_and_left_as_it_is(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("buy milk, and then some more milk; " * 20)
    with pytest.raises(StoreError, match=r"notes.txt cannot be opened as a store: file is not a database"):
        open_store(tmp_path / "notes.txt")
    with pytest.raises(StoreError, match=r"nowhere/turns.sqlite cannot be opened as a store: unable to open"):
        open_store(tmp_path / "nowhere" / "turns.sqlite")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt"]
    assert (tmp_path / "notes.txt").read_text().startswith("buy milk")
