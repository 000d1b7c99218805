"""Claims: what was measured of each arm, the differences to the baseline seed by seed, and the verdict."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from whippletree.analysis.intervals import Interval, bootstrap_difference, bootstrap_mean
from whippletree.types import Claim, Json

BASELINE, METHOD = "baseline", "method"
LEAST = 3  # pairs of seeds under which nothing is said
RESAMPLE_SEED = 0  # of the bootstrap: the same numbers give the same interval
VERDICTS = {"better": "held", "worse": "not held", "either": "inconclusive"}

Runs = Mapping[str, Mapping[str, Json]]  # arm -> seed -> {"value" or "missing", "seconds"}


def arms(claim: Claim) -> dict[str, Any]:
    """The arms of a claim by name, its baseline and method first.

    Raises:
        ValueError: a further arm has one of their names.
    """
    if taken := {BASELINE, METHOD} & set(claim.arms):
        raise ValueError(f"a claim's own arms are {BASELINE} and {METHOD}, but a further arm is named {taken.pop()!r}")
    return {BASELINE: claim.baseline, METHOD: claim.method, **claim.arms}


def measured(claim: Claim, arm: str, seed: int) -> Json:
    """What `measure` gives of an arm with a seed, or why there is no number, and its seconds.

    Global random numbers are seeded alike before each measurement, so neither order nor process changes it.
    """
    started, given = time.monotonic(), arms(claim)[arm]
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    try:
        value = float(claim.measure(given, seed))
        found: Json = {"value": value} if math.isfinite(value) else {"missing": f"measured {value}"}
    except Exception as error:  # whose fault is told: that of the arm, with this seed
        found = {"missing": f"{type(error).__name__}: {error}"}
    return {**found, "seconds": round(time.monotonic() - started, 2)}


def summarised(runs: Runs, *, better: str) -> Json:
    """What stands in the table: each arm's mean over seeds, its difference to the baseline, and the verdict.

    A missing number is left out by name and counted; a difference is over the seeds that both arms have.
    """
    values = {arm: {s: run["value"] for s, run in found.items() if "value" in run} for arm, found in runs.items()}
    differences = {arm: difference(values[BASELINE], values[arm], better=better) for arm in runs if arm != BASELINE}
    return {
        "verdict": VERDICTS[differences[METHOD]["side"]],
        "arms": {arm: {**_mean(values[arm]), "missing": _missing(found)} for arm, found in runs.items()},
        "differences": differences,
        "seconds": round(sum(run["seconds"] for found in runs.values() for run in found.values()), 1),
    }


def difference(a: Mapping[str, float], b: Mapping[str, float], *, better: str) -> Json:
    """Mean of b - a over the seeds of both, its paired bootstrap 95 % interval, and the side of 0 on which that lies.

    Raises:
        ValueError: `better` is neither "higher" nor "lower".
    """
    both = sorted(a.keys() & b.keys(), key=int)
    if not both:
        return {"pairs": 0, "value": None, "low": None, "high": None, "side": "either"}
    found = bootstrap_difference([a[s] for s in both], [b[s] for s in both], seed=RESAMPLE_SEED, paired=True)
    where = side(found, better=better) if len(both) >= LEAST else "either"
    return {"pairs": len(both), "value": found.value, "low": found.low, "high": found.high, "side": where}


def side(interval: Interval, *, better: str) -> str:
    """ "better" or "worse" where the whole interval of a difference is so, "either" where 0 is in it.

    Raises:
        ValueError: `better` is neither "higher" nor "lower".
    """
    if better not in ("higher", "lower"):
        raise ValueError(f"what is better is higher or lower, but a claim says {better!r}")
    if interval.low <= 0 <= interval.high:
        return "either"
    return "better" if (interval.low > 0) == (better == "higher") else "worse"


def _mean(values: Mapping[str, float]) -> Json:
    """Mean, its standard error s / sqrt(n) with s over n - 1, and its bootstrap interval; None where there is none."""
    n = len(values)
    if not n:
        return {"seeds": 0, "mean": None, "standard_error": None, "low": None, "high": None}
    x_I = np.array(list(values.values()))
    found = bootstrap_mean(x_I, seed=RESAMPLE_SEED)
    error = float(x_I.std(ddof=1)) / math.sqrt(n) if n > 1 else None
    return {"seeds": n, "mean": found.value, "standard_error": error, "low": found.low, "high": found.high}


def _missing(found: Mapping[str, Json]) -> dict[str, str]:
    return {seed: run["missing"] for seed, run in found.items() if "missing" in run}
