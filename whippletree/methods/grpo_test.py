from __future__ import annotations

from functools import partial

import torch

from whippletree.methods._tables import HALF, WORKED, forward_of, gradient, table
from whippletree.methods._toy import learn, negated
from whippletree.methods.grpo import METHOD, WITH_REFERENCE

BATCH = WORKED
ROOT = 1 / 2**0.5  # rewards 1 and 0: (1 - 1/2) / std, where std is sqrt(1/4 + 1/4)


def test_the_advantage_by_hand() -> None:
    # group 1: rewards 0, 2, 1 have mean 1 and std sqrt((1 + 1 + 0) / 2) = 1
    expected_N = torch.tensor([ROOT, ROOT, ROOT, -ROOT, -1, -1, 1, 1, 0])
    torch.testing.assert_close(METHOD.credit(BATCH), expected_N)


def test_the_gradient_on_policy_by_hand() -> None:
    # minus the advantage, over 5 rollouts, over the tokens of the rollout
    forward = forward_of(BATCH.logp_old_N)
    loss_N = METHOD.objective(forward, METHOD.credit(BATCH), BATCH)
    expected_N = torch.tensor([-ROOT / 15, -ROOT / 15, -ROOT / 15, ROOT / 5, 0.1, 0.1, -0.1, -0.1, 0])
    torch.testing.assert_close(gradient(forward, loss_N, METHOD.average(BATCH)), expected_N)


def test_a_good_token_past_the_clip_has_no_gradient_and_a_bad_one_has() -> None:
    # rho 1.5: min(1.5 A, 1.2 A) is the constant 1.2 for A = 1, and 1.5 A for A = -1 with slope 1.5
    batch = table([[1], [1]], rewards=[1.0, 0.0], old=HALF)
    forward = forward_of(batch.logp_old_N + torch.tensor(1.5).log())
    loss_N = METHOD.objective(forward, torch.tensor([1.0, -1.0]), batch)
    torch.testing.assert_close(loss_N.detach(), torch.tensor([-1.2, 1.5]))
    torch.testing.assert_close(gradient(forward, loss_N), torch.tensor([0.0, 1.5]))


def test_with_the_reference_the_policy_is_drawn_back() -> None:
    # advantage 0 leaves 0.04 * KL; x = log(1/2) - log(1/4) = log 2: KL = 1/2 - 1 + log 2, slope 1 - exp(-x) = 1/2
    batch = table([[1]], rewards=[1.0], old=HALF, ref_logp_N=[2 * HALF])
    forward = forward_of([HALF])
    loss_N = WITH_REFERENCE.objective(forward, torch.zeros(1), batch)
    torch.testing.assert_close(loss_N.detach(), torch.tensor([0.04 * (0.6931472 - 0.5)]))
    torch.testing.assert_close(gradient(forward, loss_N), torch.tensor([0.02]))


def test_with_the_reference_it_learns_less_far() -> None:
    assert 0.9 < learn(WITH_REFERENCE, steps=60) < learn(METHOD, steps=60)


def test_it_learns_the_toy_and_unlearns_it_with_the_credit_negated() -> None:
    # chance is 1/4
    assert learn(METHOD) > 0.9
    assert learn(METHOD.but(credit=partial(negated, credit=METHOD.credit))) < 0.05
