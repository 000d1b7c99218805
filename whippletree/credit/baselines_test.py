from __future__ import annotations

import math

import pytest
import torch

from whippletree.credit import batch_mean, group_mean, leave_one_out
from whippletree.methods._tables import WORKED, table
from whippletree.types import Batch


def one_group(*rewards: float) -> Batch:
    """One token a rollout."""
    return table([[1]] * len(rewards), rewards=rewards)


def test_group_mean_by_hand() -> None:
    # 3, 0, 0 has mean 1 and std sqrt((4 + 1 + 1) / 2) = sqrt(3)
    expected_N = torch.tensor([2.0, -1.0, -1.0])
    torch.testing.assert_close(group_mean(one_group(3.0, 0.0, 0.0), scale="none"), expected_N)
    torch.testing.assert_close(group_mean(one_group(3.0, 0.0, 0.0)), expected_N / 3**0.5)
    torch.testing.assert_close(group_mean(one_group(3.0, 0.0, 0.0), eps=1.0), expected_N / (3**0.5 + 1))


def test_leave_one_out_by_hand() -> None:
    # the winner's others average 0, so 1 - 0 = 1; a loser's others average 1/3, so 0 - 1/3
    torch.testing.assert_close(
        leave_one_out(one_group(1.0, 0.0, 0.0, 0.0)), torch.tensor([1.0, -1 / 3, -1 / 3, -1 / 3])
    )


def test_batch_mean_by_hand_over_rollouts_not_tokens() -> None:
    # rewards 1, 0, 0, 2, 1 of five rollouts: mean 4/5, squares 0.04 + 0.64 + 0.64 + 1.44 + 0.04 over 4 = 0.7
    centred_N = torch.tensor([0.2, 0.2, 0.2, -0.8, -0.8, -0.8, 1.2, 1.2, 0.2])
    torch.testing.assert_close(batch_mean(WORKED), centred_N / 0.7**0.5)


def test_leave_one_out_is_group_mean_scaled() -> None:
    batch = one_group(0.3, 2.0, -1.0)
    torch.testing.assert_close(leave_one_out(batch), group_mean(batch, scale="none") * 3 / 2)  # G / (G - 1)


def test_a_batch_of_one_group_is_that_group() -> None:
    batch = one_group(0.3, 2.0, -1.0)
    torch.testing.assert_close(batch_mean(batch), group_mean(batch))


def test_with_std_the_unit_of_the_reward_does_not_matter() -> None:
    torch.testing.assert_close(group_mean(one_group(0.3, 2.0, -1.0)), group_mean(one_group(30.0, 200.0, -100.0)))


@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, 1e5 + 0.7])
def test_equal_rewards_give_exactly_zero(reward: float) -> None:
    batch = one_group(*[reward] * 7)
    for advantage_N in (group_mean(batch), group_mean(batch, scale="none"), leave_one_out(batch), batch_mean(batch)):
        assert (advantage_N == 0).all()


def test_a_difference_that_is_rounding_is_none() -> None:
    assert (group_mean(one_group(0.5, 0.5 + 1e-7)) == 0).all()


def test_a_lone_rollout_has_no_advantage_or_is_refused() -> None:
    assert group_mean(one_group(5.0)).tolist() == group_mean(one_group(5.0), scale="none").tolist() == [0.0]
    with pytest.raises(ValueError, match=r"groups \[0\] have one. Sample more per task"):
        leave_one_out(one_group(5.0))


def test_an_untrainable_token_has_no_advantage_but_its_rollout_is_compared() -> None:
    batch = table([[2], [1]], rewards=[1.0, 0.0], old=[-1.0, math.nan, math.nan])
    assert group_mean(batch, scale="none").tolist() == [0.5, 0.0, 0.0]


def test_rollouts_without_tokens_are_compared_too() -> None:
    batch = table([[1], [], [0]], rewards=[1.0, 0.0, 0.5])
    assert group_mean(batch, scale="none").tolist() == [0.5]
