from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Literal

import pytest
import torch
from torch import Tensor

from whippletree import objective
from whippletree.credit import leave_one_out, tree_advantage
from whippletree.methods._tables import HALF, table
from whippletree.methods.contract_test import LAWS, numbered
from whippletree.types import Batch, Method, Paper
from whippletree.update.averages import token_mean

NAN = math.nan
By = Literal["leaf", "child"]


def forest(
    back: Sequence[Sequence[int]],
    outcomes: Sequence[float] | None = None,
    *,
    rewards: Sequence[float] | None = None,
    groups: Sequence[int] | None = None,
) -> Batch:
    """Rollouts of turns of one token each, with these `back_K` and outcomes `outcome_K`."""
    batch = table([[1] * len(turns) for turns in back], rewards=rewards or [0.0] * len(back), groups=groups)
    batch = batch.with_extra(back_K=torch.tensor([b for turns in back for b in turns], dtype=torch.int64))
    return batch if outcomes is None else batch.with_extra(outcome_K=torch.tensor(outcomes, dtype=torch.float32))


def named(paths: Sequence[str], rewards: Sequence[float]) -> Batch:
    """Rollouts in one group whose turns are the letters of these words; a turn is the word up to its letter."""
    batch = table([[1] * len(path) for path in paths], rewards=rewards)
    begun = [path[:end] for path in paths for end in range(1, len(path) + 1)]
    names = {begin: 10 * n for n, begin in enumerate(dict.fromkeys(begun))}
    above = [names.get(begin[:-1], -1) for begin in begun]
    return batch.with_extra(node_K=torch.tensor([names[b] for b in begun]), above_K=torch.tensor(above))


on_outcomes = partial(tree_advantage, outcome="outcome_K")

#          0            forks at 0 and at 1;  outcomes: 3 came to 1, 4 to 0, 5 to 1/2, 6 to 0
#      1       2        the other rollout of the group, a single turn, came to 1/4
#    3 4 5     6
SEVEN = forest([[0, 1, 2, 2, 3, 4, 4], [0]], [NAN, NAN, NAN, 1, 0, 0.5, 0, 0.25])


def test_seven_turns_with_two_forks_by_hand() -> None:
    # V: turn 1 (1 + 0 + 1/2) / 3 = 1/2, turn 2 as 6 is 0, turn 0 (1 + 0 + 1/2 + 0) / 4 = 3/8
    # A_0 = 3/8 - 1/4;  A_1 = 1/2 - 0, A_2 = 0 - 1/2 and 6 as 2;  A_3 = 1 - 1/4, A_4 = 0 - 3/4, A_5 = 1/2 - 1/2
    expected = torch.tensor([0.125, 0.5, -0.5, 0.75, -0.75, 0, -0.5, 0.25 - 0.375])
    torch.testing.assert_close(on_outcomes(SEVEN), expected)


def test_weighted_by_child_each_branch_counts_once_however_often_it_forks() -> None:
    # turn 0 has (1/2 + 0) / 2 = 1/4, as the other rollout has; below the forks nothing changes
    expected = torch.tensor([0, 0.5, -0.5, 0.75, -0.75, 0, -0.5, 0])
    torch.testing.assert_close(on_outcomes(SEVEN, value="child"), expected)


def test_compared_with_its_parent_a_turn_without_another_beside_it_adds_nothing() -> None:
    expected = torch.tensor([0.125, 0.5, -0.5, 0.75, -0.75, 0, 0, -0.125])
    torch.testing.assert_close(on_outcomes(SEVEN, alone="parent"), expected)


def test_every_token_of_a_turn_has_its_advantage_and_untrainable_ones_have_none() -> None:
    batch = table([[2, 0, 2], [1]], rewards=[1.0, 0.0], old=[HALF, NAN, HALF, HALF, HALF])
    batch = batch.with_extra(back_K=torch.tensor([0, 1, 2, 0]), outcome_K=torch.tensor([NAN, 1.0, 0.0, 0.0]))
    # an empty reply is a branch too: V of turn 0 is 1/2; turn 2 lost against it; the other rollout lost against 1/2
    assert on_outcomes(batch).tolist() == [0.5, 0, -1, -1, -0.5]


def test_a_turn_that_rollouts_share_has_the_mean_of_what_they_came_to() -> None:
    # the first two share turn a: V = 1/2 against the third's 1/4. Then 1 against 0. They are one against the third
    batch = named(["ab", "ac", "d"], rewards=[1.0, 0.0, 0.25])
    assert tree_advantage(batch).tolist() == [0.25, 1, 0.25, -1, -0.25]


