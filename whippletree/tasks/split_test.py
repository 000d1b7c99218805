from __future__ import annotations

import pytest

from whippletree.tasks import asked, disjoint
from whippletree.types import Task


def ask(name: str, text: str) -> Task:
    return Task(name, ({"role": "user", "content": text},))


def test_what_is_held_out_leaves_the_training_set_whatever_its_id():
    train = [ask("1", "a"), ask("2", "b"), ask("3", "a"), ask("4", "c")]
    assert disjoint(train, [ask("x", "a")]) == [train[1], train[3]]
    assert disjoint(train, []) == train


def test_tasks_without_messages_ask_by_their_columns():
    assert asked(Task("1", columns={"repository": "r", "issue": 3})) == asked(
        Task("2", columns={"issue": 3, "repository": "r"})
    )
    assert asked(Task("1", columns={"issue": 3})) != asked(Task("1", columns={"issue": 4}))


def test_a_key_of_one_s_own_decides():
    train, held_out = [ask("1", "A"), ask("2", "b")], [ask("x", "a")]
    assert disjoint(train, held_out, key=lambda task: task.messages[0]["content"].lower()) == train[1:]


def test_an_empty_training_set_is_refused():
    with pytest.raises(ValueError, match="all 1 training tasks"):
        disjoint([ask("1", "a")], [ask("x", "a")])
