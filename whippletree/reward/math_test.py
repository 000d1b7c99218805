from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from whippletree.reward import math_equal
from whippletree.reward.math import Judge
from whippletree.reward.text_test import said


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
            judge.equal({"expected": "1", "reply": "2"})
        judge.limit = 30.0  # and the answer to the first is not taken for that to the second
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
    assert "pip install math-verify" in printed and "pip install reasoning-gym" in printed
