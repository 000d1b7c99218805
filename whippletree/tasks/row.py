"""One row of a data set as a task."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from whippletree.types import Json, Task


def task_of_row(row: Mapping[str, Any], *, default_id: str) -> Task:
    """The task of a row: `id`, and `prompt` (text or messages) or `messages`, are taken out; the rest are columns.

    A row without either is a task whose harness knows what to do with its columns.

    Raises:
        ValueError: the prompt is empty or given twice, a message has no role, or a value is not JSON.
    """
    columns = dict(row)
    name = columns.pop("id", default_id)
    if not isinstance(name, str | int) or name == "":
        raise ValueError(f"an id must be text or a whole number, but it is {name!r}")
    if "prompt" in columns and "messages" in columns:
        raise ValueError("a task has either 'prompt' or 'messages', but this one has both")
    asked = [columns.pop(key) for key in ("prompt", "messages") if key in columns]
    messages = _messages(asked[0]) if asked else ()
    if not messages and not columns:
        raise ValueError("a task needs 'prompt', 'messages' or some columns, but this one has nothing")
    try:
        json.dumps([messages, columns], allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"a task must be JSON, but in this one {error}") from error
    return Task(str(name), messages, columns)


def _messages(asked: object) -> tuple[Json, ...]:
    if isinstance(asked, str):
        asked = [{"role": "user", "content": asked}] if asked.strip() else []
    if not isinstance(asked, list) or not asked:
        raise ValueError(f"a prompt must be text or a list of messages and not empty, but it is {asked!r:.80}")
    for message in asked:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"a message must be an object with a 'role', but one is {message!r:.80}")
    return tuple(asked)


def distinct_ids(places: Iterable[tuple[str, Task]]) -> list[Task]:
    """The tasks of (place, task), whose ids must tell them apart.

    Raises:
        ValueError: two tasks have one id.
    """
    place_of: dict[str, str] = {}
    tasks = []
    for place, task in places:
        if task.id in place_of:
            raise ValueError(f"{place}: the id {task.id!r} is already taken, by {place_of[task.id]}")
        place_of[task.id] = place
        tasks.append(task)
    return tasks
