from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import Any

import pytest

from whippletree.reward import exact_answer, from_harness, math_equal, reasoning_gym_score
from whippletree.reward.math import Judge
from whippletree.types import Rollout, Task, Turn


def said(reply: str, *, answer: Any = None, **columns: Any) -> Rollout:
    turn = Turn("k", (1,), (2,), (-0.5,), 0, "stop", reply={"message": {"role": "assistant", "content": reply}})
    return Rollout("r", Task("t", (), {"answer": answer, **columns}), "g", (turn,))


@pytest.mark.parametrize(
    ("reply", "answer", "right"),
    [
        ("Paris", "Paris", 1),
        ("  new\n york. ", "New York", 1),
        ("４", 4, 1),  # full-width digit, and an answer that is a number
        ("It is Paris", "Paris", 0),
        ("", "Paris", 0),
        ("3.", "3", 1),
        ("3.5", "35", 0),
    ],
)
async def test_exact_answer(reply: str, answer: Any, right: int):
    assert await exact_answer(said(reply, answer=answer)) == {"exact_answer": right}


async def test_a_pattern_finds_the_answer_where_it_matches_last():
    reward = partial(exact_answer, pattern=r"<answer>(.*?)</answer>")
    assert await reward(said("<answer>3</answer> no, <answer>\n4 </answer>", answer="4")) == {"exact_answer": 1.0}
    assert await reward(said("4", answer="4")) == {"exact_answer": 0.0}


async def test_without_an_expected_answer_a_reply_is_not_wrong():
    for reward in (exact_answer, math_equal):
        with pytest.raises(ValueError, match="no answer in its column 'answer'"):
            await reward(said("4"))


async def test_the_harness_s_own_rewards():
    assert await from_harness(Rollout("r", Task("t"), "g", rewards={"a": 0.5, "b": None})) == {"a": 0.5, "b": None}


@pytest.mark.parametrize(
    ("reply", "answer", "right"),
    [
        (r"so it is \boxed{0.5}", "1/2", 1),
        (r"$\sqrt{12}$", r"2\sqrt{3}", 1),
        (r"$2\sqrt{5}$", r"2\sqrt{3}", 0),
        ("It is 1,000.", 1000, 1),
        ("6 + 6 = 12", "12", 1),
        ("seven", "7", 0),
        ("", "7", 0),
        (r"$\frac{1}{$", r"$\frac{1}{2}$", 0),
    ],
)
async def test_math_equal(reply: str, answer: Any, right: int):
    pytest.importorskip("math_verify")
    assert await math_equal(said(reply, answer=answer)) == {"math_equal": right}


async def test_an_expected_answer_that_is_not_mathematics_is_not_a_wrong_reply():
    pytest.importorskip("math_verify")
    with pytest.raises(ValueError, match="'~' is not mathematics"):
        await math_equal(said("7", answer="~"))


def test_a_judge_that_hangs_is_ended_and_the_next_question_gets_a_new_one():
    pytest.importorskip("math_verify")
    judge = Judge(limit=0.0)  # no answer comes at once, as if it hung
    try:
        with pytest.raises(TimeoutError, match="more than 0 s"):
            judge.equal({"expected": "1", "reply": "1"})
        judge.limit = 30.0
        assert judge.equal({"expected": "1", "reply": "1"})
    finally:
        judge.close()


def test_without_its_library_a_reward_says_how_to_install_it():
    script = """
import asyncio, sys
sys.modules["math_verify"] = sys.modules["reasoning_gym"] = None  # as if they were not installed
from whippletree.reward import math_equal, reasoning_gym_score
from whippletree.types import Rollout, Task, Turn
made = {"dataset": "chain_sum", "settings": {}, "index": 0}
turn = Turn("k", (1,), (2,), (-0.5,), 0, "stop", reply={"content": "4"})
rollout = Rollout("r", Task("t", (), {"answer": "4", "reasoning_gym": made}), "g", (turn,))
for reward in (math_equal, reasoning_gym_score):
    try:
        asyncio.run(reward(rollout))
    except ImportError as error:
        print(error)
"""
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "whippletree[math]" in printed and "pip install reasoning-gym" in printed


CHAIN = {"dataset": "chain_sum", "settings": {"size": 3, "seed": 5, "min_terms": 2, "max_terms": 2}, "index": 2}


def gym_task(made: dict[str, Any]) -> dict[str, Any]:
    """The columns that `tasks.reasoning_gym_tasks` gives."""
    library = pytest.importorskip("reasoning_gym")
    problem = library.create_dataset(made["dataset"], **made["settings"])[made["index"]]
    return {"question": problem["question"], "answer": problem["answer"], "reasoning_gym": made}


async def test_reasoning_gym_scores_the_answer_in_its_tag_or_the_whole_reply():
    columns = gym_task(CHAIN)
    right = columns["answer"]
    for reply, worth in [
        (right, 1.0),
        (f" +{right}.0\n", 1.0),  # its scorer compares numbers
        (f"<answer>0.5</answer> or <answer> {right} </answer>, I think", 1.0),
        ("<answer>0.5</answer>", 0.0),
        # its scorer gives an answer among other words its share of the letters
        (f"it is {right}", len(right) / len(f"it is {right}")),
    ]:
        assert await reasoning_gym_score(said(reply, **columns)) == {"reasoning_gym_score": worth}


async def test_reasoning_gym_scores_problems_that_json_would_have_broken():
    # its ARC problems hold tuples, and its scorer gives 0.05 to the right answer when they have become lists
    columns = gym_task({"dataset": "rearc", "settings": {"size": 2, "seed": 3}, "index": 1})
    assert await reasoning_gym_score(said(columns["answer"], **columns)) == {"reasoning_gym_score": 1.0}


async def test_a_problem_that_cannot_be_made_again_is_not_scored():
    with pytest.raises(ValueError, match="makes another problem of task t"):
        await reasoning_gym_score(said("4", **{**gym_task(CHAIN), "question": "2 + 2 ="}))
    with pytest.raises(ValueError, match="no column 'reasoning_gym'"):
        await reasoning_gym_score(said("4", answer="4"))
