from __future__ import annotations

from functools import partial

import pytest
import torch

from whippletree.methods._tables import WORKED, forward_of, gradient, table
from whippletree.methods._toy import learn, negated
from whippletree.methods.rloo import METHOD

BATCH = WORKED


def test_the_gradient_on_policy_by_hand() -> None:
    # group 0: 1 - 0 = 1 and 0 - 1 = -1; group 1: 0 - 3/2, 2 - 1/2, 1 - 1
    # weights 1/5 over the tokens of each rollout: 1/15 (three tokens), 1/5, 1/10, 1/10, 1/5
    forward = forward_of(BATCH.logp_old_N)
    loss_N = METHOD.objective(forward, METHOD.credit(BATCH), BATCH)
    expected_N = torch.tensor([-1 / 15, -1 / 15, -1 / 15, 1 / 5, 0.15, 0.15, -0.15, -0.15, 0])
    torch.testing.assert_close(gradient(forward, loss_N, METHOD.average(BATCH)), expected_N)


def test_nothing_is_clipped() -> None:
    # a good token three times as likely as when sampled: loss -3 * 1, and d(-rho)/dlogp = -rho
    forward = forward_of(BATCH.logp_old_N + torch.tensor(3.0).log())
    loss_N = METHOD.objective(forward, torch.ones(BATCH.tokens), BATCH)
    torch.testing.assert_close(gradient(forward, loss_N), torch.full((BATCH.tokens,), -3.0))


def test_a_lone_rollout_is_refused() -> None:
    with pytest.raises(ValueError, match=r"two or more rollouts.*\[7\]"):
        METHOD.credit(table([[1], [1], [1]], rewards=[1.0, 0.0, 1.0], groups=[3, 3, 7]))


def test_it_learns_the_toy_and_unlearns_it_with_the_credit_negated() -> None:
    # chance is 1/4
    assert learn(METHOD) > 0.9
    assert learn(METHOD.but(credit=partial(negated, credit=METHOD.credit))) < 0.05
