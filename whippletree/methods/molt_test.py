"""The exact cases of the page are numbered as there."""

from __future__ import annotations

import inspect
import math
from dataclasses import fields
from functools import partial

import pytest
import torch
from torch import Tensor

from whippletree import credit, objective
from whippletree.methods._tables import HALF, WORKED, forward_of, gradient, moves, table
from whippletree.methods._toy import learn, negated
from whippletree.methods.molt import CLAIM, METHOD, gradient_error, lag
from whippletree.types import Batch
from whippletree.update.averages import constant, rollout_mean, token_mean

BATCH = WORKED.with_extra(logp_train_N=WORKED.logp_old_N + torch.tensor([0.1, 0, -0.1, 0.2, 0, 0.9, 0, -0.3, 0]))


def corrected(level: objective.correction.Level, mode: objective.correction.Mode) -> Tensor:
    """Weights of one reply with log-ratios 0 and 0.02, in the band 0.99-1.01."""
    batch = table([[2]], rewards=[1.0], old=HALF, logp_train_N=[HALF, HALF + 0.02])
    return objective.engine_weight(batch, level=level, mode=mode, low=0.99, high=1.01)


def test_case_3_a_rollout_in_two_pieces_counts_once_in_the_mean() -> None:
    # rewards 1 (two turns) and 0: the mean over rollouts is 1/2, not 2/3 over turns
    batch = table([[1, 1], [1]], rewards=[1.0, 0.0])
    torch.testing.assert_close(credit.group_mean(batch, scale="none"), torch.tensor([0.5, 0.5, -0.5]))


def test_case_4_the_correction() -> None:
    # exp(0.02) = 1.0202 is outside the band; the mean 0.01 gives 1.01005, outside; the sum 0.02 as well
    torch.testing.assert_close(corrected("token", "mask"), torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(corrected("token", "clip"), torch.tensor([1.0, 1.01]))
    torch.testing.assert_close(corrected("token", "trunc"), torch.tensor([1.0, 1.01]))
    torch.testing.assert_close(corrected("rollout_mean", "mask"), torch.zeros(2))
    torch.testing.assert_close(corrected("rollout", "mask"), torch.zeros(2))


def test_case_5_the_loss_denominators() -> None:
    loss_N = torch.tensor([1.0, 1.0, 4.0, 9.0])
    batch = table([[2], [2]], rewards=[1.0, 0.0], old=[HALF, HALF, HALF, math.nan])
    assert (token_mean(batch) * loss_N).sum().item() == pytest.approx(2.0)  # 6 / 3
    assert (rollout_mean(batch) * loss_N).sum().item() == pytest.approx(2.5)  # (1 + 4) / 2
    assert (constant(batch, tokens=1) * loss_N).sum().item() == pytest.approx(3.0)  # (2 + 4) / 2
    nothing = table([[2]], rewards=[1.0], old=math.nan)
    assert all(average(nothing).tolist() == [0, 0] for average in (token_mean, partial(constant, tokens=1)))


def test_case_5_two_ranks_that_weigh_by_the_whole_batch_add_up_to_it() -> None:
    # whole batch of 6 trainable tokens, shared 4 to 2: the weights of each part are those of the whole
    whole = table([[2], [2], [2]], rewards=[1.0, 0.0, 1.0])
    weight_N, loss_N = token_mean(whole), torch.tensor([1.0, 1.0, 4.0, 0.0, 5.0, 1.0])
    ranks = (weight_N * loss_N)[:4].sum() + (weight_N * loss_N)[4:].sum()
    assert ranks.item() == pytest.approx(2.0)  # 12 / 6


def test_case_6_the_estimators() -> None:
    batch = table([[1]] * 4, rewards=[1.0, 0.0, 0.0, 1.0], groups=[0, 0, 1, 1])
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0])
    torch.testing.assert_close(credit.leave_one_out(batch), signs)
    torch.testing.assert_close(credit.group_mean(batch, scale="none"), 0.5 * signs)
    torch.testing.assert_close(credit.group_mean(batch), 0.70711 * signs, atol=1e-5, rtol=0)
    lone = table([[1]], rewards=[1.0])
    assert credit.group_mean(lone).tolist() == credit.group_mean(lone, scale="none").tolist() == [0.0]


