from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from whippletree.engine.prefixes import GRAIN, Ids, Prefixes, common_prefix


def ids_of(*ids: int) -> Ids:
    return np.array(ids, dtype=np.int64)


def count_to(n: int) -> Ids:
    return np.arange(n, dtype=np.int64)


def tensors_of(places: int) -> list[Tensor]:
    """8 bytes for each place."""
    return [torch.zeros(places), torch.zeros(places, dtype=torch.int32)]


def store_of(*sequences: Sequence[int] | Ids, limit: int = 1 << 20) -> Prefixes:
    store = Prefixes(limit)
    for ids in sequences:
        store.add(np.asarray(ids, dtype=np.int64), tensors_of(len(ids)))
    return store


def test_common_prefix_by_hand():
    assert common_prefix(ids_of(1, 2, 3), ids_of(1, 2, 4)) == 2
    assert common_prefix(ids_of(1, 2), ids_of(1, 2, 4)) == 2
    assert common_prefix(ids_of(5), ids_of(6)) == 0
    assert common_prefix(ids_of(), ids_of(6)) == 0


def test_the_longest_match_by_hand():
    a, b = [*range(20), 7, 7, 7], [*range(20), 8, 8, 8, 8]
    store = store_of(a, b, range(100, 140))
    saved, shared = store.longest(ids_of(*range(20), 8, 8, 9))
    assert saved is not None
    assert (saved.ids.tolist(), shared) == (b, 22)
    assert store.longest(ids_of(*range(18), 99))[1] == 18  # both share 18
    assert store.longest(ids_of(*range(100, 200)))[1] == 40
    assert store.longest(ids_of(*range(100, 130)))[1] == 30  # shorter than the entry


def test_less_than_a_grain_is_not_found():
    store = store_of(range(40))
    assert store.longest(count_to(GRAIN - 1)) == (None, 0)
    assert store.longest(ids_of(*range(GRAIN - 1), 99, 98)) == (None, 0)
    assert store.longest(count_to(GRAIN))[1] == GRAIN
    assert store.longest(ids_of()) == (None, 0)
    assert Prefixes(100).longest(count_to(40)) == (None, 0)


def test_what_is_kept_is_a_copy():
    ids, tensors = count_to(20), tensors_of(20)
    store = Prefixes(1 << 20)
    store.add(ids, tensors)
    ids += 1
    tensors[0] += 1
    saved, shared = store.longest(count_to(20))
    assert saved is not None
    assert shared == 20
    assert saved.tensors[0].tolist() == [0.0] * 20


def test_the_least_recently_used_goes_first():
    a, b, c = (np.arange(start, start + 20, dtype=np.int64) for start in (0, 100, 200))
    store = store_of(a, b, limit=2 * 20 * 8)
    store.longest(a)  # now b is the oldest
    store.add(c, tensors_of(20))
    assert [store.longest(ids)[1] for ids in (a, b, c)] == [20, 0, 20]
    store.add(a, tensors_of(20))  # known: it only becomes the newest again
    store.add(b, tensors_of(20))
    assert [store.longest(ids)[1] for ids in (a, b, c)] == [20, 20, 0]


def test_the_bytes_never_pass_the_limit_and_a_too_long_entry_drops_nothing():
    store = store_of(*(np.arange(start, start + 25) for start in range(0, 1000, 30)), limit=1000)
    assert store.bytes == 5 * 25 * 8  # five entries of 200 bytes
    store.add(np.arange(5000, 5126), tensors_of(126))  # 1008 bytes
    assert store.bytes == 1000
    assert len(store.saved) == 5


def test_dropped_entries_leave_nothing_in_the_index():
    store = store_of(*(np.arange(start, start + 40) for start in range(0, 1000, 50)), limit=40 * 8)
    assert sum(len(found) for found in store.index.values()) == 2  # one entry with marks at 16 and 32


def test_clear_forgets_everything():
    store = store_of(range(40), range(100, 140))
    store.clear()
    assert (store.bytes, len(store.saved), len(store.index)) == (0, 0, 0)
    assert store.longest(count_to(40)) == (None, 0)


def test_prefixes_that_share_a_mark_by_chance_are_told_apart():
    store = store_of(range(40))
    (key,) = store.saved
    other = np.arange(100, 140, dtype=np.int64)
    probe = store_of(other)
    for mark in probe.index:  # the marks of other ids now lead to the entry, as if the hashes were equal
        store.index[mark] = {key: None}
    assert store.longest(other) == (None, 0)
