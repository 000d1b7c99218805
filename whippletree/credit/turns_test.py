from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from whippletree import credit
from whippletree.methods._tables import table
from whippletree.types import Batch

NAN, INF = math.nan, math.inf


def of_floats(*x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float32)


def drawn(seed: int, *, rollouts: int = 12) -> Batch:
    """Rollouts of 0 to 5 turns of 0 to 6 tokens, a quarter of which may not train."""
    draw = torch.Generator().manual_seed(seed)

    def numbers(most: int, size: int) -> list[int]:
        return torch.randint(most + 1, (size,), generator=draw).tolist()

    lengths = [numbers(6, turns) for turns in numbers(5, rollouts)]
    tokens = sum(map(sum, lengths))
    old = torch.where(torch.rand(tokens, generator=draw) < 0.25, NAN, -1.0)
    batch = table(lengths, rewards=torch.randn(rollouts, generator=draw).tolist(), old=old.tolist())
    return replace(batch, group_R=torch.arange(rollouts) % 3, id_N=torch.tensor(numbers(50, tokens)))


def total_R(x_N: Tensor, batch: Batch) -> Tensor:
    """[R] the sum over the trainable tokens of each rollout, added up one after the other."""
    sums = [0.0] * batch.rollouts
    for rollout, x, known in zip(batch.rollout_N.tolist(), x_N.tolist(), batch.trainable_N.tolist(), strict=True):
        sums[rollout] += x if known else 0.0
    return torch.tensor(sums)


# ---- turns and their tokens -------------------------------------------------------------------------------------


def test_where_turns_stand_and_what_they_hold() -> None:
    batch = table([[2, 0, 1], [], [1, 1]], rewards=[0.0] * 3, old=[0.0, NAN, 0.0, NAN, 0.0])
    assert credit.turn_position(batch).tolist() == [0, 1, 2, 0, 1]
    assert credit.turn_count(batch).tolist() == [3, 0, 2]
    assert credit.turn_tokens(batch).tolist() == [1, 0, 1, 0, 1]


def test_tokens_take_the_number_of_their_turn_and_a_missing_one_is_no_credit() -> None:
    batch = table([[2, 0, 1], [1, 1]], rewards=[0.0] * 2, old=[0.0, NAN, 0.0, 0.0, 0.0])
    assert credit.turn_to_tokens(of_floats(5, 6, 7, NAN, -9), batch).tolist() == [5, 0, 7, 0, -9]


def test_a_turn_sums_its_trainable_tokens_and_its_mean_leaves_missing_ones_out() -> None:
    batch = table([[3, 0], [2, 1]], rewards=[0.0] * 2, old=[0.0, 0.0, NAN, 0.0, 0.0, NAN])
    x_N = of_floats(1, 2, 99, 4, NAN, 99)
    # an empty turn adds up to 0 and has no mean; of a turn with an unknown token the sum is unknown
    torch.testing.assert_close(credit.turn_sum(x_N, batch).float(), of_floats(3, 0, NAN, 0), equal_nan=True)
    torch.testing.assert_close(credit.turn_mean(x_N, batch).float(), of_floats(1.5, NAN, 4, NAN), equal_nan=True)


# ---- weights ----------------------------------------------------------------------------------------------------


def test_weights_by_hand() -> None:
    # turn 1 of the first rollout is empty, and a turn of the second has no number; the third has numbers for none
    batch = table([[1, 0, 2, 1], [1, 1], [1, 1]], rewards=[0.0] * 3)
    x_K = of_floats(1, 8, 3, 0, 2, NAN, NAN, NAN)
    assert credit.uniform(batch).tolist() == [1 / 3, 0, 1 / 3, 1 / 3, 0.5, 0.5, 0.5, 0.5]
    assert credit.proportional(x_K, batch).tolist() == [0.25, 0, 0.75, 0, 1, 0, 0.5, 0.5]
    # e^(ln 2 / 1) = 2, e^(ln 4 / 1) = 4, e^0 = 1; at half the temperature their squares
    score_K = of_floats(math.log(2), 8, math.log(4), 0, 2, NAN, NAN, NAN)
    expected = torch.tensor([2 / 7, 0, 4 / 7, 1 / 7, 1, 0, 0.5, 0.5], dtype=torch.float64)
    torch.testing.assert_close(credit.softmax_within(score_K, batch), expected)
    colder_K = credit.softmax_within(score_K, batch, temperature=0.5)
    torch.testing.assert_close(colder_K[:4].float(), of_floats(4 / 21, 0, 16 / 21, 1 / 21))
    assert credit.top_turns(x_K, batch, turns=1).tolist() == [0, 0, 1, 0, 1, 0, 0.5, 0.5]
    assert credit.top_turns(x_K, batch, turns=2).tolist() == [0.5, 0, 0.5, 0, 1, 0, 0.5, 0.5]


