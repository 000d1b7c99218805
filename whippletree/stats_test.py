from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from whippletree.collect import Collected
from whippletree.methods._tables import HALF, table
from whippletree.stats import batch_metrics, collected_metrics, fidelity_metrics
from whippletree.types import Batch, Rollout, Task, Turn

NAN = math.nan


def rollout(name: str, group: str, *turns: tuple[tuple[int, ...], tuple[int, ...], str], **rest: Any) -> Rollout:
    """A rollout of these (prompt, reply, finish reason), each token sampled with probability 1/2."""
    made = [Turn(f"{name}{k}", p, r, (HALF,) * len(r), 0, end) for k, (p, r, end) in enumerate(turns)]
    return Rollout(name, Task(group), group, tuple(made), **rest)


# group a: 3 + 1 tokens in two turns that share a prefix (reward 1), 2 tokens (reward 0); group b: 1 and 2 tokens, 0.5
ROLLOUTS = (
    rollout("r0", "a", ((1, 2), (3, 4, 5), "stop"), ((1, 2, 3, 4, 5, 6), (7,), "length"), rewards={"x": 1.0, "y": 2.0}),
    rollout("r1", "a", ((1, 2), (8, 9), "stop"), rewards={"x": 0.0, "y": None}),
    rollout("r2", "b", ((1, 3), (4,), "stop"), rewards={"x": 0.5, "y": None}),
    rollout("r3", "b", ((1, 3), (5, 6), "length"), rewards={"x": 0.5, "y": None}),
)
WEIGHTS = {"x": 1.0, "y": 0.0}


def of_these(*rollouts: Rollout) -> dict[str, float]:
    return batch_metrics(rollouts, Batch.of(rollouts, channels=("x", "y"), weights=WEIGHTS))


def test_the_metrics_of_a_batch_by_hand() -> None:
    told = of_these(*ROLLOUTS)
    expected = {
        "reward": (1 + 0 + 0.5 + 0.5) / 4,
        "reward_std": (math.sqrt(0.5) + math.sqrt(0.5) + 0 + 0) / 4,  # of group a: sqrt((0.25 + 0.25) / (2 - 1))
        "frac_reward_zero_std": 2 / 4,
        "rewards/x/mean": 0.5,
        "rewards/x/std": math.sqrt((0.25 + 0.25 + 0 + 0) / 4),
        "rewards/y/mean": 2.0,  # where it applies: missing is not 0
        "rewards/y/std": 0.0,
        "completions/mean_length": (4 + 2 + 1 + 2) / 4,
        "completions/min_length": 1,
        "completions/max_length": 4,
        "completions/clipped_ratio": 2 / 5,  # of turns
        "turns/mean": 5 / 4,
        "entropy": math.log(2),
        "frac_untrainable_tokens": 0.0,
        "tree/merge_rate": 1 / 5,  # the second turn goes on from the first
    }
    assert {name: told[name] for name in expected} == pytest.approx(expected)
    # a: 1 2 {3 4 5 6 7, 8 9} is 9 nodes of 5 + 7 + 4 tokens; b: 1 3 {4, 5 6} is 5 nodes of 3 + 4
    assert told["tree/shared_token_ratio"] == pytest.approx(1 - 14 / 23)
    assert all(math.isfinite(value) for value in told.values())


def test_a_channel_that_applies_nowhere_has_no_mean() -> None:
    assert not [name for name in of_these(*ROLLOUTS[1:]) if name.startswith("rewards/y")]


def test_tokens_without_a_log_prob_are_counted_and_left_out_of_the_entropy() -> None:
    turn = Turn("t", (1,), (2, 3), (math.log(1 / 4), NAN), 0, "stop")
    told = of_these(Rollout("r", Task("a"), "a", (turn,), {"x": 1.0, "y": None}))
    assert (told["entropy"], told["frac_untrainable_tokens"]) == pytest.approx((math.log(4), 0.5))


def test_rollouts_without_turns_have_finite_metrics() -> None:
    told = of_these(rollout("r", "a", rewards={"x": 1.0, "y": None}))
    assert (told["entropy"], told["completions/clipped_ratio"], told["turns/mean"]) == (0.0, 0.0, 0.0)
    assert all(math.isfinite(value) for value in told.values())


def test_what_did_not_enter_is_counted_by_whose_fault_it_was() -> None:
    failing = rollout("r", "a", info={"reward_errors": {"x": "it raised"}}, ending="truncated")
    found = Collected(failed=Counter(harness=2, judge=1), dropped=3, refused=4)
    assert collected_metrics(found, [failing, failing, ROLLOUTS[0]]) == {
        "rollouts/failed": 3,
        "rollouts/failed/harness": 2,
        "rollouts/failed/judge": 1,
        "rollouts/truncated": 2,
        "groups/dropped": 3,
        "groups/refused": 4,
        "rewards/x/missing": 2,
    }


def test_drift_is_of_the_tokens_that_went_through_the_forward() -> None:
    batch = table([[2], [2]], rewards=[1.0, 0.0], old=[-1.0, -1.0, -1.0, NAN])
    told = fidelity_metrics(torch.tensor([-1.1, NAN, -1.3, -5.0]), batch)  # the second was left out
    assert told == pytest.approx({"logp_drift/mean": 0.2, "logp_drift/max": 0.3})
    assert set(fidelity_metrics(torch.full((4,), NAN), batch).values()) == {0.0}
