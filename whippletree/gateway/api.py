"""What an API is to the gateway: pure translations between its own words and the one internal form."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from whippletree.gateway.calls import Ask, Call
from whippletree.gateway.choices import Choice
from whippletree.gateway.errors import ApiError
from whippletree.gateway.parts import Part
from whippletree.types import Json


class Events(Protocol):
    """The server-sent events of one streamed reply. Each method gives the bytes to send now, perhaps none."""

    def begins(self) -> bytes:
        """Before anything else, once."""
        ...

    def delta(self, choice: Choice, parts: Sequence[Part]) -> bytes:
        """What is new of a choice."""
        ...

    def alive(self) -> bytes:
        """A data event that changes nothing, so that a waiting client sees that the call is alive."""
        ...

    def ends(self) -> bytes:
        """Everything that follows the last part; the reply is on disk."""
        ...

    def fails(self, error: ApiError) -> bytes:
        """In place of `ends`: the reply broke off."""
        ...


@dataclass(frozen=True)
class Api:
    """One API. `ask_of(request, default_model)` raises an `ApiError` for what cannot be read or honoured (400)."""

    name: str
    path: str  # after the version: "chat/completions"
    ask_of: Callable[[Json, str], Ask]
    reply: Callable[[Call], Json]  # in one piece
    kept: Callable[[Call, Choice], Json]  # what of a choice's reply stands with its turn
    events: Callable[[Call], Events]
    error_body: Callable[[ApiError], Json]
    counted: Callable[[int], Json] | None = None  # the answer at PATH/count_tokens, of a prompt of so many tokens


def event(data: Json, *, name: str = "") -> bytes:
    """One server-sent event, with an `event:` line where it has a name."""
    line = f"event: {name}\n".encode() if name else b""
    return line + b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
