from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from whippletree.toys.chains import chain, criteria, favour
from whippletree.toys.exact import by_task, chance, expected
from whippletree.toys.table import Table
from whippletree.toys.world import END, World


def paid(world: World, word: tuple[int, ...], name: str) -> float:
    """What a channel or measure counts for a word."""
    state, total = 0, 0.0
    for symbol in word:
        assert state != END
        total += float(world.table(name)[state, symbol])
        state = int(world.next_SV[state, symbol])
    assert state == END
    return total


def test_every_word_of_a_small_chain_by_hand() -> None:
    world = chain(positions=3, symbols=2, reward="share")
    for word in itertools.product(range(2), repeat=3):
        assert paid(world, word, "solved") == float(word == (0, 0, 0))
        assert paid(world, word, "reward") == pytest.approx(word.count(0) / 3)
    assert world.rewards["reward"] is world.measures["right_share"]


def test_every_word_of_the_two_criteria_by_hand() -> None:
    world = criteria(length=4, symbols=6)
    for word in itertools.product((0, 1, 5), repeat=4):
        assert paid(world, word, "has") == float(1 in word[:2])
        assert paid(world, word, "lacks") == float(5 not in word[2:])


def test_the_criteria_of_a_uniform_policy_are_exact() -> None:
    # at least one of four is the needed symbol: 1 - (5/6)^4; none of four is the banned one: (5/6)^4
    world = criteria()
    table = Table.of(world)
    assert chance(world, "has")(table) == pytest.approx(1 - (5 / 6) ** 4)
    assert chance(world, "lacks")(table) == pytest.approx((5 / 6) ** 4)
    assert chance(world)(table) == pytest.approx(1.0)
    batch = world.play(table, [0] * 5, np.random.default_rng(0)).batch
    assert batch.channels == ("has", "lacks") and batch.lengths_K.tolist() == [8] * 5


def test_the_gradient_of_a_chain_by_hand() -> None:
    # P = p^2 with p = 1/2: dP/dlogit of the right symbol at one position = p * p (1 - p) = 1/8, of the other -1/8
    world = chain(positions=2, symbols=2)
    table = Table.of(world, favour(world, 0.0))
    (slope,) = torch.autograd.grad(expected(world, table.logp_PV()), table.theta)
    torch.testing.assert_close(slope.view(2, 2), torch.tensor([[1 / 8, -1 / 8]] * 2))
    assert by_task(world, table.logp_PV()).tolist() == [pytest.approx(1 / 4)]
