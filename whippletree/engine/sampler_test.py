from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from whippletree.engine.sampler import BLOCK, invert, nucleus, random_stream, sample

INF = math.inf
BELOW_ONE = float(np.nextafter(1.0, 0.0))


def drawn(logits: list[float], *uniform: float, temperature: float = 1.0, top_p: float = 1.0) -> tuple[Tensor, Tensor]:
    """The same logits with each of these uniform numbers."""
    n = len(uniform)
    logits_BV = torch.tensor(logits).expand(n, -1)
    uniform_B = torch.tensor(uniform, dtype=torch.float64)
    return sample(logits_BV, uniform_B, torch.full((n,), temperature), torch.full((n,), top_p))


def logs(*weights: float) -> list[float]:
    return [math.log(w) if w else -INF for w in weights]


def test_inverse_cdf_by_hand():
    # cumulated: 0.25, 0.75, 1.0; a number that equals a bound belongs to the next token
    chosen_B, logp_B = drawn(logs(1, 2, 1), 0.0, 0.2, 0.25, 0.7, 0.75, BELOW_ONE)
    assert chosen_B.tolist() == [0, 0, 1, 1, 2, 2]
    torch.testing.assert_close(logp_B.exp(), torch.tensor([0.25, 0.25, 0.5, 0.5, 0.25, 0.25]))


def test_tokens_of_weight_zero_are_never_chosen():
    chosen_B, logp_B = drawn(logs(0, 1, 0, 0, 1, 0), 0.0, 0.499, 0.5, BELOW_ONE)
    assert chosen_B.tolist() == [1, 1, 4, 4]
    torch.testing.assert_close(logp_B, torch.full((4,), math.log(0.5)))


