from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from whippletree.report.sinks import Mlflow, TensorBoard, Trackio, Wandb, make_sinks, numbers

ROW = {"step": 2, "time": 1e9, "reward": 0.5, "kl": None, "note": "x", "nan": math.nan, "count": 3}


class Library:
    """A fake of wandb's and trackio's protocol: `init` gives a run with `log` and `finish`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def init(self, **options: Any) -> Any:
        self.calls.append(("init", options))
        return SimpleNamespace(
            log=lambda values, step: self.calls.append(("log", (step, values))),
            finish=lambda: self.calls.append(("finish", None)),
        )


def test_only_numbers_reach_a_sink_and_a_missing_one_is_not_sent() -> None:
    assert numbers(ROW) == {"reward": 0.5, "count": 3}


def test_an_unknown_sink_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tensorboard, wandb, trackio, mlflow, but got 'wandbee'"):
        make_sinks(["tensorboard", "wandbee"], tmp_path, {})
    assert list(tmp_path.iterdir()) == []


def test_no_names_make_no_sinks(tmp_path: Path) -> None:
    assert make_sinks([], tmp_path, {}) == []


@pytest.mark.parametrize("kind", [Wandb, Trackio])
def test_a_run_is_started_logged_and_finished(kind: Any, tmp_path: Path) -> None:
    library = Library()
    sink = kind(library, tmp_path / "run7", {"seed": 3})
    sink.log(2, ROW)
    sink.close()
    (_, options), logged, finished = library.calls
    assert (options["name"], options["config"]) == ("run7", {"seed": 3})
    assert (logged, finished) == (("log", (2, {"reward": 0.5, "count": 3})), ("finish", None))


def test_tensorboard_files_hold_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (sink,) = make_sinks(["tensorboard"], tmp_path, {"method": "grpo"})
    assert isinstance(sink, TensorBoard)
    sink.log(2, ROW)
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(2, 0.5)]
    assert sorted(events.Tags()["scalars"]) == ["count", "reward"]


def test_mlflow_keeps_every_step_of_a_run_in_the_run_folder(tmp_path: Path) -> None:
    client = MlflowClient()
    sink = Mlflow(SimpleNamespace(MlflowClient=client.at), tmp_path / "run7", {"seed": 3})
    sink.log(2, ROW | {"clip (high)": 0.1})
    sink.close()
    assert client.uri.endswith("run7/mlflow.db")
    assert client.calls == [
        ("seed", 3),
        ("reward", 0.5, 2),
        ("count", 3, 2),
        ("clip _high_", 0.1, 2),
        ("end", "id-run7"),
    ]


class MlflowClient:
    """A fake of the part of mlflow's client that the sink calls."""

    def __init__(self) -> None:
        self.uri = ""
        self.calls: list[tuple[Any, ...]] = []

    def at(self, tracking_uri: str) -> MlflowClient:
        self.uri = tracking_uri
        return self

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return f"e-{name}"

    def create_run(self, experiment: str, run_name: str) -> Any:
        assert experiment == "e-whippletree"
        return SimpleNamespace(info=SimpleNamespace(run_id=f"id-{run_name}"))

    def log_param(self, run_id: str, name: str, value: Any) -> None:
        self.calls.append((name, value))

    def log_metric(self, run_id: str, name: str, value: float, step: int) -> None:
        self.calls.append((name, value, step))

    def set_terminated(self, run_id: str) -> None:
        self.calls.append(("end", run_id))