def test_case_7_a_sequence_ratio_with_the_gradient_through_each_token() -> None:
    # the mean of 0.1 and -0.3 is -0.1: s = 0.904837 for both, and d(-s A)/dlogp = -s A at each
    batch = table([[2]], rewards=[1.0], old=HALF)
    forward = forward_of([HALF + 0.1, HALF - 0.3])
    loss_N = objective.sequence_ratio(forward, torch.tensor([1.0, 2.0]), batch, low=1.0, high=1.0)
    torch.testing.assert_close(gradient(forward, loss_N), -0.904837 * torch.tensor([1.0, 2.0]))


def test_the_gradient_on_policy_by_hand() -> None:
    # centred: 1/2 three times, -1/2, -1, -1, 1, 1, 0; their mean is 1/9 and mean square 5/9, so std is sqrt(44) / 9
    # whitened (9 A - 1) / sqrt(44); the trainer is the policy, so the gradient is minus that, times the weight, over 9
    forward = forward_of(BATCH.extra["logp_train_N"])
    loss_N = METHOD.objective(forward, METHOD.credit(BATCH), BATCH)
    white_N = torch.tensor([3.5, 3.5, 3.5, -5.5, -10, -10, 8, 8, -1]) / 44**0.5
    weight_N = torch.tensor([0.1, 0, -0.1, 0.2, 0, 0.9, 0, -0.3, 0]).exp().clamp(max=2)  # exp(0.9) = 2.46
    torch.testing.assert_close(gradient(forward, loss_N, METHOD.average(BATCH)), -white_N * weight_N / 9)


def group_median(batch: Batch) -> Tensor:
    """[N] reward minus the lower median of its group: the paper's example of a change of algorithm."""
    reward_R = credit.known_reward(batch)
    median_R = torch.stack([reward_R[batch.group_R == group].median() for group in batch.group_R])
    return credit.on_tokens(reward_R - median_R, batch)


def test_a_change_of_algorithm_is_one_function_of_four_lines_in_one_place() -> None:
    lines = [line for line in inspect.getsource(group_median).splitlines() if '"""' not in line]
    changed = METHOD.but(credit=partial(credit.whitened, credit=group_median))
    places = [f.name for f in fields(METHOD) if getattr(changed, f.name) is not getattr(METHOD, f.name)]
    assert len(lines) == 4 and places == ["credit"]  # the page says 4 lines and one call site
    # rewards 1, 0 have the lower median 0; rewards 0, 2, 1 have 1
    torch.testing.assert_close(group_median(BATCH), torch.tensor([1.0, 1, 1, 0, -1, -1, 1, 1, 0]))
    assert learn(changed) > 0.9


def test_the_engine_is_the_trainer_after_a_sync_and_falls_behind_between() -> None:
    assert abs(lag(0.0, 0)) < 1e-6
    assert 0 < lag(0.1, 0) < lag(0.4, 0)


def test_without_drift_the_correction_changes_nothing_and_a_blind_arm_is_useless() -> None:
    # METHOD and its baseline are the same where every ratio is 1; a credit of the wrong sign points away: 1 - (-cos)
    batch = table([[2], [2]], rewards=[1.0, 0.0], old=HALF, logp_train_N=[HALF] * 4)
    forward, advantage_N = forward_of([HALF] * 4), credit.group_mean(batch)
    losses = [arm.objective(forward, advantage_N, batch) for arm in (METHOD, CLAIM.baseline)]
    torch.testing.assert_close(*losses)
    against = METHOD.but(credit=partial(negated, credit=METHOD.credit))
    assert gradient_error(against, 0) == pytest.approx(2 - gradient_error(METHOD, 0), abs=1e-5)


def test_the_claim_measures_what_it_says_on_one_seed() -> None:
    error = {name: CLAIM.measure(arm, 2) for name, arm in {"off": CLAIM.baseline, "on": CLAIM.method}.items()}
    assert 0 < error["on"] < error["off"] < 1
    assert CLAIM.measure(CLAIM.arms["mask 0.99-1.01"], 2) > error["off"]  # the tight band leaves next to nothing


def test_the_clip_range() -> None:
    # within and beyond 1.2 for a good token, 0.8 for a bad one
    seen = moves(METHOD.objective, (1.19, 1), (1.21, 1), (0.81, -1), (0.79, -1))
    assert seen == [True, False, True, False]


def test_it_learns_the_toy_and_unlearns_it_with_the_credit_negated() -> None:
    # chance is 1/4
    assert learn(METHOD) > 0.9
    assert learn(METHOD.but(credit=partial(negated, credit=METHOD.credit))) < 0.05
