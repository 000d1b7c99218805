from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from whippletree.methods._tables import WORKED, table
from whippletree.types import Average
from whippletree.update.averages import constant, rollout_mean, token_mean, turn_mean

NAN = math.nan
# tokens: rollout 0 has turns of 2 and 1, rollout 1 one turn of 1, rollouts 2, 3, 4 have 1 + 1, 2 and 1
PARTLY = table([[2, 1], [1], [2]], rewards=[0.0] * 3, old=[-1.0, NAN, -1.0, NAN, -1.0, -1.0])


def test_token_mean_by_hand() -> None:
    torch.testing.assert_close(token_mean(WORKED), torch.full((9,), 1 / 9))


def test_turn_mean_by_hand() -> None:
    # seven turns, of 2, 1, 1, 1, 1, 2, 1 tokens
    expected_N = torch.tensor([1 / 14, 1 / 14, 1 / 7, 1 / 7, 1 / 7, 1 / 7, 1 / 14, 1 / 14, 1 / 7])
    torch.testing.assert_close(turn_mean(WORKED), expected_N)


def test_rollout_mean_by_hand() -> None:
    # five rollouts, of 3, 1, 2, 2, 1 tokens; the turns of the first share its fifth
    expected_N = torch.tensor([1 / 15, 1 / 15, 1 / 15, 1 / 5, 0.1, 0.1, 0.1, 0.1, 1 / 5])
    torch.testing.assert_close(rollout_mean(WORKED), expected_N)


def test_constant_by_hand() -> None:
    torch.testing.assert_close(constant(WORKED, tokens=4), torch.full((9,), 1 / 20))


def test_untrainable_tokens_weigh_nothing_and_count_in_no_denominator() -> None:
    # trainable: token 0 (turn 0), 2 (turn 1), 4 and 5 (turn 3); turn 2, all of rollout 1, is as if it were not there
    torch.testing.assert_close(token_mean(PARTLY), torch.tensor([1 / 4, 0, 1 / 4, 0, 1 / 4, 1 / 4]))
    torch.testing.assert_close(turn_mean(PARTLY), torch.tensor([1 / 3, 0, 1 / 3, 0, 1 / 6, 1 / 6]))
    torch.testing.assert_close(rollout_mean(PARTLY), torch.tensor([1 / 4, 0, 1 / 4, 0, 1 / 4, 1 / 4]))
    torch.testing.assert_close(constant(PARTLY, tokens=5), torch.tensor([0.1, 0, 0.1, 0, 0.1, 0.1]))


@pytest.mark.parametrize("average", [token_mean, turn_mean, rollout_mean])
def test_shares_sum_to_one(average: Average) -> None:
    assert average(WORKED).sum().item() == pytest.approx(1)
    assert average(PARTLY).sum().item() == pytest.approx(1)


def test_with_one_turn_a_rollout_turns_and_rollouts_are_the_same() -> None:
    batch = table([[3], [1], [2]], rewards=[0.0] * 3)
    torch.testing.assert_close(turn_mean(batch), rollout_mean(batch))


@pytest.mark.parametrize("average", [token_mean, turn_mean, rollout_mean, partial(constant, tokens=1)])
def test_a_batch_that_cannot_train_has_weights_of_zero(average: Average) -> None:
    assert average(table([[2], [0]], rewards=[0.0, 0.0], old=NAN)).tolist() == [0, 0]
    assert average(table([[0]], rewards=[0.0])).tolist() == []
    assert torch.isfinite(average(PARTLY)).all()
