"""pass@k: how often at least one of k attempts succeeds."""

from __future__ import annotations

import math
from collections.abc import Sequence


def pass_at_k(successes: Sequence[int], attempts: Sequence[int], *, k: int) -> list[float]:
    """For each task the unbiased estimate that at least one of k attempts succeeds; their mean is pass@k.

        1 - C(n - c, k) / C(n, k)      of n attempts, c succeeded

    One number a task, so that `bootstrap_mean` of them gives the interval over tasks.

    Raises:
        ValueError: a task has fewer than k attempts (nothing unbiased exists), or c is not among 0..n.

    Source: Chen et al. 2021 (arXiv:2107.03374), equation 1.
    """
    if k < 1 or len(successes) != len(attempts):
        raise ValueError(f"pass@k needs k >= 1 and two equal lists, but got k={k}, {len(successes)}, {len(attempts)}")
    for task, (c, n) in enumerate(zip(successes, attempts, strict=True)):
        if n < k or not 0 <= c <= n:
            raise ValueError(f"pass@{k} needs {k} or more attempts and 0..n successes, but task {task} has {c} of {n}")
    # the integers are exact and Python rounds their quotient once, however large they are
    return [1 - math.comb(n - c, k) / math.comb(n, k) for c, n in zip(successes, attempts, strict=True)]
