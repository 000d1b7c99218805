"""The store: every finished call in one SQLite file, on disk before the call is answered.

One thread writes. Writes that wait together are committed in one transaction, so that many concurrent calls share one
flush to disk; a write returns only after its commit. `open_store` also gives a store in a PostgreSQL database.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

from whippletree.gateway.rows import COLUMNS, SUMMARY, Database, Recent, SessionRow, prepare, stamp, turns_of
from whippletree.gateway.sqlite import File
from whippletree.types import Blame, Ending, Json, Rollout, Task, Turn

LATEST = "attempt = (SELECT MAX(attempt) FROM rollouts AS other WHERE other.id = rollouts.id)"
SESSION = 'SELECT id, attempt, "group", task, settings, state, COALESCE(active, opened) FROM rollouts'
# turns from a number on, and those that they refer to
TURNS = f"""
WITH RECURSIVE wanted(number) AS (
    SELECT number FROM turns WHERE rollout_id = ? AND attempt = ? AND number >= ?
    UNION SELECT turns.parent FROM turns JOIN wanted ON turns.number = wanted.number
    WHERE rollout_id = ? AND attempt = ? AND parent IS NOT NULL)
SELECT {COLUMNS} FROM turns
WHERE rollout_id = ? AND attempt = ? AND number IN (SELECT number FROM wanted) ORDER BY number
"""
LINGER = 0.05  # seconds for which a mark waits for a write whose flush it can share

T = TypeVar("T")


class StoreError(RuntimeError):
    """A write that did not reach the disk. Nothing of it was kept, and the same write may be tried again."""


class _Job(NamedTuple):
    """A write that waits. Jobs of a transaction run in the order of their rollouts, so that locks come in one order."""

    rollout_id: str
    write: Callable[[Database], Any]
    future: Future[Any]
    lazy: bool = False  # nobody waits for it


class Store:
    """Rollouts and their turns in the SQLite file at `path`.

    Reads are plain functions and see every write that returned. `max_pages` bounds the file (4096 bytes a page): a
    write past it fails as on a full disk.

    Raises:
        StoreError: the file cannot be opened, or is no SQLite file.
        ValueError: a newer version wrote the file. One that an older version wrote is brought up to date.
    """

    errors: tuple[type[Exception], ...] = (sqlite3.Error,)

    def __init__(self, path: str | Path, *, max_pages: int | None = None) -> None:
        self.path = Path(path)
        self._start(lambda: File.at(self.path), str(path))
        if max_pages is not None:
            self._writer.execute(f"PRAGMA max_page_count = {int(max_pages)}")

    def _start(self, connect: Callable[[], Database], name: str) -> None:
        self.name = name  # for people
        with ExitStack() as opened:
            try:
                self._writer = connect()
                opened.callback(self._writer.close)
                prepare(self._writer, name)
                self._reader = connect()
            except self.errors as error:
                raise StoreError(f"{name} cannot be opened as a store: {error}") from error
            opened.pop_all()
        self._recent = Recent()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="store", daemon=True)
        self._thread.start()

    # ---- writes: each returns after its commit, or raises StoreError with nothing kept ----

    async def open_rollout(
        self, rollout_id: str, *, group: str, task: Task, secret_hash: str, settings: Json | None = None
    ) -> int:
        """The number of a new attempt at this rollout; an earlier attempt stays on disk, but is no longer read."""

        def write(db: Database) -> int:
            self._recent.forget(rollout_id)
            db.execute("UPDATE rollouts SET state = 'abandoned' WHERE id = ?", (rollout_id,))
            (attempt,) = db.execute(
                "SELECT COALESCE(MAX(attempt) + 1, 0) FROM rollouts WHERE id = ?", (rollout_id,)
            ).fetchone()
            _open(db, rollout_id, attempt, group, task, secret_hash, settings)
            return int(attempt)

        return await self._submit(rollout_id, write)

    async def add_turns(self, rollout_id: str, attempt: int, turns: Sequence[Turn]) -> None:
        """Keep the turns of one call, all or none; they follow those that the attempt already has."""
        await self._submit(rollout_id, lambda db: self._add(db, rollout_id, attempt, turns))

    async def add_turn(self, rollout_id: str, attempt: int, turn: Turn) -> None:
        """Keep one turn."""
        await self.add_turns(rollout_id, attempt, [turn])

    async def add_event(self, rollout_id: str, attempt: int, kind: str, data: Json) -> None:
        """Keep what happened to this attempt beside its turns."""
        row = (kind, json.dumps(data), stamp())

        def write(db: Database) -> None:
            number = _next_number(db, "events", rollout_id, attempt)
            db.execute(
                "INSERT INTO events(rollout_id, attempt, number, kind, data, time) VALUES (?, ?, ?, ?, ?, ?)",
                (rollout_id, attempt, number, *row),
            )

        await self._submit(rollout_id, write)

    def mark_delivered(self, turn_ids: Iterable[str]) -> None:
        """Note that the last byte of these turns was sent. It is on disk a little later; `close` waits for it."""
        rows = [(turn_id,) for turn_id in turn_ids]

        def write(db: Database) -> None:
            db.executemany("UPDATE turns SET delivered = 1 WHERE id = ?", rows)

        if rows:
            self._jobs.put(_Job("", write, Future(), lazy=True))

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
        await self._submit(rollout_id, lambda db: self._end(db, rollout_id, values))

    async def set_rewards(
        self, rollout_id: str, rewards: Mapping[str, float | None], *, info: Json | None = None
    ) -> None:
        """Replace the rewards of the latest attempt, and its info where given."""
        values = (json.dumps(dict(rewards)), None if info is None else json.dumps(info))
        await self._submit(
            rollout_id, lambda db: _update(db, rollout_id, "rewards = ?, info = COALESCE(?, info)", values)
        )

    async def add_rollout(self, rollout: Rollout) -> bool:
        """Keep a rollout that ended elsewhere, all or nothing; False where this very one is here already.

        Raises:
            ValueError: another rollout of this id is here.
        """
        ended = (rollout.ending, rollout.blame, rollout.reason, json.dumps(rollout.info), json.dumps(rollout.rewards))

        def write(db: Database) -> bool:
            if db.execute("SELECT 1 FROM rollouts WHERE id = ?", (rollout.id,)).fetchone():
                return False
            _open(db, rollout.id, 0, rollout.group, rollout.task, "", None)
            self._add(db, rollout.id, 0, rollout.turns)
            self._end(db, rollout.id, ended)
            return True

        added = await self._submit(rollout.id, write)
        here = None if added else self.rollout(rollout.id)
        if not added and (here is None or here.to_json() != rollout.to_json()):
            raise ValueError(
                f"a rollout is kept once, but {self.name} has another one named {rollout.id!r}; take another store"
            )
        return added

    # ---- reads ----

    def turns(self, rollout_id: str, *, attempt: int | None = None, after: int = 0) -> tuple[Turn, ...]:
        """The turns of this attempt (default: the latest) but its first `after`, in the order of their commits."""
        key = self._key(rollout_id, attempt)
        return tuple(turns_of(self._read(TURNS, (*key, after, *key, *key)), after=after))

    def undelivered(self, rollout_id: str, attempt: int) -> set[str]:
        """Ids of the turns of this attempt whose last byte was never reported sent."""
        rows = self._read(
            "SELECT id FROM turns WHERE rollout_id = ? AND attempt = ? AND delivered = 0", (rollout_id, attempt)
        )
        return {turn_id for (turn_id,) in rows}

    def events(self, rollout_id: str, *, attempt: int | None = None) -> list[Json]:
        """The events of this attempt (default: the latest) in their order: kind, data, and the time as text."""
        rows = self._read(
            "SELECT kind, data, time FROM events WHERE rollout_id = ? AND attempt = ? ORDER BY number",
            self._key(rollout_id, attempt),
        )
        return [{"kind": kind, "data": json.loads(data), "time": time} for kind, data, time in rows]

    def session_of(self, secret_hash: str) -> SessionRow | None:
        """The attempt that was opened with this secret. Of a rollout only the latest attempt can be "open"."""
        rows = self._read(f"{SESSION} WHERE secret_hash = ? ORDER BY attempt DESC LIMIT 1", (secret_hash,))
        return next(map(_session, rows), None)

    def open_rollouts(self, *, idle_since: str | None = None) -> list[SessionRow]:
        """The open attempts, in the order of ids; with `idle_since` those that were last active before that time."""
        rows = map(_session, self._read(f"{SESSION} WHERE state = 'open' ORDER BY id", ()))
        return [row for row in rows if idle_since is None or row.active < idle_since]

    def summaries(
        self, rollout_id: str | None = None, *, after: str = "", limit: int = 1, state: str | None = None
    ) -> list[Json]:
        """What `rows.SUMMARY` names of the latest attempt at this rollout, or at those that follow the id `after`."""
        which, values = ("id > ?", after) if rollout_id is None else ("id = ?", rollout_id)
        rows = self._read(
            f"SELECT {', '.join(sql or name for name, sql in SUMMARY.items())} FROM rollouts "
            f"WHERE {which} AND {LATEST} AND state IN (?, ?) ORDER BY id LIMIT ?",
            (values, state or "open", state or "ended", limit),
        )
        found = [dict(zip(SUMMARY, row, strict=True)) for row in rows]
        return [{**row, **{name: json.loads(row[name]) for name in ("settings", "rewards")}} for row in found]

    def rollout(self, rollout_id: str, *, or_open: bool = False) -> Rollout | None:
        """The latest attempt at this rollout once it has ended, or also before; `None` where there is none."""
        rows = self._read(
            'SELECT "group", task, ending, blame, reason, rewards, info, attempt FROM rollouts '
            f"WHERE id = ? AND state IN ('ended', ?) AND {LATEST}",
            (rollout_id, "open" if or_open else "ended"),
        )
        for group, task, ending, blame, reason, rewards, info, attempt in rows:
            return Rollout(
                id=rollout_id,
                task=Task.from_json(json.loads(task)),
                group=group,
                turns=self.turns(rollout_id, attempt=attempt),
                rewards=json.loads(rewards),
                ending=ending,
                blame=blame,
                reason=reason,
                info=json.loads(info),
            )
        return None

    def ids(self, *, group: str | None = None, prefix: str = "") -> list[str]:
        """Ids of the ended rollouts of this group (default: of all) that start with `prefix`, in order."""
        of_group, values = ("", ()) if group is None else (' AND "group" = ?', (group,))
        rows = self._read(
            "SELECT id FROM rollouts WHERE state = 'ended' AND substr(id, 1, ?) = ? "
            f"AND {LATEST}{of_group} ORDER BY id",
            (len(prefix), prefix, *values),
        )
        return [name for (name,) in rows]

    def each(self, *, group: str | None = None, prefix: str = "") -> Iterator[Rollout]:
        """The rollouts of `ids`, one at a time."""
        names = self.ids(group=group, prefix=prefix)
        return (rollout for name in names if (rollout := self.rollout(name)) is not None)

    def finished(self, *, group: str | None = None, prefix: str = "") -> list[Rollout]:
        """What `each` gives, all at once."""
        return list(self.each(group=group, prefix=prefix))

    def close(self) -> None:
        """Finish what waits, then close the file."""
        self._jobs.put(None)
        self._thread.join()
        self._writer.close()
        self._reader.close()

    def _key(self, rollout_id: str, attempt: int | None) -> tuple[str, int]:
        if attempt is None:
            ((attempt,),) = self._read("SELECT COALESCE(MAX(attempt), 0) FROM rollouts WHERE id = ?", (rollout_id,))
        return rollout_id, attempt

    def _read(self, sql: str, values: Sequence[Any]) -> list[Any]:
        return list(self._reader.execute(sql, values).fetchall())

    # ---- the writing thread ----

    def _add(self, db: Database, rollout_id: str, attempt: int, turns: Sequence[Turn]) -> None:
        number = _next_number(db, "turns", rollout_id, attempt)
        rows = [
            (rollout_id, attempt, 0, *self._recent.row(rollout_id, attempt, number + n, turn))
            for n, turn in enumerate(turns)
        ]
        columns = f"rollout_id, attempt, delivered, {COLUMNS}"
        marks = ", ".join("?" * (columns.count(",") + 1))
        db.executemany(f"INSERT INTO turns({columns}) VALUES ({marks})", rows)

    def _end(self, db: Database, rollout_id: str, values: tuple[Any, ...]) -> None:
        self._recent.forget(rollout_id)
        sets = "state = 'ended', ended = ?, ending = ?, blame = ?, reason = ?, info = ?, rewards = ?"
        _update(db, rollout_id, sets, (stamp(), *values))

    async def _submit(self, rollout_id: str, write: Callable[[Database], T]) -> T:
        future: Future[T] = Future()
        self._jobs.put(_Job(rollout_id, write, future))
        # a write that was handed over happens, also when its caller is cancelled meanwhile
        return await asyncio.shield(asyncio.wrap_future(future))

    def _write_all(self) -> None:
        closing = False
        while not closing:
            jobs = [self._jobs.get()]
            with suppress(Empty):
                if jobs[0] is not None and jobs[0].lazy:
                    jobs.append(self._jobs.get(timeout=LINGER))
                while True:
                    jobs.append(self._jobs.get_nowait())
            closing = None in jobs
            self._commit(sorted((job for job in jobs if job is not None), key=lambda job: job.rollout_id))

    def _commit(self, jobs: list[_Job]) -> None:
        """Commit these writes in one transaction; if that fails, each alone, so that one cannot spoil the others."""
        try:
            self._writer.begin()
            results = [job.write(self._writer) for job in jobs]
            self._writer.commit()
        except Exception as error:  # the thread serves on; the caller of each failed write is told
            connected = self._writer.undo()
            self._recent.clear()  # it may know turns that were not kept
            if len(jobs) > 1 and connected:
                for job in jobs:
                    self._commit([job])
            else:
                for job in jobs:
                    job.future.set_exception(self._explained(error))
            return
        for job, result in zip(jobs, results, strict=True):
            job.future.set_result(result)

    def _explained(self, error: Exception) -> Exception:
        if not isinstance(error, self.errors):
            return error
        if "IntegrityError" in {kind.__name__ for kind in type(error).__mro__}:  # of whichever database
            return StoreError(f"an id is used once, but {self.name} has it already: {error}. Nothing of it was kept")
        return StoreError(
            f"a call must be on disk before it is answered, but {self.name} could not be written: {error}. "
            f"Nothing of it was kept; free space there (or repair the disk) and try again."
        )


def open_store(address: str | Path) -> Store:
    """The store at this path, or in the PostgreSQL database of this address (postgresql://USER@HOST/DATABASE).

    Raises:
        ImportError: the address is of PostgreSQL, and psycopg is not installed.
        ValueError: a newer version wrote it.
    """
    if str(address).startswith(("postgresql://", "postgres://")):
        from whippletree.gateway.postgres import PostgresStore

        return PostgresStore(str(address))
    return Store(address)


def _open(
    db: Database, rollout_id: str, attempt: int, group: str, task: Task, secret_hash: str, settings: Json | None
) -> None:
    now = stamp()
    db.execute(
        'INSERT INTO rollouts(id, attempt, "group", task, secret_hash, settings, state, opened, active) '
        "VALUES (?, ?, ?, ?, ?, ?, 'open', ?, ?)",
        (rollout_id, attempt, group, json.dumps(task.to_json()), secret_hash, json.dumps(settings or {}), now, now),
    )


def _update(db: Database, rollout_id: str, sets: str, values: tuple[Any, ...]) -> None:
    done = db.execute(f"UPDATE rollouts SET {sets} WHERE id = ? AND {LATEST}", (*values, rollout_id))
    _check_opened(done.rowcount, rollout_id)


def _next_number(db: Database, table: str, rollout_id: str, attempt: int) -> int:
    """The next number in this table; the attempt is locked, so no other process takes it meanwhile."""
    key = (rollout_id, attempt)
    done = db.execute("UPDATE rollouts SET active = ? WHERE id = ? AND attempt = ?", (stamp(), *key))
    _check_opened(done.rowcount, rollout_id)
    (number,) = db.execute(
        f"SELECT COALESCE(MAX(number) + 1, 0) FROM {table} WHERE rollout_id = ? AND attempt = ?", key
    ).fetchone()
    return int(number)


def _check_opened(changed: int, rollout_id: str) -> None:
    if changed != 1:
        raise ValueError(f"only an opened rollout can be updated, but {rollout_id!r} was never opened")


def _session(row: Sequence[Any]) -> SessionRow:
    rollout_id, attempt, group, task, settings, state, active = row
    return SessionRow(rollout_id, attempt, group, Task.from_json(json.loads(task)), json.loads(settings), state, active)
