"""From sampled ids to text that may be shown: whole characters, nothing of a stop string, calls as calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whippletree.gateway.toolcalls import ToolFormat, ToolScanner, held_back
from whippletree.types import Json

BROKEN = "\N{REPLACEMENT CHARACTER}"  # what a decoder gives for bytes that are no character, or not yet


class Decoder:
    """Text of ids that come in parts. Bytes of an unfinished character wait for the rest of it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = self._shown = 0  # ids[start:shown] are shown, and give the next ids their context

    def feed(self, ids: Sequence[int], *, last: bool = False) -> str:
        """The text that `ids` complete; with `last`, also what stays broken."""
        self._ids.extend(ids)
        before = self._decode(self._ids[self._start : self._shown])
        text = self._decode(self._ids[self._start :])
        if len(text) <= len(before) or (text.endswith(BROKEN) and not last):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return text[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


class ShownText:
    """The text of one reply as its ids come: `feed` gives what is now certain, strings and tool calls."""

    def __init__(self, tokenizer: Any, *, stop: tuple[str, ...], tools: ToolFormat | None, name: str = "") -> None:
        self.stopped = False  # a stop string was found: sampling may end
        self._decoder, self._stop = Decoder(tokenizer), stop
        self._scanner = ToolScanner(tools, name) if tools else None
        self._held = ""

    def feed(self, ids: Sequence[int], *, last: bool = False) -> list[str | Json]:
        """What these ids make certain; with `last`, everything that was held back too."""
        text = self._cut(self._decoder.feed(ids, last=last), last=last)
        if self._scanner is None:
            return [text] if text else []
        found = self._scanner.feed(text) if text else []
        return [*found, *(self._scanner.finish() if last or self.stopped else [])]

    def _cut(self, text: str, *, last: bool) -> str:
        if not self._stop:
            return text
        self._held += text
        places = [place for mark in self._stop if (place := self._held.find(mark)) >= 0]
        self.stopped = bool(places)
        keep = 0 if last else held_back(self._held, self._stop)
        end = min(places) if places else len(self._held) - keep
        shown, self._held = self._held[:end], self._held[end:]
        return shown
