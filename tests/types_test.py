"""What happened, what one pass gives, and who may be asked: exact round trips, laziness, and clear refusals."""

from __future__ import annotations

import json
import math
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from whippletree.types import Asker, Forward, Rollout, Scorer, Services, Task, Turn

NAN = math.nan
TASK = Task("sum-1", ({"role": "user", "content": "3 + 4?"},), {"answer": "7", "tests": [1, None, {"deep": 1.5}]})


def turn(*, temperature: float = 1.0, top_p: float = 1.0, finish_reason: str = "stop") -> Turn:
    return Turn(
        id="turn-1",
        prompt_ids=(1, 2, 3),
        reply_ids=(4, 5),
        reply_logps=(-0.1, NAN),
        version=3,
        finish_reason=finish_reason,
        temperature=temperature,
        top_p=top_p,
        request={"messages": [{"role": "user", "content": "é\n\u2028"}]},
        reply={"choices": [{"index": 0}]},
    )


def through_text(row: dict[str, object]) -> dict[str, object]:
    """The row as it comes back from a file; `allow_nan=False` refuses what is not JSON."""
    loaded: dict[str, object] = json.loads(json.dumps(row, allow_nan=False))
    return loaded


def test_a_task_comes_back_equal() -> None:
    assert Task.from_json(through_text(TASK.to_json())) == TASK
    assert Task.from_json(through_text(Task("empty").to_json())) == Task("empty")


def test_a_turn_comes_back_equal_with_its_unknown_places() -> None:
    row = through_text(turn().to_json())
    back = Turn.from_json(row)
    assert row["reply_logps"] == [-0.1, None]
    assert math.isnan(back.reply_logps[1])
    for name in (f.name for f in fields(Turn) if f.name != "reply_logps"):
        assert getattr(back, name) == getattr(turn(), name)
        assert type(getattr(back, name)) is type(getattr(turn(), name))
    assert back.to_json() == turn().to_json()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(max_value=0.0, allow_infinity=False, width=32), max_size=8))
def test_every_log_probability_survives_the_text_to_the_last_bit(logps: list[float]) -> None:
    there = Turn("t", (), tuple(range(len(logps))), tuple(logps), version=0, finish_reason="stop")
    assert Turn.from_json(through_text(there.to_json())).reply_logps == there.reply_logps


def test_a_rollout_comes_back_equal_and_a_missing_reward_stays_missing() -> None:
    rollout = Rollout(
        id="r",
        task=TASK,
        group="g",
        turns=(turn(),),
        rewards={"answer": 0.0, "style": None},
        ending="failed",
        blame="sandbox",
        reason="no space",
        info={"exit": 1},
    )
    back = Rollout.from_json(through_text(rollout.to_json()))
    assert back.to_json() == rollout.to_json()
    assert (back.task, back.rewards, back.blame) == (TASK, {"answer": 0.0, "style": None}, "sandbox")
    assert isinstance(back.turns, tuple)


def test_a_token_without_a_log_probability_is_refused() -> None:
    with pytest.raises(ValueError, match=r"turn t: .* 2 ids and 1 log-prob"):
        Turn("t", (1,), (2, 3), (-0.5,), version=0, finish_reason="stop")


def test_what_the_trainer_cannot_express_is_not_trainable() -> None:
    assert turn().trainable
    assert turn(temperature=0.7).trainable
    assert not turn(temperature=0.0).trainable
    assert not turn(top_p=0.99).trainable
    assert not turn(finish_reason="abandoned").trainable


# ---- one pass ---------------------------------------------------------------------------------------------------


def test_a_forward_pass_computes_what_is_read_and_that_once() -> None:
    calls: list[str] = []

    def entropy() -> Tensor:
        calls.append("entropy")
        return torch.ones(2)

    def value() -> Tensor:
        calls.append("value")
        return torch.zeros(2)

    forward = Forward(torch.zeros(2), ask={"entropy_N": entropy, "value_N": value})
    assert forward.entropy_N is forward.entropy_N
    assert calls == ["entropy"]


def test_what_a_forward_pass_cannot_give_is_refused_by_name() -> None:
    forward = Forward(torch.zeros(2), ask={"entropy_N": lambda: torch.ones(2)})
    with pytest.raises(AttributeError, match=r"entropy_N.*value_N"):
        _ = forward.value_N
    with pytest.raises(AttributeError, match="another prompt"):
        forward.under([[1]])


def test_a_second_pass_gets_the_prompts() -> None:
    forward = Forward(torch.zeros(1), second_pass=lambda prompts: Forward(torch.tensor([float(len(prompts[0]))])))
    assert forward.under([[7, 8, 9]]).logp_N.tolist() == [3.0]


# ---- services ---------------------------------------------------------------------------------------------------


class Scripted:
    async def logps(self, turns: object) -> list[Tensor]:
        return []

    async def ask(self, messages: object, **options: object) -> str:
        return "yes"


def test_services_are_found_by_name_and_missing_ones_refused_by_name() -> None:
    model = Scripted()
    services = Services(scorers={"teacher": model}, askers={"judge": model})
    assert isinstance(model, Scorer)
    assert isinstance(model, Asker)
    assert services.scorer("teacher") is model
    assert services.asker("judge") is model
    with pytest.raises(ValueError, match=r"'reference'.*teacher"):
        services.scorer("reference")
    with pytest.raises(ValueError, match=r"'critic'.*judge"):
        services.asker("critic")
