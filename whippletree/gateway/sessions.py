"""Who is calling: one secret for each rollout, as API key or as part of the URL, and what is known of the rollout."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from whippletree.gateway.errors import ApiError, bad_request
from whippletree.gateway.store import Store
from whippletree.types import Task

REMEMBERED = 2**21  # tokens of earlier turns that a rollout keeps in memory, 8 bytes each


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """What a call gets where it does not say."""

    temperature: float = 1.0
    max_tokens: int | None = None  # of a reply; None: what the window leaves


@dataclass(kw_only=True, eq=False)
class Session:
    """One open rollout: its secret, its settings, and what its calls have left behind."""

    rollout_id: str
    attempt: int
    stream: str  # names the rollout's random numbers
    secret: str = field(repr=False)
    defaults: SamplingDefaults
    max_turns: int
    failure: str = ""  # why the engine or the store failed a call of this rollout; "" when none did
    truncated: str = ""  # which limit, of turns or of the window, refused a call of this rollout
    calls: int = 0
    threads: dict[bytes, tuple[int, ...]] = field(default_factory=dict, repr=False)  # see render.Renderer.prompt
    running: set[asyncio.Task[Any]] = field(default_factory=set, repr=False)
    _remembered: int = 0  # tokens in `threads`
    _taken: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set), repr=False)

    def base_url(self, server: str) -> str:
        """The OpenAI base URL of this rollout at `server`, for harnesses that take no key of their own."""
        return f"{server}/r/{self.secret}/v1"

    def count_call(self, choices: int) -> None:
        """Count the turns of one call.

        Raises:
            ApiError: the rollout has used up its turns (400: a harness in a loop must end, not wait).
        """
        if self.calls + choices > self.max_turns:
            raise self.refused(
                f"a rollout may take {self.max_turns} turns, and this one has used them", code="turn_limit_exceeded"
            )
        self.calls += choices

    def refused(self, message: str, *, code: str) -> ApiError:
        """The error of a call that passes a limit of this rollout, noted in `truncated`."""
        self.truncated = message
        return bad_request(message, code=code, param="messages")

    def remember(self, key: bytes, ids: tuple[int, ...]) -> None:
        """Keep a turn for later calls to continue; the oldest turns are forgotten beyond REMEMBERED tokens."""
        self._remembered += len(ids) - len(self.threads.pop(key, ()))
        self.threads[key] = ids
        while self._remembered > REMEMBERED and len(self.threads) > 1:
            self._remembered -= len(self.threads.pop(next(iter(self.threads))))

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
    """The open rollouts of one gateway. Secrets live in memory alone; the store keeps their SHA-256."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._by_hash: dict[str, Session] = {}
        self._by_rollout: dict[str, Session] = {}

    async def open(
        self,
        rollout_id: str,
        *,
        group: str,
        task: Task,
        stream: str,
        defaults: SamplingDefaults | None = None,
        max_turns: int = 1000,
    ) -> Session:
        """A new attempt at this rollout, with a new secret; an attempt that is still open is closed first."""
        await self.close(rollout_id)
        secret = secrets.token_urlsafe(32)
        attempt = await self._store.open_rollout(rollout_id, group=group, task=task, secret_hash=_hash(secret))
        session = Session(
            rollout_id=rollout_id,
            attempt=attempt,
            stream=stream,
            secret=secret,
            defaults=defaults or SamplingDefaults(),
            max_turns=max_turns,
        )
        self._by_hash[_hash(secret)] = self._by_rollout[rollout_id] = session
        return session

    async def close(self, rollout_id: str) -> None:
        """Refuse further calls of this rollout and end those that run; returns when their turns are on disk."""
        session = self._by_rollout.pop(rollout_id, None)
        if session is None:
            return
        del self._by_hash[_hash(session.secret)]
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
        if session is None:
            raise ApiError(
                401,
                "each call needs the key of an open rollout (Authorization: Bearer KEY, x-api-key: KEY, or /r/KEY/v1 "
                "in the URL), but this one has " + ("an unknown key: that rollout has ended" if secret else "no key"),
                code="invalid_api_key",
            )
        return session


def _hash(secret: str) -> str:
    return sha256(secret.encode("utf-8", "replace")).hexdigest()
