"""Which turns of a rollout a request continues, and the ids of a prompt that holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from whippletree.gateway.chatform import chained, said_calls
from whippletree.gateway.errors import ApiError
from whippletree.gateway.memory import Known, Memory
from whippletree.types import Json, Link

if TYPE_CHECKING:
    from whippletree.gateway.render import Renderer

THINK = ("<think>", "</think>")


@dataclass(frozen=True)
class Found:
    ids: tuple[int, ...]
    link: Link = "root"
    parent: str = ""
    drift: int = 0
    dropped_reasoning: bool = False
    thought: frozenset[int] = frozenset()


class Continuing:
    """The search for the turns that one request continues."""

    def __init__(
        self, renderer: Renderer, chat: list[Json], tools: Sequence[Json], keys: list[bytes], memory: Memory
    ) -> None:
        self.r, self.chat, self.tools, self.keys, self.memory = renderer, chat, tools, keys, memory
        first = next((n for n, message in enumerate(chat) if message["role"] != "system"), len(chat) - 1)
        self.opening = keys[first + 1]
        self.replies = [place for place, message in enumerate(chat) if message["role"] == "assistant"]
        self.exact = {p: known for p in self.replies if (known := memory.continued(keys[p + 1], chat[p]))}
        self.kept = self._reasoning_kept()
        self.grown: dict[int, str] = {}  # what the harness wrote after a reply, in the same message

    def found(self) -> Found:
        """Ids and link of the prompt."""
        usable = [p for p, known in self.exact.items() if known.thought <= self.kept]
        base = max(usable, default=-1)
        later = [place for place in self.replies if place > base]
        before = self.exact[base].ids if base >= 0 else ()
        known = self.exact.get(base)
        drift, link = 0, "append"
        for place in reversed(later):  # the prompt of the latest turn holds those before it, as it was given them
            if whole := self._whole(place):
                known, before, base = whole, whole.ids, place
            elif changed := self._realigned(place):
                (known, before, drift), base, link = changed, place, "realign"
            else:
                continue
            later = [p for p in later if p > base]
            break
        spliced = {p: other for p in later if (other := self._same(p))}
        ids = self._ids(base, before, spliced)
        if ids is None:
            base, known, spliced, ids = -1, None, {}, self.r.ids_of(self.r.text(self.chat, self.tools))
            later = self.replies
        lost = [other for p in later if p not in spliced and (other := self._ours(p))]
        if lost or known is None or any(p > base for p in self.exact):
            known = (
                known or next(iter(spliced.values()), None) or (lost[0] if lost else self.memory.opened(self.opening))
            )
            link = "fork" if known else "root"
        thought = (known.thought if known and base >= 0 else frozenset()) | (self.kept & set(spliced))
        return Found(
            ids,
            link,  # type: ignore[arg-type]
            known.turn_id if known else "",
            drift + sum(len(other.reply_ids) for other in lost),
            self._dropped(),
            frozenset(thought),
        )

    def _reasoning_kept(self) -> set[int]:
        """Places of replies that had reasoning, where the template writes it."""
        if self.r.thinking is None:
            return set()
        ours = {p for p in self.replies if (known := self._same(p)) and "reasoning_content" in known.message}
        if not ours:
            return set()
        marked = [m | {"reasoning_content": self.r.thought_of(p)} if p in ours else m for p, m in enumerate(self.chat)]
        text = self.r.text(marked, self.tools)
        return {p for p in ours if self.r.thought_of(p) in text}

    def _same(self, place: int) -> Known | None:
        """The turn whose reply stands here as it was sampled, whatever stood before it."""
        if place in self.exact:
            return self.exact[place]
        known = self.memory.sampled(self.chat[place], self.opening)
        return known if known and _says(known.message) == _says(self.chat[place]) else None

    def _ours(self, place: int) -> Known | None:
        """The turn whose reply stands here, perhaps changed."""
        asked = self.memory.asked(self.keys[place])
        return self.memory.sampled(self.chat[place], self.opening) or (asked[-1] if asked else None)

    def _spliced(self, place: int) -> tuple[int, ...] | Known | None:
        return self._same(place)

    def _whole(self, place: int) -> Known | None:
        """The turn whose reply, which no closing token ended, stands here with more text after it."""
        message = self.chat[place]
        for known in reversed(self.memory.asked(self.keys[place])):
            said = self.r.said(known)
            fits = said and said_calls(known.message) == said_calls(message) == [] and known.thought <= self.kept
            if fits and message["content"].startswith(said) and not self._same(place):
                self.grown[place] = message["content"][len(said) :]
                return known
        return None

    def _realigned(self, place: int) -> tuple[Known, tuple[int, ...], int] | None:
        """(turn, its ids with the changed spans exchanged, their tokens) where the reply here was changed a little."""
        message = self.chat[place]
        if self._same(place):
            return None
        for known in reversed(self.memory.asked(self.keys[place])):
            if said_calls(known.message) == said_calls(message) and known.thought <= self.kept | {place}:
                drift, ids = self.r.changed(known, message["content"])
                if ids is not None:
                    return known, known.ids[: known.start] + ids, drift
        return None

    def _dropped(self) -> bool:
        """Whether an earlier reply's reasoning is not in the request, or not in the prompt."""
        had = [p for p in self.replies if (known := self._same(p)) and "reasoning_content" in known.message]
        return any("reasoning_content" not in self.chat[p] or p not in self.kept for p in had)

    def _ids(self, base: int, before: tuple[int, ...], spliced: dict[int, Known]) -> tuple[int, ...] | None:
        """`before`, then what follows the reply at `base`, with the sampled ids of later ones; `None`: it cannot be."""
        places = [base, *spliced] if base >= 0 else list(spliced)
        if not places:
            return self.r.ids_of(self.r.text(self.chat, self.tools))
        marked = [self._marked(p, p in places, p in spliced) for p in range(len(self.chat))]
        try:
            rest = self.r.text(marked, self.tools)
        except ApiError:  # some templates refuse a tool's answer where no call stands before it
            return None
        ids, last = before, before[-1] if before else -1
        for place in places:
            parts = self.r.split(rest, self.chat, place)
            if parts is None:
                return None
            head, rest = parts
            if place == base:
                continue
            sampled = self._sampled(place, spliced[place])
            if sampled is None:
                return None
            if place in self.kept and self.r.thinking:
                at = head.rfind(self.r.thought_of(place))
                cut = at if self.r.opens_thinking else head.rfind(THINK[0], 0, at)
                head = head[:cut]
            ids += (self.r.follows(head, last) if ids else self.r.ids_of(head)) + sampled
            last = ids[-1]
        return ids + self.r.follows(rest, last)

    def _marked(self, place: int, marked: bool, spliced: bool) -> Json:
        message = self.chat[place]
        if not marked:
            return message
        thought = {"reasoning_content": self.r.thought_of(place)} if spliced and place in self.kept else {}
        return self.r.marked(message, place, more=self.grown.get(place, "")) | thought

    def _sampled(self, place: int, known: Known) -> tuple[int, ...] | None:
        if place in self.kept:
            return known.reply_ids
        if "reasoning_content" in known.message:
            return self.r.visible(known)
        # reasoning that the prompt opened and that stayed empty: the reply begins with its end
        return (self.r.visible(known) if self.r.opens_thinking else None) or known.reply_ids


def _says(message: Json) -> bytes:
    return chained(b"", message)
