from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from whippletree.analysis.claims import arms, difference, measured, summarised
from whippletree.analysis.intervals import bootstrap_mean
from whippletree.types import Claim, Json


def runs(**values: list[float | None]) -> dict[str, dict[str, Json]]:
    """Runs of arms from their numbers, seeds 0, 1, 2, ...; None is missing. Each took half a second."""
    return {
        arm: {str(s): {"missing": "NaN"} if x is None else {"value": x} for s, x in enumerate(numbers)}
        for arm, numbers in values.items()
    }


def timed(found: dict[str, dict[str, Json]]) -> dict[str, dict[str, Json]]:
    return {arm: {s: {**run, "seconds": 0.5} for s, run in of.items()} for arm, of in found.items()}


def told(better: str = "higher", **values: list[float | None]) -> Json:
    return summarised(timed(runs(**values)), better=better)


# ---- verdicts ---------------------------------------------------------------------------------------------------


def test_differences_that_are_all_equal_have_an_interval_without_width() -> None:
    # seeds differ by 10 while the arms differ by 2 in each: paired, nothing but the 2 is left
    found = told(baseline=[1.0, 11.0, 21.0], method=[3.0, 13.0, 23.0])
    assert found["differences"]["method"] == {"pairs": 3, "value": 2.0, "low": 2.0, "high": 2.0, "side": "better"}
    assert found["verdict"] == "held"


def test_two_differences_by_hand() -> None:
    # resampled means of (0, 1) are 0, 1/2, 1 with chances 1/4, 1/2, 1/4: the 2.5 % and 97.5 % points are 0 and 1
    found = difference({"7": 5.0, "8": 5.0}, {"7": 5.0, "8": 6.0}, better="higher")
    assert found == {"pairs": 2, "value": 0.5, "low": 0.0, "high": 1.0, "side": "either"}


@pytest.mark.parametrize(
    ("better", "step", "verdict"),
    [("higher", 1.0, "held"), ("higher", -1.0, "not held"), ("lower", 1.0, "not held"), ("lower", -1.0, "held")],
)
def test_the_verdict_is_the_side_of_0_on_which_the_whole_interval_lies(better: str, step: float, verdict: str) -> None:
    # differences step * (1, 2, 3): every resampled mean lies within 1 and 3 times the step
    assert told(better, baseline=[0.0] * 3, method=[step, 2 * step, 3 * step])["verdict"] == verdict