@pytest.mark.parametrize("width", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
def test_the_edges_of_any_vocabulary_are_reached_and_never_passed(width: int):
    weight_BV = torch.rand(1, width, generator=torch.Generator().manual_seed(0)).expand(2, -1) + 0.01
    place_B, total_B = invert(weight_BV, torch.tensor([0.0, BELOW_ONE], dtype=torch.float64))
    assert place_B.tolist() == [0, width - 1]
    torch.testing.assert_close(total_B, weight_BV.double().sum(1), rtol=1e-6, atol=0)


def test_a_single_weight_anywhere_is_always_found():
    weight_BV = torch.eye(3 * BLOCK + 7)
    for uniform in (0.0, 0.5, BELOW_ONE):
        place_B, _ = invert(weight_BV, torch.full((len(weight_BV),), uniform, dtype=torch.float64))
        assert place_B.tolist() == list(range(len(weight_BV)))


def test_a_number_near_one_never_falls_into_the_empty_end_of_a_block():
    # many numbers that do not sum exactly in float32, then nothing
    weight_BV = torch.rand(64, 5 * BLOCK, generator=torch.Generator().manual_seed(1))
    weight_BV[:, 4 * BLOCK + 3 :] = 0
    place_B, _ = invert(weight_BV, torch.full((64,), BELOW_ONE, dtype=torch.float64))
    assert place_B.tolist() == [4 * BLOCK + 2] * 64


def test_blocks_and_one_long_cumulative_sum_choose_alike():
    random = torch.Generator().manual_seed(2)
    weight_BV = torch.rand(500, 1000, generator=random, dtype=torch.float64)
    uniform_B = torch.rand(500, generator=random, dtype=torch.float64)
    place_B, _ = invert(weight_BV, uniform_B)
    cumulated_BV = weight_BV.cumsum(1)
    expected_B = torch.searchsorted(cumulated_BV, (uniform_B * cumulated_BV[:, -1])[:, None], right=True)[:, 0]
    assert place_B.tolist() == expected_B.tolist()


def test_frequencies_are_the_probabilities_exactly():
    # with uniform numbers 0, 1/1000, 2/1000, ... a token of probability p is chosen 1000 p times
    chosen_B, _ = drawn(logs(0.1, 0.25, 0.05, 0.6), *((n + 0.5) / 1000 for n in range(1000)))
    assert chosen_B.bincount().tolist() == [100, 250, 50, 600]


def test_streams_fill_a_distribution():
    probs = [0.1, 0.25, 0.05, 0.6]
    numbers = random_stream(3, "chi").random(20_000)
    chosen_B, _ = drawn(logs(*probs), *numbers)
    expected = np.array(probs) * 20_000
    chi = float(((chosen_B.bincount().numpy() - expected) ** 2 / expected).sum())
    assert chi < 16.3  # 99.9 % of chi-square values with 3 degrees of freedom


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0, 1e-30])
def test_the_log_prob_is_that_of_the_tempered_distribution(temperature: float):
    logits_BV = torch.randn(200, 300, generator=torch.Generator().manual_seed(4)) * 3
    uniform_B = torch.rand(200, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    chosen_B, logp_B = sample(logits_BV, uniform_B, torch.full((200,), temperature), torch.ones(200))
    expected_BV = (logits_BV.double() / temperature).log_softmax(1)
    torch.testing.assert_close(logp_B.double(), expected_BV.gather(1, chosen_B[:, None])[:, 0], atol=2e-6, rtol=1e-6)


def test_top_p_renormalises_the_nucleus():
    # sorted 0.5, 0.3, 0.15, 0.05: 0.8 is reached by the first two (float sums aside), so 0.79 keeps two, 0.81 three
    chosen_B, logp_B = drawn(logs(0.3, 0.05, 0.5, 0.15), 0.0, 0.37, 0.38, BELOW_ONE, top_p=0.79)
    assert chosen_B.tolist() == [0, 0, 2, 2]  # the bound is 0.3 / 0.8 = 0.375
    torch.testing.assert_close(logp_B.exp(), torch.tensor([0.375, 0.375, 0.625, 0.625]))
    assert nucleus(torch.tensor([logs(0.3, 0.05, 0.5, 0.15)]), torch.tensor([0.81])).isfinite().tolist() == [
        [True, False, True, True]
    ]


def test_a_tiny_top_p_leaves_the_most_likely_token():
    chosen_B, logp_B = drawn([0.0, 3.0, 1.0], 0.0, 0.5, BELOW_ONE, top_p=1e-9)
    assert chosen_B.tolist() == [1, 1, 1]
    assert logp_B.tolist() == [0.0] * 3


def test_temperature_0_takes_the_most_likely_and_gives_the_models_own_log_prob():
    chosen_B, logp_B = drawn(logs(0.2, 0.7, 0.1), 0.0, BELOW_ONE, temperature=0.0, top_p=0.1)
    assert chosen_B.tolist() == [1, 1]
    torch.testing.assert_close(logp_B, torch.full((2,), math.log(0.7)))


def test_each_row_has_its_own_settings():
    logits_BV = torch.tensor(logs(0.2, 0.7, 0.1)).expand(3, -1)
    uniform_B = torch.full((3,), 0.95, dtype=torch.float64)
    chosen_B, logp_B = sample(logits_BV, uniform_B, torch.tensor([0.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, 0.85]))
    assert chosen_B.tolist() == [1, 2, 1]
    torch.testing.assert_close(logp_B.exp(), torch.tensor([0.7, 0.1, 0.7 / 0.9]))


def test_the_logits_given_are_left_alone():
    logits_BV = torch.tensor([[0.0, 1.0]])
    sample(logits_BV, torch.zeros(1, dtype=torch.float64), torch.tensor([0.5]), torch.tensor([0.5]))
    assert logits_BV.tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("bad", [[math.nan, 0.0], [INF, 0.0], [-INF, -INF]])
def test_logits_that_are_no_distribution_are_refused(bad: list[float]):
    with pytest.raises(FloatingPointError, match="NaN or infinite"):
        drawn(bad, 0.5)


def test_streams_are_equal_on_equal_names_and_different_on_others():
    def numbers(seed: int, name: str) -> tuple[float, ...]:
        return tuple(random_stream(seed, name).random(4))

    assert numbers(1, "a/0") == numbers(1, "a/0")
    assert len({numbers(seed, name) for seed in (1, 2) for name in ("a/0", "a/1", "")}) == 6
    assert numbers(1, "1/a") != numbers(11, "/a")
