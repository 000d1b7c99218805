from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from whippletree.gateway.exchange import write_rows
from whippletree.gateway.samples import LAYOUTS, chains, layout, samples
from whippletree.types import Rollout, Task, Turn


def turn(prompt: str, reply: str, **changes: Any) -> Turn:
    """A token is a letter's code; the log-probability of the k-th sampled one is -k."""
    logps = tuple(-float(k) for k in range(1, len(reply) + 1))
    settings = {"version": 1, "finish_reason": "stop", "reply_logps": logps, **changes}
    return Turn(f"{prompt}>{reply}", tuple(map(ord, prompt)), tuple(map(ord, reply)), **settings)


def run(*turns: Turn, **changes: Any) -> Rollout:
    return Rollout("r", Task("t"), "g", turns=turns, **{"rewards": {"a": 1.0, "b": 0.5, "c": None}, **changes})


def codes(text: str) -> list[int]:
    return list(map(ord, text))


# one conversation of two turns: prompt "ab", reply "CD", then "e" from a tool, reply "F" of which the value is unknown
TALK = run(
    turn("ab", "CD", temperature=0.5),
    turn("abCDe", "FG", reply_logps=(-3.0, math.nan), temperature=0.5, finish_reason="length"),
)
IDS = {"rollout_id": "r", "group": "g", "thread": "main"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "verl",
            {
                "prompt_ids": codes("ab"),
                "response_ids": codes("CDeFG"),
                "response_mask": [1, 1, 0, 1, 0],
                "response_logprobs": [-1.0, -2.0, 0.0, -3.0, 0.0],
                "reward_score": 1.5,  # 1 + 0.5; c does not apply
            },
        ),
        (
            "trl",
            {
                "prompt_ids": codes("ab"),
                "completion_ids": codes("CDeFG"),
                "env_mask": [1, 1, 0, 1, 0],
                "logprobs": [-1.0, -2.0, 0.0, -3.0, 0.0],
                "reward": 1.5,
            },
        ),
        (
            "verifiers",
            {
                "prompt_ids": codes("ab"),
                "prompt_mask": [0, 0],
                "completion_ids": codes("CDeFG"),
                "completion_mask": [1, 1, 0, 1, 0],
                "completion_logprobs": [-1.0, -2.0, 0.0, -3.0, 0.0],
                "reward": 1.5,
            },
        ),
        (
            "prime-rl",
            {
                "token_ids": codes("abCDeFG"),
                "mask": [False, False, True, True, False, True, False],
                "logprobs": [0.0, 0.0, -1.0, -2.0, 0.0, -3.0, 0.0],
                "temperatures": [0.5] * 7,
                "reward": 1.5,
            },
        ),
        (
            "slime",
            {
                "tokens": codes("abCDeFG"),
                "response_length": 5,
                "loss_mask": [1, 1, 0, 1, 0],
                "rollout_log_probs": [-1.0, -2.0, 0.0, -3.0, 0.0],
                "reward": 1.5,
                "status": "truncated",
            },
        ),
    ],
)
def test_a_conversation_is_one_sample_by_hand(name: str, expected: dict[str, Any]):
    assert list(samples(TALK, name)) == [{**expected, **IDS}]


def test_for_agent_lightning_each_turn_is_a_sample():
    assert list(samples(TALK, "agent-lightning")) == [
        {"prompt": {"token_ids": codes("ab")}, "response": {"token_ids": codes("CD")}, "reward": 1.5, **IDS},
        {"prompt": {"token_ids": codes("abCDe")}, "response": {"token_ids": codes("FG")}, "reward": 1.5, **IDS},
    ]


def test_a_turn_goes_on_from_the_latest_turn_of_its_thread_that_it_begins_with():
    first, second = turn("a", "B"), turn("aBc", "D")
    title = turn("aBc", "T", thread="title/1")
    fork = turn("aBx", "Y")  # begins with the first turn, but the second does already
    last = turn("aBcDe", "F")
    assert chains([first, title, second, fork, last]) == [[first, second, last], [title], [fork]]
    assert chains([first, second], single=True) == [[first], [second]]
    assert chains([]) == []


def test_every_token_that_may_train_stands_in_one_sample():
    rollout = run(
        turn("a", "BC"),
        turn("aBCd", "EF"),
        turn("aB", "XYZ"),
        turn("q", "RS", thread="sub-agent/1"),
        turn("aBCdEFg", "H", finish_reason="abandoned"),
        turn("aBXx", "U", top_p=0.9),
    )
    # 2 + 2 of the first two, 3 and 2 of the next; the last two are not trainable
    for name in ("verl", "trl", "slime"):
        field = {"verl": "response_mask", "trl": "env_mask", "slime": "loss_mask"}[name]
        assert sum(sum(sample[field]) for sample in samples(rollout, name)) == 2 + 2 + 3 + 2


def test_where_nothing_can_train_there_is_no_sample():
    assert list(samples(run(turn("a", "B", temperature=0.0)), "trl")) == []
    assert list(samples(run(turn("a", "")), "trl")) == []
    assert list(samples(run(turn("a", "B"), ending="failed", blame="harness"), "trl")) == []
    assert list(samples(run(), "trl")) == []


def test_a_reward_that_does_not_apply_is_null_and_not_zero():
    (sample,) = samples(run(turn("a", "B"), rewards={"a": None}), "trl")
    assert sample["reward"] is None
    (sample,) = samples(run(turn("a", "B"), rewards={"a": 0}), "trl")
    assert sample["reward"] == 0.0


def test_a_rollout_that_was_cut_short_says_so():
    states = [
        sample["status"]
        for ending in ("done", "truncated")
        for sample in samples(run(turn("a", "B"), ending=ending), "slime")
    ]
    assert states == ["completed", "truncated"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_samples_are_written_and_read_by_pyarrow(name: str, tmp_path: Path):
    kept = [*samples(TALK, name), *samples(run(turn("a", "B"), rewards={}), name)]
    for ending in ("jsonl", "parquet"):
        assert write_rows(kept, tmp_path / f"x.{ending}", layout(name)) == len(kept)
    assert pyarrow.parquet.read_table(tmp_path / "x.parquet").to_pylist() == kept
    assert list(map(json.loads, (tmp_path / "x.jsonl").read_text().splitlines())) == kept


def test_an_unknown_trainer_is_refused():
    with pytest.raises(ValueError, match=r"one of verl, trl, .*, agent-lightning, but got 'TRL'"):
        layout("TRL")
