from __future__ import annotations

import asyncio
import math
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from whippletree.gateway.store import Store, StoreError
from whippletree.types import Rollout, Task, Turn

TASK = Task(id="t", messages=({"role": "user", "content": "hi"},), columns={"answer": 7})


def turn(name: str, *, tokens: int = 2, finish_reason: str = "stop") -> Turn:
    return Turn(
        id=name,
        prompt_ids=(5, 2**31 - 1),
        reply_ids=tuple(range(tokens)),
        reply_logps=tuple(-1 / 3 / (place + 1) for place in range(tokens)),
        version=3,
        finish_reason=finish_reason,
        temperature=0.7,
        request={"messages": [{"role": "user", "content": "h\u00e9\u2028\ud800"}]},
        reply={"message": {"content": None}},
    )


async def opened(store: Store, rollout_id: str = "r", *, group: str = "g") -> int:
    return await store.open_rollout(rollout_id, group=group, task=TASK, secret_hash="0" * 64)


async def test_a_rollout_comes_back_exactly(tmp_path: Path):
    store = Store(tmp_path / "turns.sqlite")
    attempt = await opened(store)
    kept = (turn("a"), turn("b", tokens=0, finish_reason="abandoned"), turn("c", tokens=5))
    await store.add_turn("r", attempt, kept[0])
    await store.add_turns("r", attempt, kept[1:])
    await store.end_rollout("r", ending="failed", blame="harness", reason="exit 1", info={"stderr": "x"})
    await store.set_rewards("r", {"correct": 1 / 3, "style": None})
    store.close()
    assert Store(tmp_path / "turns.sqlite").rollout("r") == Rollout(
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


async def test_an_unknown_log_probability_stays_unknown(tmp_path: Path):
    store = Store(tmp_path / "turns.sqlite")
    row = {**turn("a").to_json(), "reply_logps": [None, -math.inf]}
    await store.add_turn("r", await opened(store), Turn.from_json(row))
    assert store.turns("r")[0].to_json() == row


async def test_a_new_attempt_hides_the_turns_of_the_earlier_one(tmp_path: Path):
    store = Store(tmp_path / "turns.sqlite")
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
    states = sqlite3.connect(store.path).execute("SELECT state FROM rollouts ORDER BY attempt").fetchall()
    assert states == [("abandoned",), ("ended",)]
    assert [r.id for r in store.finished()] == ["r"]


async def test_finished_gives_ended_rollouts_by_group_and_prefix(tmp_path: Path):
    store = Store(tmp_path / "turns.sqlite")
    for name, group in (("s1/b", "g1"), ("s1/a", "g2"), ("s10/a", "g1"), ("s1%c", "g1")):
        await opened(store, name, group=group)
        await store.end_rollout(name, ending="done")
    await opened(store, "s1/open", group="g1")
    assert [r.id for r in store.finished()] == ["s1%c", "s1/a", "s1/b", "s10/a"]
    assert [r.id for r in store.finished(prefix="s1/")] == ["s1/a", "s1/b"]
    assert [r.id for r in store.finished(group="g1", prefix="s1")] == ["s1%c", "s1/b", "s10/a"]
    assert store.finished(prefix="%") == []


async def test_waiting_writes_share_commits_and_one_bad_write_spoils_no_other(tmp_path: Path):
    store = Store(tmp_path / "turns.sqlite")
    attempt = await opened(store)
    names = [*(f"t{n}" for n in range(50)), "t7"]  # the last is there already
    results = await asyncio.gather(
        *(store.add_turn("r", attempt, turn(name)) for name in names), return_exceptions=True
    )
    assert [type(r) for r in results] == [type(None)] * 50 + [StoreError]
    assert sorted(t.id for t in store.turns("r")) == sorted(names[:-1])


async def test_the_turns_of_one_call_are_kept_together_or_not_at_all(tmp_path: Path):
    store = Store(tmp_path / "turns.sqlite")
    attempt = await opened(store)
    with pytest.raises(StoreError, match="UNIQUE"):
        await store.add_turns("r", attempt, [turn("a"), turn("a")])
    assert store.turns("r") == ()


async def test_a_cancelled_caller_does_not_undo_its_write(tmp_path: Path):
    store = Store(tmp_path / "turns.sqlite")
    attempt = await opened(store)
    write = asyncio.create_task(store.add_turn("r", attempt, turn("a")))
    await asyncio.sleep(0)
    write.cancel()
    await store.add_turn("r", attempt, turn("b"))  # written after it
    assert [t.id for t in store.turns("r")] == ["a", "b"]


async def test_a_rollout_that_was_never_opened_is_refused(tmp_path: Path):
    store = Store(tmp_path / "turns.sqlite")
    with pytest.raises(ValueError, match="'r' was never opened"):
        await store.end_rollout("r", ending="done")
    with pytest.raises(ValueError, match="never opened"):
        await store.add_turn("r", 0, turn("a"))


async def test_a_full_disk_is_an_error_that_keeps_nothing_half(tmp_path: Path):
    store = Store(tmp_path / "turns.sqlite", max_pages=24)
    attempt = await opened(store)
    await store.add_turn("r", attempt, turn("small"))
    with pytest.raises(StoreError, match=r"turns\.sqlite could not be written: database or disk is full"):
        # 12 bytes a token: 120 kB do not fit in 24 pages of 4 kB
        await store.add_turns("r", attempt, [turn("also small"), turn("large", tokens=10_000)])
    assert [t.id for t in store.turns("r")] == ["small"]
    await store.add_turn("r", attempt, turn("small again"))  # what fits is still taken
    store.close()
    with_space = Store(tmp_path / "turns.sqlite")
    await with_space.add_turn("r", attempt, turn("large", tokens=10_000))
    assert [t.id for t in with_space.turns("r")] == ["small", "small again", "large"]


async def test_another_schema_is_refused(tmp_path: Path):
    Store(tmp_path / "turns.sqlite").close()
    with sqlite3.connect(tmp_path / "turns.sqlite") as db:
        db.execute("UPDATE schema SET version = 99")
    with pytest.raises(ValueError, match="store schema 99, but this version reads up to 2"):
        Store(tmp_path / "turns.sqlite")


WRITER = """
import asyncio, sys
from whippletree.gateway.store import Store
from whippletree.gateway.store_test import opened, turn

async def write(store, attempt, lane):
    for number in range(100_000):
        await store.add_turn("r", attempt, turn(f"{lane}.{number}"))
        print(f"{lane}.{number}", flush=True)

async def main():
    store = Store(sys.argv[1])
    attempt = await opened(store)
    await asyncio.gather(*(write(store, attempt, lane) for lane in range(8)))

asyncio.run(main())
"""


def test_every_acknowledged_turn_survives_kill_9_exactly_once(tmp_path: Path):
    path = tmp_path / "turns.sqlite"
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        acknowledged = [process.stdout.readline().strip() for _ in range(100)]
        os.kill(process.pid, signal.SIGKILL)
        acknowledged += process.stdout.read().split("\n")[:-1]  # the last line may be half
    ids = [t.id for t in Store(path).turns("r")]
    assert set(acknowledged) <= set(ids)
    assert len(ids) == len(set(ids))


LIMITED = """
import asyncio, resource, sys
from whippletree.gateway.store import Store, StoreError
from whippletree.gateway.store_test import opened, turn

async def main():
    store = Store(sys.argv[1])
    attempt = await opened(store)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, hard))
    for number in range(1000):
        try:
            await store.add_turn("r", attempt, turn(f"t{number}", tokens=1000))
        except StoreError:
            break
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    await store.add_turn("r", attempt, turn("after", tokens=1000))
    assert [t.id for t in store.turns("r")] == [*(f"t{n}" for n in range(number)), "after"]
    print(number)

asyncio.run(main())
"""


def test_the_store_works_again_once_there_is_space(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "turns.sqlite")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert 0 < int(done.stdout) < 999  # some fitted, then it was full
