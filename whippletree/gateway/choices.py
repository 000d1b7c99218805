"""One reply while it is sampled: the exact ids, and what may be shown of them."""

from __future__ import annotations

from typing import Any

from whippletree.gateway.parts import Part, merged, message_of
from whippletree.gateway.text import ShownText
from whippletree.types import Json, Piece, Turn


class Choice:
    """A reply to one call; a call for several has several."""

    def __init__(self, index: int, stream: str, text: ShownText) -> None:
        self.index, self.stream, self._text = index, stream, text
        self.ids: list[int] = []
        self.logps: list[float] = []
        self.versions: list[int] = []
        self.ended = ""  # "stop", "length" or "abandoned"; "" while it runs
        self.parts: list[Part] = []
        self.turn_id, self.number = "", 0  # number: of the times that this prompt was sampled in its rollout
        self._read = 0  # ids whose text was taken in

    @classmethod
    def replayed(cls, index: int, turn: Turn) -> Choice:
        """The reply that this turn was."""
        choice = cls(index, "", ShownText(None, stop=(), tools=None))
        choice.ids, choice.logps = list(turn.reply_ids), list(turn.reply_logps)
        choice.versions = list(turn.versions) or [turn.version] * len(turn.reply_ids)
        choice.ended = "stop" if turn.finish_reason == "tool_calls" else turn.finish_reason
        choice.parts, choice.turn_id = [Part(**row) for row in turn.info["parts"]], turn.id
        choice._text.stopped = turn.info.get("stopped", "")
        choice._read = len(choice.ids)
        return choice

    @property
    def version(self) -> int:
        """The oldest policy that sampled of it: as stale as its stalest token."""
        return min(self.versions, default=0)

    @property
    def stopped(self) -> str:
        """The stop string that ended it; "" if none did."""
        return self._text.stopped

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for how it ended: a reply that calls tools and was not cut ends for them."""
        return "tool_calls" if self.ended == "stop" and any(part.call for part in self.parts) else self.ended

    @property
    def message(self) -> Json:
        """The reply as a chat message."""
        return message_of(self.parts)

    def take(self, piece: Piece) -> None:
        """Append what was sampled."""
        self.ids += piece.ids
        self.logps += piece.logps
        self.versions += [piece.version] * len(piece.ids)
        self.ended = piece.finish_reason or ""

    def show(self) -> list[Part]:
        """Take in the text of the ids since the last time; returns what is new of it. A stop string ends the reply."""
        new = self._text.feed(self.ids[self._read :], last=bool(self.ended))
        self._read = len(self.ids)
        self.parts = merged([*self.parts, *new])
        if self._text.stopped:
            self.ended = "stop"
        return new

    def noted(self, tools: tuple[Json, ...]) -> Json:
        """What a trainer must know of the reply: its parts, calls that are none, calls of tools that there are not."""
        offered = {tool.get("function", {}).get("name") for tool in tools}
        called = [part.call["function"]["name"] for part in self.parts if part.call]
        out: dict[str, Any] = {"parts": [_row(part) for part in self.parts]}
        out["malformed"] = sum(part.malformed for part in self.parts)
        out["unknown_tools"] = [name for name in called if name not in offered]
        out["stopped"] = self.stopped
        return out


def _row(part: Part) -> Json:
    said = {"text": part.text, "call": part.call, "malformed": part.malformed}
    return {"kind": part.kind, **{name: value for name, value in said.items() if value}}
