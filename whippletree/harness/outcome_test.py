from __future__ import annotations

import math

import pytest

from whippletree.harness.outcome import Outcome, failure, outcome_of


def test_an_agent_may_return_nothing_a_number_or_channels():
    assert outcome_of(None) == Outcome()
    assert outcome_of(0.5).rewards == {"reward": 0.5}
    assert outcome_of(True).rewards == {"reward": 1.0}
    assert outcome_of({"correct": 1, "format": None}).rewards == {"correct": 1.0, "format": None}
    assert outcome_of({"correct": 1, "info": {"tries": 2}}) == Outcome(rewards={"correct": 1.0}, info={"tries": 2})


def test_a_nan_is_kept_for_the_scorer_to_name():
    assert math.isnan(outcome_of(math.nan).rewards["reward"] or 0.0)


@pytest.mark.parametrize("returned", ["1.0", [1.0], {"correct": "yes"}, {"info": 3}, {1: 1.0}, object()])
def test_anything_else_is_refused(returned: object):
    with pytest.raises(ValueError, match=r"must be a mapping|an agent returns"):
        outcome_of(returned)


def test_a_failure_has_no_reward():
    assert failure("why", blame="engine") == Outcome("failed", "engine", "why")
