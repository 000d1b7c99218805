from __future__ import annotations

import asyncio
import sqlite3
from hashlib import sha256
from pathlib import Path

import pytest

from whippletree.gateway.budget import Budget
from whippletree.gateway.errors import ApiError
from whippletree.gateway.sessions import Session, Sessions
from whippletree.gateway.store import Store
from whippletree.types import Task

TASK = Task(id="t")


async def opened(sessions: Sessions, rollout_id: str = "r", *, turns: int = 1000) -> Session:
    return await sessions.open(rollout_id, group="g", task=TASK, stream="s", budget=Budget(turns=turns))


async def test_each_rollout_has_its_own_secret(tmp_path: Path):
    sessions = Sessions(Store(tmp_path / "t.sqlite"))
    one, two = await opened(sessions, "1"), await opened(sessions, "2")
    assert one.secret != two.secret
    assert len(one.secret) >= 43  # 256 bits in base64
    assert sessions.find(one.secret) is one
    assert sessions.find(two.secret) is two
    assert one.base_url("http://h:1") == f"http://h:1/r/{one.secret}/v1"


async def test_only_the_hash_of_a_secret_leaves_memory(tmp_path: Path):
    store = Store(tmp_path / "t.sqlite")
    session = await opened(Sessions(store))
    (kept,) = sqlite3.connect(store.path).execute("SELECT secret_hash FROM rollouts").fetchone()
    assert kept == sha256(session.secret.encode()).hexdigest()
    store.close()
    assert all(session.secret.encode() not in path.read_bytes() for path in tmp_path.iterdir())
    assert session.secret not in repr(session)


@pytest.mark.parametrize("secret", ["unknown", "", None, "\udcff"])
async def test_an_unknown_key_is_a_401(tmp_path: Path, secret: str | None):
    sessions = Sessions(Store(tmp_path / "t.sqlite"))
    await opened(sessions)
    with pytest.raises(ApiError) as caught:
        sessions.find(secret)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


async def test_a_closed_rollout_and_an_earlier_attempt_are_unknown(tmp_path: Path):
    sessions = Sessions(Store(tmp_path / "t.sqlite"))
    first = await opened(sessions)
    second = await opened(sessions)
    assert second.attempt == first.attempt + 1
    with pytest.raises(ApiError):
        sessions.find(first.secret)
    await sessions.close("r")
    await sessions.close("r")  # closing twice is closing
    with pytest.raises(ApiError):
        sessions.find(second.secret)


async def test_closing_ends_what_runs_and_waits_for_it(tmp_path: Path):
    sessions = Sessions(Store(tmp_path / "t.sqlite"))
    session = await opened(sessions)
    kept = []

    async def call() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            kept.append("partial turn")

    session.running.add(asyncio.create_task(call()))
    await asyncio.sleep(0)
    await sessions.close("r")
    assert kept == ["partial turn"]


async def test_a_rollout_in_a_loop_runs_out_of_turns(tmp_path: Path):
    session = await opened(Sessions(Store(tmp_path / "t.sqlite")), turns=3)
    session.count_call(2)
    with pytest.raises(ApiError, match="3 turns") as caught:
        session.count_call(2)
    assert caught.value.status == 400
    assert session.truncated == caught.value.message  # so that its end can be told from a harness's mistake
    session.count_call(1)


async def test_a_prompts_numbers_are_the_lowest_free_and_a_failure_gives_them_back(tmp_path: Path):
    session = await opened(Sessions(Store(tmp_path / "t.sqlite")))
    with session.occurrences("p", 2) as first, session.occurrences("p", 1) as beside:
        assert (first, beside) == ([0, 1], [2])
    with session.occurrences("other prompt", 1) as other:
        assert other == [0]
    with pytest.raises(OSError), session.occurrences("p", 1) as failed:
        assert failed == [3]
        raise OSError
    with session.occurrences("p", 1) as retry:
        assert retry == [3]
