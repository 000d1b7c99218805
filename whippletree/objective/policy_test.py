from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from whippletree.methods._tables import HALF, WORKED, forward_of, gradient, table
from whippletree.objective import clipped_ratio, clipped_weight, policy_gradient, sequence_ratio
from whippletree.types import Objective

NAN, INF = math.nan, math.inf
EVERY: dict[str, Objective] = {
    "policy_gradient": policy_gradient,
    "clipped_ratio": clipped_ratio,
    "dual": partial(clipped_ratio, dual=3.0),
    "unclipped": partial(clipped_ratio, low=INF, high=INF),
    "sequence_ratio": sequence_ratio,
    "by rollout": partial(sequence_ratio, level="rollout"),
    "clipped_weight": clipped_weight,
}
RATIOS = torch.tensor([0.5, 0.9, 1.1, 1.5, 0.5, 0.9, 1.1, 5.0])
SIGNS = torch.tensor([1.0, 1, 1, 1, -1, -1, -1, -1])
EIGHT = table([[8]], rewards=[1.0], old=-3.0)


def test_policy_gradient_by_hand() -> None:
    forward = forward_of([-2.0, -0.5])
    loss_N = policy_gradient(forward, torch.tensor([3.0, -1.0]), table([[2]], rewards=[1.0], old=-1.0))
    torch.testing.assert_close(loss_N.detach(), torch.tensor([6.0, -0.5]))
    torch.testing.assert_close(gradient(forward, loss_N), torch.tensor([-3.0, 1.0]))


def test_clipped_ratio_by_hand() -> None:
    # good: the gain stops at 1.3; bad: the loss stops shrinking at 0.8; slope is -rho A where not stopped
    forward = forward_of(RATIOS.log() - 3)
    loss_N = clipped_ratio(forward, SIGNS, EIGHT, low=0.2, high=0.3)
    torch.testing.assert_close(loss_N.detach(), torch.tensor([-0.5, -0.9, -1.1, -1.3, 0.8, 0.9, 1.1, 5.0]))
    expected_N = torch.tensor([-0.5, -0.9, -1.1, 0, 0, 0.9, 1.1, 5.0])
    torch.testing.assert_close(gradient(forward, loss_N), expected_N)


def test_the_dual_clip_bounds_the_loss_of_a_bad_token() -> None:
    # the bad token of ratio 5 costs 3, not 5, and has no gradient; all else is as without
    forward = forward_of(RATIOS.log() - 3)
    plain_N, dual_N = clipped_ratio(forward, SIGNS, EIGHT), clipped_ratio(forward, SIGNS, EIGHT, dual=3.0)
    torch.testing.assert_close(dual_N[:-1], plain_N[:-1])
    assert dual_N[-1].item() == 3 and gradient(forward, dual_N)[-1] == 0


def test_a_dual_clip_within_the_plain_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must exceed 1, but got 0\.5"):
        clipped_ratio(forward_of([-3.0] * 8), SIGNS, EIGHT, dual=0.5)


def test_sequence_ratio_by_hand() -> None:
    # turn 0: mean of 0.1, -0.3 is -0.1; turn 1: 0.4; the rollout: 0.2 / 3
    batch = table([[2, 1]], rewards=[1.0], old=-1.0)
    forward = forward_of([-0.9, -1.3, -0.6])
    by_turn = sequence_ratio(forward, torch.ones(3), batch, low=1.0, high=1.0)
    s_N = torch.tensor([-0.1, -0.1, 0.4]).exp()
    torch.testing.assert_close(by_turn.detach(), -s_N)
    torch.testing.assert_close(gradient(forward, by_turn), -s_N)
    by_rollout = sequence_ratio(forward, torch.ones(3), batch, low=1.0, high=1.0, level="rollout")
    torch.testing.assert_close(gradient(forward, by_rollout), torch.full((3,), -math.exp(0.2 / 3)))


def test_the_mean_of_a_sequence_leaves_untrainable_tokens_out() -> None:
    batch = table([[3]], rewards=[1.0], old=[-1.0, NAN, -1.0])
    loss_N = sequence_ratio(forward_of([-0.8, 7.0, -0.6]), torch.ones(3), batch, low=1.0, high=1.0)
    torch.testing.assert_close(loss_N.detach()[[0, 2]], torch.full((2,), -math.exp(0.3)))


def test_clipped_weight_by_hand() -> None:
    # weights 0.9 (below the cap), 1.5 (capped from 5 by high=0.5), 0.8 (raised from 0.5 by low=0.2); slope -w A
    batch = table([[3]], rewards=[1.0], old=-3.0)
    logp_N = torch.tensor([0.9, 5.0, 0.5]).log() - 3
    forward = forward_of(logp_N)
    advantage_N = torch.tensor([1.0, 2.0, -1.0])
    loss_N = clipped_weight(forward, advantage_N, batch, low=0.2, high=0.5)
    weight_N = torch.tensor([0.9, 1.5, 0.8])
    torch.testing.assert_close(loss_N.detach(), -weight_N * advantage_N * logp_N)
    torch.testing.assert_close(gradient(forward, loss_N), -weight_N * advantage_N)


@pytest.mark.parametrize("name", EVERY)
def test_on_policy_every_objective_has_the_policy_gradient(name: str) -> None:
    forward, advantage_N = forward_of(WORKED.logp_old_N), torch.linspace(-1, 2, 9)
    loss_N = EVERY[name](forward, advantage_N, WORKED)
    torch.testing.assert_close(gradient(forward, loss_N), -advantage_N)


@pytest.mark.parametrize("name", EVERY)
def test_without_advantage_there_is_no_loss_however_far_the_policy_is(name: str) -> None:
    forward = forward_of(torch.linspace(-200, 0, 9))  # far beyond what float32 can exponentiate
    loss_N = EVERY[name](forward, torch.zeros(9), WORKED)
    assert (loss_N == 0).all() and (gradient(forward, loss_N) == 0).all()


@pytest.mark.parametrize("name", EVERY)
def test_an_untrainable_token_has_no_loss_and_no_gradient_whatever_it_holds(name: str) -> None:
    batch = table([[2, 2]], rewards=[1.0], old=[HALF, NAN, NAN, HALF])
    forward = forward_of([HALF + 1e-4, NAN, -INF, HALF - 1e-4])
    loss_N = EVERY[name](forward, torch.tensor([1.0, 5.0, NAN, 1.0]), batch)
    slope_N = gradient(forward, loss_N)
    assert loss_N[1:3].tolist() == [0, 0] and slope_N[1:3].tolist() == [0, 0]
    assert torch.isfinite(loss_N).all() and (slope_N[[0, 3]] < -0.9).all()
