"""A run is a directory: the resolved recipe, metrics, every turn, checkpoints, report. The same command resumes it."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from safetensors import SafetensorError
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


FORMAT = {"format": "pt"}  # what transformers asks of a file
FREE = {"steps", "checkpoint_every", "keep_checkpoints", "sinks"}  # settings that a resumed run may change


class RunDirectory:
    """The files of one run, held by one process at a time; `fresh` empties it first.

    Raises:
        ValueError: another process holds the run, the directory is of a run with another recipe, or `fresh` would
            empty a folder that is no run directory.
    """

    def __init__(self, path: str | Path, recipe: config.Recipe, *, fresh: bool = False) -> None:
        self.path, self.recipe = Path(path), recipe
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = self._hold()
        try:
            if fresh:
                self._empty()
            self._agree()
        except BaseException:
            self.close()
            raise

    def _hold(self) -> TextIO:
        lock = (self.path / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ValueError(
                f"{self.path} is in use by another process: wait for it, or give the run another name"
            ) from None
        return lock

    def _empty(self) -> None:
        """Remove all but the lock; a folder without a recipe holds something else, and is left alone."""
        rest = [entry for entry in self.path.iterdir() if entry.name != "lock"]
        if rest and not (self.path / "config.toml").exists():
            raise ValueError(
                f"{self.path} must be emptied to begin anew, but it is no run directory, as it has no config.toml: "
                f"remove it yourself, or give the run another name"
            )
        for entry in sorted(rest, key=lambda entry: entry.name == "config.toml"):  # what marks the folder goes last
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()

    def _agree(self) -> None:
        """Write the recipe, or see that it is the one the run began with; only how long it runs may differ."""
        file = self.path / "config.toml"
        if file.exists() and self.begun:
            odd = config.differences(config.load(file), self.recipe)
            if told := [f"{key} was {a!r} and is {b!r}" for key, (a, b) in odd.items() if key not in FREE]:
                raise ValueError(
                    f"{self.path} is a run with another recipe: {'; '.join(told)}. Resume it with the settings in its "
                    f"config.toml, or give this run another name with --set name=..."
                )
        write_aside(file, config.dump(self.recipe).encode())

    @property
    def begun(self) -> bool:
        """Whether there is anything that its recipe made; a launch that was refused leaves nothing."""
        traces = (self.path / name for name in ("metrics.jsonl", "turns.sqlite"))
        return bool(self.checkpoints) or any(trace.exists() and trace.stat().st_size for trace in traces)

    @property
    def checkpoints(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        found = {path: re.fullmatch(r"step-(\d+)", path.name) for path in (self.path / "checkpoints").glob("step-*")}
        steps = {path: int(match[1]) for path, match in found.items() if match and (path / "state.json").exists()}
        return sorted(steps, key=steps.__getitem__)

    def save(
        self,
        state: State,
        weights: Mapping[str, Tensor],
        moments: Mapping[str, Tensor],
        extras: Callable[[Path], None] | None = None,
    ) -> Path:
        """Write a checkpoint aside, then rename it; only `keep_checkpoints` stay. `extras(folder)` adds files.

        Raises:
            OSError: the disk did not take it; what was written of it is removed, and older checkpoints are whole.
        """
        folder = self.path / "checkpoints" / f"step-{state.step:06d}"
        for leftover in folder.parent.glob(".step-*"):
            shutil.rmtree(leftover)
        aside = folder.with_name(f".{folder.name}")
        with _removed_unless_whole(aside):
            save_file({name: x.contiguous() for name, x in weights.items()}, aside / "model.safetensors", FORMAT)
            save_file({name: x.contiguous() for name, x in moments.items()}, aside / "optimizer.safetensors")
            if extras:
                extras(aside)
            (aside / "state.json").write_text(json.dumps(asdict(state)))
            for place in [*aside.rglob("*"), aside]:
                sync(place)
            remove(folder)
            aside.rename(folder)
        sync(folder.parent)
        for old in self.checkpoints[: -self.recipe.keep_checkpoints]:
            remove(old)
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


@contextmanager
def _removed_unless_whole(folder: Path) -> Iterator[None]:
    """A new folder that an error removes, so that a full disk gets its room back."""
    folder.mkdir(parents=True)
    try:
        yield
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, SafetensorError) and (number := re.search(r"os error (\d+)", str(error))):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error
        raise


def remove(folder: Path) -> None:
    """Remove a folder that may be there: at once by name, so that a kill never leaves a part of it under that name."""
    if folder.exists():
        aside = folder.with_name(f".{folder.name}-old")
        folder.rename(aside)
        shutil.rmtree(aside)


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
