"""A run is a directory: the resolved recipe, metrics, every turn, checkpoints, report. The same command resumes it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from safetensors.torch import load_file, save_file
from torch import Tensor

from whippletree import config


@dataclass(frozen=True, kw_only=True)
class State:
    """Where a run stands after a whole step."""

    step: int = 0  # steps done
    version: int = 0  # of the policy
    cursor: int = 0  # tasks handed out
    tokens: int = 0  # sampled so far, for `num_tokens`
    seconds: float = 0.0  # of training so far


class RunDirectory:
    """The files of one run, held by one process at a time.

    Raises:
        ValueError: another process holds the run, or the directory is of a run with another recipe.
    """

    def __init__(self, path: str | Path, recipe: config.Recipe) -> None:
        self.path, self.recipe = Path(path), recipe
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = self._hold()
        self._agree(recipe)

    def _hold(self) -> TextIO:
        lock = (self.path / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{self.path} is in use by another process: wait for it, or give the run another name"
            ) from None
        return lock

    def _agree(self, recipe: config.Recipe) -> None:
        """Write the recipe, or see that it is the one the run began with; only how long it runs may differ."""
        file = self.path / "config.toml"
        if file.exists():
            before, now = config.load(file).model_dump(), recipe.model_dump()
            free = {"steps", "checkpoint_every", "keep_checkpoints", "sinks"}
            odd = sorted(key for key in now if key not in free and now[key] != before[key])
            if odd:
                raise ValueError(
                    f"{self.path} is a run with another recipe: {', '.join(odd)} differ. Resume it with the settings "
                    f"in its config.toml, or give this run another name with --set name=..."
                )
        write_aside(file, config.dump(recipe).encode())

    @property
    def checkpoints(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        return sorted(p for p in (self.path / "checkpoints").glob("step-[0-9]*") if (p / "state.json").exists())

    def save(
        self, state: State, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor], extras: Any = None
    ) -> Path:
        """Write a checkpoint aside, then rename it; only `keep_checkpoints` stay. `extras(folder)` adds files."""
        folder = self.path / "checkpoints" / f"step-{state.step:06d}"
        aside = folder.with_name(f".{folder.name}")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        save_file({name: x.contiguous() for name, x in weights.items()}, aside / "model.safetensors", {"format": "pt"})
        save_file({name: x.contiguous() for name, x in moments.items()}, aside / "optimizer.safetensors")
        if extras:
            extras(aside)
        (aside / "state.json").write_text(json.dumps(asdict(state)))
        for file in aside.iterdir():
            sync(file)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
        sync(folder.parent)
        for old in self.checkpoints[: -self.recipe.keep_checkpoints]:
            shutil.rmtree(old)
        return folder

    def latest(self) -> tuple[State, dict[str, Tensor], dict[str, Tensor]] | None:
        """The last whole checkpoint: state, weights, moments; None where a run has none yet."""
        if not self.checkpoints:
            return None
        folder = self.checkpoints[-1]
        state = State(**json.loads((folder / "state.json").read_text()))
        return state, load_file(folder / "model.safetensors"), load_file(folder / "optimizer.safetensors")

    def write_json(self, name: str, value: Any) -> Path:
        """Write one JSON file of the run, whole or not at all."""
        return write_aside(self.path / name, json.dumps(value, indent=2).encode())

    def close(self) -> None:
        """Let another process have the run."""
        self._lock.close()


def write_aside(path: Path, content: bytes) -> Path:
    """Replace a file in one step: a kill leaves the old content or the new, never a part."""
    aside = path.with_name(f".{path.name}")
    aside.write_bytes(content)
    sync(aside)
    aside.replace(path)
    return path


def sync(path: Path) -> None:
    """Have the disk hold what was written to a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
