from __future__ import annotations

from functools import partial

import torch

from whippletree.credit import group_mean, reward_to_go, whiten, whitened
from whippletree.methods._tables import table

ALL = torch.ones(3, dtype=torch.bool)


def test_whiten_by_hand_over_tokens() -> None:
    # 3, 0, 0 has mean 1 and variance (4 + 1 + 1) / 3 = 2
    torch.testing.assert_close(whiten(torch.tensor([3.0, 0.0, 0.0]), ALL), torch.tensor([2.0, -1, -1]) / 2**0.5)


def test_a_long_rollout_counts_by_its_tokens() -> None:
    # advantages 1, 1, 1 and 0: mean 3/4, variance 3/16
    batch = table([[3], [1]], rewards=[1.0, 0.0])
    expected_N = torch.tensor([0.25, 0.25, 0.25, -0.75]) / (3 / 16) ** 0.5
    torch.testing.assert_close(whitened(batch, credit=reward_to_go), expected_N)


def test_what_is_untrainable_has_no_part_in_the_statistics() -> None:
    known = torch.tensor([True, False, True])
    torch.testing.assert_close(whiten(torch.tensor([2.0, torch.nan, 0.0]), known), torch.tensor([1.0, 0, -1]))


def test_equal_advantages_none_and_a_single_one_give_zero() -> None:
    assert whiten(torch.full((3,), 0.1), ALL).tolist() == [0, 0, 0]
    assert whiten(torch.ones(3), ~ALL).tolist() == [0, 0, 0]
    assert whiten(torch.tensor([4.0]), ALL[:1]).tolist() == [0]
    assert whiten(torch.zeros(0), ALL[:0]).tolist() == []


def test_credit_of_zero_stays_zero() -> None:
    batch = table([[3], [1]], rewards=[0.3, 0.3])
    assert (whitened(batch, credit=partial(group_mean, scale="none")) == 0).all()
