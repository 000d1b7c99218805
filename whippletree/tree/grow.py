"""Turns merged by exact token prefix: the tree, and how much merging saves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from whippletree.types import Tree

Ids = Sequence[int]
Array = NDArray[np.int64]


def grow(sequences: Sequence[tuple[Ids, Ids]]) -> Tree:
    """The prefix tree of these turns `(prompt_ids, reply_ids)`: one node for each distinct prefix, depth first.

    Children stand in the order of their token ids, so the tree does not depend on the order of the turns.
    """
    id_T, parent_T, depth_T, paths = _merge(sequences)
    sampled = [path[len(prompt) :] for path, (prompt, _) in zip(paths, sequences, strict=True)]
    node_N = np.concatenate(sampled) if sampled else np.empty(0, np.int64)
    return Tree(*(torch.from_numpy(x) for x in (id_T, parent_T, depth_T, node_N)))


def subtree_ends(tree: Tree) -> Array:
    """[T] one past the last node of each node's subtree: j is i or an ancestor of i iff j <= i < end_j."""
    depth_T, parent_T = tree.depth_T.numpy(), tree.parent_T.numpy()
    size = len(depth_T)
    end_T = np.full(size, size)
    path = np.empty(int(depth_T.max(initial=-1)) + 1, np.int64)  # the nodes above the current one, by depth
    length = 0
    # a run of only children; node 0 is a root, and its parent -1 is 0 - 1 too
    edges = np.append(np.flatnonzero((parent_T != np.arange(size) - 1) | (parent_T < 0)), size)
    for start, stop in pairwise(edges):
        depth = depth_T[start]
        end_T[path[depth:length]] = start
        length = depth + stop - start
        path[depth:length] = np.arange(start, stop)
    return end_T


def metrics(sequences: Sequence[tuple[Ids, Ids]], group_K: Sequence[int] | None = None) -> dict[str, float]:
    """How much merging saves, with one tree a group (all turns in one without `group_K`); both within 0 and 1.

    merge_rate         = turns whose prompt begins with the whole of an earlier turn / turns
    shared_token_ratio = 1 - nodes / tokens of all turns
    """
    groups: dict[int, list[tuple[Ids, Ids]]] = {}
    for group, sequence in zip(group_K or [0] * len(sequences), sequences, strict=True):
        groups.setdefault(int(group), []).append(sequence)
    tokens = sum(len(prompt) + len(reply) for prompt, reply in sequences)
    nodes = merged = 0
    for members in groups.values():
        id_T, _, _, paths = _merge(members)
        nodes += len(id_T)
        ended = np.zeros(len(id_T), bool)  # an earlier turn ends at this node
        for path, (prompt, _) in zip(paths, members, strict=True):
            merged += bool(ended[path[: len(prompt)]].any())
            ended[path[-1:]] = True
    return {"merge_rate": merged / max(len(sequences), 1), "shared_token_ratio": 1 - nodes / max(tokens, 1)}


def _merge(sequences: Sequence[tuple[Ids, Ids]]) -> tuple[Array, Array, Array, list[Array]]:
    """Ids, parents and depths of the nodes, and for each turn the node of each of its tokens.

    In sorted order a turn shares with all before it exactly what it shares with its neighbour, and its remaining tokens
    are new nodes, already depth first. Big-endian bytes compare as the ids do.
    """
    rows = [np.asarray([*prompt, *reply], np.int64) for prompt, reply in sequences]
    keys = [row.astype(">u4").tobytes() for row in rows]
    paths, path = [np.empty(0, np.int64)] * len(rows), np.empty(max(map(len, rows), default=0), np.int64)
    ids, parents, depths = [path[:0]], [path[:0]], [path[:0]]
    before, count = path[:0], 0
    for k in sorted(range(len(rows)), key=keys.__getitem__):
        row = rows[k]
        shared = _common(before, row)
        fresh = np.arange(count, count + len(row) - shared)
        path[shared : len(row)] = fresh
        paths[k] = path[: len(row)].copy()
        parent = fresh - 1
        parent[:1] = path[shared - 1] if shared else -1
        ids.append(row[shared:])
        parents.append(parent)
        depths.append(np.arange(shared, len(row)))
        before, count = row, count + len(fresh)
    return np.concatenate(ids), np.concatenate(parents), np.concatenate(depths), paths


def _common(a: Array, b: Array) -> int:
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    return int(differs.argmax()) if differs.any() else size
