from __future__ import annotations

import pytest

from benchmarks.credit import RULES, example, seconds
from whippletree import credit


@pytest.mark.parametrize("name", RULES)
def test_every_rule_that_is_measured_gives_credit(name: str) -> None:
    batch = example(20_000)
    advantage_N = RULES[name](batch)
    assert advantage_N.shape == (20_000,) and advantage_N.isfinite().all()
    assert 0.8 < advantage_N.count_nonzero() / 20_000 < 0.95 or name == "redistributed: top_turns"  # a tenth may not
    assert 0 < min(seconds(RULES[name], batch, calls=1)) < 10


def test_the_trees_that_are_measured_branch() -> None:
    batch = example(20_000)
    for tree in ("tree_advantage in rollouts", "tree_advantage between rollouts"):
        assert (RULES[tree](batch) - credit.leave_one_out(batch)).abs().max() > 0.1
