from __future__ import annotations

from functools import partial

import torch

from whippletree.methods._tables import WORKED, forward_of, gradient
from whippletree.methods._toy import learn, negated
from whippletree.methods.reinforce import METHOD

BATCH = WORKED


def test_each_token_has_the_reward_of_its_rollout() -> None:
    expected_N = torch.tensor([1.0, 1, 1, 0, 0, 0, 2, 2, 1])
    torch.testing.assert_close(METHOD.credit(BATCH), expected_N)


def test_the_gradient_on_policy_is_the_reward_over_the_number_of_rollouts() -> None:
    # d/dlogp of -(1/5) r log pi, for each token of each turn
    forward = forward_of(BATCH.logp_old_N)
    loss_N = METHOD.objective(forward, METHOD.credit(BATCH), BATCH)
    expected_N = -torch.tensor([1.0, 1, 1, 0, 0, 0, 2, 2, 1]) / 5
    torch.testing.assert_close(gradient(forward, loss_N, METHOD.average(BATCH)), expected_N)


def test_it_learns_the_toy_and_unlearns_it_with_the_credit_negated() -> None:
    # chance is 1/4
    assert learn(METHOD) > 0.9
    assert learn(METHOD.but(credit=partial(negated, credit=METHOD.credit))) < 0.05
