"""What a PostgreSQL server can do to a store: it goes away, comes back, and has settings of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psycopg
import pytest

from tests.postgres import Server, postgres  # noqa: F401 - a fixture
from whippletree.gateway.rows import Database
from whippletree.gateway.store import Store, StoreError, open_store
from whippletree.types import Task, Turn

END_OTHERS = (
    "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
    "WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
)


@pytest.fixture
def address(postgres: Server) -> str:  # noqa: F811
    return postgres.address()


@pytest.fixture
def store(address: str) -> Iterator[Store]:
    store = open_store(address)
    yield store
    store.close()


def turn(name: str) -> Turn:
    return Turn(name, tuple(range(30)), (7,), (-0.5,), 1, "stop")


async def opened(store: Store) -> int:
    return await store.open_rollout("r", group="g", task=Task("t"), secret_hash="0")


def cut(address: str) -> None:
    """End all connections to the server but this one."""
    with psycopg.connect(address) as db:
        db.execute(END_OTHERS)


async def test_connections_that_were_lost_are_made_anew(store: Store, address: str):
    attempt = await opened(store)
    await store.add_turn("r", attempt, turn("a"))
    cut(address)
    assert [t.id for t in store.turns("r")] == ["a"]
    await store.add_turn("r", attempt, turn("b"))
    assert store.turns("r") == (turn("a"), turn("b"))


async def test_a_write_that_loses_its_connection_keeps_nothing_and_may_be_tried_again(store: Store, address: str):
    attempt = await opened(store)

    def write(db: Database) -> None:
        store._add(db, "r", attempt, [turn("a")])
        cut(address)
        db.execute("SELECT 1")

    with pytest.raises(StoreError, match="the PostgreSQL database postgres could not be written"):
        await store._submit("r", write)
    assert store.turns("r") == ()
    await store.add_turn("r", attempt, turn("a"))
    await store.add_turn("r", attempt, turn("b"))
    assert store.turns("r") == (turn("a"), turn("b"))


async def test_what_was_written_outlives_the_server(store: Store, postgres: Server):  # noqa: F811
    attempt = await opened(store)
    await store.add_turn("r", attempt, turn("a"))
    postgres.stop()
    try:
        with pytest.raises(StoreError, match="could not be written"):
            await store.add_turn("r", attempt, turn("b"))
        with pytest.raises(StoreError, match="could not be read"):
            store.turns("r")
    finally:
        postgres.start()
    await store.add_turn("r", attempt, turn("c"))
    assert store.turns("r") == (turn("a"), turn("c"))


async def test_a_commit_is_on_disk_whatever_the_server_does_by_default(address: str):
    store = open_store(f"{address}%20-csynchronous_commit%3Doff")
    found = await store._submit("", lambda db: db.execute("SHOW synchronous_commit").fetchone())
    assert found == ("on",)
    store.close()


def test_a_server_that_cannot_be_reached_is_told():
    with pytest.raises(StoreError, match=r"cannot be reached: .*nowhere"):
        open_store("postgresql://tester@/postgres?host=/nowhere")


def test_without_psycopg_its_extra_is_named():
    code = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from whippletree.gateway.store import open_store; open_store('postgresql://x@localhost/x')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'whippletree[postgres]'" in result.stderr.splitlines()[-1]
