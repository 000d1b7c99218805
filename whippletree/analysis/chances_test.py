from __future__ import annotations

import math

import pytest
import torch

from whippletree.analysis.chances import calibration, turn_labels
from whippletree.types import Batch, Rollout, Task, Turn


def test_a_fall_is_a_mistake_and_a_rise_after_it_a_recovery_until_it_is_made_good() -> None:
    assert turn_labels([0.5, 0.3, 0.8, 1.0]) == ["mistake", "recovery", "productive"]


def test_small_changes_are_neutral_and_the_threshold_itself_is_not() -> None:
    assert turn_labels([0.2, 0.3, 0.2, 0.29, 0.11, 0.29]) == ["productive", "mistake", "neutral", "mistake", "recovery"]
    assert turn_labels([0.2, 0.4], threshold=0.3) == ["neutral"]


def test_the_highest_loss_counts_and_one_chance_labels_nothing() -> None:
    # lost 0.9 at first, then 0.4: still below 0.9 at 0.6
    assert turn_labels([0.9, 0.4, 0.2, 0.6, 0.85, 1.0]) == ["mistake", "mistake", "recovery", "recovery", "recovery"]
    assert turn_labels([0.9]) == []


def batch_of(*told: tuple[str, float, int]) -> Batch:
    turn = Turn("", (1,), (2,), (-0.1,), 0, "stop")
    return Batch.of([Rollout("", Task(g), g, (turn,) * turns, {"reward": reward}) for g, reward, turns in told])


def test_calibration_by_hand() -> None:
    batch = batch_of(("a", 1.0, 3), ("a", 0.0, 2), ("a", 0.0, 1), ("b", 1.0, 1), ("b", 0.0, 0))
    # the middles are 0.8 (of three turns), 0.4 (the second of two), 0.8, and 0.1
    found = calibration(batch, torch.tensor([0.5, 0.8, 0.9, 0.1, 0.4, 0.8, 0.1]))
    assert found["critic/brier"] == pytest.approx((0.04 + 0.16 + 0.64 + 0.81) / 4)
    assert found["critic/auc"] == pytest.approx((1 + 0.5) / 2)  # 0.8 > 0.4, 0.8 = 0.8; in b there is no other


def test_what_is_unknown_is_left_out() -> None:
    found = calibration(batch_of(("a", 1.0, 1), ("a", 0.0, 1)), torch.tensor([math.nan, 0.5]))
    assert found["critic/brier"] == 0.25 and math.isnan(found["critic/auc"])
    assert math.isnan(calibration(batch_of(("a", 1.0, 1)), torch.tensor([math.nan]))["critic/brier"])
