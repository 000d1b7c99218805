from __future__ import annotations

from typing import Any

import pytest

from whippletree.reward import reasoning_gym_score
from whippletree.reward.text_test import said

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
