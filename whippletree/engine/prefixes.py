"""Keys and values of sequences that ended, kept for prompts that extend them, the oldest dropped at a byte budget."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

Ids = np.ndarray[Any, np.dtype[np.int64]]
GRAIN = 16  # prefixes are indexed at multiples of this length, then compared exactly
CANDIDATES = 64  # entries looked at where more share an indexed prefix; the others save less than GRAIN tokens more


@dataclass(frozen=True)
class Saved:
    """Token ids, and what was computed for each of them."""

    ids: Ids
    tensors: list[Tensor]

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class Prefixes:
    """A store of (ids, keys and values) found again by longest common prefix. Least recently used go first."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit, self.bytes = limit_bytes, 0
        self.saved: OrderedDict[bytes, Saved] = OrderedDict()
        self.index: dict[int, dict[bytes, None]] = {}

    def add(self, ids: Ids, tensors: Sequence[Tensor]) -> None:
        """Keep a copy of what was computed for these ids; nothing where they are known or too long for the budget."""
        key, size = ids.tobytes(), sum(tensor.nbytes for tensor in tensors)
        if key in self.saved:
            self.saved.move_to_end(key)
        if key in self.saved or size > self.limit:
            return
        while self.bytes + size > self.limit:
            self._drop(next(iter(self.saved)))
        self.saved[key] = Saved(ids.copy(), [tensor.clone() for tensor in tensors])
        self.bytes += size
        for mark in _marks(key):
            self.index.setdefault(mark, {})[key] = None

    def longest(self, ids: Ids) -> tuple[Saved | None, int]:
        """(an entry, how many leading ids it shares), sharing most up to a part of GRAIN; (None, 0) where none does."""
        marks = list(_marks(ids.tobytes()))
        for number in reversed(range(len(marks))):
            if found := self.index.get(marks[number]):
                after = slice((number + 1) * GRAIN, (number + 2) * GRAIN)
                newest = [key for key, _ in zip(reversed(found), range(CANDIDATES), strict=False)]
                best = max(newest, key=lambda key: common_prefix(self.saved[key].ids[after], ids[after]))
                # two prefixes may share a mark by chance: what counts is what the whole entry shares
                if shared := common_prefix(self.saved[best].ids, ids):
                    self.saved.move_to_end(best)
                    return self.saved[best], shared
        return None, 0

    def clear(self) -> None:
        """Forget everything."""
        self.saved.clear()
        self.index.clear()
        self.bytes = 0

    def _drop(self, key: bytes) -> None:
        self.bytes -= self.saved.pop(key).bytes
        for mark in _marks(key):
            del self.index[mark][key]
            if not self.index[mark]:
                del self.index[mark]


def _marks(key: bytes) -> Iterator[int]:
    """A chained hash of each prefix whose length is a multiple of GRAIN."""
    mark, grain = 0, GRAIN * np.dtype(np.int64).itemsize
    for end in range(grain, len(key) + 1, grain):
        mark = hash((mark, key[end - grain : end]))
        yield mark


def common_prefix(a: Ids, b: Ids) -> int:
    """How many leading ids are equal."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n
