from __future__ import annotations

from functools import partial

import torch

from whippletree.methods._tables import HALF, WORKED, forward_of, gradient, table
from whippletree.methods._toy import learn, negated
from whippletree.methods.cispo import METHOD

BATCH = WORKED
ROOT = 1 / 2**0.5


def test_the_gradient_on_policy_by_hand() -> None:
    # on policy the weight is 1: minus the advantage over the 9 tokens of the batch
    forward = forward_of(BATCH.logp_old_N)
    loss_N = METHOD.objective(forward, METHOD.credit(BATCH), BATCH)
    expected_N = -torch.tensor([ROOT, ROOT, ROOT, -ROOT, -1, -1, 1, 1, 0]) / 9
    torch.testing.assert_close(gradient(forward, loss_N, METHOD.average(BATCH)), expected_N)


def test_a_token_far_from_its_sampler_keeps_its_gradient_with_a_weight_of_at_most_5() -> None:
    # ratios 3, 8 and 1/100: weights 3, 5 and 1/100 (no lower bound), times minus the advantage
    batch = table([[3]], rewards=[1.0], old=10 * HALF)
    forward = forward_of(batch.logp_old_N + torch.tensor([3.0, 8.0, 0.01]).log())
    loss_N = METHOD.objective(forward, torch.tensor([1.0, 1.0, -1.0]), batch)
    torch.testing.assert_close(gradient(forward, loss_N), torch.tensor([-3.0, -5.0, 0.01]))


def test_it_learns_the_toy_and_unlearns_it_with_the_credit_negated() -> None:
    # chance is 1/4
    assert learn(METHOD) > 0.9
    assert learn(METHOD.but(credit=partial(negated, credit=METHOD.credit))) < 0.05
