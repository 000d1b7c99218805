"""Tasks as a recipe names them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from whippletree.tasks.gym import reasoning_gym_tasks
from whippletree.tasks.hub import hub_tasks
from whippletree.tasks.jsonl import read_jsonl
from whippletree.types import Task

KINDS: Mapping[str, Callable[..., list[Task]]] = {
    "jsonl": read_jsonl,
    "hub": hub_tasks,
    "reasoning_gym": reasoning_gym_tasks,
}


def load(spec: Mapping[str, Any]) -> list[Task]:
    """The tasks of a recipe's table: `kind`, and the arguments of the function that `KINDS` has for it.

    Raises:
        ValueError: the kind is unknown, or an argument is missing, unknown or refused.
    """
    settings = {name: value for name, value in spec.items() if name != "kind"}
    kind: Any = spec.get("kind")
    if kind not in KINDS:
        raise ValueError(f"tasks need a kind, one of {sorted(KINDS)}, but got {kind!r}")
    try:
        inspect.signature(KINDS[kind]).bind(**settings)
    except TypeError as error:
        raise ValueError(f"tasks of kind {kind!r}: {error}, but got {sorted(settings)}") from error
    return KINDS[kind](**settings)
