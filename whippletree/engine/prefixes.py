"""Keys and values of sequences that ended, kept for prompts that extend them, the oldest dropped at a byte budget."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

Ids = tuple[int, ...]
GRAIN = 16  # prefixes are indexed at multiples of this length, then compared exactly


class Prefixes:
    """A store of (ids, keys and values) found again by longest common prefix. Least recently used go first."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit, self.bytes = limit_bytes, 0
        self.saved: OrderedDict[Ids, list[Tensor]] = OrderedDict()
        self.index: dict[int, dict[Ids, None]] = {}

    def add(self, ids: Sequence[int], tensors: list[Tensor]) -> None:
        """Keep what was computed for these ids; nothing where they are known or too long for the budget."""
        key = tuple(ids)
        size = sum(tensor.nbytes for tensor in tensors)
        if key in self.saved or size > self.limit:
            return
        while self.bytes + size > self.limit:
            self._drop(next(iter(self.saved)))
        self.saved[key] = tensors
        self.bytes += size
        for mark in _marks(key):
            self.index.setdefault(mark, {})[key] = None

    def longest(self, ids: Sequence[int]) -> tuple[list[Tensor] | None, int]:
        """(what was saved, how many leading ids it shares) for the entry that shares most; (None, 0) where none does."""
        key = tuple(ids)
        for mark in reversed(list(_marks(key))):
            if found := self.index.get(mark):
                shared, best = max((common_prefix(entry, key), entry) for entry in found)
                self.saved.move_to_end(best)
                return self.saved[best], shared
        return None, 0

    def clear(self) -> None:
        """Forget everything."""
        self.saved.clear()
        self.index.clear()
        self.bytes = 0

    def _drop(self, key: Ids) -> None:
        self.bytes -= sum(tensor.nbytes for tensor in self.saved.pop(key))
        for mark in _marks(key):
            del self.index[mark][key]
            if not self.index[mark]:
                del self.index[mark]


def _marks(key: Ids) -> Iterator[int]:
    """A chained hash of each prefix whose length is a multiple of GRAIN."""
    mark = 0
    for end in range(GRAIN, len(key) + 1, GRAIN):
        mark = hash((mark, key[end - GRAIN : end]))
        yield mark


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading ids are equal."""
    n = min(len(a), len(b))
    differs = np.asarray(a[:n]) != np.asarray(b[:n])
    return int(differs.argmax()) if differs.any() else n
