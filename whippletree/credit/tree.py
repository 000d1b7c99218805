"""Credit on trees: where turns branch, each branch is compared with the others at its fork.

    o_l    the outcome of a leaf: a turn that no other continues
    V(c)   the value of a turn c: the mean of the outcomes below it        (`value="leaf"`: each leaf counts once)
                                  the mean of the values of its children   (`value="child"`)
    b(c)   its baseline: the mean of V over the other children of its parent; where there are none, b of its parent
    A(c)   = V(c) - b(c), on all sampled tokens of c

The first turns of a rollout have its baseline: the mean, over the other rollouts of the group, of the mean outcome of
their leaves (of the V of their first turns); of a rollout alone in its group, its own. So a turn that the next one
follows without a fork has the advantage of its branch, and a turn before a fork has what its branches came to in the
mean, against the fork above.

What follows, where outcomes are known:

    no forks                           A is `leave_one_out`
    at a fork                          A of the children sums to 0, and so does V - b of the rollouts of a group
    equal outcomes below a fork        A of its children is 0
    a branch whose leaves are missing  has no credit, and all else is as if it were not there

A is unbiased where branches are drawn alike, whatever comes of them: best of n, continued rollouts. Where a harness
tries again because a first try failed, there is a fork because of an outcome, and A is biased. A fork of m branches
trains the turns after it m times; weighed by 1 / m they add up to the gradient of the mean outcome.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from whippletree.credit.groups import known_reward
from whippletree.credit.turns import mean_of, numbered, turn_count, turn_position, turn_to_tokens
from whippletree.types import Batch


def tree_advantage(
    batch: Batch,
    *,
    outcome: str | None = None,
    value: Literal["leaf", "child"] = "leaf",
    alone: Literal["branch", "parent"] = "branch",
) -> Tensor:
    """[N] the value of a token's turn, less that of the other branches of its fork; definition and laws stand above.

    The tree is found by evidence. `back_K`: how many turns before a turn its parent stands in the rollout; 0: none. Or,
    where rollouts share turns because one continues another, `node_K` and `above_K`: a turn's name, an integer that is
    the same in all rollouts of the group that hold it, and its parent's; -1: none. A turn that several rollouts hold is
    one turn of the tree, with one credit; rollouts that share a first turn are one in the baseline of their group.

    Outcomes are the column `outcome`, a number a turn (NaN: missing), read at the leaves of each rollout. Without it
    the reward of a rollout is the outcome of all its leaves. As branches within a rollout then share their outcome,
    they are no comparison: only branches of different rollouts are.

    With `alone="parent"` a turn without another branch beside it is compared with its parent: b(c) = V(parent). Then
    only first turns and those right after a fork have credit.

    Raises:
        ValueError: the columns are missing or say no tree; or a reward is missing and no `outcome` is named.
    """
    node_K, parent_T = _nodes(batch)
    source_T = _sources(batch, node_K, parent_T)
    turns, inner = len(parent_T), len(parent_T) + batch.rollouts
    group_R = inner + numbered(batch.group_R)  # all nodes: turns, rollouts above them, groups above those
    parent = torch.cat([torch.where(parent_T < 0, turns + source_T, parent_T), group_R, group_R.unique()])
    levels = _levels(parent, inner)
    v = _values(batch, node_K, parent, levels, outcome=outcome, by_leaf=value == "leaf")
    part = torch.arange(inner, device=parent.device)
    if outcome is None:
        part[:turns] = source_T
    b = mean_of(v[:inner], parent[:inner], besides=parent[:inner] * (inner + 1) + part)
    b[:turns][parent[:turns] >= turns] = torch.nan  # first turns are compared as rollouts
    b[turns:] = torch.where(b[turns:].isnan(), v[turns:inner], b[turns:])
    for level in levels[2:]:
        above = parent[level]
        else_ = torch.where(above < turns, v[above], b[above]) if alone == "parent" else b[above]
        b[level] = torch.where(b[level].isnan(), else_, b[level])
    return turn_to_tokens((v[:turns] - b[:turns])[node_K], batch)


def _nodes(batch: Batch) -> tuple[Tensor, Tensor]:
    """([K] each turn's place among the distinct turns, [T] the place of the parent of each of those, -1: none)."""
    if "node_K" not in batch.extra:
        back_K, place_K = batch.column("back_K"), torch.arange(batch.turns, device=batch.rollout_K.device)
        if ((back_K < 0) | (back_K > turn_position(batch))).any():
            raise ValueError("back_K counts turns back within a rollout, but some stand outside of it")
        return place_K, torch.where(back_K > 0, place_K - back_K, -1)
    names, name_2K = torch.unique(torch.stack([batch.column("node_K"), batch.column("above_K")]), return_inverse=True)
    key_2K = numbered(batch.group_R)[batch.rollout_K] * len(names) + name_2K
    key_T, node_K = torch.unique(key_2K[0], return_inverse=True)
    above_K = torch.searchsorted(key_T, key_2K[1]).clamp(max=max(len(key_T) - 1, 0))
    none_K = batch.column("above_K") == -1
    parent_K = torch.where(none_K, -1, above_K)
    parent_T = torch.zeros_like(key_T).index_put((node_K,), parent_K)
    if ((key_T[above_K] != key_2K[1]) & ~none_K).any() or (parent_T[node_K] != parent_K).any():
        raise ValueError("above_K names one parent of each turn, among node_K of the group, but some have two or none")
    return node_K, parent_T


def _sources(batch: Batch, node_K: Tensor, parent_T: Tensor) -> Tensor:
    """[T] a rollout that holds each distinct turn, the same for children of one parent that any rollout holds both."""
    group_K = len(parent_T) + numbered(batch.group_R)[batch.rollout_K]
    above_K = torch.where(parent_T[node_K] < 0, group_K, parent_T[node_K])
    pair_K = numbered(above_K * batch.rollouts + batch.rollout_K)
    found_T, source_T = parent_T, _lowest(batch.rollout_K, node_K, len(parent_T))
    while not torch.equal(found_T, source_T):
        low_K = _lowest(source_T[node_K], pair_K, len(pair_K))[pair_K]
        found_T, source_T = source_T, _lowest(low_K, node_K, len(parent_T))
    return source_T


def _lowest(x: Tensor, owner: Tensor, owners: int) -> Tensor:
    lowest: Tensor = x.new_full((owners,), torch.iinfo(x.dtype).max).scatter_reduce(0, owner, x, "amin")
    return lowest


def _levels(parent: Tensor, inner: int) -> tuple[Tensor, ...]:
    """The nodes at depth 0 (the groups, from `inner` on, each its own parent), 1, ..., by doubling what is jumped."""
    jump, depth = parent, (torch.arange(len(parent), device=parent.device) < inner).long()
    for _ in range(len(parent).bit_length()):
        depth, jump = depth + depth[jump], jump[jump]
        if (jump >= inner).all():
            break
    else:
        raise ValueError("above_K says no tree: some turn is above itself")
    levels: tuple[Tensor, ...] = torch.argsort(depth, stable=True).split(torch.bincount(depth).tolist())
    return levels


def _values(
    batch: Batch, node_K: Tensor, parent: Tensor, levels: tuple[Tensor, ...], *, outcome: str | None, by_leaf: bool
) -> Tensor:
    """The value of each node in float64: of turns, rollouts and groups; NaN where no outcome below is known."""
    turns = len(parent) - batch.rollouts - int(levels[0].numel())
    reward_R = known_reward(batch) if outcome is None else torch.full_like(batch.reward_R, torch.nan)
    outcome_K = reward_R[batch.rollout_K] if outcome is None else batch.column(outcome)
    held_K = node_K + batch.rollout_K * len(parent)  # a turn as this rollout holds it
    goes_on_K = torch.isin(held_K, parent[node_K] + batch.rollout_K * len(parent))
    empty_R = turn_count(batch) == 0
    place_R = torch.arange(turns, turns + batch.rollouts, device=parent.device)
    at = torch.cat([node_K[~goes_on_K], place_R[empty_R]])
    known = torch.cat([outcome_K[~goes_on_K], reward_R[empty_R]]).double()
    total, count = torch.zeros(2, len(parent), dtype=torch.float64, device=parent.device).unbind()
    total.index_add_(0, at[~known.isnan()], known[~known.isnan()])
    count.index_add_(0, at, (~known.isnan()).double())
    for level in levels[:0:-1]:
        n, x = count[level], total[level]
        total.index_add_(0, parent[level], x if by_leaf else x / n.clamp(min=1))
        count.index_add_(0, parent[level], n if by_leaf else (n > 0).double())
    return total / count  # 0 / 0 is NaN
