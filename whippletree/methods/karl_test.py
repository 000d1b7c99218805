"""The unit cases of the page are numbered as there."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from whippletree.methods._tables import HALF, WORKED, forward_of, gradient, table
from whippletree.methods._toy import learn, negated
from whippletree.methods.karl import (
    CLAIM,
    CLIPPED,
    METHOD,
    NEAR,
    WEIGHED,
    above_value,
    learned,
    off_target,
    regression,
    sometimes_solved,
)
from whippletree.types import Batch

BATCH = WORKED
PAIR = table([[1], [1]], rewards=[1.0, 0.0], old=HALF)


def losses(batch: Batch, moved: list[float], *, beta: float = 1.0) -> torch.Tensor:
    """[N] the losses of a policy whose log-probs have moved by this much, with targets at a temperature of 1."""
    forward = forward_of(batch.logp_old_N + torch.tensor(moved))
    return regression(forward, above_value(batch), batch, beta=beta).detach()


# ---- by hand ----------------------------------------------------------------------------------------------------


def test_case_1_targets_loss_and_optimum_of_a_pair() -> None:
    # V = ln((e + 1) / 2) = 0.620115
    target_N = above_value(PAIR)
    torch.testing.assert_close(target_N, torch.tensor([0.379885, -0.620115]))
    assert losses(PAIR, [0, 0]).sum().item() == pytest.approx(0.528855, abs=1e-6)  # 0.144313 + 0.384543
    # log-ratios that are the targets have no loss; from (1/2, 1/2) they lead to a distribution again
    torch.testing.assert_close(losses(PAIR, target_N.tolist()), torch.zeros(2))
    torch.testing.assert_close(target_N.exp() / 2, torch.tensor([0.731059, 0.268941]))


@pytest.mark.parametrize(
    ("beta_v", "value"),
    # 1 - 0.1 ln 2, as exp(-10) is next to nothing; and the mean, a half, plus variance / (2 beta_v) = 0.25 / 200
    [(0.1, 0.930690), (100.0, 0.501250)],
)
def test_case_2_the_value_goes_from_the_largest_reward_to_the_mean(beta_v: float, value: float) -> None:
    torch.testing.assert_close(above_value(PAIR, beta_v=beta_v), torch.tensor([1 - value, -value]), atol=1e-6, rtol=0)


def test_a_tiny_temperature_and_large_rewards_do_not_overflow() -> None:
    batch = table([[1], [1], [1]], rewards=[1000.0, 999.0, -1000.0], old=HALF)
    # V = 1000 + 1e-3 ln(1/3)
    value = 1000 - 1e-3 * math.log(3)
    torch.testing.assert_close(above_value(batch, beta_v=1e-3), torch.tensor([1000.0, 999, -1000]) - value)


def test_case_3_equal_rewards_draw_the_policy_back_to_the_one_that_sampled() -> None:
    batch = replace(PAIR, reward_RC=torch.full((2, 1), 0.7))
    assert above_value(batch).tolist() == [0, 0]
    forward = forward_of(batch.logp_old_N + torch.tensor([0.3, -0.1]))
    loss_N = regression(forward, above_value(batch), batch, beta=1.0)
    torch.testing.assert_close(loss_N.detach(), torch.tensor([0.09, 0.01]))
    torch.testing.assert_close(gradient(forward, loss_N), torch.tensor([0.6, -0.2]))


def test_case_4_squared_errors_of_a_policy_that_moved() -> None:
    found_N = losses(PAIR, [0.2, -0.1])
    torch.testing.assert_close(found_N, torch.tensor([0.032359, 0.270519]), atol=1e-6, rtol=0)
    assert found_N.sum().item() == pytest.approx(0.302878, abs=1e-6)


def test_a_lone_rollout_has_the_target_0_and_is_only_drawn_back() -> None:
    lone = table([[2]], rewards=[1.0], old=HALF)
    assert above_value(lone).tolist() == [0, 0]
    torch.testing.assert_close(losses(lone, [0.1, 0.2]), torch.full((2,), 0.09))  # (0.1 + 0.2)^2


def test_log_ratios_are_summed_over_all_turns_of_a_rollout_and_not_averaged() -> None:
    # 0.1 + 0.2 + 0.3 over turns of one, no and two tokens; beta 1/2: (0.3 - A)^2 on each token
    batch = table([[1, 0, 2], [1]], rewards=[1.0, 0.0], old=HALF)
    found_N = losses(batch, [0.1, 0.2, 0.3, 0.0], beta=0.5)
    torch.testing.assert_close(found_N[:3], torch.full((3,), (0.3 - 0.379885) ** 2))
    # a rollout counts once, whatever its length
    torch.testing.assert_close(METHOD.average(batch), torch.tensor([1 / 6, 1 / 6, 1 / 6, 1 / 2]))


def test_the_gradient_by_hand() -> None:
    # d/dlogp of the mean over 2 rollouts of (beta u - A)^2 is beta (beta u - A) at each token, whatever its rollout's
    # length: here beta 0.05, u = 0.2 - 0.1 and 0.4, A as in case 1
    batch = table([[2], [1]], rewards=[1.0, 0.0], old=HALF)
    forward = forward_of(batch.logp_old_N + torch.tensor([0.2, -0.1, 0.4]))
    found_N = gradient(forward, METHOD.objective(forward, METHOD.credit(batch), batch), METHOD.average(batch))
    good, bad = 0.05 * (0.05 * 0.1 - 0.379885), 0.05 * (0.05 * 0.4 + 0.620115)
    torch.testing.assert_close(found_N, torch.tensor([good, good, bad]))


def test_nothing_is_clipped_however_far_the_policy_has_moved() -> None:
    # at u = 5, a ratio of 148, the loss still pulls: 2 (5 - 0.379885)
    forward = forward_of(PAIR.logp_old_N + torch.tensor([5.0, 0.0]))
    found_N = gradient(forward, regression(forward, above_value(PAIR), PAIR, beta=1.0))
    torch.testing.assert_close(found_N, 2 * torch.tensor([5 - 0.379885, 0.620115]))


def test_where_the_mean_log_ratio_is_used_another_policy_is_best() -> None:
    """Two words of two letters against one letter: the sum finds pi_0 exp(r) / Z, a mean moves each letter so far."""
    batch = table([[2], [1]], rewards=[1.0, 0.0], old=HALF)
    target_N = above_value(batch)
    half = (target_N[:2] / 2).tolist()
    torch.testing.assert_close(losses(batch, [*half, target_N[2].item()]), torch.zeros(3))
    assert losses(batch, target_N.tolist())[0] > 0.1  # the mean of its log-ratios is the target, the sum is not


def test_a_token_that_may_not_train_is_in_no_sum() -> None:
    batch = table([[2], [1]], rewards=[1.0, 0.0], old=[HALF, math.nan, HALF])
    forward = forward_of([HALF + 0.2, math.nan, HALF])
    loss_N = regression(forward, above_value(batch), batch, beta=1.0)
    torch.testing.assert_close(loss_N.detach(), torch.tensor([(0.2 - 0.379885) ** 2, 0, 0.620115**2]))
    assert gradient(forward, loss_N)[1] == 0


# ---- what is refused --------------------------------------------------------------------------------------------


def test_a_missing_reward_is_refused() -> None:
    with pytest.raises(ValueError, match="Missing is not zero"):
        above_value(replace(PAIR, reward_RC=torch.tensor([[1.0], [math.nan]])))


def test_a_temperature_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ValueError, match="must be positive, but got 0"):
        above_value(PAIR, beta_v=0.0)


def test_a_group_of_several_versions_is_refused_and_groups_of_different_versions_are_not() -> None:
    batch = table([[1], [1], [1], [1]], rewards=[1.0, 0, 1, 0], groups=[4, 4, 7, 7], old=HALF)
    apart = replace(batch, version_N=torch.tensor([3, 3, 5, 5]))
    torch.testing.assert_close(above_value(apart), above_value(batch))
    with pytest.raises(ValueError, match=r"groups \[7\] were sampled by several versions"):
        above_value(replace(batch, version_N=torch.tensor([3, 3, 5, 6])))


def test_what_is_always_or_never_solved_does_not_enter() -> None:
    rewards = ([0.0, 0, 0, 0], [0.0, 0, 0, 1], [1.0, 1, 1, 1], [0.01, 0, 0, 0])
    assert [sometimes_solved(torch.tensor(r)) for r in rewards] == [False, True, False, True]
    # the page's thresholds tell the same of groups of up to nine, and leave out what is nearly never solved
    page = partial(sometimes_solved, low=0.1, high=0.9)
    assert [page(torch.tensor(r)) for r in rewards] == [False, True, False, False]
    for size in range(2, 10):
        for solved in range(size + 1):
            reward_R = (torch.arange(size) < solved).float()
            assert page(reward_R) == sometimes_solved(reward_R)


# ---- learning ---------------------------------------------------------------------------------------------------


def test_it_learns_the_toy_and_unlearns_it_with_the_credit_negated() -> None:
    # chance is 1/4
    assert learn(METHOD) > 0.9
    assert learn(METHOD.but(credit=partial(negated, credit=METHOD.credit))) < 0.05


@pytest.mark.parametrize("lag", [1, 50, 400])
def test_the_tilted_policy_is_found_however_long_samples_are_used(lag: int) -> None:
    assert off_target(NEAR, 0, lag=lag) < 0.02


def test_ratios_alone_find_another_policy() -> None:
    # without a clip all goes to the best of ten actions, as its reward is largest
    assert off_target(WEIGHED, 0, lag=50) > 0.8
    assert off_target(CLIPPED, 0, lag=50) > 0.1


def test_the_lag_hurts_the_clipped_ratio_more() -> None:
    run = partial(learned, seed=0, updates=100)
    fresh, late = (
        {"clip": run((CLIPPED, 1)), "it": run((METHOD, 1))},
        {"clip": run((CLIPPED, 50)), "it": run(CLAIM.method)},
    )
    assert abs(fresh["clip"] - fresh["it"]) < 0.03
    assert late["clip"] < fresh["clip"] - 0.2 < late["it"]
