from __future__ import annotations

from functools import partial

import torch

from whippletree.methods._tables import HALF, WORKED, forward_of, gradient, moves, table
from whippletree.methods._toy import learn, negated
from whippletree.methods.ppo import ADVANTAGE, METHOD
from whippletree.types import Services

VALUES = [0.5, 0.75, 0.5, 0.5, 1.0, 0.5, 1.0, 1.5, 1.0]
BATCH = WORKED.with_extra(value_N=torch.tensor(VALUES), return_N=torch.ones(9))
SMALL = table([[1, 1], [1]], rewards=[1.0, 0.0], old=HALF, value_N=[0.5, 0.75, 0.5])


async def test_the_return_by_hand() -> None:
    # rollout 0, two turns: A_1 = 1 - 0.75; A_0 = (0.75 - 0.5) + 0.95 * 0.25 = 0.4875; rollout 1: A = 0 - 0.5
    # return = A + V
    torch.testing.assert_close(ADVANTAGE(SMALL), torch.tensor([0.4875, 0.25, -0.5]))
    found = await METHOD.evidence[1]([], SMALL, Services())
    torch.testing.assert_close(found["return_N"], torch.tensor([0.9875, 1.0, 0.0]))


def test_the_advantage_is_whitened() -> None:
    # mean 0.2375 / 3 = 0.0791667; variance 0.5501562 / 3 - 0.0791667^2 = 0.1771180; std 0.4208539
    expected_N = torch.tensor([0.4083333, 0.1708333, -0.5791667]) / 0.4208539
    torch.testing.assert_close(METHOD.credit(SMALL), expected_N)


def test_the_gradient_on_policy_by_hand_at_policy_and_value() -> None:
    # policy: -A / 3 tokens; value: 0.5 * 2 (V - G) / 3 = (V - G) / 3
    batch = SMALL.with_extra(return_N=torch.tensor([0.9875, 1.0, 0.0]))
    forward = forward_of(batch.logp_old_N, value_N=batch.extra["value_N"])
    advantage_N = METHOD.credit(batch)
    loss_N = METHOD.objective(forward, advantage_N, batch)
    torch.testing.assert_close(gradient(forward, loss_N, METHOD.average(batch)), -advantage_N / 3)
    (got_N,) = torch.autograd.grad((METHOD.average(batch) * loss_N).sum(), forward.value_N)
    torch.testing.assert_close(got_N, torch.tensor([-0.4875, -0.25, 0.5]) / 3)


def test_a_value_that_is_right_leaves_nothing_to_learn() -> None:
    batch = table([[2], [1]], rewards=[1.0, 0.0], old=HALF, value_N=[1.0, 1.0, 0.0])
    assert (METHOD.credit(batch) == 0).all()


def test_the_clip_range() -> None:
    # within and beyond 1.2 for a good token, 0.8 for a bad one
    seen = moves(METHOD.objective, (1.19, 1), (1.21, 1), (0.81, -1), (0.79, -1))
    assert seen == [True, False, True, False]


def test_it_learns_the_toy_and_unlearns_it_with_the_credit_negated() -> None:
    # chance is 1/4
    assert learn(METHOD) > 0.9
    assert learn(METHOD.but(credit=partial(negated, credit=METHOD.credit))) < 0.05
