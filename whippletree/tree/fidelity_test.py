from __future__ import annotations

import math

import pytest
import torch

from whippletree.tree.fidelity import FidelityError, check, drift, in_context
from whippletree.types import Batch, Rollout, Task, Turn


def _batch(logps):
    turn = Turn("t", (1,), tuple(range(5, 5 + len(logps))), tuple(logps), version=0, finish_reason="stop")
    return Batch.of([Rollout("r", Task("x"), "g", (turn,), {"reward": 1.0})])


BATCH = _batch([-1.0, math.nan, -2.0, -3.0])
TRAIN_N = torch.tensor([-1.5, -9.0, -2.0, -2.0])  # off by 0.5, unknown, 0 and 1


def test_drift_by_hand():
    # (0.5 + 0 + 1) / 3; the token with an unknown log-probability is not counted
    assert drift(TRAIN_N, BATCH) == {"logp_drift/mean": pytest.approx(0.5), "logp_drift/max": pytest.approx(1.0)}


def test_within_its_limits_a_drift_is_handed_on():
    assert check(TRAIN_N, BATCH, mean_limit=0.5, max_limit=1.0) == drift(TRAIN_N, BATCH)


@pytest.mark.parametrize("limits", [{"mean_limit": 0.4, "max_limit": 2.0}, {"mean_limit": 1.0, "max_limit": 0.9}])
def test_beyond_either_limit_training_stops_and_names_the_worst(limits):
    with pytest.raises(FidelityError) as stopped:
        check(TRAIN_N, BATCH, **limits, describe=lambda n: f"word {n}", worst=2)
    message = str(stopped.value)
    assert "differ by 0.5 and 1" in message
    worst, second = message.splitlines()[-2:]
    assert worst == "token 3 (id 8, turn 0, rollout 0): -3.0000 at sampling, -2.0000 at training - word 3"
    assert second.startswith("token 0 (id 5,")


def test_not_a_number_at_training_is_the_worst_drift():
    with pytest.raises(FidelityError, match="token 2"):
        check(torch.tensor([-1.0, 0.0, math.nan, -3.0]), BATCH, mean_limit=10, max_limit=10, worst=1)


def test_where_nothing_is_trainable_nothing_drifts():
    assert drift(torch.zeros(1), _batch([math.nan])) == {"logp_drift/mean": 0.0, "logp_drift/max": 0.0}


def test_a_token_is_shown_where_it_stands():
    ids = list(range(40))
    shown = in_context(ids, 30, lambda some: "".join(f" {x}" for x in some), around=4)
    assert shown == "' 26 27 28 29>>> 30<<< 31 32'"
    assert in_context(ids, 0, str, around=4) == "'[]>>>[0]<<<[1, 2]'"
    assert in_context(ids, 39, str, around=4) == "'[35, 36, 37, 38]>>>[39]<<<[]'"


def test_three_tokens_are_shown():
    with pytest.raises(FidelityError) as stopped:
        check(torch.zeros(5), _batch([-1.0, -2.0, -3.0, -4.0, -5.0]), mean_limit=0.1, max_limit=0.2)
    assert [line.split()[1] for line in str(stopped.value).splitlines()[1:]] == ["4", "3", "2"]
