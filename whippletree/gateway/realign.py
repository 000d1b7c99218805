"""A reply that came back a little changed: our own ids but for the changed span, which alone is tokenised."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from difflib import SequenceMatcher
from typing import Any

LONGEST = 4000  # characters of a changed middle that are compared one by one; beyond, it is one span

Spans = list[tuple[int, int, str]]  # characters from, to, and what stands there now


def realigned(
    tokenizer: Any,
    reply_ids: tuple[int, ...],
    old: str,
    new: str,
    tokenized: Callable[[str], tuple[int, ...]],
    *,
    limit: int,
) -> tuple[int, tuple[int, ...] | None]:
    """(tokens of the changed spans, the reply with them exchanged), where text `old` of the reply came back as `new`.

    A span counts the larger of the tokens that went and that came. `None` for the ids where all spans are more than
    `limit`, or where `old` is not found in the reply.
    """
    text = _decoded(tokenizer, reply_ids)
    start = text.find(old, max(text.find("</think>"), 0))
    if start < 0 or not old:
        return 0, None
    size, done = 0, len(reply_ids)
    out: tuple[int, ...] = ()
    for low, high, written in reversed(_joined_spans(tokenizer, reply_ids, text, _spans(old, new, start))):
        ids = tokenized(written)
        size += max(high - low, len(ids))
        out, done = ids + reply_ids[high:done] + out, low
    return size, reply_ids[:done] + out if size <= limit else None


def _spans(old: str, new: str, start: int) -> Spans:
    """What changed, in characters of a text in which `old` starts at `start`."""
    shortest = min(len(old), len(new))
    head = next((k for k in range(shortest) if old[k] != new[k]), shortest)
    tail = next((k for k in range(shortest - head) if old[-1 - k] != new[-1 - k]), shortest - head)
    before, after = old[head : len(old) - tail], new[head : len(new) - tail]
    start += head
    if max(len(before), len(after)) > LONGEST:
        return [(start, start + len(before), after)]
    codes = SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return [(start + i, start + j, after[k:l]) for kind, i, j, k, l in codes if kind != "equal"]


def _joined_spans(tokenizer: Any, ids: tuple[int, ...], text: str, spans: Spans) -> Spans:
    """The spans in tokens, widened to whole ones with their text; those that meet within a token are one."""

    def length(count: int) -> int:
        return len(_decoded(tokenizer, ids[:count]))

    places = range(len(ids) + 1)
    out: list[tuple[int, int, int, int, str]] = []  # tokens from, to; characters from, to; text
    for start, end, written in spans:
        high = bisect_left(places, end, key=length)  # before a closing token, which has no text
        low = min(bisect_right(places, start, key=length) - 1, high)
        # bytes of one character may be several tokens: never begin or end within it
        while low > 0 and not text.startswith(_decoded(tokenizer, ids[:low])):
            low -= 1
        while high < len(ids) and not text.startswith(_decoded(tokenizer, ids[:high])):
            high += 1
        if out and low < out[-1][1]:
            low, _, first, before, earlier = out.pop()
            start, written = first, earlier + text[before:start] + written
        out.append((low, high, start, end, written))
    return [(low, high, text[length(low) : a] + new + text[b : length(high)]) for low, high, a, b, new in out]


def _decoded(tokenizer: Any, ids: tuple[int, ...]) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text