def test_a_rollout_may_end_where_another_goes_on() -> None:
    # a: leaves of 1 and 0, so 1/2; against d: 1/2 - 1/4. Turn b has no other beside it, so a's baseline: 0 - 1/4
    assert tree_advantage(named(["a", "ab", "d"], rewards=[1.0, 0.0, 0.25])).tolist() == [0.25, 0.25, -0.25, -0.25]


def test_branches_of_one_rollout_are_no_comparison_where_its_reward_is_the_outcome_of_all() -> None:
    batch = forest([[0, 1, 2, 0], [0]], rewards=[1.0, 0.0])
    torch.testing.assert_close(tree_advantage(batch), leave_one_out(batch))
    # abc, abd and ab' within one rollout, and a second rollout below ab: the first's branches are compared with it
    batch = table([[1, 1, 1, 1], [1, 1, 1]], rewards=[1.0, 0.0]).with_extra(
        node_K=torch.tensor([1, 2, 3, 4, 1, 2, 5]), above_K=torch.tensor([-1, 1, 2, 2, -1, 1, 2])
    )
    # leaves 1, 1 and 0: a and b are alone with 2/3, which is their baseline
    torch.testing.assert_close(tree_advantage(batch), torch.tensor([0.0, 0, 1, 1, 0, 0, -1]), atol=1e-6, rtol=0)


# ---- laws -------------------------------------------------------------------------------------------------------


def test_without_forks_it_is_leave_one_out() -> None:
    lengths = [[2, 1, 3], [], [1], [2, 2], [0, 1]]  # one without turns, whose reward counts, and a history rewritten
    batch = table(lengths, rewards=[1.0, 0.5, 0.0, 2.0, 4.0], groups=[4, 4, 4, 1, 1], old=HALF)
    batch = batch.with_extra(back_K=torch.tensor([0, 1, 1, 0, 0, 0, 0, 1]))
    for value in ("leaf", "child"):
        torch.testing.assert_close(tree_advantage(batch, value=value), leave_one_out(batch))


def test_a_rollout_alone_in_its_group_has_credit_at_its_forks_only() -> None:
    assert on_outcomes(forest([[0, 1, 2]], [NAN, 1, 0])).tolist() == [0, 1, -1]
    assert on_outcomes(forest([[0, 1]], [NAN, 1])).tolist() == [0, 0]


def test_equal_outcomes_teach_nothing_exactly() -> None:
    below = forest([[0, 1, 2, 2, 3, 4, 4], [0]], [NAN, NAN, NAN, 0.1, 0.1, 0.1, 0.7, 0.3])
    assert on_outcomes(below)[3:6].tolist() == [0, 0, 0]
    all_of_them = forest([[0, 1, 2, 2, 3, 4, 4], [0], [0, 1]], [NAN, NAN, NAN, 0.1, 0.1, 0.1, 0.1, 0.1, NAN, 0.1])
    for value in ("leaf", "child"):
        assert (on_outcomes(all_of_them, value=value) == 0).all()


def test_a_branch_without_an_outcome_has_no_credit_and_changes_nothing_else() -> None:
    without = on_outcomes(forest([[0, 1, 2], [0]], [NAN, 1, 0, 0]))
    torch.testing.assert_close(on_outcomes(forest([[0, 1, 2, 3], [0]], [NAN, 1, NAN, 0, 0]))[[0, 1, 3, 4]], without)
    # where the only other branch is missing there is no fork: the turn goes on with the advantage of its branch
    assert on_outcomes(forest([[0, 1, 2], [0]], [NAN, 1, NAN, 0])).tolist() == [1, 1, 0, -1]
    # and a rollout without any outcome is in no baseline
    assert on_outcomes(forest([[0], [0, 1], [0]], [1, NAN, NAN, 0])).tolist() == [1, 0, 0, -1]


def test_an_outcome_of_a_turn_that_goes_on_is_not_read() -> None:
    torch.testing.assert_close(
        on_outcomes(forest([[0, 1], [0]], [9, 1, 0])), on_outcomes(forest([[0, 1], [0]], [NAN, 1, 0]))
    )


def random_back(draw: random.Random, turns: int) -> list[int]:
    return [draw.randrange(min(k + 1, 4)) for k in range(turns)]


def random_forest(seed: int) -> Batch:
    draw = random.Random(seed)
    back = [random_back(draw, draw.randrange(9)) for _ in range(9)]
    outcomes = [draw.choice([NAN, 0.0, 1.0, draw.random()]) for turns in back for _ in turns]
    return forest(back, outcomes, groups=[draw.randrange(3) for _ in back])


