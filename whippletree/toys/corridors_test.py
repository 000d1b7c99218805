from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from whippletree.toys.corridors import BACK, FORWARD, STAY, TAKE, corridor, key_corridor, on_taking
from whippletree.toys.exact import chance, optimum
from whippletree.toys.table import Table
from whippletree.toys.world import END, World


def end_of(world: World, *actions: int) -> tuple[float, int, float]:
    """(reward, last state, keys) of these actions."""
    state, reward, keys = int(world.start_G[0]), 0.0, 0.0
    for action in actions:
        reward += float(world.reward_SV[state, action])
        keys += float(world.table("key")[state, action])
        state = int(world.next_SV[state, action])
    return reward, state, keys


def test_a_corridor_is_walked_cell_by_cell() -> None:
    world = corridor()
    assert world.states == world.places == 9 and world.actions == 3 and world.steps == 20
    assert world.next_SV[0].tolist() == [1, 0, 0] and world.next_SV[7].tolist() == [END, 7, 6]
    assert world.reward_SV.nonzero().tolist() == [[7, FORWARD]]


def test_without_the_key_the_last_cell_pays_nothing() -> None:
    world = key_corridor(cells=4, key=1)
    assert end_of(world, FORWARD, FORWARD, FORWARD, STAY) == (0.0, 3, 0.0)
    assert end_of(world, FORWARD, FORWARD, FORWARD, BACK, BACK, TAKE) == (0.0, 4 + 1, 1.0)  # comes back for it
    assert end_of(world, FORWARD, TAKE, TAKE, FORWARD, FORWARD) == (1.0, END, 1.0)
    assert end_of(world, TAKE, FORWARD, STAY) == (0.0, 1, 0.0)  # there is no key in cell 0


def test_the_key_is_needed_by_hand() -> None:
    # uniform over four: forward, take, forward are the only three actions that succeed in three steps
    world = key_corridor(cells=3, key=1, steps=3)
    assert chance(world)(Table.of(world)) == pytest.approx(1 / 64)
    assert optimum(world).tolist() == [1.0] and optimum(replace(world, steps=2)).tolist() == [0.0]


def test_reluctance_to_take_makes_success_rare() -> None:
    world = key_corridor()
    shares = [chance(world)(Table.of(world, on_taking(world, logit))) for logit in (0.0, -2.0, -4.0)]
    assert shares[0] > shares[1] > shares[2] > 0 and shares[2] < 5e-4


def test_a_logit_for_taking_in_one_cell() -> None:
    world = key_corridor()
    start_PV = on_taking(world, 3.0, cell=3)
    assert start_PV.nonzero().tolist() == [[3, TAKE]] and torch.equal(start_PV[3], torch.tensor([0, 0, 0, 3.0]))
