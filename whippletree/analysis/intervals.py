"""Intervals: how far a measured number may be from the true one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
CELLS = 1 << 22  # numbers drawn at once, so that memory stays near 64 MB however long the data are


@dataclass(frozen=True)
class Interval:
    """An estimate and the two ends of its interval, all in the unit of what was measured."""

    value: float
    low: float
    high: float


def wilson(successes: int, n: int, *, level: float = 0.95) -> Interval:
    """Share of successes and its Wilson score interval, which stays inside [0, 1] and is sound for small n.

        centre = (p + z^2 / 2n) / (1 + z^2 / n)
        half   = z / (1 + z^2 / n) * sqrt(p (1 - p) / n + z^2 / 4n^2)

    Raises:
        ValueError: n is not positive, or successes are not among 0..n.

    Source: Wilson 1927.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"wilson counts successes among n >= 1 trials, but got {successes} of {n}")
    z = NormalDist().inv_cdf(0.5 + _checked(level) / 2)
    p, shrink = successes / n, 1 + z * z / n
    centre = (p + z * z / (2 * n)) / shrink
    half = z / shrink * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # at the ends one limit is p itself in exact arithmetic; rounding must not put p outside its interval
    return Interval(p, min(p, max(0.0, centre - half)), max(p, min(1.0, centre + half)))


def bootstrap_mean(x: ArrayLike, *, seed: int, level: float = 0.95, resamples: int = 10_000) -> Interval:
    """Mean and its percentile bootstrap interval: quantiles of the means of samples drawn with replacement.

    Raises:
        ValueError: there are no numbers, or one is not finite (drop missing ones by name before, never as 0).

    Source: Efron 1979.
    """
    x_I = _finite(x)
    means = _resampled(lambda rng, rows: _means(x_I, rng, rows), size=len(x_I), seed=seed, resamples=resamples)
    return Interval(float(x_I.mean()), *_ends(means, level))


def bootstrap_difference(
    a: ArrayLike, b: ArrayLike, *, seed: int, level: float = 0.95, resamples: int = 10_000, paired: bool = False
) -> Interval:
    """Mean of b minus mean of a, and its percentile bootstrap interval.

    `paired` says that a[i] and b[i] are of one task or one seed: pairs are drawn together, so what they share cancels.

    Raises:
        ValueError: a side is empty or not finite, or pairs are of unequal number.
    """
    a_I, b_J = _finite(a), _finite(b)
    if paired:
        if len(a_I) != len(b_J):
            raise ValueError(f"paired numbers come in pairs, but got {len(a_I)} and {len(b_J)}")
        return bootstrap_mean(b_J - a_I, seed=seed, level=level, resamples=resamples)

    def draw(rng: np.random.Generator, rows: int) -> Floats:
        return _means(b_J, rng, rows) - _means(a_I, rng, rows)

    differences = _resampled(draw, size=max(len(a_I), len(b_J)), seed=seed, resamples=resamples)
    return Interval(float(b_J.mean() - a_I.mean()), *_ends(differences, level))


def _means(x_I: Floats, rng: np.random.Generator, rows: int) -> Floats:
    """[rows] means of samples of the same size, drawn with replacement."""
    means: Floats = x_I[rng.integers(0, len(x_I), size=(rows, len(x_I)))].mean(axis=1)
    return means


def _resampled(draw: Callable[[np.random.Generator, int], Floats], *, size: int, seed: int, resamples: int) -> Floats:
    """[resamples] statistics, drawn in blocks of bounded memory."""
    rng, block = np.random.default_rng(seed), max(1, CELLS // size)
    return np.concatenate([draw(rng, min(block, resamples - done)) for done in range(0, resamples, block)])


def _ends(statistics: Floats, level: float) -> tuple[float, float]:
    tail = (1 - _checked(level)) / 2
    low, high = np.quantile(statistics, [tail, 1 - tail])
    return float(low), float(high)


def _finite(x: ArrayLike) -> Floats:
    x_I = np.asarray(x, dtype=np.float64).reshape(-1)
    bad = np.flatnonzero(~np.isfinite(x_I))
    if not len(x_I) or len(bad):
        raise ValueError(
            f"an interval needs one or more finite numbers, but got {len(x_I)}, not finite at {bad[:5].tolist()}: "
            "a missing number is not a 0; drop it by name before"
        )
    return x_I


def _checked(level: float) -> float:
    if not 0 < level < 1:
        raise ValueError(f"level is a probability between 0 and 1, such as 0.95, but got {level}")
    return level
