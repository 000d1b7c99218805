"""Tool calls in a model's text: one row a format, so that another family is another row."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

from whippletree.gateway.parts import Part
from whippletree.types import Json


@dataclass(frozen=True)
class ToolFormat:
    """A call stands between `start` and `end`; `read` gives its name and arguments, or raises ValueError."""

    start: str
    end: str
    read: Callable[[str], tuple[str, Json]]


def _read_hermes(text: str) -> tuple[str, Json]:
    call = json.loads(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError("a call is an object with a name")
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        raise ValueError("arguments are an object")
    return call["name"], arguments


FORMATS = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>", _read_hermes),  # Hermes, Qwen 2.5 and 3, SmolLM3, ...
}


def format_of(template_text: str) -> ToolFormat | None:
    """The format whose start mark the chat template names."""
    return next((found for found in FORMATS.values() if found.start in template_text), None)


class ToolScanner:
    """Splits a text that comes in parts into plain text and whole calls; what may yet become a call is held back.

    A malformed call is text, exactly as the model wrote it, and marked. White space after a call is dropped unless text
    follows. Ids of calls follow from `name` and their number, so that a repeated run repeats them.
    """

    def __init__(self, form: ToolFormat, name: str) -> None:
        self._form, self._name, self._held, self._after_call, self._calls = form, name, "", False, 0

    def feed(self, text: str) -> list[Part]:
        """What is now certain."""
        self._held += text
        found: list[Part] = []
        while True:
            start = self._held.find(self._form.start)
            if start < 0:
                keep = held_back(self._held, (self._form.start,))
                self._show(found, len(self._held) - keep)
                return found
            self._show(found, start)
            end = self._held.find(self._form.end)
            if end < 0:
                return found
            end += len(self._form.end)
            found.append(self._call(self._held[:end]))
            self._held = self._held[end:]

    def finish(self) -> list[Part]:
        """The rest, as text: no call can still come of it."""
        rest, self._held = self._held, ""
        if not rest or (self._after_call and rest.isspace()):
            return []
        return [Part("text", rest, malformed=rest.startswith(self._form.start))]

    def _show(self, found: list[Part], length: int) -> None:
        """Move this much of what is held to `found`, unless it is white space that follows a call."""
        text = self._held[:length]
        whole = length == len(self._held)
        if self._after_call and (not text or text.isspace()):
            if not whole and self._held.startswith(self._form.start, length):
                self._held = self._held[length:]
            return
        self._after_call = False
        self._held = self._held[length:]
        if text:
            found.append(Part("text", text))

    def _call(self, text: str) -> Part:
        try:
            name, arguments = self._form.read(text[len(self._form.start) : -len(self._form.end)])
        except (ValueError, RecursionError):  # JSONDecodeError is a ValueError
            self._after_call = False
            return Part("text", text, malformed=True)
        self._after_call = True
        self._calls += 1
        number = sha256(f"{self._name}/{self._calls}".encode()).hexdigest()[:28]
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        return Part("call", call={"id": "call" + number, "type": "function", "function": function})


def held_back(text: str, marks: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that is the beginning of one of `marks`, but not all of it."""
    longest = max((len(mark) for mark in marks), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
