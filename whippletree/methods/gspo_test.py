from __future__ import annotations

from functools import partial

import torch

from whippletree.methods._tables import HALF, WORKED, forward_of, gradient, moves, table
from whippletree.methods._toy import learn, negated
from whippletree.methods.gspo import METHOD

BATCH = WORKED
ROOT = 1 / 2**0.5


def test_the_gradient_on_policy_by_hand() -> None:
    # on policy s is 1 and every token has its own gradient: minus the advantage over 5 rollouts and their tokens
    forward = forward_of(BATCH.logp_old_N)
    loss_N = METHOD.objective(forward, METHOD.credit(BATCH), BATCH)
    expected_N = torch.tensor([-ROOT / 15, -ROOT / 15, -ROOT / 15, ROOT / 5, 0.1, 0.1, -0.1, -0.1, 0])
    torch.testing.assert_close(gradient(forward, loss_N, METHOD.average(BATCH)), expected_N)


def test_a_turn_is_clipped_as_a_whole_by_its_mean() -> None:
    # one token up by 0.3, one down by 0.2998: the mean is 1e-4, within 4e-4, though each alone is far outside;
    # the second turn's mean is 1e-3, outside, so it has no gradient
    batch = table([[2, 2]], rewards=[1.0], old=HALF)
    forward = forward_of(batch.logp_old_N + torch.tensor([0.3, -0.2998, 1e-3, 1e-3]))
    loss_N = METHOD.objective(forward, torch.ones(4), batch)
    expected_N = torch.tensor([-1.0001, -1.0001, 0.0, 0.0])  # -exp(1e-4)
    torch.testing.assert_close(gradient(forward, loss_N), expected_N)
    torch.testing.assert_close(loss_N.detach(), torch.tensor([-1.0001, -1.0001, -1.0004, -1.0004]))


def test_the_clip_range() -> None:
    # within and beyond 1.0004 for a good token, 0.9997 for a bad one
    seen = moves(METHOD.objective, (1.00038, 1), (1.00042, 1), (0.99972, -1), (0.99968, -1))
    assert seen == [True, False, True, False]


def test_it_learns_the_toy_and_unlearns_it_with_the_credit_negated() -> None:
    # chance is 1/4
    assert learn(METHOD) > 0.9
    assert learn(METHOD.but(credit=partial(negated, credit=METHOD.credit))) < 0.05
