"""Where metrics can go besides `metrics.jsonl`: each library is imported only when named, and none needs a network."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


class Sink(Protocol):
    """Who else is told the metrics of each step."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def make_sinks(names: Sequence[str], run_dir: str | Path, config: Mapping[str, Any]) -> list[Sink]:
    """The sinks of these names, started; `config` is the run's configuration, which most of them keep beside it.

    Raises:
        ValueError: a name is unknown, or its library is not installed. Nothing is started then.
    """
    unknown = [name for name in names if name not in SINKS]
    if unknown:
        raise ValueError(f"metrics can go to {', '.join(SINKS)}, but got {', '.join(map(repr, unknown))}")
    libraries = [_library(name) for name in names]
    folder = Path(run_dir)
    return [SINKS[name][1](library, folder, config) for name, library in zip(names, libraries, strict=True)]


class TensorBoard:
    """Event files in `run_dir/tensorboard`; read them with `tensorboard --logdir`."""

    def __init__(self, library: Any, run_dir: Path, config: Mapping[str, Any]) -> None:
        self.writer = library.SummaryWriter(str(run_dir / "tensorboard"))
        for name, value in config.items():
            self.writer.add_text(f"config/{name}", str(value))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in numbers(metrics).items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """A run in `run_dir/wandb`, offline unless `WANDB_MODE` says otherwise; send it later with `wandb sync`."""

    def __init__(self, library: Any, run_dir: Path, config: Mapping[str, Any]) -> None:
        mode = os.environ.get("WANDB_MODE", "offline")
        self.run = library.init(
            project="whippletree", name=run_dir.name, dir=str(run_dir), config=dict(config), mode=mode
        )

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.run.log(numbers(metrics), step=step)

    def close(self) -> None:
        self.run.finish()


class Trackio:
    """A run in trackio's own local store (`TRACKIO_DIR`); see it with `trackio show`."""

    def __init__(self, library: Any, run_dir: Path, config: Mapping[str, Any]) -> None:
        self.run = library.init(project="whippletree", name=run_dir.name, config=dict(config), resume="allow")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.run.log(numbers(metrics), step=step)

    def close(self) -> None:
        self.run.finish()


class Mlflow:
    """A run in the store of `MLFLOW_TRACKING_URI`, or in `run_dir/mlflow.db`."""

    def __init__(self, library: Any, run_dir: Path, config: Mapping[str, Any]) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{(run_dir / 'mlflow.db').resolve()}")
        self.client = library.MlflowClient(tracking_uri=uri)
        found = self.client.get_experiment_by_name("whippletree")
        experiment = found.experiment_id if found else self.client.create_experiment("whippletree")
        self.run_id = self.client.create_run(experiment, run_name=run_dir.name).info.run_id
        for name, value in config.items():
            self.client.log_param(self.run_id, name, value)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in numbers(metrics).items():
            legal = re.sub(r"[^\w\-. :/]", "_", name)  # mlflow refuses any other character
            self.client.log_metric(self.run_id, legal, value, step=step)

    def close(self) -> None:
        self.client.set_terminated(self.run_id)


SINKS: dict[str, tuple[str, Callable[[Any, Path, Mapping[str, Any]], Sink]]] = {
    "tensorboard": ("torch.utils.tensorboard", TensorBoard),
    "wandb": ("wandb", Wandb),
    "trackio": ("trackio", Trackio),
    "mlflow": ("mlflow", Mlflow),
}


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are numbers, without step and time, which every sink has its own column for."""
    kept = {name: value for name, value in metrics.items() if name not in ("step", "time")}
    return {name: value for name, value in kept.items() if isinstance(value, int | float) and value == value}


def _library(name: str) -> Any:
    try:
        return importlib.import_module(SINKS[name][0])
    except ImportError as error:
        raise ValueError(
            f"metrics to {name} need the package {name}, which is not installed ({error}): pip install {name}"
        ) from error
