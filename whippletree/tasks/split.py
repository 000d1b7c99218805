"""Keeping what is trained on apart from what is measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence

from whippletree.types import Task


def asked(task: Task) -> str:
    """What a task asks: its messages, or its columns where it has none. Ids do not count."""
    return json.dumps(task.messages or task.columns, sort_keys=True)


def disjoint(train: Sequence[Task], held_out: Sequence[Task], *, key: Callable[[Task], Hashable] = asked) -> list[Task]:
    """The training tasks that ask nothing that a held-out task asks, in their order.

    Raises:
        ValueError: none is left.
    """
    held = {key(task) for task in held_out}
    left = [task for task in train if key(task) not in held]
    if not left:
        raise ValueError(
            f"all {len(train)} training tasks ask what one of the {len(held)} held-out questions asks; hold fewer out, "
            f"or make the tasks more varied"
        )
    return left
