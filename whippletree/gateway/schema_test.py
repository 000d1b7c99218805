"""A database that an older version wrote is brought up to date, in SQLite and in a real PostgreSQL."""

from __future__ import annotations

import json
import sqlite3
import threading
import zlib
from pathlib import Path

import psycopg
import pytest

from tests.postgres import Server, postgres  # noqa: F401 - a fixture
from whippletree.gateway.postgres import _translated
from whippletree.gateway.rows import STEPS, SessionRow
from whippletree.gateway.store import StoreError, open_store
from whippletree.types import Rollout, Task, Turn

TASK = Task(id="t", messages=({"role": "user", "content": "hi"},), columns={"answer": 7})
FIRST = f"CREATE TABLE schema(version INTEGER NOT NULL); INSERT INTO schema VALUES (1); {STEPS[0]}"
ROLLOUT = (
    'INSERT INTO rollouts(id, attempt, "group", task, state, ending, secret_hash, opened) '
    "VALUES ('r', 0, 'g', ?, 'ended', 'done', 'hash', '2026-01-01T00:00:00.000Z')"
)
TURN = "INSERT INTO turns VALUES ('a', 'r', 0, 0, ?, ?, ?, 4, 'stop', 1.0, 1.0, ?, ?)"
# little-endian: 5 and 6, 7, and -0.5, which as a double is sign 1, exponent 0x3fe, fraction 0
NUMBERS = tuple(map(bytes.fromhex, ("0500000006000000", "07000000", "000000000000e0bf")))
VALUES = (*NUMBERS, zlib.compress(b"{}"), zlib.compress(b'{"x": 1}'))


def old_file(folder: Path) -> Path:
    """A SQLite file of the first schema, with one turn."""
    old = sqlite3.connect(folder / "turns.sqlite")
    old.executescript(FIRST)
    old.execute(ROLLOUT, (json.dumps(TASK.to_json()),))
    old.execute(TURN, VALUES)
    old.commit()
    old.close()
    return folder / "turns.sqlite"


def old_database(server: Server) -> str:
    """A database of the first schema, with one turn."""
    address = server.address()
    with psycopg.connect(address) as old:
        for statement in FIRST.split(";"):
            old.execute(_translated(statement).encode())
        old.execute(ROLLOUT.replace("?", "%s").encode(), (json.dumps(TASK.to_json()),))
        old.execute(TURN.replace("?", "%s").encode(), VALUES)
    return address


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_what_the_first_schema_holds_is_read_by_this_version(kind: str, tmp_path: Path, request: pytest.FixtureRequest):
    place = old_file(tmp_path) if kind == "sqlite" else old_database(request.getfixturevalue("postgres"))
    expected = Turn("a", (5, 6), (7,), (-0.5,), 4, "stop", reply={"x": 1})
    for _ in range(2):  # and what was brought up to date is opened as it is
        store = open_store(place)
        assert store.finished() == [Rollout("r", TASK, "g", turns=(expected,))]
        assert store.session_of("hash") == SessionRow("r", 0, "g", TASK, {}, "ended", "2026-01-01T00:00:00.000Z")
        assert store.undelivered("r", 0) == set()  # nobody noted it, so nothing is said
        store.close()


def test_a_change_of_schema_that_is_cut_off_leaves_the_file_as_it_was(tmp_path: Path):
    place = old_file(tmp_path)
    old = sqlite3.connect(place)
    before = list(old.execute("SELECT sql FROM sqlite_master"))
    old.execute("CREATE TABLE events(x)")  # the last statement of the step fails on it
    old.commit()
    with pytest.raises(StoreError, match="events already exists"):
        open_store(place)
    old.execute("DROP TABLE events")
    assert list(old.execute("SELECT sql FROM sqlite_master")) == before
    old.close()
    store = open_store(place)
    assert [rollout.id for rollout in store.finished()] == ["r"]
    store.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_gateways_that_start_together_change_the_schema_once(kind: str, tmp_path: Path, request: pytest.FixtureRequest):
    place = old_file(tmp_path) if kind == "sqlite" else old_database(request.getfixturevalue("postgres"))
    found: list[list[str]] = []

    def start() -> None:
        store = open_store(place)
        found.append([rollout.id for rollout in store.finished()])
        store.close()

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [["r"]] * 6
