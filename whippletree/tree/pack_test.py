from __future__ import annotations

import pytest
import torch

from whippletree.tree.grow import grow, subtree_ends
from whippletree.tree.grow_test import TURNS
from whippletree.tree.pack import QUADRATIC, Row, ancestors, call_rows, cut_tree, micro_batches, pack

SAMPLED = [(prompt, reply, 1.0) for prompt, reply in TURNS]


def _rows(rows):
    return [(row.id_T.tolist(), row.depth_T.tolist(), row.end_T.tolist()) for row in rows]


def test_an_ancestor_mask_by_hand():
    #  1 2 ─┬─ 3 ─ 9       2 is above all but 1; the branches 3 9 and 5 do not see each other
    #       └─ 5
    mask = ancestors(torch.tensor([[5, 5, 4, 4, 5]]))[0]
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]


def test_a_tree_stays_whole_without_the_tokens_that_predict_nothing():
    # of 1 2 (3 9 4)(5 6) the ends of replies, 4 and 6, predict nothing; 3 and 5 are read at 2, 4 at 9, 6 at 5
    rows, row_N, column_N = cut_tree(grow(TURNS), unroll=False)
    assert _rows(rows) == [([1, 2, 3, 9, 5], [0, 1, 2, 3, 2], [5, 5, 4, 4, 5])]
    assert (row_N.tolist(), column_N.tolist()) == ([0] * 4, [1, 3, 1, 4])
    assert not rows[0].chain


def test_an_unrolled_tree_is_chains_and_reads_the_trunk_once():
    # the trunk 1 2 stands in both chains, and what it predicts (3 and 5) is read off the first
    rows, row_N, column_N = cut_tree(grow(TURNS), unroll=True)
    assert _rows(rows) == [([1, 2, 3, 9], [0, 1, 2, 3], [4] * 4), ([1, 2, 5], [0, 1, 2], [3] * 3)]
    assert (row_N.tolist(), column_N.tolist()) == ([0, 0, 0, 1], [1, 3, 1, 2])
    assert all(row.chain for row in rows)


def test_a_tree_over_the_budget_is_cut_at_its_fork():
    assert len(cut_tree(grow(TURNS), unroll=False, most=5)[0]) == 1
    assert len(cut_tree(grow(TURNS), unroll=False, most=4)[0]) == 2


def test_long_branches_are_cut_where_attention_costs_more_than_the_trunk():
    def rows(trunk: int, branch: int) -> int:
        turns = [([0] * trunk, [n + 1] * (branch + 1)) for n in range(8)]
        return len(cut_tree(grow(turns), unroll=False)[0])

    # trunk 100, 8 branches of 10: whole 180 + 180^2 / Q = 184; apart 8 (110 + 110^2 / 2Q) = 886
    # trunk 10, 8 branches of 1000: whole 8010 + 8010^2 / Q = 15842; apart 8 (1010 + 1010^2 / 2Q) = 8578
    # trunk 10, 8 branches of 100: whole 810 + 810^2 / Q = 890.1; apart 8 (110 + 110^2 / 2Q) = 885.9, with Q 891.8
    assert QUADRATIC == 8192
    assert (rows(100, 10), rows(10, 1000), rows(10, 100)) == (1, 8, 8)


def test_a_packed_batch_by_hand():
    # two groups of the same turns: the group tree of five tokens, and in the second group a chain 7 (read for 8)
    packed = pack([*SAMPLED, ([7], [8], 0.5)], [0, 0, 0, 1], unroll=False)
    tree, chain = packed.calls
    assert tree.id_BT.tolist() == [[1, 2, 3, 9, 5]] and tree.position_BT.tolist() == [[0, 1, 2, 3, 2]]
    assert tree.place_P.tolist() == [1, 3, 4]
    assert chain.id_BT.tolist() == [[7]] and chain.end_BT is None and chain.place_P.tolist() == [0]
    assert packed.place_N.tolist() == [0, 1, 0, 2, 3]
    assert packed.id_N.tolist() == [3, 4, 5, 6, 8]
    assert packed.temperature_P.tolist() == [1, 1, 1, 0.5]
    assert packed.computed == 6


