from __future__ import annotations

import datetime
from typing import Any

import pytest

from whippletree.tasks.row import distinct_ids, task_of_row
from whippletree.types import Task

ASKED = ({"role": "user", "content": "2 + 2"},)


def test_a_prompt_is_text_or_messages_and_the_rest_are_columns():
    system = [{"role": "system", "content": "Be brief."}, *ASKED]
    assert task_of_row({"prompt": "2 + 2", "answer": 4}, default_id="f:1") == Task("f:1", ASKED, {"answer": 4})
    assert task_of_row({"id": 7, "messages": system}, default_id="f:1") == Task("7", tuple(system))
    assert task_of_row({"prompt": system}, default_id="f:1").messages == tuple(system)
    assert task_of_row({"repository": "r"}, default_id="f:1") == Task("f:1", (), {"repository": "r"})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "has nothing"),
        ({"id": "a"}, "has nothing"),
        ({"id": "", "prompt": "x"}, "an id must be"),
        ({"id": ["a"], "prompt": "x"}, "an id must be"),
        ({"prompt": " \n"}, "not empty"),
        ({"prompt": None, "answer": 4}, "not empty"),
        ({"messages": []}, "not empty"),
        ({"messages": [{"content": "x"}]}, "with a 'role'"),
        ({"messages": ["x"]}, "with a 'role'"),
        ({"prompt": "x", "messages": list(ASKED)}, "has both"),
        ({"prompt": "x", "day": datetime.date(2026, 1, 1)}, "date is not JSON serializable"),
        ({"prompt": "x", "score": float("nan")}, "must be JSON"),
    ],
)
def test_a_row_that_is_no_task_says_why(row: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        task_of_row(row, default_id="f:1")


def test_ids_tell_tasks_apart():
    assert distinct_ids([("row 1", Task("a")), ("row 2", Task("b"))]) == [Task("a"), Task("b")]
    with pytest.raises(ValueError, match="row 3: the id 'a' is already taken, by row 1"):
        distinct_ids([("row 1", Task("a")), ("row 2", Task("b")), ("row 3", Task("a"))])
