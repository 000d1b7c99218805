"""Trees cut into rows, rows into model calls, rollouts into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whippletree.tree.grow import Array, Ids, grow, subtree_ends
from whippletree.types import Tree

QUADRATIC = 8192  # tokens of a masked row whose attention costs as much as all the rest of the model
CALL = 256  # tokens of padding that cost as much as a further call of the model

# prompt ids, reply ids, temperature
Sampled = tuple[Ids, Ids, float]


@dataclass(frozen=True)
class Row:
    """Nodes of one tree, depth first: the ancestors of a branch, then the branch."""

    id_T: Array
    depth_T: Array
    end_T: Array  # one past the last node of the subtree, within the row

    @cached_property
    def chain(self) -> bool:
        return bool((self.end_T == len(self.end_T)).all())


@dataclass(frozen=True)
class Call:
    """One call of the model: right-padded rows. `end_BT` is None where every row is a chain and needs no mask."""

    id_BT: Tensor
    position_BT: Tensor
    end_BT: Tensor | None
    place_P: Tensor  # flat positions (row * T + column) whose next token is sampled


@dataclass(frozen=True)
class Packed:
    """The calls for some turns, and where each sampled token is predicted.

    Places are distinct pairs of a position and a temperature, numbered through the calls in order.
    """

    calls: tuple[Call, ...]
    place_N: Tensor
    id_N: Tensor
    temperature_P: Tensor

    @property
    def computed(self) -> int:
        """Tokens the model computes, padding included."""
        return sum(call.id_BT.numel() for call in self.calls)


def ancestors(end_BT: Tensor) -> Tensor:
    """[B, T, T] bool: token i may see token j iff j is i or an ancestor of i, that is j <= i < end_j."""
    index_T = torch.arange(end_BT.shape[1], device=end_BT.device)
    return (index_T[None, :] <= index_T[:, None]) & (index_T[:, None] < end_BT[:, None, :])


def pack(turns: Sequence[Sampled], group_K: Sequence[int], *, unroll: bool, most: int | None = None) -> Packed:
    """Rows of one tree a group, in calls of at most `most` tokens; with `unroll` every row is a chain.

    A single chain longer than `most` is a call of its own.

    Raises:
        ValueError: a turn has a reply and no prompt, so nothing predicts its first token.
    """
    for k, (prompt, reply, _) in enumerate(turns):
        if reply and not prompt:
            raise ValueError(f"turn {k} sampled {len(reply)} tokens after an empty prompt: nothing predicts the first")
    start_K = np.cumsum([0, *(len(reply) for _, reply, _ in turns)])
    row_N, column_N = np.empty((2, start_K[-1]), np.int64)
    rows: list[Row] = []
    for members in _members(group_K):
        cut, row, column = cut_tree(grow([turns[k][:2] for k in members]), unroll=unroll, most=most)
        token = np.concatenate([np.arange(start_K[k], start_K[k + 1]) for k in members])
        row_N[token], column_N[token] = row + len(rows), column
        rows += cut
    heat_N = np.repeat([t for *_, t in turns], np.diff(start_K)).astype(np.float32)
    id_N = torch.tensor([i for _, reply, _ in turns for i in reply], dtype=torch.int64)
    return _place(rows, row_N, column_N, heat_N, id_N, most)


def _place(
    rows: list[Row], row_N: Array, column_N: Array, heat_N: NDArray[np.float32], id_N: Tensor, most: int | None
) -> Packed:
    shapes = call_rows(rows, most=most)
    base_row, first = np.empty(len(rows), np.int64), [0]  # where each row begins, counted through all calls
    for members in shapes:
        width = len(rows[members[0]].id_T)
        base_row[members] = first[-1] + np.arange(len(members)) * width
        first.append(first[-1] + len(members) * width)
    heats, heat = np.unique(heat_N, return_inverse=True)
    key_P, place_N = np.unique((base_row[row_N] + column_N) * max(len(heats), 1) + heat, return_inverse=True)
    flat_P = key_P // max(len(heats), 1)
    edges = np.searchsorted(flat_P, first)
    calls = [
        _call([rows[r] for r in members], torch.from_numpy(flat_P[a:b] - begin))
        for members, begin, a, b in zip(shapes, first[:-1], edges[:-1], edges[1:], strict=True)
    ]
    heat_P = heats[key_P % len(heats)] if len(heats) else heats
    return Packed(tuple(calls), torch.from_numpy(place_N), id_N, torch.from_numpy(heat_P))


def _call(rows: list[Row], place_P: Tensor) -> Call:
    width = len(rows[0].id_T)
    id_BT, position_BT = np.zeros((2, len(rows), width), np.int64)
    end_BT = np.full((len(rows), width), width)  # padding sees padding: a token that sees nothing would be NaN
    for b, row in enumerate(rows):
        size = len(row.id_T)
        id_BT[b, :size], position_BT[b, :size], end_BT[b, :size] = row.id_T, row.depth_T, row.end_T
    end = None if all(row.chain for row in rows) else torch.from_numpy(end_BT)
    return Call(torch.from_numpy(id_BT), torch.from_numpy(position_BT), end, place_P)


def call_rows(rows: Sequence[Row], *, most: int | None = None) -> list[list[int]]:
    """Which rows go through the model together: chains apart, longest first, padding below the cost of a call."""
    calls: list[list[int]] = []
    waste = 0
    for r in sorted(range(len(rows)), key=lambda r: (rows[r].chain, -len(rows[r].id_T))):
        first = rows[calls[-1][0]] if calls else rows[r]
        width = len(first.id_T)
        waste += width - len(rows[r].id_T)
        full = most is not None and calls and (len(calls[-1]) + 1) * width > most
        if not calls or full or waste > CALL or first.chain != rows[r].chain:
            calls.append([])
            waste = 0
        calls[-1].append(r)
    return calls


def cut_tree(tree: Tree, *, unroll: bool, most: int | None = None) -> tuple[list[Row], Array, Array]:
    """Rows that cover every position which predicts a sampled token, and the (row, column) of each of those, [N].

    A tree is cut at its first fork, the trunk repeated in each part, where `unroll` wants chains, where it is longer
    than `most`, or where that is cheaper. With n tokens in a row and Q = QUADRATIC,

        cost = n + n^2 / Q,  and n + n^2 / 2Q for a chain, which needs no mask

    so a long tree of long branches becomes chains and a long prompt with short replies stays whole.
    """
    id_T, depth_T, end_T, predict_N = _needed(tree)
    parts, stack = [], [(0, len(id_T))] if len(id_T) else []
    while stack:
        start, end = stack.pop()
        children = _children(end_T, start, end)
        apart = sum(_cost(depth_T, end_T, child, int(end_T[child])) for child in children)
        long = most is not None and depth_T[start] + end - start > most
        if children and (unroll or long or apart < _cost(depth_T, end_T, start, end)):
            stack += [(child, int(end_T[child])) for child in reversed(children)]
        else:
            parts.append((start, end))
    rows = []
    for start, end in parts:
        above = np.flatnonzero(end_T[:start] > start)
        node = np.concatenate([above, np.arange(start, end)])
        local = np.minimum(end_T[node], end) - start + len(above)
        rows.append(Row(id_T[node], depth_T[node], local))
    # a trunk that was cut belongs to the first part after it
    row_N = np.searchsorted([end for _, end in parts], predict_N, side="right")
    start_N = np.array([start for start, _ in parts], np.int64)[row_N]
    below = predict_N >= start_N
    column_N = np.where(below, depth_T[np.where(below, start_N, 0)] + predict_N - start_N, depth_T[predict_N])
    return rows, row_N, column_N


def _needed(tree: Tree) -> tuple[Array, Array, Array, Array]:
    """Ids, depths and subtree ends of the nodes that predict a sampled token or lead to one that does.

    The last token of a reply that nothing extends is not among them: nothing is read off it.
    """
    end_T, predict_N = subtree_ends(tree), tree.parent_T.numpy()[tree.node_N.numpy()]
    marks = np.zeros(len(end_T), np.int64)
    marks[predict_N] = 1
    before = np.concatenate([[0], marks.cumsum()])
    keep = before[end_T] > before[:-1]
    rank = np.concatenate([[0], keep.cumsum()])
    return tree.id_T.numpy()[keep], tree.depth_T.numpy()[keep], rank[end_T[keep]], rank[predict_N]


def _children(end_T: Array, start: int, end: int) -> list[int]:
    """The branches at the first fork of the nodes [start, end); none in a chain."""
    forks = end_T[start:end] < end
    if not forks.any():
        return []
    children = [start + int(forks.argmax())]
    while end_T[children[-1]] < end:
        children.append(int(end_T[children[-1]]))
    return children


def _cost(depth_T: Array, end_T: Array, start: int, end: int) -> float:
    size = int(depth_T[start]) + end - start
    chain = bool((end_T[start:end] == end).all())
    return size + size**2 / (QUADRATIC * (1 + chain))


def micro_batches(
    turns: Sequence[Sampled], rollout_K: Tensor, group_R: Tensor, *, token_budget: int, unroll: bool = False
) -> list[Tensor]:
    """Rollouts (indices, ascending) of each micro-batch: all of them once, a group together where the budget allows.

    A micro-batch counts (trees in it) * (tokens of its largest tree), so padding is in the budget. A rollout that alone
    is over the budget is a micro-batch of its own.
    """
    turn_R: list[list[Sampled]] = [[] for _ in group_R]
    for turn, rollout in zip(turns, rollout_K.tolist(), strict=True):
        turn_R[rollout].append(turn)

    def size(members: Sequence[int]) -> int:
        tree = grow([turn[:2] for r in members for turn in turn_R[r]])
        return sum(len(row.id_T) for row in cut_tree(tree, unroll=unroll)[0])

    parts: list[tuple[int, list[int]]] = []
    for group in _members(group_R.tolist()):
        if (whole := size(group)) <= token_budget:
            parts.append((whole, group))
            continue
        part = group[:1]
        for r in group[1:]:
            if size([*part, r]) > token_budget:
                parts.append((size(part), part))
                part = []
            part = [*part, r]
        parts.append((size(part), part))
    batches: list[tuple[int, list[list[int]]]] = []
    for tokens, members in sorted(parts, key=lambda part: -part[0]):
        if not batches or (len(batches[-1][1]) + 1) * batches[-1][0] > token_budget:
            batches.append((tokens, []))
        batches[-1][1].append(members)
    return [torch.tensor(sorted(r for members in batch for r in members)) for _, batch in batches]


def _members(group_K: Sequence[int]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for k, group in enumerate(group_K):
        groups.setdefault(int(group), []).append(k)
    return list(groups.values())
