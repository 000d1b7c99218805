from __future__ import annotations

from functools import partial

import torch

from whippletree.methods._tables import HALF, WORKED, forward_of, gradient, moves, table
from whippletree.methods._toy import learn, negated
from whippletree.methods.reinforce_pp import METHOD

BATCH = WORKED.with_extra(ref_logp_N=torch.tensor([-1.0, -0.5, -2.0, -0.7, -0.6, -1.5, -0.9, -0.4, -1.1]))
SMALL = table([[1, 1], [1]], rewards=[1.0, 0.0], old=-1.0, ref_logp_N=[-2.0, -1.0, -1.0])


def test_the_advantage_by_hand() -> None:
    # kl = 1, 0 and 0; A = 1 - 0.01 * (1 + 0), 1 - 0 and 0, with mean 1.99 / 3 and mean square 1.9801 / 3
    mean, square = 1.99 / 3, 1.9801 / 3
    expected_N = (torch.tensor([0.99, 1.0, 0.0]) - mean) / (square - mean**2) ** 0.5
    torch.testing.assert_close(METHOD.credit(SMALL), expected_N)


def test_the_gradient_on_policy_by_hand() -> None:
    # minus the advantage, over the 3 tokens
    forward = forward_of(SMALL.logp_old_N)
    advantage_N = METHOD.credit(SMALL)
    loss_N = METHOD.objective(forward, advantage_N, SMALL)
    torch.testing.assert_close(gradient(forward, loss_N, METHOD.average(SMALL)), -advantage_N / 3)


def test_drifting_from_the_reference_costs_even_with_equal_rewards() -> None:
    # kl = 1 on the first rollout's token, 0 on the second's: A = 1 - 0.01 and 1, whitened to -1 and 1
    batch = table([[1], [1]], rewards=[1.0, 1.0], old=HALF, ref_logp_N=[HALF - 1, HALF])
    torch.testing.assert_close(METHOD.credit(batch), torch.tensor([-1.0, 1.0]), atol=1e-4, rtol=0)


def test_the_clip_range() -> None:
    # within and beyond 1.2 for a good token, 0.8 for a bad one
    seen = moves(METHOD.objective, (1.19, 1), (1.21, 1), (0.81, -1), (0.79, -1))
    assert seen == [True, False, True, False]


def test_it_learns_the_toy_and_unlearns_it_with_the_credit_negated() -> None:
    # chance is 1/4
    assert learn(METHOD) > 0.9
    assert learn(METHOD.but(credit=partial(negated, credit=METHOD.credit))) < 0.05
