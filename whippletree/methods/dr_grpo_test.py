from __future__ import annotations

from functools import partial

import torch

from whippletree.methods._tables import WORKED, forward_of, gradient, moves, table
from whippletree.methods._toy import learn, negated
from whippletree.methods.dr_grpo import METHOD

BATCH = WORKED


def test_the_gradient_on_policy_by_hand() -> None:
    # r - mean: 1/2, -1/2 in group 0; -1, 1, 0 in group 1; each token over 5 rollouts and the budget of 3000
    forward = forward_of(BATCH.logp_old_N)
    loss_N = METHOD.objective(forward, METHOD.credit(BATCH), BATCH)
    expected_N = -torch.tensor([0.5, 0.5, 0.5, -0.5, -1, -1, 1, 1, 0]) / 15000
    torch.testing.assert_close(gradient(forward, loss_N, METHOD.average(BATCH)), expected_N)


def test_a_token_of_a_long_wrong_reply_weighs_as_one_of_a_short() -> None:
    weight_N = METHOD.average(table([[1], [9]], rewards=[0.0, 0.0]))
    torch.testing.assert_close(weight_N, torch.full((10,), 1 / 6000))


def test_a_nearly_solved_task_is_not_raised() -> None:
    # 7 of 8 right: the one wrong rollout is 0 - 7/8 here; over the std of sqrt(7)/8 * sqrt(8/7) it would be -2.5
    batch = table([[1]] * 8, rewards=[1.0] * 7 + [0.0])
    torch.testing.assert_close(METHOD.credit(batch)[-1], torch.tensor(-0.875))


def test_the_clip_range() -> None:
    # within and beyond 1.2 for a good token, 0.8 for a bad one
    seen = moves(METHOD.objective, (1.19, 1), (1.21, 1), (0.81, -1), (0.79, -1))
    assert seen == [True, False, True, False]


def test_it_learns_the_toy_and_unlearns_it_with_the_credit_negated() -> None:
    # chance is 1/4
    assert learn(METHOD) > 0.9
    assert learn(METHOD.but(credit=partial(negated, credit=METHOD.credit))) < 0.05
