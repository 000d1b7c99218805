"""The scorers of reasoning-gym."""

from __future__ import annotations

import asyncio
import importlib
import json
from functools import lru_cache
from typing import Any

from whippletree.reward.text import final_text
from whippletree.types import Rollout, Task


async def reasoning_gym_score(rollout: Rollout, *, tag: str = "answer") -> dict[str, float]:
    """What reasoning-gym gives the last reply, usually 0 to 1: the text in its last <answer> tag, else all of it.

    Many of its scorers give part of 1 to an answer that stands among other words.

    Raises:
        ImportError: the library is not installed.
        ValueError: the task is not one of reasoning-gym's, or the installed version makes another problem of it.
    """
    return {"reasoning_gym_score": await asyncio.to_thread(_score, rollout.task, final_text(rollout), tag)}


def _score(task: Task, reply: str, tag: str) -> float:
    made = task.columns.get("reasoning_gym")
    if not isinstance(made, dict):
        raise ValueError(f"task {task.id} has no column 'reasoning_gym', which says how its problem was made")
    problems = _problems(made["dataset"], json.dumps(made["settings"], sort_keys=True))
    # made again and not kept in the task: as JSON, some problems lose what their scorers need (tuples)
    problem = problems[made["index"]]
    if problem["question"] != task.columns.get("question"):
        raise ValueError(f"this version of reasoning-gym makes another problem of task {task.id} than it holds")
    answer = importlib.import_module("reasoning_gym.utils").extract_answer(reply, tag_name=tag)
    return float(problems.score_answer(reply.strip() if answer is None else answer, problem))


@lru_cache(maxsize=64)
def _problems(dataset: str, settings: str) -> Any:
    try:
        library = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ImportError("this reward needs the library reasoning-gym: pip install reasoning-gym") from error
    return library.create_dataset(dataset, **json.loads(settings))
