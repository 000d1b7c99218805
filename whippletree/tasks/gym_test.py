from __future__ import annotations

import json
from typing import Any

import pytest

from whippletree.tasks import disjoint, load, reasoning_gym_tasks
from whippletree.types import Task

pytest.importorskip("reasoning_gym")
DIGITS: dict[str, Any] = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def test_a_problem_is_a_task_that_is_pure_json():
    task = reasoning_gym_tasks("chain_sum", size=3, seed=5, **DIGITS)[2]
    assert task.id == "chain_sum:5:2"
    assert task.messages == ({"role": "user", "content": task.columns["question"]},)
    assert task.columns["reasoning_gym"] == {
        "dataset": "chain_sum",
        "settings": {**DIGITS, "size": 3, "seed": 5},
        "index": 2,
    }
    assert Task.from_json(json.loads(json.dumps(task.to_json()))) == task
    # the question ends in "a + b =" or "a - b ="
    first, sign, second = task.columns["question"].removesuffix(" =").split()[-3:]
    assert int(task.columns["answer"]) == int(first) + int(second) * (1 if sign == "+" else -1)


def test_the_same_seed_gives_the_same_tasks_and_a_near_one_the_same_questions_shifted():
    tasks = reasoning_gym_tasks("chain_sum", size=20, seed=5)
    assert tasks == reasoning_gym_tasks("chain_sum", size=20, seed=5)
    # why different seeds are not enough: problem i has the random numbers of seed + i
    shifted = reasoning_gym_tasks("chain_sum", size=20, seed=6)
    assert [t.columns["question"] for t in shifted[:19]] == [t.columns["question"] for t in tasks[1:]]


def test_distinct_questions_of_a_small_data_set_are_asked_once_and_run_out():
    # 10 first terms, 10 second terms, + or -: 200
    tasks = reasoning_gym_tasks("chain_sum", size=200, seed=1, distinct=True, **DIGITS)
    assert len({task.columns["question"] for task in tasks}) == len(tasks) == 200
    with pytest.raises(ValueError, match=r"201 distinct questions of 'chain_sum' .* only 200"):
        reasoning_gym_tasks("chain_sum", size=201, seed=1, distinct=True, **DIGITS)


def test_held_out_questions_leave_the_training_set():
    held_out = load(
        {"kind": "reasoning_gym", "dataset": "chain_sum", "size": 128, "seed": 10**6, "distinct": True, **DIGITS}
    )
    train = disjoint(
        load({"kind": "reasoning_gym", "dataset": "chain_sum", "size": 4000, "seed": 1, **DIGITS}), held_out
    )
    trained, held = ({task.columns["question"] for task in tasks} for tasks in (train, held_out))
    assert not trained & held
    assert len(trained) == 72  # all of the 200 - 128 that are left; 4000 draws miss one of them with odds below 1e-6


@pytest.mark.parametrize(
    ("dataset", "settings", "message"),
    [
        ("chainsum", {}, "has no data set 'chainsum'; it has chain_sum"),
        ("qqqqqq", {}, r"it has ab, acre, .*zebra_puzzles"),
        ("chain_sum", {"terms": 2}, "unexpected keyword argument 'terms'"),
        ("chain_sum", {"min_terms": 0}, "refuses these settings of 'chain_sum'"),
        ("chain_sum", {"size": 0}, "refuses these settings of 'chain_sum'"),
        ("chain_sum", {"min_terms": object()}, "refuses these settings of 'chain_sum'"),
    ],
)
def test_an_unknown_data_set_or_setting_is_refused(dataset: str, settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        reasoning_gym_tasks(dataset, **{"size": 2, "seed": 1, **settings})
