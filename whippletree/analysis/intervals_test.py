from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from whippletree.analysis.intervals import CELLS, Floats, _resampled, bootstrap_difference, bootstrap_mean, wilson

Z = 1.959963984540054  # the 97.5 % point of the standard normal


def test_wilson_of_half_by_hand() -> None:
    # p = 1/2: centre (1/2 + z²/2n) / (1 + z²/n) = 1/2; half = z/2 / sqrt(n + z²), after cancelling (1 + z²/n)
    interval = wilson(5, 10)
    half = Z / 2 / math.sqrt(10 + Z * Z)
    assert (interval.value, interval.low, interval.high) == pytest.approx((0.5, 0.5 - half, 0.5 + half))


def test_wilson_of_none_and_of_all_by_hand() -> None:
    # p = 0: both terms are (z²/2n) / (1 + z²/n), so the ends are 0 and z² / (n + z²); p = 1 is its mirror
    top = Z * Z / (20 + Z * Z)
    none, every = wilson(0, 20), wilson(20, 20)
    assert (none.low, none.high) == pytest.approx((0, top))
    assert (every.low, every.high) == pytest.approx((1 - top, 1))


def test_wilson_holds_its_own_value_for_every_count() -> None:
    for n in (1, 2, 3, 49, 128):
        for c in range(n + 1):
            interval = wilson(c, n)
            assert 0 <= interval.low <= interval.value <= interval.high <= 1


def test_a_higher_level_gives_a_wider_wilson_interval() -> None:
    narrow, wide = wilson(3, 10, level=0.5), wilson(3, 10, level=0.99)
    assert wide.low < narrow.low < narrow.high < wide.high


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (-1, 3), (4, 3)])
def test_impossible_counts_are_refused(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match="successes among"):
        wilson(successes, n)


def test_bootstrap_of_two_numbers_by_hand() -> None:
    # the resampled mean of [0, 1] is 0, 1/2, 1 with probabilities 1/4, 1/2, 1/4:
    # quantiles 2.5 % and 97.5 % are 0 and 1; quantiles 30 % and 70 % are both 1/2
    wide, narrow = bootstrap_mean([0, 1], seed=0), bootstrap_mean([0, 1], seed=0, level=0.4)
    assert (wide.value, wide.low, wide.high) == (0.5, 0, 1)
    assert (narrow.value, narrow.low, narrow.high) == (0.5, 0.5, 0.5)


def test_bootstrap_agrees_with_counting_every_resample() -> None:
    x = [0.0, 1.0, 4.0, 9.0]
    every = [np.mean(draw) for draw in product(x, repeat=4)]  # all 4^4 equally likely resamples
    interval = bootstrap_mean(x, seed=1, level=0.8, resamples=40_000)
    assert interval.low == pytest.approx(np.quantile(every, 0.1), abs=0.26)  # the means lie 1/4 apart
    assert interval.high == pytest.approx(np.quantile(every, 0.9), abs=0.26)


def test_bootstrap_of_many_numbers_has_the_normal_width() -> None:
    # half width z * s / sqrt(n) with s the standard deviation; 1 % is many times the error of 10,000 resamples
    x = np.arange(2000) / 2000
    interval = bootstrap_mean(x, seed=2)
    assert (interval.high - interval.low) / 2 == pytest.approx(Z * x.std() / math.sqrt(2000), rel=0.05)


def test_blocks_of_bounded_memory_add_up_to_every_resample() -> None:
    # three rows fit a block of CELLS numbers, so ten are drawn as 3 + 3 + 3 + 1
    rows: list[int] = []

    def draw(rng: np.random.Generator, count: int) -> Floats:
        rows.append(count)
        return rng.random(count)

    assert len(_resampled(draw, size=CELLS // 3, seed=0, resamples=10)) == 10
    assert rows == [3, 3, 3, 1]


def test_a_seed_repeats_and_another_seed_differs() -> None:
    x = np.sqrt(np.arange(30))
    assert bootstrap_mean(x, seed=3) == bootstrap_mean(x, seed=3)
    assert bootstrap_mean(x, seed=3) != bootstrap_mean(x, seed=4)


def test_difference_is_second_minus_first() -> None:
    difference = bootstrap_difference([1, 1, 1], [4, 4], seed=0)
    assert (difference.value, difference.low, difference.high) == (3, 3, 3)


def test_the_two_sides_of_a_difference_are_drawn_apart() -> None:
    # a and b independent copies of [0, 1]: the difference is ±1 with 1/16 each, ±1/2 with 1/4 each, 0 with 3/8,
    # so its 2.5 % and 97.5 % quantiles are -1 and 1; drawn together they would always be 0
    difference = bootstrap_difference([0, 1], [0, 1], seed=5)
    assert (difference.value, difference.low, difference.high) == (0, -1, 1)


def test_pairs_cancel_what_they_share() -> None:
    tasks = np.array([0.0, 10.0, 20.0, 30.0])
    paired = bootstrap_difference(tasks, tasks + 1, seed=0, paired=True)
    assert (paired.value, paired.low, paired.high) == (1, 1, 1)
    with pytest.raises(ValueError, match="in pairs"):
        bootstrap_difference([1.0], [1.0, 2.0], seed=0, paired=True)


@pytest.mark.parametrize("x", [[], [1.0, math.nan], [math.inf]])
def test_a_missing_number_is_refused_and_never_a_zero(x: list[float]) -> None:
    with pytest.raises(ValueError, match="not a 0"):
        bootstrap_mean(x, seed=0)


@pytest.mark.parametrize("level", [0, 1, 95])
def test_a_level_in_percent_is_refused(level: float) -> None:
    with pytest.raises(ValueError, match=r"such as 0\.95"):
        wilson(1, 2, level=level)
    with pytest.raises(ValueError, match=r"such as 0\.95"):
        bootstrap_mean([1.0], seed=0, level=level)