def test_one_position_at_two_temperatures_is_two_places():
    packed = pack([([1], [2], 1.0), ([1], [3], 0.5), ([1], [2], 0.5)], [0, 0, 0], unroll=False)
    assert packed.calls[0].place_P.tolist() == [0, 0]
    assert packed.temperature_P.tolist() == [0.5, 1.0]
    assert packed.place_N.tolist() == [1, 0, 0]


def test_padding_sees_itself_and_is_seen_by_no_token():
    # trees of 4 tokens (1 2 and branches 3, 4) and 3 tokens (1 and branches 2, 3): one call, one column of padding
    turns = [([1, 2], [3, 0], 1.0), ([1, 2], [4, 0], 1.0), ([1], [2, 0], 1.0), ([1], [3, 0], 1.0)]
    (call,) = pack(turns, [0, 0, 1, 1], unroll=False).calls
    assert call.id_BT.tolist() == [[1, 2, 3, 4], [1, 2, 3, 0]]
    assert call.end_BT is not None
    mask = ancestors(call.end_BT)[1]
    assert mask[3].tolist() == [False, False, False, True]
    assert not mask[:3, 3].any()


def test_rows_of_very_different_length_are_not_padded_to_each_other():
    def chain(size: int) -> Row:
        tree = grow([([0] * size, [1])])
        return Row(tree.id_T.numpy(), tree.depth_T.numpy(), subtree_ends(tree))

    # 1000 and 990 waste 10 (+1 token each); 50 would waste 950 more, over 256
    rows = [chain(50), chain(1000), chain(45), chain(990)]
    assert call_rows(rows) == [[1, 3], [0, 2]]
    assert call_rows(rows, most=1500) == [[1], [3], [0, 2]]
    assert call_rows([], most=10) == []


def test_a_reply_without_a_prompt_is_refused():
    with pytest.raises(ValueError, match="turn 1 sampled 2 tokens after an empty prompt"):
        pack([([1], [2], 1.0), ([], [3, 4], 1.0)], [0, 0], unroll=False)


# rollouts of 10 + 3 computed tokens (one more is sampled last), two groups with a prompt each
def _group(first, rollouts):
    return [([first] * 10, [100 + n] * 4, 1.0) for n in range(rollouts)]


def test_groups_stay_together_where_the_budget_allows():
    # a group of 2 has 10 + 2 * 3 = 16 tokens: two groups fit in 32, a third does not
    turns = [*_group(1, 2), *_group(2, 2), *_group(3, 2)]
    group_R = torch.tensor([0, 0, 1, 1, 2, 2])
    batches = micro_batches(turns, torch.arange(6), group_R, token_budget=33)
    assert [b.tolist() for b in batches] == [[0, 1, 2, 3], [4, 5]]


def test_a_group_over_the_budget_is_split_and_a_rollout_over_it_is_kept():
    # 10 + 3n tokens for n rollouts: three fit in 20; alone a rollout has 13
    batches = micro_batches(_group(1, 5), torch.arange(5), torch.zeros(5), token_budget=20)
    assert [b.tolist() for b in batches] == [[0, 1, 2], [3, 4]]
    assert len(micro_batches(_group(1, 5), torch.arange(5), torch.zeros(5), token_budget=1)) == 5


def test_padding_counts_towards_the_budget():
    # trees of 14 and 10 tokens: 24 of their own, 28 as two padded rows
    turns = [([1] * 14, [2], 1.0), ([3] * 10, [2], 1.0)]
    sizes = [len(micro_batches(turns, torch.arange(2), torch.arange(2), token_budget=b)) for b in (24, 27, 28)]
    assert sizes == [2, 2, 1]


def test_every_rollout_is_in_one_micro_batch_whatever_its_turns():
    # rollout 1 has no turn, rollout 2 two
    turns = [([1], [2], 1.0), ([1], [3], 1.0), ([1, 3, 4], [5], 1.0)]
    batches = micro_batches(turns, torch.tensor([0, 2, 2]), torch.tensor([0, 1, 1]), token_budget=3)
    assert sorted(torch.cat(batches).tolist()) == [0, 1, 2]
