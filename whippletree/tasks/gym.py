"""Tasks from reasoning-gym, whose problems are made from a seed."""

from __future__ import annotations

import difflib
import importlib
import json
from typing import Any

from whippletree.types import Task

_DRAWS = 20  # draws for each distinct question wanted, after which the data set counts as exhausted


def reasoning_gym_tasks(dataset: str, *, size: int, seed: int, distinct: bool = False, **settings: Any) -> list[Task]:
    """`size` problems of a reasoning-gym data set, with the columns `question`, `answer` and `reasoning_gym`.

    The last holds what makes problem and scorer again. `distinct` keeps only the first problem of each question.

    reasoning-gym gives problem i the random numbers of seed + i, so two seeds closer than their size share problems;
    and small data sets repeat questions under any seed (a sum or difference of two one-digit numbers: 200 questions).
    Keep training and held-out questions apart with `tasks.disjoint`.

    Raises:
        ImportError: the library is not installed.
        ValueError: it has no such data set, setting, or number of distinct questions.
    """
    draws = size * _DRAWS if distinct else size
    made = {"dataset": dataset, "settings": {**settings, "size": draws, "seed": seed}}
    problems = _create(dataset, made["settings"])
    found: dict[Any, Task] = {}
    for index in range(draws):
        problem = problems[index]
        columns = {key: problem[key] for key in ("question", "answer")}
        columns["reasoning_gym"] = {**made, "index": index}
        asked = ({"role": "user", "content": problem["question"]},)
        found.setdefault(problem["question"] if distinct else index, Task(f"{dataset}:{seed}:{index}", asked, columns))
        if len(found) == size:
            return list(found.values())
    raise ValueError(
        f"{size} distinct questions of {dataset!r} were asked for, but {draws} draws gave only {len(found)}; ask for "
        f"fewer, or widen its settings {settings}"
    )


def _create(dataset: str, settings: Any) -> Any:
    try:
        library = importlib.import_module("reasoning_gym")
        known = importlib.import_module("reasoning_gym.factory").DATASETS
    except ImportError as error:
        raise ImportError("these tasks need the library reasoning-gym: pip install reasoning-gym") from error
    if dataset not in known:
        close = difflib.get_close_matches(dataset, known) or sorted(known)
        raise ValueError(f"reasoning-gym has no data set {dataset!r}; it has {', '.join(close)}")
    try:
        json.dumps(settings)
        return library.create_dataset(dataset, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"reasoning-gym refuses these settings of {dataset!r}: {settings}: {error}") from error
