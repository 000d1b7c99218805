"""Where a run was won and lost, by the chances of success before each of its turns; and how good such chances are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from whippletree.types import Batch


def turn_labels(chances: Sequence[float], *, threshold: float = 0.1) -> list[str]:
    """What each of T turns did to T + 1 chances (0 to 1, the last the outcome).

    A change of `threshold` or more is "productive" or a "mistake", a smaller one "neutral". It is a "recovery" if it
    rises from below where an earlier mistake began.
    """
    labels, lost = [], -math.inf
    for before, after in pairwise(chances):
        change = after - before
        if change <= -threshold + 1e-9:  # 0.3 - 0.2 is less than 0.1
            labels.append("mistake")
            lost = max(lost, before)
        elif change >= threshold - 1e-9:
            labels.append("recovery" if before < lost else "productive")
        else:
            labels.append("neutral")
    return labels


def calibration(batch: Batch, chance_K: Tensor) -> dict[str, float]:
    """How well the chance before the middle turn (number T // 2 of T) tells the reward (0 to 1), by rollout.

    `critic/brier` is the mean of (chance - reward)^2. `critic/auc` is the share of pairs of one group with unequal
    rewards in which the better one had the higher chance, a tie counting a half. Rollouts whose chance is NaN are left
    out; NaN where there is nothing to count.
    """
    groups: dict[int, list[tuple[float, float]]] = {}
    for r, (group, reward) in enumerate(zip(batch.group_R.tolist(), batch.reward_R.tolist(), strict=True)):
        mine = chance_K[batch.rollout_K == r].tolist()
        if mine and not math.isnan(middle := mine[len(mine) // 2]):
            groups.setdefault(group, []).append((middle, reward))
    every = [(chance - reward) ** 2 for told in groups.values() for chance, reward in told]
    pairs = [
        1.0 if a > b else 0.5 if a == b else 0.0
        for told in groups.values()
        for a, better in told
        for b, worse in told
        if better > worse
    ]
    return {"critic/brier": _mean(every), "critic/auc": _mean(pairs)}


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else math.nan
