from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from whippletree.reward import exact_answer
from whippletree.reward.text_test import said


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
    with pytest.raises(ValueError, match="no answer in its column 'answer'"):
        await exact_answer(said("4"))
