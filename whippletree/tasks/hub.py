"""Tasks from a Hugging Face data set, on the hub or on disk."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from whippletree.tasks.row import distinct_ids, task_of_row
from whippletree.types import Task


def hub_tasks(
    dataset: str, *, split: str = "train", prompt: str = "prompt", size: int | None = None, **options: Any
) -> list[Task]:
    """The first `size` rows (None: all) of a data set, read through the library `datasets`.

    `prompt` names the column that is asked; under another name than "prompt" it stays a column too. `options` go on to
    `datasets.load_dataset`: `name`, `revision`, or for local files `dataset="json"` (or "csv") and `data_files`.

    Raises:
        ImportError: the library is not installed.
        ValueError: there are no rows, a row is no task, or two have one id.
    """
    try:
        library = importlib.import_module("datasets")
    except ImportError as error:
        raise ImportError("Hugging Face data sets need the library datasets: pip install datasets") from error
    rows = library.load_dataset(dataset, split=split, **options)
    tasks = distinct_ids(_rows(islice(rows, size), source=f"{dataset}:{split}", prompt=prompt))
    if not tasks:
        raise ValueError(f"{dataset}, split {split}, has no rows")
    return tasks


def _rows(rows: Iterator[Mapping[str, Any]], *, source: str, prompt: str) -> Iterator[tuple[str, Task]]:
    for number, row in enumerate(rows):
        place = f"{source}:{number}"
        try:
            if prompt not in ("prompt", "messages"):
                if prompt not in row:
                    raise ValueError(f"there is no column {prompt!r} to ask, only {sorted(row)}")
                row = {**row, "prompt": row[prompt]}
            yield place, task_of_row(row, default_id=place)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
