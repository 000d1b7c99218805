"""Which conversation of a rollout a call belongs to: the main one, a sub-agent's, or a side call for a title.

Harnesses that say who is calling are believed (`SAYS`). Else a call that continues an earlier turn stays in its thread,
and a new conversation is told by its tools, its system prompt and its model, against those of the main one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b

from whippletree.types import Json, Turn

Headers = Mapping[str, str]
# (header of a sub-agent, header that names it): the first one tells that a call is a sub-agent's
SAYS = (
    ("x-claude-code-agent-id", "x-claude-code-agent-id"),
    ("x-codex-parent-thread-id", "thread-id"),
    ("x-openai-subagent", "thread-id"),
    ("x-parent-session-id", "x-session-id"),
)
TITLE = re.compile(
    r"\btitle generator\b|\b(?:generat|creat|writ|produc|com)\w*\b[^.\n]{0,60}\btitle\b[^.\n]{0,40}"
    r"\b(?:conversation|session|chat|thread|message|task)",
    re.IGNORECASE,
)
SUMMARY = re.compile(
    r"\bsummar(?:y|ies|i[sz]\w*)\b[^.\n]{0,60}\b(?:conversation|session|chat|history|context|work|progress|thread)\b|"
    r"\b(?:conversation|session|chat|history|context)\b[^.\n]{0,60}\bsummar(?:y|i[sz]\w*)\b|"
    r"\bcompact(?:ion|ing)?\b[^.\n]{0,40}\b(?:conversation|session|chat|history|context)\b|\bhandoff summary\b",
    re.IGNORECASE,
)
TOPIC = re.compile(r"\b(?:new|conversation|current) topic\b", re.IGNORECASE)


@dataclass(frozen=True)
class Speaker:
    """What tells one conversation from another; texts as digests."""

    system: str
    tools: tuple[str, ...]  # names, sorted
    model: str
    opening: str  # the first message that is not the system's
    hint: str = field(default="", compare=False)  # the kind of side call that its system prompt names
    asks: str = field(default="", compare=False)  # the kind that its last message names

    @classmethod
    def of(cls, messages: Sequence[Json], tools: Sequence[Json], model: str) -> Speaker:
        """The speaker of these messages, in the form of chat completions."""
        system = "\n".join(_text(m) for m in messages if m.get("role") in ("system", "developer"))
        others = [m for m in messages if m.get("role") not in ("system", "developer")]
        names = tuple(sorted({str(tool.get("function", {}).get("name")) for tool in tools}))
        first, last = (_text(others[0]), others[-1]) if others else ("", {})
        asks = _hint(_text(last)) if last.get("role") == "user" and len(others) > 1 else ""
        return cls(_digest(system), names, model, _digest(first), hint=_hint(system), asks=asks)

    def to_json(self) -> Json:
        """What `Speaker(**...)` makes an equal speaker of."""
        return {"system": self.system, "tools": self.tools, "model": self.model, "opening": self.opening}


class Threads:
    """The threads of one rollout by name: "main", or a kind and a number."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # by what identifies it
        self._main: Speaker | None = None

    def name(self, speaker: Speaker, headers: Headers, parent: str | None) -> tuple[str, Json]:
        """(the thread of a call, what to keep with its turn so that the thread is known again).

        `parent` is the thread of the turn that its prompt continues, if it continues one.
        """
        kind, identity = said_by(headers)
        if kind:
            return self._named(kind, identity or _digest(speaker))
        if speaker.asks == "summary" and parent:  # the history, and at its end a request to sum it up
            return self._named("summary", _digest(speaker.system, speaker.opening, parent))
        kind = self._side(speaker)
        if parent and not (kind and parent == "main"):
            return parent, {}
        if kind:
            return self._named(kind, _digest(speaker.system, speaker.opening))
        first = self._main is None
        self._main = self._main or speaker
        if self._is_main(speaker, self._main):
            return "main", {"main": speaker.to_json()} if first else {}
        return self._named("sub-agent", _digest(speaker.system, speaker.tools, speaker.opening))

    def restore(self, turns: Iterable[Turn]) -> None:
        """Take in the turns that others kept, in their order."""
        for turn in turns:
            who = turn.info.get("who", {})
            if "main" in who and self._main is None:
                self._main = Speaker(**{**who["main"], "tools": tuple(who["main"]["tools"])})
            if "named" in who:
                self._names[who["named"]] = turn.thread

    def _named(self, kind: str, identity: str) -> tuple[str, Json]:
        who = f"{kind} {identity}"
        if who in self._names:
            return self._names[who], {}
        count = sum(name.startswith(f"{kind}/") for name in self._names.values())
        self._names[who] = f"{kind}/{count + 1}"
        return self._names[who], {"named": who}

    def _side(self, speaker: Speaker) -> str:
        """What a call without tools is for beside the main conversation; "" for none of it."""
        if speaker.tools or speaker.hint:
            return "" if speaker.tools else speaker.hint
        if self._main is None or not self._main.tools:
            return ""
        return speaker.asks or ("answer" if speaker.opening == self._main.opening else "side")

    def _is_main(self, speaker: Speaker, main: Speaker) -> bool:
        """The main agent, perhaps with a new list of messages, or with tools that have grown."""
        if speaker.model != main.model:
            return False
        if speaker.system == main.system:
            return not main.tools or bool(set(speaker.tools) & set(main.tools))
        return speaker.tools == main.tools and speaker.opening == main.opening  # a clock in the system prompt


def said_by(headers: Headers) -> tuple[str, str]:
    """(kind, identity) as the harness's own headers tell; ("", "") where they tell nothing."""
    with suppress(ValueError, RecursionError):
        told = json.loads(headers.get("x-codex-turn-metadata", "{}"))
        if isinstance(told, dict) and told.get("request_kind") == "compaction":
            return "summary", f"{headers.get('thread-id', '')} {headers.get('x-codex-window-id', '')}"
    for mark, name in SAYS:
        if headers.get(mark):
            return "sub-agent", headers.get(name, "")
    return "", ""


def _text(message: Json) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def _hint(text: str) -> str:
    kinds = ((TITLE, "title"), (SUMMARY, "summary"), (TOPIC, "topic"))
    return next((kind for mark, kind in kinds if mark.search(text)), "")


def _digest(*parts: object) -> str:
    return blake2b(repr(parts).encode("utf-8", "replace"), digest_size=8).hexdigest()