def mean(x: Sequence[float]) -> float:
    known = [each for each in x if not math.isnan(each)]
    return sum(known) / len(known) if known else NAN


def defined(batch: Batch, *, value: By) -> list[float]:
    """The advantages of turns as the module defines them, one turn after the other."""
    back, outcome = batch.extra["back_K"].tolist(), batch.extra["outcome_K"].tolist()
    rollout, group = batch.rollout_K.tolist(), batch.group_R.tolist()
    above = [k - b if b else -1 for k, b in enumerate(back)]
    below = [[c for c, p in enumerate(above) if p == k] for k in range(batch.turns)]

    def leaves(k: int) -> list[float]:
        return [x for c in below[k] for x in leaves(c)] if below[k] else [outcome[k]]

    def v(k: int) -> float:
        return mean(leaves(k)) if value == "leaf" or not below[k] else mean([v(c) for c in below[k]])

    def v_of(i: int) -> float:
        first = [k for k in range(batch.turns) if rollout[k] == i and above[k] < 0]
        return mean([x for k in first for x in leaves(k)] if value == "leaf" else [v(k) for k in first])

    def b(k: int) -> float:
        if above[k] >= 0:
            others = mean([v(c) for c in below[above[k]] if c != k])
            return b(above[k]) if math.isnan(others) else others
        others = mean([v_of(j) for j, g in enumerate(group) if g == group[rollout[k]] and j != rollout[k]])
        return v_of(rollout[k]) if math.isnan(others) else others

    return [0.0 if math.isnan(v(k)) else v(k) - b(k) for k in range(batch.turns)]


@pytest.mark.parametrize("value", ["leaf", "child"])
@pytest.mark.parametrize("seed", range(15))
def test_it_is_the_definition(seed: int, value: By) -> None:
    batch = random_forest(seed)
    found = on_outcomes(batch, value=value)
    torch.testing.assert_close(found, torch.tensor(defined(batch, value=value), dtype=torch.float32))


@pytest.mark.parametrize("seed", range(5))
def test_at_every_fork_and_over_every_group_it_sums_to_0(seed: int) -> None:
    draw = random.Random(seed)
    back = [[0, *(1 + draw.randrange(k) for k in range(1, 9))] for _ in range(4)]  # one first turn each
    batch = forest(back, [draw.random() for _ in range(36)], groups=[0, 0, 1, 1])
    for value in ("leaf", "child"):
        advantage = on_outcomes(batch, value=value)
        parent = torch.arange(36) - batch.extra["back_K"]
        first = batch.extra["back_K"] == 0
        parent[first] = 36 + batch.group_R[batch.rollout_K[first]]
        sums = torch.zeros(38).index_add(0, parent, advantage)
        forks = torch.bincount(parent, minlength=38) > 1
        assert forks.sum() > 4
        torch.testing.assert_close(sums[forks], torch.zeros(int(forks.sum())), atol=1e-6, rtol=0)


@pytest.mark.parametrize("value", ["leaf", "child"])
def test_along_a_path_what_turns_add_sums_to_what_it_came_to(value: By) -> None:
    # with one other branch at each fork, V(c) - b(c) is twice V(c) - V(parent) by child, which telescopes to o - V(0)
    batch = forest([[0, 1, 2, 1, 2]], [NAN, 0.25, NAN, 1.0, 0.5])
    added = on_outcomes(batch, value="child", alone="parent")
    assert (added[2] + added[3]).item() == 2 * (1.0 - (0.25 + 0.75) / 2)
    assert on_outcomes(batch, value=value, alone="parent")[0] == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_tree_of_rollouts_that_share_turns_is_that_of_one_rollout_that_forks(seed: int) -> None:
    draw = random.Random(seed)
    words = sorted({"".join(draw.choice("ab") for _ in range(5)) for _ in range(8)})
    rewards = [draw.random() for _ in words]
    shared = named(words, rewards)
    turns = [sorted({w[:end] for w in words if w[0] == first for end in range(1, 6)}) for first in "ab"]
    back = [[k - own.index(w[:-1]) if len(w) > 1 else 0 for k, w in enumerate(own)] for own in turns]
    told = dict(zip(words, rewards, strict=True))
    forked = forest(back, [told.get(w, NAN) for own in turns for w in own])
    found = dict(zip([w for own in turns for w in own], on_outcomes(forked).tolist(), strict=True))
    expected = torch.tensor([found[w[:end]] for w in words for end in range(1, 6)])
    torch.testing.assert_close(tree_advantage(shared), expected)


