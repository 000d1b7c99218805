"""Which requests of a rollout are one step: a client's retry is no second sample, and a deliberate repeat is one.

A step is what is asked: messages, tools and sampling, but neither streaming nor the length limit, as clients ask again
without the one and with another of the other. Of a request whose step was there before:

    the same Idempotency-Key, or a retry header       it gets the reply of the first one, once that is there
    the first one's reply was kept and not delivered  it gets that reply
    the first one was abandoned                       it samples anew, and the turn says which turns it retries
    the first one was delivered, or still runs        it is a sibling: another sample of the same step
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

from whippletree.types import Turn

State = Literal["running", "delivering", "undelivered", "delivered", "abandoned", "refused"]


@dataclass(eq=False)
class Attempt:
    """One request for a step."""

    idempotency: str = ""  # the client's key for it
    state: State = "running"
    turn_ids: tuple[str, ...] = ()
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # it runs no more

    def becomes(self, state: State) -> None:
        """Note how far it is."""
        self.state = state
        if state != "running":
            self.changed.set()


class Steps:
    """The steps of one rollout, and the requests for each in the order in which they came."""

    def __init__(self) -> None:
        self._attempts: defaultdict[str, list[Attempt]] = defaultdict(list)

    async def begun(self, step: str, headers: Mapping[str, str]) -> tuple[Attempt, Attempt | None]:
        """(a new attempt at this step, the one that it follows). Where that one has the reply, both are the same."""
        key = headers.get("idempotency-key", "")
        retried = headers.get("x-stainless-retry-count", "0").strip() not in ("", "0")
        while earlier := self._earlier(step, key):
            same = retried or bool(key and earlier.idempotency == key)
            if earlier.state == "running" and same:
                await earlier.changed.wait()
                continue
            if earlier.state == "undelivered" or (same and earlier.state in ("delivering", "delivered")):
                earlier.becomes("delivering")  # to this request, and to no other one but its retries
                return earlier, earlier
            break
        attempt = Attempt(idempotency=key)
        self._attempts[step].append(attempt)
        return attempt, earlier

    def _earlier(self, step: str, key: str) -> Attempt | None:
        attempts = [attempt for attempt in self._attempts.get(step, ()) if attempt.state != "refused"]
        same = [attempt for attempt in attempts if key and attempt.idempotency == key]
        # a repeat with another key was meant as another request
        found = same or [attempt for attempt in attempts if not (key and attempt.idempotency)]
        waits = [attempt for attempt in found if attempt.state == "undelivered"]
        return (waits or found)[-1] if found else None

    def restore(self, turns: Iterable[Turn], undelivered: set[str]) -> None:
        """Take in the turns that an earlier process kept."""
        calls: dict[str, list[Turn]] = defaultdict(list)
        for turn in turns:
            calls[turn.id.rpartition(".")[0]].append(turn)
        for rows in calls.values():
            first = rows[0]
            attempt = Attempt(first.info.get("idempotency", ""), turn_ids=tuple(turn.id for turn in rows))
            lost = any(turn.id in undelivered for turn in rows)
            abandoned = first.finish_reason == "abandoned"
            attempt.becomes("abandoned" if abandoned else "undelivered" if lost else "delivered")
            self._attempts[first.info.get("step", "")].append(attempt)


def step_of(key: bytes, *asked: object) -> str:
    """The step of these messages and tools (`key`, see `render.Prompt`) with these sampling settings."""
    return blake2b(key + json.dumps(asked).encode(), digest_size=16).hexdigest()
