from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from whippletree.report.metrics import Metrics, read


class Told:
    """A sink that remembers what it was told."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, Any]] = []
        self.closed = False

    def log(self, step: int, metrics: Any) -> None:
        self.rows.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed = True


def steps(run_dir: Path) -> list[int]:
    return [row["step"] for row in read(run_dir / "metrics.jsonl")]


def written(run_dir: Path, *numbers: int) -> Metrics:
    metrics = Metrics(run_dir)
    for step in numbers:
        metrics.log(step, {"reward": step / 10})
    return metrics


def test_a_step_is_one_json_line_with_the_keys_as_given(tmp_path: Path) -> None:
    Metrics(tmp_path / "new").log(3, {"reward": 0.5, "rewards/exact answer/mean": 1, "note": "é"})
    (line,) = (tmp_path / "new" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    row = json.loads(line)
    assert row.pop("time") > 1e9  # seconds since 1970
    assert row == {"step": 3, "reward": 0.5, "rewards/exact answer/mean": 1, "note": "é"}


def test_what_is_not_finite_is_null_and_not_zero(tmp_path: Path) -> None:
    tensors = {"a": torch.tensor(0.25), "b": np.float32(0.5), "c": torch.tensor(math.nan)}
    Metrics(tmp_path).log(1, {**tensors, "kl": math.nan, "loss": -math.inf})
    (row,) = read(tmp_path / "metrics.jsonl")
    assert [row[name] for name in ("a", "b", "c", "kl", "loss")] == [0.25, 0.5, None, None, None]


def test_a_torn_last_line_is_dropped_and_the_next_step_is_whole(tmp_path: Path) -> None:
    written(tmp_path, 1, 2)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-5])  # a kill in the middle of step 2
    assert steps(tmp_path) == [1]
    written(tmp_path, 2)
    assert steps(tmp_path) == [1, 2]


def test_a_kill_at_any_byte_leaves_the_steps_before_it(tmp_path: Path) -> None:
    written(tmp_path, 1, 2)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        assert steps(tmp_path) == [1, 2][: (cut >= first) + (cut == len(whole))]
        written(tmp_path, 3)
        assert steps(tmp_path)[-1] == 3


def test_a_resumed_run_forgets_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    metrics = written(tmp_path, 1, 2, 3, 4)
    before = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    metrics.truncate_after(2)
    assert (tmp_path / "metrics.jsonl").read_bytes().splitlines() == before[:2]
    with pytest.raises(ValueError, match="came after 2"):
        metrics.log(1, {})
    metrics.log(3, {"reward": 1.0})
    assert steps(tmp_path) == [1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_going_back_without_truncating_is_refused_also_after_a_restart(tmp_path: Path) -> None:
    written(tmp_path, 1, 2)
    with pytest.raises(ValueError, match="truncate_after"):
        Metrics(tmp_path).log(1, {})
    again = Metrics(tmp_path)
    again.truncate_after(0)
    again.log(1, {})
    assert steps(tmp_path) == [1]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"reward": 2}\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        read(tmp_path / "metrics.jsonl")


def test_a_run_without_metrics_has_none(tmp_path: Path) -> None:
    assert read(tmp_path / "metrics.jsonl") == []


def test_sinks_are_told_every_step_and_closed(tmp_path: Path) -> None:
    sink = Told()
    metrics = Metrics(tmp_path, sinks=[sink])
    metrics.log(7, {"reward": 0.5, "kl": math.nan})
    metrics.close()
    ((step, row),) = sink.rows
    assert (step, row["reward"], row["kl"], sink.closed) == (7, 0.5, None, True)
