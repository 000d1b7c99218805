"""The store: every finished call in one SQLite file, on disk before the call is answered.

One thread writes. Writes that wait together are committed in one transaction, so that many concurrent calls share one
flush to disk; a write returns only after its commit.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import numpy as np

from whippletree.types import Blame, Ending, Json, Rollout, Task, Turn

SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS schema(version INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS rollouts(
    id TEXT NOT NULL, attempt INTEGER NOT NULL, "group" TEXT NOT NULL, task TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('open', 'ended', 'abandoned')),
    ending TEXT, blame TEXT, reason TEXT NOT NULL DEFAULT '', rewards TEXT NOT NULL DEFAULT '{}',
    info TEXT NOT NULL DEFAULT '{}', secret_hash TEXT NOT NULL,
    opened TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')), ended TEXT,
    PRIMARY KEY (id, attempt));
CREATE INDEX IF NOT EXISTS rollouts_of_group ON rollouts("group");
CREATE TABLE IF NOT EXISTS turns(
    id TEXT PRIMARY KEY, rollout_id TEXT NOT NULL, attempt INTEGER NOT NULL, number INTEGER NOT NULL,
    prompt_ids BLOB NOT NULL, reply_ids BLOB NOT NULL, reply_logps BLOB NOT NULL, version INTEGER NOT NULL,
    finish_reason TEXT NOT NULL, temperature REAL NOT NULL, top_p REAL NOT NULL,
    request BLOB NOT NULL, reply BLOB NOT NULL,
    UNIQUE (rollout_id, attempt, number),
    FOREIGN KEY (rollout_id, attempt) REFERENCES rollouts(id, attempt));
"""
LATEST = "attempt = (SELECT MAX(attempt) FROM rollouts AS other WHERE other.id = rollouts.id)"

T = TypeVar("T")
Write = Callable[[sqlite3.Connection], Any]


class StoreError(RuntimeError):
    """A write that did not reach the disk. Nothing of it was kept, and the same write may be tried again."""


