from __future__ import annotations

from functools import partial

import pytest
import torch

from whippletree.methods import grpo
from whippletree.toys.bandits import bandit, effort_bandit, expert_turns
from whippletree.toys.exact import by_task, chance, optimum, tilted
from whippletree.toys.learning import learn, negated
from whippletree.toys.table import Table


def test_a_bandit_pays_its_table() -> None:
    world = bandit(torch.tensor([[1.0, 0.0], [0.5, 0.25]]))
    assert by_task(world, Table.of(world).logp_PV()).tolist() == [0.5, 0.375]
    assert optimum(world).tolist() == [1.0, 0.5]


def test_the_best_policy_near_another_by_hand() -> None:
    # e = 2.71828 on the first two of (.1, .2, .3, .4): Z = .3 e + .7
    logp_PV = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    got = tilted(logp_PV, torch.tensor([[1.0, 1.0, 0.0, 0.0]]), beta=1.0).exp()
    torch.testing.assert_close(got, torch.tensor([[0.179367, 0.358734, 0.197956, 0.263942]]), atol=1e-6, rtol=0)


def test_what_is_tilted_is_best_for_reward_less_the_divergence() -> None:
    logp_PV, reward_PV = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([[0.0, 1.0, 0.3]])
    best_PV = tilted(logp_PV, reward_PV, beta=0.5).requires_grad_()
    policy_PV = best_PV.log_softmax(-1)
    gain = (policy_PV.exp() * (reward_PV - 0.5 * (policy_PV - logp_PV))).sum()
    (slope,) = torch.autograd.grad(gain, best_PV)
    torch.testing.assert_close(slope, torch.zeros(1, 3), atol=1e-6, rtol=0)


def test_effort_solves_the_hard_task_only_at_its_most() -> None:
    world = effort_bandit(lambda effort: 0.02 * effort)
    assert optimum(world, "solved").tolist() == [1.0, 1.0]
    assert optimum(world).tolist() == pytest.approx([1 - 0.02, 1 - 0.2])
    assert by_task(world, Table.of(world).logp_PV(), "solved").tolist() == pytest.approx([1.0, 0.1])
    assert chance(world, "effort")(Table.of(world)) == pytest.approx(5.5)


def test_turns_of_an_expert_come_in_thirds_that_the_reference_knows_does_not_or_half() -> None:
    turns = expert_turns()
    share_P = by_task(turns.world, Table.of(turns.world, turns.reference_PV).logp_PV())
    assert torch.bincount(turns.kind_P).tolist() == [67, 67, 66]
    torch.testing.assert_close(share_P[turns.kind_P == 0], torch.full((67,), 0.999))
    torch.testing.assert_close(share_P[turns.kind_P == 1], torch.full((67,), 0.001))
    mixed_P = share_P[turns.kind_P == 2]
    assert mixed_P.min() > 0.09 and mixed_P.max() < 0.61
    accepted_PV = turns.world.reward_SV
    assert set(accepted_PV.sum(1).tolist()) == {2.0, 3.0}
    assert (accepted_PV[torch.arange(200), turns.expert_P] == 1).all()
    assert torch.equal(turns.world.measures["exact"].argmax(1), turns.expert_P)
    assert torch.equal(expert_turns().reference_PV, turns.reference_PV)
    assert not torch.equal(expert_turns(seed=1).reference_PV, turns.reference_PV)


def test_a_bandit_is_learned_and_unlearned_with_the_credit_negated() -> None:
    world = bandit(torch.eye(10)[[3, 7]])
    run = partial(learn, seed=0, updates=60, rate=1.0)
    assert run(grpo.METHOD, world, Table.of(world)).last() > 0.9
    assert run(negated(grpo.METHOD), world, Table.of(world)).last() < 0.05