def test_in_the_mean_over_all_draws_it_is_the_gradient_of_the_expected_outcome() -> None:
    # A first turn a is 1 with probability p; then twice, alike and apart, a second turn b, 1 with probability q[a];
    # outcomes o[a][b]. J = sum over a, b of P(a) P(b | a) o[a][b]. The slope of log P at a logit is x - P(x = 1).
    p, q, o = 0.3, (0.6, 0.2), ((0.1, 0.9), (1.0, 0.4))
    worth = [q[a] * o[a][1] + (1 - q[a]) * o[a][0] for a in (0, 1)]
    expected = torch.tensor(
        [
            p * (1 - p) * (worth[1] - worth[0]),
            (1 - p) * q[0] * (1 - q[0]) * (o[0][1] - o[0][0]),
            p * q[1] * (1 - q[1]) * (o[1][1] - o[1][0]),
        ]
    )
    trees = list(product((0, 1), repeat=3))  # a, b of the first branch, b of the second
    groups = list(product(trees, repeat=2))  # all groups of two rollouts

    def chance(a: int, *b: int) -> float:
        return (p if a else 1 - p) * math.prod(q[a] if x else 1 - q[a] for x in b)

    outcomes = [x for group in groups for a, b, c in group for x in (NAN, o[a][b], o[a][c])]
    numbers = [n for n in range(len(groups)) for _ in range(2)]
    advantage = on_outcomes(forest([[0, 1, 2]] * 2 * len(groups), outcomes, groups=numbers)).view(-1, 2, 3)
    found = torch.zeros(3)
    for group, first in zip(groups, advantage.tolist(), strict=True):
        for (a, b, c), (of_a, of_b, of_c) in zip(group, first, strict=True):
            slopes = torch.zeros(3)
            slopes[0] = of_a * (a - p)
            slopes[1 + a] = (of_b * (b - q[a]) + of_c * (c - q[a])) / 2  # each of two branches weighs 1/2
            found += math.prod(chance(*tree) for tree in group) * slopes / 2
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


LEAVES = table([[2, 1, 1], [1], [1, 1], [2], [1]], groups=[0, 0, 1, 1, 1], rewards=[1.0, 0.0, 0.0, 2.0, 1.0], old=HALF)
IN_ROLLOUTS = LEAVES.with_extra(back_K=torch.tensor([0, 1, 2, 0, 0, 0, 0, 0]))
BETWEEN = LEAVES.with_extra(
    node_K=torch.tensor([3, 4, 5, 6, 3, 8, 9, 3]), above_K=torch.tensor([-1, 3, 3, -1, -1, 3, -1, -1])
)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("batch", [IN_ROLLOUTS, BETWEEN])
def test_it_obeys_the_laws_of_methods(batch: Batch, law: str) -> None:
    method = Method(paper=Paper("none"), credit=tree_advantage, objective=objective.clipped_ratio, average=token_mean)
    LAWS[law](method, numbered(batch))


# ---- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({}, "reads the column 'back_K'"),
        ({"back_K": [0, 2, 0]}, "outside of it"),
        ({"back_K": [0, -1, 0]}, "outside of it"),
        ({"back_K": [0, 0, 1]}, "outside of it"),  # the parent is in another rollout
        ({"node_K": [1, 2, 3]}, "reads the column 'above_K'"),
        ({"node_K": [1, 2, 3], "above_K": [-1, 7, -1]}, "two or none"),
        ({"node_K": [1, 2, 2], "above_K": [-1, 1, -1]}, "two or none"),
        ({"node_K": [1, 2, 3], "above_K": [2, 1, -1]}, "above itself"),
        ({"node_K": [1, 2, 3], "above_K": [-1, 2, -1]}, "above itself"),
    ],
)
def test_what_is_no_tree_is_refused(columns: dict[str, list[int]], says: str) -> None:
    batch = table([[1, 1], [1]], rewards=[1.0, 0.0])
    with pytest.raises(ValueError, match=says):
        tree_advantage(batch.with_extra(**{name: torch.tensor(x) for name, x in columns.items()}))


def test_a_missing_reward_is_refused_unless_turns_have_outcomes() -> None:
    batch = forest([[0], [0]], [1, 0], rewards=[NAN, 0.0])
    with pytest.raises(ValueError, match="Missing is not zero"):
        tree_advantage(batch)
    assert on_outcomes(batch).tolist() == [1, -1]
    with pytest.raises(ValueError, match="reads the column 'nobody_K'"):
        tree_advantage(batch, outcome="nobody_K")


def test_without_turns_there_is_nothing() -> None:
    nothing: Tensor = tree_advantage(forest([[], []], rewards=[1.0, 0.0]))
    assert nothing.tolist() == []
    assert tree_advantage(named(["", ""], [1.0, 0.0])).tolist() == []