def test_of_equal_turns_the_earlier_is_chosen_and_a_score_may_be_anything() -> None:
    batch = table([[1, 1, 1], [1, 1, 1]], rewards=[0.0] * 2)
    assert credit.top_turns(of_floats(0, 1, 1, -5, -5, -7), batch, turns=1).tolist() == [0, 1, 0, 1, 0, 0]
    assert credit.top_turns(of_floats(NAN, -INF, -INF, INF, 0, INF), batch, turns=1).tolist() == [0, 1, 0, 1, 0, 0]
    assert credit.softmax_within(of_floats(1000, -1000, 1000, 0, -INF, 0), batch).tolist() == [0.5, 0, 0.5] * 2


@pytest.mark.parametrize("weight", [-0.1, INF, -INF])
def test_a_weight_that_is_no_share_is_refused(weight: float) -> None:
    batch = table([[1, 1]], rewards=[1.0])
    for refused in (
        lambda w: credit.proportional(w, batch),
        lambda w: credit.redistributed(torch.ones(2), w, batch),
        lambda w: credit.redistributed_over_tokens(torch.ones(2), w, batch),
    ):
        with pytest.raises(ValueError, match="0 or more and finite"):
            refused(of_floats(1, weight))
    with pytest.raises(ValueError, match="turns is 0"):
        credit.top_turns(of_floats(1, 2), batch, turns=0)


# ---- laid out anew ----------------------------------------------------------------------------------------------


def test_an_advantage_laid_out_by_hand() -> None:
    # turns of 10, 20 and 10 tokens, A = 1 on each of 40. All on the second: 40 / 20 = 2 on each of its tokens
    batch = table([[10, 20, 10]], rewards=[1.0])
    first_K = partial(credit.turn_mean, batch=batch)
    for by in ("turns", "tokens"):
        assert first_K(credit.redistributed(torch.ones(40), of_floats(0, 1, 0), batch, by=by)).tolist() == [0, 2, 0]
    # weights 1, 2, 1: by turns 40 / 4 = 10, 20, 10 in all, so 1 on each token; by tokens 1 * 10 + 2 * 20 + 1 * 10 = 60
    # shares, each of 40 / 60
    even_N = credit.redistributed(torch.ones(40), of_floats(1, 2, 1), batch, by="turns")
    torch.testing.assert_close(even_N, torch.ones(40))
    twice_K = first_K(credit.redistributed(torch.ones(40), of_floats(1, 2, 1), batch, by="tokens"))
    torch.testing.assert_close(twice_K.float(), of_floats(2 / 3, 4 / 3, 2 / 3))


def test_tokens_share_by_their_own_weight() -> None:
    # the total is 3 * 2 = 6, of which 1/6, 2/6 and 3/6; the last token may not train, whatever it weighs
    batch = table([[2, 2]], rewards=[1.0], old=[0.0, 0.0, 0.0, NAN])
    found_N = credit.redistributed_over_tokens(of_floats(2, 2, 2, 9), of_floats(1, 2, 3, 100), batch)
    torch.testing.assert_close(found_N, of_floats(1, 2, 3, 0))


def test_what_weighs_nothing_is_laid_out_evenly() -> None:
    # a total of 4 over turns of 1 and 3 tokens: 2 a turn, or 1 a token; an empty turn's weight is no weight
    batch = table([[1, 0, 3]], rewards=[1.0])
    for weight_K in (of_floats(0, 0, 0), of_floats(NAN, NAN, NAN), of_floats(0, 7, NAN)):
        by_turns_N = credit.redistributed(torch.ones(4), weight_K, batch, by="turns")
        torch.testing.assert_close(by_turns_N, of_floats(2, 2 / 3, 2 / 3, 2 / 3))
        assert credit.redistributed(torch.ones(4), weight_K, batch, by="tokens").tolist() == [1, 1, 1, 1]


LAYOUTS: dict[str, Callable[[Tensor, Tensor, Batch], Tensor]] = {
    "by turns": partial(credit.redistributed, by="turns"),
    "by tokens": partial(credit.redistributed, by="tokens"),
    "over tokens": lambda a_N, w_K, batch: credit.redistributed_over_tokens(a_N, w_K[batch.turn_N], batch),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(20))
