"""How rollouts and turns stand in a database, whichever it is.

The calls of an agent repeat each other: a prompt begins with an earlier prompt and its reply, and a request has the
messages of the one before. So a turn may name a parent, an earlier turn of its attempt, and hold what differs:

    prompt_ids = the first `taken` of the parent's prompt_ids + reply_ids, then what the row holds
    request    = the first `head` bytes of the parent's request, what the row holds, the parent's last `tail` bytes

where a request is the bytes of its JSON text. What an attempt takes on disk thus grows with what was said, not with its
square.
"""

from __future__ import annotations

import json
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

import numpy as np

from whippletree.types import Json, Task, Turn

STEPS = (  # step n takes a database from schema n to schema n + 1
    """
CREATE TABLE IF NOT EXISTS rollouts(
    id TEXT NOT NULL, attempt INTEGER NOT NULL, "group" TEXT NOT NULL, task TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('open', 'ended', 'abandoned')),
    ending TEXT, blame TEXT, reason TEXT NOT NULL DEFAULT '', rewards TEXT NOT NULL DEFAULT '{}',
    info TEXT NOT NULL DEFAULT '{}', secret_hash TEXT NOT NULL, opened TEXT NOT NULL, ended TEXT,
    PRIMARY KEY (id, attempt));
CREATE INDEX IF NOT EXISTS rollouts_of_group ON rollouts("group");
CREATE TABLE IF NOT EXISTS turns(
    id TEXT PRIMARY KEY, rollout_id TEXT NOT NULL, attempt INTEGER NOT NULL, number INTEGER NOT NULL,
    prompt_ids BLOB NOT NULL, reply_ids BLOB NOT NULL, reply_logps BLOB NOT NULL, version BIGINT NOT NULL,
    finish_reason TEXT NOT NULL, temperature DOUBLE PRECISION NOT NULL, top_p DOUBLE PRECISION NOT NULL,
    request BLOB NOT NULL, reply BLOB NOT NULL,
    UNIQUE (rollout_id, attempt, number),
    FOREIGN KEY (rollout_id, attempt) REFERENCES rollouts(id, attempt))
""",
    """
ALTER TABLE rollouts ADD COLUMN settings TEXT NOT NULL DEFAULT '{}';
ALTER TABLE rollouts ADD COLUMN active TEXT;
CREATE INDEX rollouts_of_secret ON rollouts(secret_hash);
CREATE INDEX rollouts_open ON rollouts(id) WHERE state = 'open';
ALTER TABLE turns ADD COLUMN parent INTEGER;
ALTER TABLE turns ADD COLUMN taken INTEGER NOT NULL DEFAULT 0;
ALTER TABLE turns ADD COLUMN head INTEGER NOT NULL DEFAULT 0;
ALTER TABLE turns ADD COLUMN tail INTEGER NOT NULL DEFAULT 0;
ALTER TABLE turns ADD COLUMN thread TEXT NOT NULL DEFAULT 'main';
ALTER TABLE turns ADD COLUMN link TEXT NOT NULL DEFAULT 'root';
ALTER TABLE turns ADD COLUMN versions BLOB;
ALTER TABLE turns ADD COLUMN info BLOB;
ALTER TABLE turns ADD COLUMN delivered INTEGER;
CREATE TABLE events(
    rollout_id TEXT NOT NULL, attempt INTEGER NOT NULL, number INTEGER NOT NULL,
    kind TEXT NOT NULL, data TEXT NOT NULL, time TEXT NOT NULL,
    PRIMARY KEY (rollout_id, attempt, number),
    FOREIGN KEY (rollout_id, attempt) REFERENCES rollouts(id, attempt))
""",
)
SCHEMA_VERSION = len(STEPS)
COLUMNS = (
    "number, parent, taken, head, tail, id, prompt_ids, reply_ids, reply_logps, version, finish_reason, temperature, "
    "top_p, request, reply, thread, link, versions, info"
)
SUMMARY = {  # what is known of a rollout without its turns: name -> SQL
    **dict.fromkeys(("id", "attempt", "state", "opened", "ended", "settings", "rewards", "ending", "blame", "reason")),
    "group": '"group"',
    "active": "COALESCE(active, opened)",
    "turns": "(SELECT COUNT(*) FROM turns WHERE rollout_id = rollouts.id AND attempt = rollouts.attempt)",
    "tokens": "(SELECT COALESCE(SUM(LENGTH(reply_ids)), 0) / 4 FROM turns "
    "WHERE rollout_id = rollouts.id AND attempt = rollouts.attempt)",
}
LEAST = 16  # tokens that are worth a reference
CANDIDATES = 16  # turns of an attempt that a new one may refer to: as many threads may take turns
MEMORY = 256 << 20  # bytes of turns that are kept at hand to refer to


