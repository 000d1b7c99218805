"""Who is calling: one secret for each rollout, as API key or as part of the URL, and what is known of the rollout."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any
from weakref import WeakValueDictionary

from whippletree.gateway.budget import Budget, Spent
from whippletree.gateway.errors import ApiError, bad_request
from whippletree.gateway.memory import Memory
from whippletree.gateway.retries import Steps
from whippletree.gateway.rows import SessionRow
from whippletree.gateway.store import Store
from whippletree.gateway.threads import Threads
from whippletree.types import Json, Task, Turn


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """What a call gets where it does not say."""

    temperature: float = 1.0
    max_tokens: int | None = None  # of a reply; None: what the window leaves

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature is 0 or more, but it is {self.temperature}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(
                f"max_tokens is 1 or more, or None for what the window leaves, but it is {self.max_tokens}"
            )


@dataclass(kw_only=True, eq=False)
class Session:
    """One open rollout: its secret, its settings, and what its calls have left behind."""

    rollout_id: str
    attempt: int
    stream: str  # names the rollout's random numbers
    secret: str = field(repr=False)
    defaults: SamplingDefaults
    spent: Spent
    failure: str = ""  # why the engine or the store failed a call of this rollout; "" when none did
    truncated: str = ""  # which limit, of the budget or of the window, refused or cut a call of this rollout
    memory: Memory = field(default_factory=Memory, repr=False)
    steps: Steps = field(default_factory=Steps, repr=False)
    threads: Threads = field(default_factory=Threads, repr=False)
    running: set[asyncio.Task[Any]] = field(default_factory=set, repr=False)
    _taken: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set), repr=False)
    _known: set[str] = field(default_factory=set, repr=False)  # ids of turns that were taken in
    _followed: int = 0  # turns of the store that were looked at

    def base_url(self, server: str) -> str:
        """The OpenAI base URL of this rollout at `server`, for harnesses that take no key of their own."""
        return f"{server}/r/{self.secret}/v1"

    def count_call(self, choices: int) -> None:
        """Count the turns of one call.

        Raises:
            ApiError: the rollout has used up its budget (400: a harness in a loop must end, not wait).
        """
        if over := self.spent.exhausted(choices):
            code, why = over
            raise self.refused(why, code=code)

    def refused(self, message: str, *, code: str) -> ApiError:
        """The error of a call that passes a limit of this rollout, noted in `truncated`."""
        self.truncated = message
        return bad_request(message, code=code, param="messages")

    def learn(self, turn: Turn) -> None:
        """Take in a turn that is on disk, so that later calls continue it. An abandoned one was not read by anyone."""
        self._known.add(turn.id)
        if turn.finish_reason != "abandoned":
            self.memory.remember(turn)

    def follow(self, store: Store) -> None:
        """Take in the turns that others kept: an earlier process, or another gateway."""
        new = store.turns(self.rollout_id, attempt=self.attempt, after=self._followed)
        self._followed += len(new)
        new = tuple(turn for turn in new if turn.id not in self._known and "key" in turn.info)
        if not new:
            return
        self.steps.restore(new, store.undelivered(self.rollout_id, self.attempt))
        self.threads.restore(new)
        for turn in new:
            self.learn(turn)
            self.spent.turns += 1
            self.spent.tokens += len(turn.reply_ids)
            if turn.finish_reason != "abandoned":
                self._taken[turn.info["prompt"]].add(turn.info["number"])

    @contextmanager
    def occurrences(self, digest: str, count: int) -> Iterator[list[int]]:
        """The lowest free numbers of this prompt in this rollout; given back if the call does not finish.

        A retry of a failed call thus samples what the failed call would have, and a repeat of a finished one does not.
        """
        taken = self._taken[digest]
        free = list(itertools.islice((number for number in itertools.count() if number not in taken), count))
        taken.update(free)
        try:
            yield free
        except BaseException:
            taken.difference_update(free)
            raise


class Sessions:
    """The open rollouts of one gateway. Secrets live in memory alone; the store keeps their SHA-256.

    A rollout that another process opened, and that is still open in the store, goes on here where it was. With
    `shared`, other gateways serve the same rollouts at the same time, so the store is asked before each call.
    """

    def __init__(self, store: Store, *, shared: bool = False) -> None:
        self._store, self._shared = store, shared
        self._by_hash: dict[str, Session] = {}
        self._by_rollout: dict[str, Session] = {}
        self._closed: set[str] = set()  # hashes; the store may not have heard of the end yet
        self._admin = ""  # hash of the key that opens, reads and ends all rollouts; "" for none
        self._alone: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def open(
        self,
        rollout_id: str,
        *,
        group: str,
        task: Task,
        stream: str,
        defaults: SamplingDefaults | None = None,
        budget: Budget | None = None,
        sealed: bool = False,
    ) -> Session:
        """A new attempt at this rollout, with a new secret; an attempt that is still open is closed first.

        The secret of a `sealed` one serves calls of the model alone: it neither rewards nor reads its rollout.
        """
        await self.close(rollout_id)
        secret = secrets.token_urlsafe(32)
        settings = {
            "stream": stream,
            "defaults": asdict(defaults or SamplingDefaults()),
            "budget": asdict(budget or Budget()),
            "opened": time.time(),
            "sealed": sealed,
        }
        attempt = await self._store.open_rollout(
            rollout_id, group=group, task=task, secret_hash=_hash(secret), settings=settings
        )
        return self._kept(_session(rollout_id, attempt, secret, settings))

    async def close(self, rollout_id: str) -> None:
        """Refuse further calls of this rollout and end those that run; returns when their turns are on disk."""
        session = self._by_rollout.pop(rollout_id, None)
        if session is None:
            return
        del self._by_hash[_hash(session.secret)]
        self._closed.add(_hash(session.secret))
        running = tuple(session.running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def find(self, secret: str | None) -> Session:
        """The open rollout of this secret.

        Raises:
            ApiError: there is none (401).
        """
        session = self._by_hash.get(_hash(secret)) if secret else None
        if secret and (session is None or self._shared):
            session = self._from_store(secret, session)
        if session is None:
            raise ApiError(
                401,
                "each call needs the key of an open rollout (Authorization: Bearer KEY, x-api-key: KEY, or /r/KEY/v1 "
                "in the URL), but this one has " + ("an unknown key: that rollout has ended" if secret else "no key"),
                code="invalid_api_key",
            )
        return session

    def admit(self, key: str) -> None:
        """Serve the paths of `rollouts` too; this key opens, reads and ends every rollout."""
        self._admin = _hash(key)

    @property
    def administered(self) -> bool:
        """Whether there is an admin key."""
        return bool(self._admin)

    def is_admin(self, key: str | None) -> bool:
        """Whether this is the admin key, in a time that does not tell how much of it is right."""
        return bool(key and self._admin) and hmac.compare_digest(_hash(key or ""), self._admin)

    def row_of(self, secret: str) -> SessionRow | None:
        """The attempt that was opened with this secret, ended or not."""
        return self._store.session_of(_hash(secret))

    def loaded(self, rollout_id: str) -> Session | None:
        """The open session of this rollout, if this process opened it or served a call of it."""
        return self._by_rollout.get(rollout_id)

    def alone(self, rollout_id: str) -> asyncio.Lock:
        """To be held while something is said of this rollout, so that nothing is said after its end."""
        return self._alone.setdefault(rollout_id, asyncio.Lock())

    def _from_store(self, secret: str, session: Session | None) -> Session | None:
        """The rollout of this secret as the store has it: gone on with, or `None` where it is not open."""
        row = self.row_of(secret)
        if row is None or row.state != "open" or not row.settings or _hash(secret) in self._closed:
            return None
        session = session or self._kept(_session(row.rollout_id, row.attempt, secret, row.settings))
        session.follow(self._store)
        return session

    def _kept(self, session: Session) -> Session:
        self._by_hash[_hash(session.secret)] = self._by_rollout[session.rollout_id] = session
        return session


def _session(rollout_id: str, attempt: int, secret: str, settings: Json) -> Session:
    return Session(
        rollout_id=rollout_id,
        attempt=attempt,
        stream=settings["stream"],
        secret=secret,
        defaults=SamplingDefaults(**settings["defaults"]),
        spent=Spent(Budget(**settings["budget"]), opened=settings["opened"]),
    )


def _hash(secret: str) -> str:
    return sha256(secret.encode("utf-8", "replace")).hexdigest()