@pytest.mark.parametrize("method", [[-1.0, 1.0, -1.0, 1.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
def test_an_interval_that_holds_0_or_touches_it_is_inconclusive(method: list[float | None]) -> None:
    # of (0, 0, 0, 1) a resample is all zeros with chance (3/4)^4 = 32 %, so the interval begins at 0
    assert told(baseline=[0.0] * 4, method=method)["verdict"] == "inconclusive"


def test_noise_is_seldom_held_and_oftener_the_fewer_its_seeds() -> None:
    """What docs/claims.md says of few seeds: of claims about nothing, the share that is held, 2.5 % in the limit."""
    rng = np.random.default_rng(0)
    share = {
        n: np.mean([bootstrap_mean(rng.standard_normal(n), seed=0, resamples=1000).low > 0 for _ in range(1500)])
        for n in (3, 12)
    }
    assert share[3] == pytest.approx(0.125, abs=0.03)  # all three above 0: 1/8
    assert share[12] == pytest.approx(0.045, abs=0.02)


# ---- missing seeds ----------------------------------------------------------------------------------------------


def test_a_missing_seed_is_left_out_of_its_arm_and_of_the_pair_and_is_counted() -> None:
    found = told(baseline=[1.0, 1.0, None, 1.0, 1.0], method=[2.0, 2.0, 9.0, 2.0, None])
    base, method = found["arms"]["baseline"], found["arms"]["method"]
    assert (base["seeds"], base["mean"], base["missing"]) == (4, 1.0, {"2": "NaN"})
    assert (method["seeds"], method["mean"], method["missing"]) == (4, 15 / 4, {"4": "NaN"})
    assert found["differences"]["method"] == {"pairs": 3, "value": 1.0, "low": 1.0, "high": 1.0, "side": "better"}


def test_under_three_pairs_nothing_is_said() -> None:
    found = told(baseline=[1.0, 1.0, 1.0], method=[2.0, 2.0, None])
    assert found["differences"]["method"]["value"] == 1.0
    assert found["verdict"] == "inconclusive"
    nothing = told(baseline=[None, 1.0], method=[2.0, None])
    assert nothing["differences"]["method"] == {"pairs": 0, "value": None, "low": None, "high": None, "side": "either"}
    assert told(baseline=[None], method=[None])["arms"]["method"]["mean"] is None


# ---- what else is told ------------------------------------------------------------------------------------------


def test_mean_and_standard_error_by_hand() -> None:
    # 1, 2, 3, 6: mean 3, squares 4 + 1 + 0 + 9 = 14 over n - 1 = 3, over n = 4: sqrt(14 / 12)
    arm = told(baseline=[0.0] * 4, method=[1.0, 2.0, 3.0, 6.0])["arms"]["method"]
    assert (arm["mean"], arm["standard_error"]) == (3.0, pytest.approx(math.sqrt(14 / 12)))
    assert told(baseline=[4.0], method=[4.0])["arms"]["baseline"]["standard_error"] is None  # of one number


def test_every_further_arm_is_compared_with_the_baseline_and_does_not_touch_the_verdict() -> None:
    found = told(baseline=[0.0] * 3, method=[1.0] * 3, placebo=[0.0] * 3, broken=[-2.0] * 3)
    assert {arm: d["side"] for arm, d in found["differences"].items()} == {
        "method": "better",
        "placebo": "either",
        "broken": "worse",
    }
    assert (found["verdict"], found["seconds"]) == ("held", 6.0)  # 4 arms x 3 seeds x 0.5 s


def test_the_order_in_which_seeds_came_changes_nothing() -> None:
    a, b = {"2": 1.0, "10": 5.0, "9": 2.0}, {"9": 2.5, "10": 3.0, "2": 4.0}
    assert difference(a, b, better="higher") == difference(dict(sorted(a.items())), b, better="higher")


def test_what_is_neither_higher_nor_lower_is_refused() -> None:
    with pytest.raises(ValueError, match="higher or lower, but a claim says 'more'"):
        told("more", baseline=[0.0] * 3, method=[1.0] * 3)


# ---- one measurement --------------------------------------------------------------------------------------------


def claim(measure, **further) -> Claim:
    return Claim(says="", baseline="b", method="m", measure=measure, better="higher", arms=further)


def test_a_number_that_is_not_finite_and_an_error_are_missing_with_their_reason() -> None:
    def measure(arm: str, seed: int) -> float:
        if seed == 2:
            raise KeyError("reward")
        return (7.0, math.nan, 0.0, math.inf)[seed]

    found = [measured(claim(measure), "method", seed) for seed in range(4)]
    assert [run.get("value") for run in found] == [7.0, None, None, None]
    assert [run.get("missing") for run in found] == [None, "measured nan", "KeyError: 'reward'", "measured inf"]
    assert all(run["seconds"] >= 0 for run in found)


def test_global_random_numbers_are_those_of_the_seed_whatever_ran_before() -> None:
    def measure(arm: str, seed: int) -> float:
        return random.random() + float(np.random.random()) + torch.rand(1).item()

    first = measured(claim(measure), "method", 5)["value"]
    assert measured(claim(measure), "method", 6)["value"] != first
    assert measured(claim(measure), "baseline", 5)["value"] == first


def test_an_arm_is_measured_by_its_name_and_none_may_take_the_name_of_the_first_two() -> None:
    names = claim(lambda arm, seed: float(arm == "s"), shuffled="s")
    assert list(arms(names)) == ["baseline", "method", "shuffled"]
    assert [measured(names, arm, 0)["value"] for arm in arms(names)] == [0.0, 0.0, 1.0]
    with pytest.raises(ValueError, match="a further arm is named 'method'"):
        arms(claim(lambda arm, seed: 0.0, method="x"))
