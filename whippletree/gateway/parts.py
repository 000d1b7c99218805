"""What a reply is made of, in the order in which it was sampled; every API writes it in its own shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from whippletree.types import Json


@dataclass(frozen=True)
class Part:
    """Some of a reply, as it may be shown: text, reasoning, or one whole tool call."""

    kind: Literal["text", "reasoning", "call"]
    text: str = ""
    call: Json | None = None  # as OpenAI's `tool_calls` entry; its arguments are a JSON string
    malformed: bool = False  # text that the model opened as a call and that is none


def merged(parts: Sequence[Part]) -> list[Part]:
    """Neighbours of one kind of text as one part."""
    out: list[Part] = []
    for part in parts:
        if out and part.kind != "call" and out[-1].kind == part.kind:
            out[-1] = replace(out[-1], text=out[-1].text + part.text, malformed=out[-1].malformed or part.malformed)
        else:
            out.append(part)
    return out


def text_of(parts: Sequence[Part], kind: str = "text") -> str:
    """All text of this kind."""
    return "".join(part.text for part in parts if part.kind == kind)


def message_of(parts: Sequence[Part]) -> Json:
    """The reply as a chat message; content is null where it is calls alone."""
    calls = [part.call for part in parts if part.call]
    content, thought = text_of(parts), text_of(parts, "reasoning")
    out: Json = {"role": "assistant", "content": content if content or not calls else None}
    return out | ({"reasoning_content": thought} if thought else {}) | ({"tool_calls": calls} if calls else {})
