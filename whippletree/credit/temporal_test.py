from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from whippletree.credit import gae, reward_to_go
from whippletree.methods._tables import table

NAN = math.nan


def recursion(values: Sequence[float], reward: float, *, gamma: float, lam: float) -> list[float]:
    """GAE of one rollout as the paper writes it, one token after another."""
    advantage, found = 0.0, []
    for t in reversed(range(len(values))):
        after = values[t + 1] if t + 1 < len(values) else 0.0
        arrived = reward if t + 1 == len(values) else 0.0
        advantage = arrived + gamma * after - values[t] + gamma * lam * advantage
        found.append(advantage)
    return found[::-1]


def test_gae_by_hand_through_the_turns_of_a_rollout() -> None:
    # rollout 0, tokens 0 1 | 2: delta_2 = 1 - 0.5, delta_1 = 0.9 * 0.5 - 0.2 = 0.25, delta_0 = 0.9 * 0.2 - 0.1 = 0.08
    # A_2 = 0.5; A_1 = 0.25 + 0.45 * 0.5 = 0.475; A_0 = 0.08 + 0.45 * 0.475 = 0.29375;  rollout 1: 0 - 0.3
    batch = table([[2, 1], [1]], rewards=[1.0, 0.0], value_N=[0.1, 0.2, 0.5, 0.3])
    expected_N = torch.tensor([0.29375, 0.475, 0.5, -0.3])
    torch.testing.assert_close(gae(batch, gamma=0.9, lam=0.5), expected_N)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("lengths", [[1, 2, 3, 4, 5], [64], [65, 1, 63], [1, 0, 1]])
def test_gae_is_the_recursion(lengths: list[int], gamma: float, lam: float) -> None:
    random = torch.Generator().manual_seed(0)
    values = [torch.rand(n, generator=random).tolist() for n in lengths]
    rewards = [float(i % 2) for i in range(len(lengths))]
    expected = [x for v, r in zip(values, rewards, strict=True) for x in recursion(v, r, gamma=gamma, lam=lam)]
    batch = table([[n] for n in lengths], rewards=rewards, value_N=[x for v in values for x in v])
    torch.testing.assert_close(gae(batch, gamma=gamma, lam=lam), torch.tensor(expected))


def test_with_gamma_and_lam_1_the_advantage_is_the_reward_less_the_value() -> None:
    batch = table([[2], [1]], rewards=[1.0, 3.0], value_N=[0.25, 0.5, 1.0])
    torch.testing.assert_close(gae(batch), torch.tensor([0.75, 0.5, 2.0]))


def test_untrainable_tokens_are_transparent_and_pass_on_the_reward() -> None:
    # tokens 1 and 3 may not train: the recursion is that of tokens 0 and 2, and the reward arrives at 2
    batch = table([[2, 2]], rewards=[1.0], old=[-1.0, NAN, -1.0, NAN], value_N=[0.1, NAN, 0.5, NAN])
    a_0, a_2 = recursion([0.1, 0.5], 1.0, gamma=0.9, lam=0.5)
    torch.testing.assert_close(gae(batch, gamma=0.9, lam=0.5), torch.tensor([a_0, 0.0, a_2, 0.0]))


def test_reward_to_go_by_hand() -> None:
    # gamma 1/2, reward 4 at the last of three tokens: 1, 2, 4; the penalty 0.1 * kl of 1, 0, 2 is at its own token:
    # 4 - 0.2; 2 - 0.1 - 0; 1 - 0.05 - 0 - 0.1
    batch = table([[1, 2], [1]], rewards=[4.0, 1.0], old=-1.0, ref_logp_N=[-2.0, -1.0, -3.0, -1.0])
    torch.testing.assert_close(reward_to_go(batch, gamma=0.5), torch.tensor([1.0, 2.0, 4.0, 1.0]))
    penalised_N = reward_to_go(batch, gamma=0.5, kl_beta=0.1)
    torch.testing.assert_close(penalised_N, torch.tensor([0.85, 1.9, 3.8, 1.0]))


def test_reward_to_go_without_discount_is_the_reward() -> None:
    batch = table([[2, 1], [1]], rewards=[1.0, 0.5], old=[-1.0, -1.0, NAN, -1.0])
    torch.testing.assert_close(reward_to_go(batch), torch.tensor([1.0, 1.0, 0.0, 0.5]))


def test_reward_to_go_is_gae_of_a_value_of_zero() -> None:
    batch = table([[3], [1, 1]], rewards=[1.0, 2.0], value_N=[0.0] * 5)
    torch.testing.assert_close(reward_to_go(batch, gamma=0.9), gae(batch, gamma=0.9, lam=1.0))


def test_a_missing_column_or_reward_is_refused() -> None:
    with pytest.raises(ValueError, match="reads the column 'value_N'"):
        gae(table([[1]], rewards=[1.0]))
    with pytest.raises(ValueError, match="reads the column 'ref_logp_N'"):
        reward_to_go(table([[1]], rewards=[1.0]), kl_beta=0.1)
    with pytest.raises(ValueError, match="Missing is not zero"):
        reward_to_go(table([[1]], rewards=[NAN]))


def test_nothing_trainable_gives_nothing() -> None:
    nothing: Tensor = gae(table([[2]], rewards=[1.0], old=NAN, value_N=[0.5, 0.5]))
    assert nothing.tolist() == [0, 0]
    assert reward_to_go(table([[0], []], rewards=[1.0, 0.0])).tolist() == []
