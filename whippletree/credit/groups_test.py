from __future__ import annotations

import math

import pytest
import torch

from whippletree.credit import group_mean, group_size, known_reward, mean_within, on_tokens, std_within
from whippletree.methods._tables import table

GROUP_R = torch.tensor([7, 3, 7, 7, 3, 5])  # neither sorted nor counted from 0, as after `select`
X_R = torch.tensor([1.0, 2.0, 4.0, 1.0, 6.0, 9.0])


def test_statistics_within_groups_by_hand() -> None:
    # group 7: 1, 4, 1 has mean 2 and squares 1 + 4 + 1 over 2; group 3: 2, 6 has 4 and 4 + 4 over 1; group 5 is alone
    double = torch.float64
    assert group_size(GROUP_R).tolist() == [3, 2, 3, 3, 2, 1]
    torch.testing.assert_close(mean_within(X_R, GROUP_R), torch.tensor([2, 4, 2, 2, 4, 9], dtype=double))
    torch.testing.assert_close(std_within(X_R, GROUP_R), torch.tensor([3, 8, 3, 3, 8, 0], dtype=double).sqrt())


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e6 + 0.3, -7.7])
@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_equal_numbers_are_exactly_their_mean(reward: float, size: int) -> None:
    x_R = torch.full((size,), reward)
    group_R = torch.zeros(size, dtype=torch.int64)
    assert (mean_within(x_R, group_R) == x_R.double()).all() and (std_within(x_R, group_R) == 0).all()


def test_a_missing_reward_is_refused_with_its_rollout_and_is_not_zero() -> None:
    batch = table([[1], [1], [1]], rewards=[1.0, math.nan, 0.0])
    with pytest.raises(ValueError, match=r"rollouts \[1\] have none.*Missing is not zero"):
        known_reward(batch)
    with pytest.raises(ValueError, match="Missing is not zero"):
        group_mean(batch)


def test_tokens_take_the_number_of_their_rollout_and_untrainable_ones_0() -> None:
    batch = table([[1, 1], [2]], rewards=[1.0, 0.0], old=[-1.0, math.nan, -1.0, -1.0])
    assert on_tokens(torch.tensor([5.0, 6.0]), batch).tolist() == [5, 0, 6, 6]
