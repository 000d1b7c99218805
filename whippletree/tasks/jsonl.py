"""Tasks from a file with one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from whippletree.tasks.row import distinct_ids, task_of_row
from whippletree.types import Task


def read_jsonl(path: str | Path) -> list[Task]:
    """The tasks of a file, one JSON object a line; see `task_of_row` for what an object holds. Empty lines are skipped.

    Without `id` a task is named by its file and line.

    Raises:
        ValueError: a line is broken or repeats an id (file, line number and reason), or there is no task.
    """
    tasks = distinct_ids(_lines(Path(path)))
    if not tasks:
        raise ValueError(f"{path} has no tasks: it needs one JSON object a line")
    return tasks


def _lines(path: Path) -> Iterator[tuple[str, Task]]:
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line.strip():
            place = f"{path}, line {number}"
            try:
                yield place, _task(line, default_id=f"{path.stem}:{number}")
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error


def _task(line: bytes, *, default_id: str) -> Task:
    try:
        row = json.loads(line.decode("utf-8-sig"), parse_constant=_refuse)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(row, dict):
        raise ValueError(f"it must be a JSON object, but it is a {type(row).__name__}")
    return task_of_row(row, default_id=default_id)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"JSON has no {constant}; write null")