def test_the_total_of_every_rollout_is_kept(seed: int, layout: str) -> None:
    batch, draw = drawn(seed), torch.Generator().manual_seed(seed)
    advantage_N = torch.where(batch.trainable_N, torch.randn(batch.tokens, generator=draw), 0.0)
    weight_K = torch.rand(batch.turns, generator=draw).square()
    weight_K[torch.rand(batch.turns, generator=draw) < 0.3] = 0.0
    weight_K[torch.rand(batch.turns, generator=draw) < 0.2] = NAN
    weight_K[batch.rollout_K == 3] = 0.0
    for scaled_K in (weight_K, weight_K * 1e-30, weight_K * 1e30):
        found_N = LAYOUTS[layout](advantage_N, scaled_K, batch)
        assert (found_N[~batch.trainable_N] == 0).all()
        torch.testing.assert_close(total_R(found_N, batch), total_R(advantage_N, batch), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_an_even_layout_by_tokens_leaves_a_rollouts_advantage_as_it_is(seed: int) -> None:
    batch = drawn(seed)
    advantage_N = credit.leave_one_out(batch)
    torch.testing.assert_close(
        credit.redistributed(advantage_N, credit.uniform(batch), batch, by="tokens"), advantage_N
    )


# ---- the shuffled control ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_shuffling_keeps_what_each_rollout_has_and_what_empty_turns_have(seed: int) -> None:
    batch = drawn(seed)
    x_K = torch.arange(batch.turns).float()
    dealt_K = credit.shuffled(x_K, batch, seed=seed)
    empty_K = credit.turn_tokens(batch) == 0
    assert (dealt_K[empty_K] == x_K[empty_K]).all() and (dealt_K != x_K).any()
    assert (batch.rollout_K[dealt_K.long()] == batch.rollout_K).all()
    assert sorted(dealt_K.tolist()) == x_K.tolist()


def test_a_shuffle_is_drawn_by_seed_version_and_ids_and_by_nothing_else() -> None:
    batch = drawn(0)
    x_K = torch.arange(batch.turns).float()
    dealt_K = credit.shuffled(x_K, batch, seed=1)
    assert (credit.shuffled(x_K, batch, seed=1) == dealt_K).all()
    assert (credit.shuffled(x_K, batch, seed=2) != dealt_K).any()
    assert (credit.shuffled(x_K, replace(batch, version_N=batch.version_N + 1), seed=1) != dealt_K).any()
    assert (credit.shuffled(x_K, replace(batch, id_N=batch.id_N + 1), seed=1) != dealt_K).any()
    assert (credit.shuffled(x_K, replace(batch, reward_RC=-batch.reward_RC), seed=1) == dealt_K).all()
    turned = batch.with_extra(x_K=x_K, dealt_K=dealt_K).select(torch.arange(batch.rollouts).flip(0))
    assert (credit.shuffled(turned.extra["x_K"], turned, seed=1) == turned.extra["dealt_K"]).all()


def test_every_order_is_dealt_as_often() -> None:
    # 6000 rollouts of three turns, each of other ids: each of 6 orders 1000 times, with a deviation of 29
    batch = replace(table([[1, 1, 1]] * 6000, rewards=[0.0] * 6000), id_N=torch.arange(18000))
    dealt = credit.shuffled(torch.tensor([0.0, 1.0, NAN] * 6000), batch, seed=0).nan_to_num(2).view(6000, 3)
    counts = Counter(tuple(row) for row in dealt.tolist())
    assert len(counts) == 6 and all(abs(count - 1000) < 4 * 29 for count in counts.values())


# ---- turns against turns ----------------------------------------------------------------------------------------

# rollouts 0, 1 and 2 of one group, 3 alone in another
PEERS = table([[1, 1], [1, 1], [1], [1]], rewards=[0.0] * 4, groups=[5, 5, 5, 2])


def test_a_turn_is_compared_with_those_at_its_position_in_other_rollouts_of_the_group() -> None:
    # first turns 1, 3 and 8: (3 + 8) / 2, (1 + 8) / 2, (1 + 3) / 2; second turns 2 and 4; the last has no other
    baseline_K = credit.turn_baseline(of_floats(1, 2, 3, 4, 8, 9), PEERS)
    torch.testing.assert_close(baseline_K.float(), of_floats(5.5, 4, 4.5, 2, 2, NAN), equal_nan=True)
    with_own_K = credit.turn_baseline(of_floats(1, 2, 3, 4, 8, 9), PEERS, others=False)
    torch.testing.assert_close(with_own_K.float(), of_floats(4, 3, 4, 3, 4, 9))


def test_a_turn_is_compared_with_those_in_its_state_but_not_with_its_own_rollout() -> None:
    # state 7: turns 0 and 1 of rollout 0, turn 3 of rollout 1. Turn 3 has (1 + 2) / 2, they have 4. State -7: 3 and 8
    key_K = torch.tensor([7, 7, -7, 7, -7, 7])
    baseline_K = credit.turn_baseline(of_floats(1, 2, 3, 4, 8, 9), PEERS, key_K=key_K)
    torch.testing.assert_close(baseline_K.float(), of_floats(4, 4, 8, 1.5, 3, NAN), equal_nan=True)


def test_a_missing_turn_is_in_no_baseline() -> None:
    baseline_K = credit.turn_baseline(of_floats(1, 2, NAN, NAN, 8, 9), PEERS)
    torch.testing.assert_close(baseline_K.float(), of_floats(8, NAN, 4.5, 2, 1, NAN), equal_nan=True)


@pytest.mark.parametrize("seed", range(5))
def test_baselines_are_those_of_the_definition(seed: int) -> None:
    batch, draw = drawn(seed), torch.Generator().manual_seed(seed)
    x_K = torch.where(torch.rand(batch.turns, generator=draw) < 0.2, NAN, torch.randn(batch.turns, generator=draw))
    key_K = torch.randint(-2, 3, (batch.turns,), generator=draw)
    group_K, rollout_K = batch.group_R[batch.rollout_K], batch.rollout_K
    for k, found in enumerate(credit.turn_baseline(x_K, batch, key_K=key_K).tolist()):
        peers = (group_K == group_K[k]) & (key_K == key_K[k]) & (rollout_K != rollout_K[k]) & ~x_K.isnan()
        assert found == pytest.approx(x_K[peers].double().mean().item(), nan_ok=True)


def test_with_one_turn_each_it_is_leave_one_out() -> None:
    batch = table([[2], [1], [3]], rewards=[1.0, 0.0, 4.0])
    advantage_N = credit.turn_to_tokens(batch.reward_R - credit.turn_baseline(batch.reward_R, batch), batch)
    torch.testing.assert_close(advantage_N, credit.leave_one_out(batch))


def test_returns_of_turns_by_hand() -> None:
    # score 0, 0.25, 0.25, 1 gives rewards 0.25, 0, 0.75 and so 1, 0.75, 0.75; at gamma 1/2: 0.25 + 0 + 0.75 / 4
    batch = table([[1, 0, 2], [1]], rewards=[0.0] * 2)
    reward_K = of_floats(0.25, 0, 0.75, 3)
    assert credit.turn_returns(reward_K, batch).tolist() == [1, 0.75, 0.75, 3]
    assert credit.turn_returns(reward_K, batch, gamma=0.5).tolist() == [0.4375, 0.375, 0.75, 3]
    assert credit.turn_returns(reward_K, batch, gamma=0).tolist() == reward_K.tolist()


@pytest.mark.parametrize("gamma", [1.0, 0.5, 0.0])
def test_a_missing_reward_leaves_what_came_before_it_unknown(gamma: float) -> None:
    batch = table([[1, 1, 1], [1]], rewards=[0.0] * 2)
    missing = credit.turn_returns(of_floats(1, NAN, 2, 3), batch, gamma=gamma).isnan()
    assert missing.tolist() == [gamma > 0, True, False, False]


# ---- edges ------------------------------------------------------------------------------------------------------


def test_without_turns_there_is_nothing() -> None:
    batch, none = table([[], []], rewards=[1.0, 0.0]), torch.zeros(0)
    for found in (
        credit.turn_position(batch),
        credit.turn_tokens(batch),
        credit.uniform(batch),
        credit.softmax_within(none, batch),
        credit.top_turns(none, batch, turns=2),
        credit.shuffled(none, batch, seed=0),
        credit.turn_baseline(none, batch),
        credit.turn_returns(none, batch),
        credit.turn_mean(none, batch),
        credit.redistributed(none, none, batch),
    ):
        assert found.shape == (0,)
    assert credit.turn_count(batch).tolist() == [0, 0]
