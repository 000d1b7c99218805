from __future__ import annotations

import asyncio
import re
import threading
from functools import partial
from typing import Any

import pytest

from whippletree.reward import from_rubric, from_trl, from_verifiers, score
from whippletree.types import Batch, Json, Rollout, Task, Turn

ASK, REPLY = {"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "5"}
AGAIN, BETTER = {"role": "user", "content": "No."}, {"role": "assistant", "content": "<answer>4</answer>"}


def turn(messages: list[Json], reply: Json, ids: tuple[int, ...]) -> Turn:
    logps = (-0.5,) * len(ids)
    return Turn("k", (1,), ids, logps, 0, "stop", request={"messages": messages}, reply={"message": reply})


TASK = Task("t", (ASK,), {"answer": "4", "info": {"tests": [1]}, "level": 3, "prompt": "unused"})
ROLLOUT = Rollout("r", TASK, "g", (turn([ASK], REPLY, (7,)), turn([ASK, REPLY, AGAIN], BETTER, (8, 9))))


# ---- TRL ----


def format_reward(completions: list[list[Json]], **kwargs: Any) -> list[float]:
    return [float(bool(re.fullmatch(r"<answer>.*</answer>", c[-1]["content"]))) for c in completions]


async def judge_reward(prompts: Any, completions: Any, answer: list[str], **kwargs: Any) -> list[float]:
    await asyncio.sleep(0)
    assert prompts == [[ASK]]
    return [0.5 * (a in c[-1]["content"]) for c, a in zip(completions, answer, strict=True)]


def code_reward(completions: Any, level: list[int]) -> list[float | None]:
    return [None if n > 2 else 1.0 for n in level]


async def test_trl_functions_score_one_rollout():
    rewards = [from_trl(format_reward), from_trl(judge_reward, name="judge"), from_trl(code_reward)]
    scored = await score(ROLLOUT, rewards, timeout=9)
    assert scored.rewards == {"format_reward": 1.0, "judge": 0.5, "code_reward": None}
    assert "reward_errors" not in scored.info  # None from TRL does not apply


async def test_a_trl_function_sees_what_trl_would_give_it():
    seen: Json = {}

    def spy(**given: Any) -> list[float]:
        seen.update(given)
        return [1.0]

    await from_trl(spy)(ROLLOUT)
    assert seen == {
        "prompts": [[ASK]],
        "completions": [[REPLY, AGAIN, BETTER]],
        "completion_ids": [[7, 8, 9]],
        "answer": ["4"],
        "info": [{"tests": [1]}],
        "level": [3],
    }
    await from_trl(spy, conversational=False)(ROLLOUT)
    assert (seen["prompts"], seen["completions"]) == (["2 + 2"], ["<answer>4</answer>"])


async def test_a_length_reward_counts_letters_of_text():
    def reward_len(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(len(completion)) for completion in completions]

    assert await from_trl(reward_len, conversational=False)(ROLLOUT) == {"reward_len": 18.0}  # <answer>4</answer>


async def test_a_sync_function_runs_in_a_thread_unless_it_must_not():
    def where(**kwargs: Any) -> list[float]:
        return [float(threading.current_thread() is threading.main_thread())]

    assert await from_trl(where)(ROLLOUT) == {"where": 0.0}
    assert await from_trl(where, thread=False)(ROLLOUT) == {"where": 1.0}


async def test_a_trl_function_that_goes_wrong_is_missing():
    def wants_more(completions: Any, tests: Any) -> list[float]:
        return [1.0]

    def too_many(**kwargs: Any) -> list[float]:
        return [1.0, 0.0]

    scored = await score(ROLLOUT, [from_trl(wants_more), from_trl(too_many)], timeout=9)
    assert scored.rewards == {"wants_more": None, "too_many": None}
    assert "missing 1 required positional argument: 'tests'" in scored.info["reward_errors"]["wants_more"]
    assert "for one it returned 2" in scored.info["reward_errors"]["too_many"]


def test_what_only_trl_s_trainer_has_is_refused_where_it_is_required():
    def scheduled(completions: Any, trainer_state: Any) -> list[float]:
        return [trainer_state.global_step]

    def logs_if_it_can(completions: Any, log_metric: Any = None, **kwargs: Any) -> list[float]:
        return [1.0]

    with pytest.raises(ValueError, match=r"scheduled requires \['trainer_state'\]"):
        from_trl(scheduled)
    from_trl(logs_if_it_can)


# ---- verifiers ----


class AnswerParser:
    """The part of a verifiers parser that reward functions call."""

    def parse_answer(self, completion: list[Json]) -> str:
        return re.sub(r"</?answer>", "", completion[-1]["content"])


def correct_answer(parser: AnswerParser, completion: list[Json], answer: str) -> float:
    return float(parser.parse_answer(completion) == answer)


async def few_turns(state: Json, info: Json) -> float:
    assert state["info"] is info and not state["is_truncated"]
    return 1 / len(state["trajectory"])


def everything(prompt: Any, **kwargs: Any) -> float:
    assert prompt == [ASK]
    return float(sorted(kwargs) == ["answer", "completion", "info", "level", "state", "task"])


async def test_a_rubric_scores_a_rollout_with_its_weights():
    rewards, weights = from_rubric([correct_answer, few_turns, everything], [1.0, 0.5, 0.0], parser=AnswerParser())
    scored = await score(ROLLOUT, {k: v for k, v in rewards.items() if k != "everything"}, timeout=9)
    assert scored.rewards == {"correct_answer": 1.0, "few_turns": 0.5}
    assert weights == {"correct_answer": 1.0, "few_turns": 0.5, "everything": 0.0}
    # 1.0 * 1.0 + 0.5 * 0.5
    assert Batch.of([scored], weights=weights).reward_R.tolist() == [1.25]


async def test_a_verifiers_function_gets_what_it_names_or_everything():
    assert await from_verifiers(everything)(ROLLOUT) == {"everything": 1.0}
    assert await from_verifiers(lambda level: level, name="level")(ROLLOUT) == {"level": 3}
    named = partial(correct_answer, AnswerParser())
    assert await from_verifiers(named)(ROLLOUT) == {"correct_answer": 1.0}


def test_what_a_rubric_cannot_be_asked_here_is_refused():
    def best_of(completions: Any, answers: Any) -> list[float]:
        return [1.0]

    with pytest.raises(ValueError, match=r"asks for \['answers', 'completions'\]"):
        from_verifiers(best_of)
    with pytest.raises(ValueError, match="correct_answer requires a parser"):
        from_verifiers(correct_answer)
    with pytest.raises(ValueError, match="one weight and one name a function"):
        from_rubric([few_turns], [1.0, 2.0])
    with pytest.raises(ValueError, match="one weight and one name a function"):
        from_rubric([few_turns, few_turns])
