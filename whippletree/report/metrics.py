"""The metrics of a run: one JSON object a step in `metrics.jsonl`, on disk before the step counts as done."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from whippletree.report.sinks import Sink

Row = dict[str, Any]


class Metrics:
    """Appends to `run_dir/metrics.jsonl`; a line is whole only with its line end, and a torn last one is dropped."""

    def __init__(self, run_dir: str | Path, *, sinks: Sequence[Sink] = ()) -> None:
        self.path = Path(run_dir) / "metrics.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.sinks = tuple(sinks)
        rows = read(self.path)
        self.last = rows[-1]["step"] if rows else None
        self.path.touch()
        os.truncate(self.path, len(_whole(self.path)))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one line, flushed and fsynced, then tell the sinks; a number that is not finite is written as null.

        Raises:
            ValueError: `step` is before the last one written; a resumed run calls `truncate_after` first.
        """
        if self.last is not None and step < self.last:
            raise ValueError(
                f"steps are written in order, but step {step} came after {self.last} in {self.path}: "
                "a run that goes back to a checkpoint calls truncate_after(its step) first"
            )
        row = {"step": step, "time": time.time()} | {name: _plain(value) for name, value in metrics.items()}
        with self.path.open("ab") as file:
            file.write(_line(row))
            file.flush()
            os.fsync(file.fileno())
        self.last = step
        for sink in self.sinks:
            sink.log(step, row)

    def truncate_after(self, step: int) -> None:
        """Remove the lines of later steps, atomically: the file is the old one or the new one at every moment."""
        rows = [row for row in read(self.path) if row["step"] <= step]
        aside = self.path.with_suffix(".jsonl.new")
        with aside.open("wb") as file:
            file.write(b"".join(map(_line, rows)))
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self.path)
        _sync_folder(self.path.parent)
        self.last = rows[-1]["step"] if rows else None

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


def read(path: str | Path) -> list[Row]:
    """Every whole line of a metrics file, in order; an absent file has none, and null is `None`.

    Raises:
        ValueError: a line before the last is not a JSON object with a step; names file and line.
    """
    rows: list[Row] = []
    for number, line in enumerate(_whole(Path(path)).splitlines(), start=1):
        try:
            row = json.loads(line)
            rows.append({"step": int(row["step"]), **row})
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: each line is a JSON object with a step, but {error!r}") from error
    return rows


def _whole(path: Path) -> bytes:
    """The bytes up to the last line end: what a kill in the middle of a write cannot have torn."""
    data = path.read_bytes() if path.exists() else b""
    return data[: data.rfind(b"\n") + 1]


def _line(row: Row) -> bytes:
    return json.dumps(row, allow_nan=False, ensure_ascii=False).encode() + b"\n"


def _plain(value: Any) -> Any:
    """A JSON value: numbers of torch and numpy become Python's, and what is not finite becomes None."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _sync_folder(folder: Path) -> None:
    """Make a rename in this folder last through a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
