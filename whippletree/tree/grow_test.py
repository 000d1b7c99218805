from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from whippletree.tree.grow import grow, metrics, subtree_ends

# a rollout of two turns, the second extending the first, and a sibling with the same prompt
#
#   1 2 ─┬─ 3 ─── 9 ─── 4        turn 0: 1 2 -> 3      turn 1: 1 2 3 9 -> 4
#        └─ 5 ─── 6              turn 2: 1 2 -> 5 6
TURNS = [([1, 2], [3]), ([1, 2, 3, 9], [4]), ([1, 2], [5, 6])]


def test_a_tree_by_hand():
    tree = grow(TURNS)
    assert tree.id_T.tolist() == [1, 2, 3, 9, 4, 5, 6]
    assert tree.parent_T.tolist() == [-1, 0, 1, 2, 3, 1, 5]
    assert tree.depth_T.tolist() == [0, 1, 2, 3, 4, 2, 3]
    assert tree.node_N.tolist() == [2, 4, 5, 6]
    # 5 ends where the tree ends; 3's branch ends where 5 begins
    assert subtree_ends(tree).tolist() == [7, 7, 5, 5, 5, 7, 7]


def test_metrics_by_hand():
    # turn 1 begins with all of turn 0, the other two extend nothing: 1 of 3; 3 + 5 + 4 tokens in 7 nodes
    assert metrics(TURNS) == pytest.approx({"merge_rate": 1 / 3, "shared_token_ratio": 1 - 7 / 12})
    # apart from turn 0, turn 1 extends nothing; the groups {0} and {1, 2} have 3 and 5 + 2 nodes
    assert metrics(TURNS, [0, 1, 1]) == pytest.approx({"merge_rate": 0, "shared_token_ratio": 1 - 10 / 12})
    assert metrics([]) == {"merge_rate": 0, "shared_token_ratio": 1.0 - 0}


def test_only_an_earlier_turn_can_be_extended():
    assert metrics([TURNS[1], TURNS[0]])["merge_rate"] == 0


def test_a_prompt_that_rewrites_the_last_token_of_a_reply_is_a_fork():
    turns = [([1, 2], [3, 4]), ([1, 2, 3, 5], [6])]
    assert metrics(turns)["merge_rate"] == 0
    assert grow(turns).parent_T.tolist() == [-1, 0, 1, 2, 2, 4]


def test_the_same_reply_twice_shares_its_nodes():
    tree = grow([([1], [2, 3]), ([1], [2, 3]), ([1], [2, 4])])
    assert tree.id_T.tolist() == [1, 2, 3, 4]
    assert tree.node_N.tolist() == [1, 2, 1, 2, 1, 3]


def test_turns_that_share_nothing_have_a_root_each():
    tree = grow([([7], [8]), ([1], [2])])
    assert (tree.id_T.tolist(), tree.parent_T.tolist()) == ([1, 2, 7, 8], [-1, 0, -1, 2])
    assert tree.node_N.tolist() == [3, 1]
    assert subtree_ends(tree).tolist() == [2, 2, 4, 4]


def test_an_empty_reply_and_no_turns_at_all():
    tree = grow([([1, 2], []), ([1], [2])])
    assert (tree.id_T.tolist(), tree.node_N.tolist()) == ([1, 2], [1])
    for empty in (grow([]), grow([([], [])])):
        assert [len(x) for x in (empty.id_T, empty.parent_T, empty.depth_T, empty.node_N)] == [0, 0, 0, 0]
        assert len(subtree_ends(empty)) == 0


def test_ids_sort_as_numbers():
    # 1 < 256 < 65536: little-endian or signed bytes would put them in another order
    assert grow([([65536], []), ([1], []), ([2**31 + 1], []), ([256], [])]).id_T.tolist() == [1, 256, 65536, 2**31 + 1]


@pytest.mark.parametrize("seed", range(30))
def test_every_node_is_one_distinct_prefix_and_every_turn_is_a_path(seed):
    rng = random.Random(seed)
    turns = [
        (rng.choices(range(3), k=rng.randrange(1, 7)), rng.choices(range(3), k=rng.randrange(5)))
        for _ in range(rng.randrange(1, 20))
    ]
    tree = grow(turns)
    parent, ids, end = tree.parent_T.tolist(), tree.id_T.tolist(), subtree_ends(tree)

    def prefix(node: int) -> tuple[int, ...]:
        return () if node < 0 else (*prefix(parent[node]), ids[node])

    whole = [(*prompt, *reply) for prompt, reply in turns]
    prefixes = [prefix(node) for node in range(len(ids))]
    assert sorted(prefixes) == sorted({row[:n] for row in whole for n in range(1, len(row) + 1)})
    assert [len(p) - 1 for p in prefixes] == tree.depth_T.tolist()
    sampled = [(*prompt, *reply[: n + 1]) for prompt, reply in turns for n in range(len(reply))]
    assert [prefixes[node] for node in tree.node_N.tolist()] == sampled
    for j, above in enumerate(prefixes):  # j <= i < end_j, exactly where j is i or above it
        under = [i for i, p in enumerate(prefixes) if p[: len(above)] == above]
        assert under == list(range(j, end[j]))
    extends = [any(whole[k][: len(turns[k][0])][: len(e)] == e for e in whole[:k]) for k in range(len(turns))]
    assert metrics(turns)["merge_rate"] == np.mean(extends)
    shuffled = rng.sample(turns, len(turns))
    assert torch.equal(grow(shuffled).id_T, tree.id_T)
