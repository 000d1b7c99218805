from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from whippletree.toys.chains import chain, favour
from whippletree.toys.table import Table


def test_logits_are_start_plus_parameters_and_what_shares_one_moves_together() -> None:
    world = chain(positions=2, symbols=2)
    table = Table.of(world, favour(world, 1.0), index_PV=torch.tensor([[0, 1], [0, 1]]))
    with torch.no_grad():
        table.theta[0] = 2.0
    torch.testing.assert_close(table.logp_PV(), torch.tensor([[3.0, 0], [3.0, 0]]).log_softmax(-1))


@pytest.mark.parametrize("apart", [False, True])
def test_what_is_learned_beside_a_message_stays_there_if_kept_apart(apart: bool) -> None:
    world = replace(chain(positions=1, symbols=2), messages=1)
    table = Table.of(world, message_MPV=torch.tensor([[[1.0, 0.0]]]), apart=apart)
    told = world.play(table, [0] * 4, np.random.default_rng(0), message_RT=np.ones((4, 1), dtype=int))
    (slope,) = torch.autograd.grad(table.forward(told, told.batch).logp_N.sum(), table.theta)
    assert len(slope) == (4 if apart else 2)
    assert (slope[:2] != 0).any() == (not apart)
    torch.testing.assert_close(table.logp_PV()[1], torch.tensor([1.0, 0.0]).log_softmax(-1))


async def test_values_are_learned_beside_the_logits() -> None:
    world = chain(positions=3, symbols=2, one_turn=True)
    table = Table.of(world)
    with torch.no_grad():
        table.value_P += torch.tensor([0.1, 0.2, 0.3])
    played = world.play(table, [0, 0], np.random.default_rng(0))
    expected_N = torch.tensor([0.1, 0.2, 0.3] * 2)
    torch.testing.assert_close(table.forward(played, played.batch).value_N.detach(), expected_N)
    turns = [(turn.prompt_ids, turn.reply_ids) for r in played for turn in r.turns]
    torch.testing.assert_close(torch.cat(await table.values().logps(turns)), expected_N)


def test_the_entropy_of_a_uniform_row_is_the_log_of_its_actions() -> None:
    world = chain(positions=2)
    table = Table.of(world)
    played = world.play(table, [0], np.random.default_rng(0))
    passed = table.forward(played, played.batch)
    torch.testing.assert_close(passed.entropy_N, torch.full((2,), 4.0).log())
    assert passed.logits_NV.shape == (2, 4)


def test_a_table_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"logits for 6 places \(messages counted\) and 4 actions, but got \(5, 4\)"):
        Table(chain(), torch.zeros(5, 4))
