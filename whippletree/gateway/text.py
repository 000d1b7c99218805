"""From sampled ids to text that may be shown: whole characters, nothing of a stop string, calls as calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whippletree.gateway.parts import Part
from whippletree.gateway.toolcalls import ToolFormat, ToolScanner, held_back

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


class Thinking:
    """Splits a reply that opens with reasoning between two marks; `opened` where the prompt wrote the first one."""

    def __init__(self, marks: tuple[str, str], *, opened: bool) -> None:
        self._start, self._end = marks
        self._state, self._held = ("inside" if opened else "before"), ""
        self._newlines = opened  # those at the edges of reasoning are the template's

    def feed(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """(reasoning, text) that are now certain."""
        self._held += text
        thought = ""
        if self._state == "before":
            begun = self._held.lstrip()
            if begun.startswith(self._start):
                self._state, self._held, self._newlines = "inside", begun[len(self._start) :], True
            elif last or not self._start.startswith(begun):
                self._state, self._newlines = "after", False
        if self._state == "inside":
            thought = self._inside(last=last)
        if self._state != "after":
            return thought, ""
        rest = self._held.lstrip("\n") if self._newlines else self._held
        self._held, self._newlines = "", self._newlines and not rest
        return thought, rest

    def _inside(self, *, last: bool) -> str:
        self._held = self._held.lstrip("\n") if self._newlines else self._held
        self._newlines = self._newlines and not self._held
        end = self._held.find(self._end)
        if end >= 0:
            thought, self._held = self._held[:end].rstrip("\n"), self._held[end + len(self._end) :]
            self._state, self._newlines = "after", True
            return thought
        sure = len(self._held) - (0 if last else held_back(self._held, (self._end,)))
        thought = self._held[:sure] if last else self._held[:sure].rstrip("\n")
        self._held = self._held[len(thought) :]
        return thought


class ShownText:
    """The text of one reply as its ids come: `feed` gives what is now certain. `forced` is how the prompt opened it."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        stop: tuple[str, ...],
        tools: ToolFormat | None,
        thinking: Thinking | None = None,
        forced: str = "",
        name: str = "",
    ) -> None:
        self.stopped = ""  # the stop string that was found: sampling may end
        self._decoder, self._stop, self._thinking = Decoder(tokenizer), stop, thinking
        self._scanner = ToolScanner(tools, name) if tools else None
        self._held, self._forced = "", forced

    def feed(self, ids: Sequence[int], *, last: bool = False) -> list[Part]:
        """What these ids make certain; with `last`, everything that was held back too."""
        text = self._cut(self._decoder.feed(ids, last=last), last=last)
        last = last or bool(self.stopped)
        found: list[Part] = []
        if self._thinking:
            thought, text = self._thinking.feed(text, last=last)
            found += [Part("reasoning", thought)] if thought else []
        text, self._forced = self._forced + text, ""
        if self._scanner is None:
            return [*found, Part("text", text)] if text else found
        return [*found, *(self._scanner.feed(text) if text else []), *(self._scanner.finish() if last else [])]

    def _cut(self, text: str, *, last: bool) -> str:
        if not self._stop:
            return text
        self._held += text
        places = {mark: place for mark in self._stop if (place := self._held.find(mark)) >= 0}
        self.stopped = min(places, key=places.__getitem__, default="")
        keep = 0 if last else held_back(self._held, self._stop)
        end = places[self.stopped] if self.stopped else len(self._held) - keep
        shown, self._held = self._held[:end], self._held[end:]
        return shown
