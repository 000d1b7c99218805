"""What an agent saw and did in a turn, in words, whatever API its harness speaks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from whippletree.reward.text import reply_message, text_of
from whippletree.types import Json, Rollout, Turn

SAYS = ("content", "text", "output", "parts", "functionResponse", "response", "result")  # keys under which words stand
ITS_OWN = ("function_call", "reasoning")  # types of the model's own items that have no role
ERRORS = r"(?i)\b(error|invalid|exception|not allowed|not found|nothing happens|can't|cannot|unable to)\b"


def seen(turn: Turn) -> str:
    """What stands in the request after the model's last words there: a tool's answer, a page, the task at first.

    Where no request was kept it is the ids of the prompt.
    """
    asked = turn.request
    items = asked.get("messages") or asked.get("input") or asked.get("contents")
    if not items:
        return " ".join(map(str, turn.prompt_ids))
    if isinstance(items, str):
        return items
    new = list(takewhile(lambda item: not _is_own(item), reversed(items)))
    return "\n".join(_words(item) for item in reversed(new))


def done(turn: Turn) -> str:
    """The text of the reply and its tool calls as `name arguments`, without reasoning; else the ids of the reply."""
    message = reply_message(turn)
    called = [call["function"] for call in message.get("tool_calls") or ()]
    said = [text_of(message), *(f"{call['name']} {call['arguments']}" for call in called)]
    return "\n".join(filter(None, said)) or " ".join(map(str, turn.reply_ids))


@dataclass(frozen=True)
class Step:
    """What a turn led from and to: states; None where nothing of its thread followed."""

    at: str
    then: str | None
    refused: bool  # an error followed, and an error shows no new state


def steps(rollout: Rollout, *, state: Callable[[str], str] = str, errors: str = ERRORS) -> list[Step]:
    """One for each turn. `state` names the state that a text shows; `errors` is a pattern of a text that is one."""
    at, found, last = dict[str, str](), list[Step](), dict[str, int]()
    for n, turn in enumerate(rollout.turns):
        shown, before = seen(turn), last.get(turn.thread)
        refused = before is not None and bool(re.search(errors, shown))
        at[turn.thread] = at[turn.thread] if refused else state(shown)
        if before is not None:
            found[before] = replace(found[before], then=at[turn.thread], refused=refused)
        last[turn.thread] = n
        found.append(Step(at[turn.thread], None, False))
    return found


def _is_own(item: Json) -> bool:
    return item.get("role") in ("assistant", "model") or item.get("type") in ITS_OWN


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return _words([value[key] for key in SAYS if key in value] or list(value.values()))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " ".join(filter(None, map(_words, value)))
    return "" if value is None else str(value)