class Store:
    """Rollouts and their turns in the SQLite file at `path`.

    Reads are plain functions and see every write that returned. `max_pages` bounds the file (4096 bytes a page): a
    write past it fails as on a full disk.

    Raises:
        ValueError: the file was written by another schema version, so its meaning is not known here.
    """

    def __init__(self, path: str | Path, *, max_pages: int | None = None) -> None:
        self.path = Path(path)
        self._writer = _connect(self.path)
        _prepare(self._writer, self.path)
        if max_pages is not None:
            self._writer.execute(f"PRAGMA max_page_count = {int(max_pages)}")
        self._reader = _connect(self.path)
        self._jobs: SimpleQueue[tuple[Write, Future[Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="store", daemon=True)
        self._thread.start()

    # ---- writes: each returns after its commit, or raises StoreError with nothing kept ----

    async def open_rollout(self, rollout_id: str, *, group: str, task: Task, secret_hash: str) -> int:
        """The number of a new attempt at this rollout; an earlier attempt stays on disk, but is no longer read."""
        values = (group, json.dumps(task.to_json()), secret_hash)

        def write(db: sqlite3.Connection) -> int:
            db.execute("UPDATE rollouts SET state = 'abandoned' WHERE id = ?", (rollout_id,))
            (attempt,) = db.execute(
                "SELECT COALESCE(MAX(attempt) + 1, 0) FROM rollouts WHERE id = ?", (rollout_id,)
            ).fetchone()
            db.execute(
                "INSERT INTO rollouts(id, attempt, \"group\", task, secret_hash, state) VALUES (?, ?, ?, ?, ?, 'open')",
                (rollout_id, attempt, *values),
            )
            return int(attempt)

        return await self._submit(write)

    async def add_turns(self, rollout_id: str, attempt: int, turns: Sequence[Turn]) -> None:
        """Keep the turns of one call, all or none; they follow those that the attempt already has."""

        def write(db: sqlite3.Connection) -> None:
            key = (rollout_id, attempt)
            (number,) = db.execute(
                "SELECT COALESCE(MAX(number) + 1, 0) FROM turns WHERE rollout_id = ? AND attempt = ?", key
            ).fetchone()
            rows = [(*key, number + n, *_turn_row(turn)) for n, turn in enumerate(turns)]
            db.executemany(
                "INSERT INTO turns(rollout_id, attempt, number, id, prompt_ids, reply_ids, reply_logps, version, "
                "finish_reason, temperature, top_p, request, reply) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                rows,
            )

        await self._submit(write)

    async def add_turn(self, rollout_id: str, attempt: int, turn: Turn) -> None:
        """Keep one turn."""
        await self.add_turns(rollout_id, attempt, [turn])

    async def end_rollout(
        self,
        rollout_id: str,
        *,
        ending: Ending,
        blame: Blame | None = None,
        reason: str = "",
        info: Json | None = None,
        rewards: Mapping[str, float | None] | None = None,
    ) -> None:
        """Say how the latest attempt at this rollout ended; from then on `rollout` and `finished` give it."""
        values = (ending, blame, reason, json.dumps(info or {}), json.dumps(dict(rewards or {})))
        await self._update(
            rollout_id,
            "state = 'ended', ended = strftime('%Y-%m-%dT%H:%M:%fZ', 'now'), "
            "ending = ?, blame = ?, reason = ?, info = ?, rewards = ?",
            values,
        )

    async def set_rewards(
        self, rollout_id: str, rewards: Mapping[str, float | None], *, info: Json | None = None
    ) -> None:
        """Replace the rewards of the latest attempt, and its info where given."""
        told = None if info is None else json.dumps(info)
        await self._update(rollout_id, "rewards = ?, info = COALESCE(?, info)", (json.dumps(dict(rewards)), told))

    # ---- reads ----

    def turns(self, rollout_id: str, *, attempt: int | None = None) -> tuple[Turn, ...]:
        """The turns of this attempt (default: the latest), in the order of their commits; also while it is open."""
        rows = self._reader.execute(
            "SELECT id, prompt_ids, reply_ids, reply_logps, version, finish_reason, temperature, top_p, request, reply "
            "FROM turns WHERE rollout_id = ?1 AND attempt = COALESCE(?2, "
            "(SELECT MAX(attempt) FROM rollouts WHERE id = ?1)) ORDER BY number",
            (rollout_id, attempt),
        )
        return tuple(_turn_of(row) for row in rows)

    def rollout(self, rollout_id: str) -> Rollout | None:
        """The latest attempt at this rollout once it has ended; `None` while it is open or unknown."""
        return next(iter(self._rollouts("id = ?", (rollout_id,))), None)

    def finished(self, *, group: str | None = None, prefix: str = "") -> list[Rollout]:
        """Every ended rollout of this group (default: of all) whose id starts with `prefix`, in the order of ids."""
        where = '("group" = ?1 OR ?1 IS NULL) AND substr(id, 1, length(?2)) = ?2'
        return list(self._rollouts(where, (group, prefix)))

    def export(self, path: str | Path) -> int:
        """Write every ended rollout as one JSON line; returns how many."""
        count = 0
        with open(path, "w", encoding="utf-8") as file:
            for count, rollout in enumerate(self._rollouts("1", ()), start=1):  # noqa: B007 - the last count is used
                file.write(json.dumps(rollout.to_json()) + "\n")
        return count

    def close(self) -> None:
        """Finish what waits, then close the file."""
        self._jobs.put(None)
        self._thread.join()
        self._writer.close()
        self._reader.close()

    def _rollouts(self, where: str, values: tuple[Any, ...]) -> Iterable[Rollout]:
        rows = self._reader.execute(
            'SELECT id, "group", task, ending, blame, reason, rewards, info FROM rollouts '
            f"WHERE state = 'ended' AND {LATEST} AND {where} ORDER BY id",
            values,
        ).fetchall()
        for rollout_id, group, task, ending, blame, reason, rewards, info in rows:
            yield Rollout(
                id=rollout_id,
                task=Task.from_json(json.loads(task)),
                group=group,
                turns=self.turns(rollout_id),
                rewards=json.loads(rewards),
                ending=ending,
                blame=blame,
                reason=reason,
                info=json.loads(info),
            )

    # ---- the writing thread ----

    async def _update(self, rollout_id: str, sets: str, values: tuple[Any, ...]) -> None:
        def write(db: sqlite3.Connection) -> None:
            done = db.execute(f"UPDATE rollouts SET {sets} WHERE id = ? AND {LATEST}", (*values, rollout_id))
            if done.rowcount != 1:
                raise ValueError(f"only an opened rollout can be updated, but {rollout_id!r} was never opened")

        await self._submit(write)

    async def _submit(self, write: Callable[[sqlite3.Connection], T]) -> T:
        future: Future[T] = Future()
        self._jobs.put((write, future))
        # a write that was handed over happens, also when its caller is cancelled meanwhile
        return await asyncio.shield(asyncio.wrap_future(future))

    def _write_all(self) -> None:
        closing = False
        while not closing:
            jobs = [self._jobs.get()]
            with suppress(Empty):
                while True:
                    jobs.append(self._jobs.get_nowait())
            closing = None in jobs
            self._commit([job for job in jobs if job is not None])

    def _commit(self, jobs: list[tuple[Write, Future[Any]]]) -> None:
        """Commit these writes in one transaction; if that fails, each alone, so that one cannot spoil the others."""
        try:
            self._writer.execute("BEGIN IMMEDIATE")
            results = [write(self._writer) for write, _ in jobs]
            self._writer.execute("COMMIT")
        except Exception as error:  # the thread serves on; the caller of each failed write is told
            if self._writer.in_transaction:  # SQLite ends it by itself after some errors
                self._writer.execute("ROLLBACK")
            if len(jobs) > 1:
                for job in jobs:
                    self._commit([job])
            elif jobs:
                jobs[0][1].set_exception(self._explained(error))
            return
        for (_, future), result in zip(jobs, results, strict=True):
            future.set_result(result)

    def _explained(self, error: Exception) -> Exception:
        if not isinstance(error, sqlite3.Error):
            return error
        return StoreError(
            f"a call must be on disk before it is answered, but {self.path} could not be written: {error}. "
            f"Nothing of it was kept; free space there (or repair the disk) and try again."
        )


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA foreign_keys = ON")
    return db


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    db.executescript(SCHEMA)
    db.execute("INSERT INTO schema SELECT ? WHERE NOT EXISTS (SELECT 1 FROM schema)", (SCHEMA_VERSION,))
    (found,) = db.execute("SELECT version FROM schema").fetchone()
    if found != SCHEMA_VERSION:
        raise ValueError(
            f"{path} was written with store schema {found}, but this version reads {SCHEMA_VERSION}; "
            f"use the version of whippletree that wrote it, or another path"
        )


def _turn_row(turn: Turn) -> tuple[Any, ...]:
    return (
        turn.id,
        np.asarray(turn.prompt_ids, "<i4").tobytes(),
        np.asarray(turn.reply_ids, "<i4").tobytes(),
        np.asarray(turn.reply_logps, "<f8").tobytes(),
        turn.version,
        turn.finish_reason,
        turn.temperature,
        turn.top_p,
        zlib.compress(json.dumps(turn.request).encode(), 1),
        zlib.compress(json.dumps(turn.reply).encode(), 1),
    )


def _turn_of(row: tuple[Any, ...]) -> Turn:
    turn_id, prompt, reply, logps, version, finish_reason, temperature, top_p, asked, answered = row
    return Turn(
        id=turn_id,
        prompt_ids=tuple(np.frombuffer(prompt, "<i4").tolist()),
        reply_ids=tuple(np.frombuffer(reply, "<i4").tolist()),
        reply_logps=tuple(np.frombuffer(logps, "<f8").tolist()),
        version=version,
        finish_reason=finish_reason,
        temperature=temperature,
        top_p=top_p,
        request=json.loads(zlib.decompress(asked)),
        reply=json.loads(zlib.decompress(answered)),
    )
