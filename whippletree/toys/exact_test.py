from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from whippletree import objective
from whippletree.credit import group_mean, reward_to_go
from whippletree.toys.chains import chain, favour
from whippletree.toys.corridors import corridor
from whippletree.toys.exact import chance, expected, optimum, values
from whippletree.toys.table import Table
from whippletree.update.averages import constant


@pytest.mark.parametrize(
    ("cells", "steps", "probability"),
    [
        (2, 1, 1 / 3),
        (2, 2, 1 - (2 / 3) ** 2),
        (3, 1, 0.0),
        (3, 2, 1 / 9),  # FF
        (3, 3, 3 / 27 + 3 / 27),  # FF and anything; SFF, BFF (the first cell has no back), FSF; not FBF
    ],
)
def test_the_success_of_a_uniform_walk_by_hand(cells: int, steps: int, probability: float) -> None:
    world = corridor(cells=cells, steps=steps)
    assert chance(world)(Table.of(world)) == pytest.approx(probability, abs=1e-6)


def test_values_by_hand() -> None:
    # one action left: 1/3 next to the goal, 0 before; two left: 1/9 in cell 0, 1/3 + 1/3 * 1/3 in cell 1
    world = corridor(cells=3, steps=2)
    value_TS = values(world, Table.of(world).logp_PV())
    torch.testing.assert_close(value_TS, torch.tensor([[1 / 9, 4 / 9, 0], [0, 1 / 3, 0], [0, 0, 0]]))


@pytest.mark.parametrize("bonus", [0.0, 1.0, 2.0])
def test_a_chain_is_solved_with_the_product_of_its_positions(bonus: float) -> None:
    world = chain()
    right = math.exp(bonus) / (math.exp(bonus) + 3)
    table = Table.of(world, favour(world, bonus))
    assert chance(world)(table) == pytest.approx(right**6, rel=1e-5)
    assert chance(world, "right_share")(table) == pytest.approx(right, rel=1e-5)


def test_the_optimum_is_what_the_best_actions_give() -> None:
    assert optimum(corridor()).tolist() == [1.0]
    assert optimum(corridor(cells=9, steps=7)).tolist() == [0.0]  # eight steps are needed
    assert optimum(chain(), "right_share").tolist() == pytest.approx([1.0])


@pytest.mark.parametrize("world", [corridor(cells=4, steps=6), chain(positions=2), chain(positions=2, one_turn=True)])
def test_exact_and_sampled_means_agree(world) -> None:
    start_PV = torch.randn(world.places, world.actions, generator=torch.Generator().manual_seed(0))
    table = Table.of(world, start_PV)
    played = world.play(table, [0] * 20_000, np.random.default_rng(0))
    for name in (*world.rewards, *world.measures):
        count_R = played.counted(name)
        noise = count_R.std() / len(count_R) ** 0.5
        assert abs(count_R.mean() - chance(world, name)(table)) < 4 * noise + 1e-6


@pytest.mark.parametrize("credit", [reward_to_go, partial(group_mean, scale="none")])
def test_the_mean_of_the_sampled_gradient_is_the_exact_one(credit) -> None:
    # a baseline of the group's mean shrinks it by (R - 1) / R, here 1 in 40,000
    world = corridor(cells=3, steps=4)
    table = Table.of(world, torch.tensor([[0.5, 0.0, -0.5], [0.0, 0.3, 0.2], [0.0, 0.0, 0.0]]))
    (exact,) = torch.autograd.grad(expected(world, table.logp_PV()), table.theta)
    played = world.play(table, [0] * 40_000, np.random.default_rng(1))
    loss_N = objective.policy_gradient(table.forward(played, played.batch), credit(played.batch), played.batch)
    (sampled,) = torch.autograd.grad((loss_N * constant(played.batch, tokens=1)).sum(), table.theta)
    torch.testing.assert_close(-sampled, exact, atol=0.01, rtol=0)
    assert exact.abs().max() > 0.1


def test_a_measure_is_counted_on_its_own() -> None:
    world = corridor(cells=2, steps=3)
    world = replace(world, measures={"moves": torch.ones(2, 3)})
    # one action, then a second after 2/3, a third after 4/9
    assert chance(world, "moves")(Table.of(world)) == pytest.approx(1 + 2 / 3 + 4 / 9)
    with pytest.raises(ValueError, match=r"counts \['moves', 'reward'\], but not 'steps'"):
        world.table("steps")