class Database(Protocol):
    """A connection. SQL is what SQLite and PostgreSQL both read, with ? for a value."""

    def begin(self) -> None:
        """Start to write; whatever was lost of the connection is made anew."""

    def execute(self, sql: str, values: Sequence[Any] = (), /) -> Any: ...

    def executemany(self, sql: str, rows: Iterable[Sequence[Any]], /) -> Any: ...

    def commit(self) -> None: ...

    def undo(self) -> bool:
        """Forget what was begun; False where the connection is lost."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class SessionRow:
    """An attempt at a rollout, as a gateway finds it: `state` is "open", "ended" or "abandoned"."""

    rollout_id: str
    attempt: int
    group: str
    task: Task
    settings: Json
    state: str
    active: str = ""  # time of its last turn or event, or of its opening; as `stamp` writes it


def stamp(seconds: float | None = None) -> str:
    """This time (seconds since 1970; default: now) as text that sorts by time, in UTC to the millisecond."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def prepare(db: Database, name: str) -> None:
    """Bring a database to the schema that is known here, in one transaction.

    Raises:
        ValueError: a newer version wrote it, so its meaning is not known here.
    """
    db.begin()
    try:
        db.execute("CREATE TABLE IF NOT EXISTS schema(version INTEGER NOT NULL)")
        (found,) = db.execute("SELECT version FROM schema").fetchone() or (0,)
        if found > SCHEMA_VERSION:
            raise ValueError(
                f"{name} was written with store schema {found}, but this version reads up to {SCHEMA_VERSION}; "
                f"use the version of whippletree that wrote it, or another place"
            )
        for step in STEPS[found:]:
            for statement in step.split(";"):
                db.execute(statement)
        if found < SCHEMA_VERSION:
            db.execute("DELETE FROM schema")
            db.execute("INSERT INTO schema(version) VALUES (?)", (SCHEMA_VERSION,))
    except BaseException:
        db.undo()
        raise
    db.commit()


# ---- turns to rows, and back ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Whole:
    """What a later turn may refer to."""

    number: int
    ids: np.ndarray[Any, np.dtype[np.int32]]  # of prompt and reply
    request: bytes

    @property
    def size(self) -> int:
        return self.ids.nbytes + len(self.request)


class Recent:
    """The turns that new ones may refer to, of the rollouts that were written last. One thread may use it."""

    def __init__(self, memory: int = MEMORY) -> None:
        self._memory, self._size = memory, 0
        self._of: OrderedDict[str, tuple[int, list[Whole]]] = OrderedDict()

    def row(self, rollout_id: str, attempt: int, number: int, turn: Turn) -> tuple[Any, ...]:
        """The `COLUMNS` of this turn, to which later ones may refer."""
        before = self.forget(rollout_id)
        known = before[1] if before and before[0] == attempt else []
        prompt, reply = np.asarray(turn.prompt_ids, "<i4"), np.asarray(turn.reply_ids, "<i4")
        request = json.dumps(turn.request).encode()
        shared = [_shared(other.ids, prompt) for other in known]
        taken = max(shared, default=0)
        parent = known[shared.index(taken)] if taken >= LEAST else None
        taken = taken if parent else 0
        head, tail = _ends(parent.request, request) if parent else (0, 0)
        whole = Whole(number, np.concatenate([prompt, reply]), request)
        # a turn that begins with all of another serves in its place
        others = [other for other in known if _shared(other.ids, whole.ids) < len(other.ids)]
        self._keep(rollout_id, attempt, [*others[1 - CANDIDATES :], whole])
        return (
            *(number, parent.number if parent else None, taken, head, tail, turn.id),
            *(prompt[taken:].tobytes(), reply.tobytes(), np.asarray(turn.reply_logps, "<f8").tobytes()),
            *(turn.version, turn.finish_reason, turn.temperature, turn.top_p),
            *(zlib.compress(request[head : len(request) - tail], 1), _packed(turn.reply), turn.thread, turn.link),
            np.asarray(turn.versions, "<i8").tobytes() or None,
            _packed(turn.info) if turn.info else None,
        )

    def forget(self, rollout_id: str) -> tuple[int, list[Whole]] | None:
        """No new turn will refer to one of this rollout."""
        found = self._of.pop(rollout_id, None)
        self._size -= sum(whole.size for whole in found[1]) if found else 0
        return found

    def clear(self) -> None:
        """No new turn will refer to one that was written before."""
        self._of.clear()
        self._size = 0

    def _keep(self, rollout_id: str, attempt: int, wholes: list[Whole]) -> None:
        self._of[rollout_id] = attempt, wholes
        self._size += sum(whole.size for whole in wholes)
        while self._size > self._memory:
            self.forget(next(iter(self._of)))


def turns_of(rows: Iterable[Sequence[Any]], *, after: int = 0) -> Iterator[Turn]:
    """The turns with number `after` or more; `rows` are `COLUMNS` in the order of numbers, parents among them."""
    wholes: dict[int, Whole] = {}
    for number, parent, taken, head, tail, *row in rows:
        turn_id, prompt, reply, logps, version, finish_reason, temperature, top_p, asked, answered, *later = row
        ids = np.frombuffer(prompt + reply, "<i4")
        request = zlib.decompress(asked)
        if parent is not None:
            other = wholes[parent]
            ids = np.concatenate([other.ids[:taken], ids])
            request = other.request[:head] + request + other.request[len(other.request) - tail :]
        wholes[number] = Whole(number, ids, request)
        if number < after:
            continue
        end = len(ids) - len(reply) // 4
        thread, link, versions, info = later
        yield Turn(
            id=turn_id,
            prompt_ids=tuple(ids[:end].tolist()),
            reply_ids=tuple(ids[end:].tolist()),
            reply_logps=tuple(np.frombuffer(logps, "<f8").tolist()),
            version=version,
            finish_reason=finish_reason,
            temperature=temperature,
            top_p=top_p,
            request=json.loads(request),
            reply=_unpacked(answered),
            thread=thread,
            link=link,
            versions=tuple(np.frombuffer(versions or b"", "<i8").tolist()),
            info=_unpacked(info) if info else {},
        )


def _shared(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> int:
    """How many of their first entries are equal."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _ends(one: bytes, other: bytes) -> tuple[int, int]:
    """How many bytes they share at the beginning, and how many of the rest at the end."""
    a, b = np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8)
    head = _shared(a, b)
    return head, _shared(a[head:][::-1], b[head:][::-1])


def _packed(value: Json) -> bytes:
    return zlib.compress(json.dumps(value).encode(), 1)


def _unpacked(value: bytes) -> Any:
    return json.loads(zlib.decompress(value))
