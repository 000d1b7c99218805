"""What a gateway remembers of one rollout's turns, so that a later call continues their exact ids."""

from __future__ import annotations

from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from whippletree.gateway.chatform import chained, clean, names
from whippletree.gateway.parts import Part, message_of
from whippletree.types import Json, Turn

LIMIT = 2**21  # tokens of one rollout


@dataclass(eq=False)
class Strand:
    """Ids of a conversation that was only appended to; its turns are beginnings of it."""

    ids: array[int]
    turns: list[Known] = field(default_factory=list)


@dataclass(eq=False)
class Known:
    """A turn that a later prompt may continue. Its reply is `ids[start:]`, with what the prompt opened it by."""

    turn_id: str
    thread: str
    message: Json  # clean, see `chatform`
    strand: Strand
    start: int
    length: int
    thought: frozenset[int]  # places of messages whose reasoning stands in the ids
    keys: tuple[bytes | str, ...] = ()
    opening: bytes = b""  # key of the conversation's first messages

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and reply."""
        return tuple(self.strand.ids[: self.length])

    @property
    def reply_ids(self) -> tuple[int, ...]:
        """The reply alone."""
        return tuple(self.strand.ids[self.start : self.length])


class Memory:
    """The turns of one rollout by what a later request shows of them; the strand longest unused is forgotten first."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit, self._size = limit, 0
        self._threads: dict[str, str] = {}
        self._strands: OrderedDict[int, Strand] = OrderedDict()
        self._by_id: dict[str, Known] = {}
        self._replies: defaultdict[bytes | str, list[Known]] = defaultdict(list)

    def remember(self, turn: Turn) -> None:
        """Take in a turn as the gateway kept it."""
        info, ids = turn.info, turn.prompt_ids + turn.reply_ids
        key, place, opening = bytes.fromhex(info["key"]), info["place"], bytes.fromhex(info["opening"])
        parts = [Part("text", info.get("begun", "")), *(Part(**row) for row in info["parts"])]
        message = clean(message_of(parts), 0)
        thought = {*info.get("thought", ()), *([place] if "reasoning_content" in message else ())}
        known = Known(
            turn.id,
            turn.thread,
            message,
            self._strand(ids, info.get("parent", "") if turn.link == "append" else ""),
            len(turn.prompt_ids) - info.get("opened", 0),
            len(ids),
            frozenset(thought),
            (chained(key, message), *names(message), b"asked" + key, b"opening" + opening),
            opening,
        )
        known.strand.turns.append(known)
        self._threads[turn.id], self._by_id[turn.id] = turn.thread, known
        for name in known.keys:
            self._replies[name].append(known)
        while self._size > self._limit and len(self._strands) > 1:
            self._forget(next(iter(self._strands.values())))

    def thread_of(self, turn_id: str) -> str | None:
        """The thread of this turn."""
        return self._threads.get(turn_id)

    def continued(self, key: bytes, message: Json) -> Known | None:
        """The turn whose messages and reply are those of `key`; `message` tells siblings apart by its calls' ids."""
        found = self._replies.get(key, [])
        if len(found) > 1:
            found = [known for known in found if names(known.message) == names(message)] or found
        return found[-1] if found else None

    def sampled(self, message: Json, opening: bytes) -> Known | None:
        """The turn whose reply this message is, wherever it stands: by the ids of its calls, else by its text.

        Of turns that said the same, one of a conversation with this opening.
        """
        for name in names(message):
            if found := self._replies.get(name):
                return next((known for known in reversed(found) if known.opening == opening), found[-1])
        return None

    def asked(self, key: bytes) -> Sequence[Known]:
        """The turns whose messages are those of `key`."""
        return self._replies.get(b"asked" + key, ())

    def opened(self, key: bytes) -> Known | None:
        """The last turn whose messages began with those of `key`."""
        found = self._replies.get(b"opening" + key)
        return found[-1] if found else None

    def _strand(self, ids: tuple[int, ...], parent: str) -> Strand:
        before = self._by_id.get(parent)
        if before and before.length == len(before.strand.ids):  # nothing else follows it: the strand goes on
            strand = before.strand
            strand.ids.extend(ids[before.length :])
            self._size += len(ids) - before.length
        else:
            strand = Strand(array("i", ids))
            self._size += len(ids)
        self._strands[id(strand)] = strand
        self._strands.move_to_end(id(strand))
        return strand

    def _forget(self, strand: Strand) -> None:
        del self._strands[id(strand)]
        self._size -= len(strand.ids)
        for known in strand.turns:
            del self._by_id[known.turn_id]
            for name in known.keys:
                self._replies[name].remove(known)
                if not self._replies[name]:
                    del self._replies[name]
