"""Tool calls in a model's text: one row a format, so that another family is another row."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

from whippletree.gateway.parts import Part
from whippletree.types import Json

Calls = list[tuple[str, Json]]


@dataclass(frozen=True)
class ToolFormat:
    """Calls stand between `start` and `end`, or from `start` to the end of the reply where `end` is "".

    `read` gives names and arguments of the text between and with the marks, or raises ValueError. `opening` is how a
    reply begins that must call a tool, or this one. With `whole`, only a reply that begins with `start` is a call.
    """

    start: str
    end: str
    read: Callable[[str], Calls]
    opening: Callable[[str], str]  # name, or "" for any
    whole: bool = False


def _hermes(text: str) -> Calls:
    return [_call(json.loads(text[len("<tool_call>") : -len("</tool_call>")]), "arguments")]


def _llama(text: str) -> Calls:
    return [_call(json.loads(text), "parameters")]


def _mistral(text: str) -> Calls:
    rows = json.loads(text[len("[TOOL_CALLS]") :])
    if not isinstance(rows, list) or not rows:
        raise ValueError("calls are a list of one or more")
    return [_call(row, "arguments") for row in rows]


def _call(row: object, field: str) -> tuple[str, Json]:
    if not isinstance(row, dict) or not isinstance(row.get("name"), str):
        raise ValueError("a call is an object with a name")
    arguments = row.get(field, {})
    if not isinstance(arguments, dict):
        raise ValueError("arguments are an object")
    return row["name"], arguments


def _opening(before: str, field: str) -> Callable[[str], str]:
    return lambda name: before + (f'{{"name": {json.dumps(name)}, "{field}": ' if name else '{"name": "')


FORMATS = {
    # Hermes, Qwen 2.5 and 3, SmolLM3, ...
    "hermes": ToolFormat("<tool_call>", "</tool_call>", _hermes, _opening("<tool_call>\n", "arguments")),
    "mistral": ToolFormat("[TOOL_CALLS]", "", _mistral, _opening("[TOOL_CALLS] [", "arguments")),
    "llama": ToolFormat("{", "", _llama, _opening("", "parameters"), whole=True),
}
NAMED_BY = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama": '"parameters": '}


def format_of(template_text: str) -> ToolFormat | None:
    """The format whose mark the chat template holds."""
    return next((FORMATS[name] for name, mark in NAMED_BY.items() if mark in template_text), None)


class ToolScanner:
    """Splits a text that comes in parts into plain text and whole calls; what may yet become a call is held back.

    A malformed call is text, exactly as the model wrote it, and marked. White space after a call is dropped unless text
    follows. Ids of calls follow from `name` and their number, so that a repeated run repeats them.
    """

    def __init__(self, form: ToolFormat, name: str) -> None:
        self._form, self._name, self._held, self._after_call, self._calls = form, name, "", False, 0
        self._plain = False  # no call can come any more

    def feed(self, text: str) -> list[Part]:
        """What is now certain."""
        self._held += text
        found: list[Part] = []
        while self._held and not self._undecided():
            start = -1 if self._plain else self._held.find(self._form.start)
            if start < 0:
                keep = 0 if self._plain else held_back(self._held, (self._form.start,))
                self._show(found, len(self._held) - keep)
                return found
            self._show(found, start)
            end = self._held.find(self._form.end) if self._form.end else -1
            if end < 0:
                return found
            end += len(self._form.end)
            found += self._read(self._held[:end])
            self._held = self._held[end:]
        return found

    def finish(self) -> list[Part]:
        """The rest: a call that ends with the reply, or text."""
        rest, self._held = self._held, ""
        if not rest or (self._after_call and rest.isspace()):
            return []
        if self._form.end or not rest.lstrip().startswith(self._form.start):
            return [Part("text", rest, malformed=rest.startswith(self._form.start))]
        return self._read(rest)

    def _undecided(self) -> bool:
        """Of a format that takes the whole reply: whether this one may be a call; sets `_plain` if it cannot."""
        if not self._form.whole or self._plain:
            return False
        begun = self._held.lstrip()
        self._plain = bool(begun) and not begun.startswith(self._form.start)
        return not self._plain

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

    def _read(self, text: str) -> list[Part]:
        try:
            calls = self._form.read(text)
        except (ValueError, RecursionError):  # JSONDecodeError is a ValueError
            self._after_call = False
            # where a call is bare JSON, other JSON is an answer
            return [Part("text", text, malformed=not self._form.whole or '"name"' in text)]
        self._after_call = True
        return [self._made(name, arguments) for name, arguments in calls]

    def _made(self, name: str, arguments: Json) -> Part:
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
