from __future__ import annotations

from typing import Any

import pytest

from whippletree.methods._observed import Step, done, seen, steps
from whippletree.types import Rollout, Task, Turn


def turn(thread: str = "main", **said: Any) -> Turn:
    return Turn("t", (5, 6), (7, 8), (-0.1, -0.1), 0, "stop", thread=thread, **said)


CALLED = {"role": "assistant", "tool_calls": [{"function": {"name": "go", "arguments": '{"to": 3}'}}]}


@pytest.mark.parametrize(
    "request_",
    [
        {"messages": [{"role": "user", "content": "go"}, CALLED, {"role": "tool", "content": "a wall"}]},
        {
            "messages": [
                {"role": "assistant", "content": [{"type": "tool_use", "name": "go"}]},
                {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "text", "text": "a wall"}]}]},
            ]
        },
        {
            "input": [
                {"role": "user", "content": "go"},
                {"type": "function_call", "name": "go", "arguments": "{}"},
                {"type": "function_call_output", "output": "a wall"},
            ]
        },
        {
            "contents": [
                {"role": "model", "parts": [{"functionCall": {"name": "go"}}]},
                {"role": "user", "parts": [{"functionResponse": {"name": "go", "response": {"told": "a wall"}}}]},
            ]
        },
        {"input": "a wall"},
    ],
)
def test_what_is_seen_is_what_came_after_the_models_own_words(request_: dict[str, Any]) -> None:
    assert seen(turn(request=request_)) == "a wall"


def test_at_first_all_is_seen_and_without_a_request_the_ids_are() -> None:
    both = [{"role": "system", "content": "play"}, {"role": "user", "content": [{"type": "text", "text": "begin"}]}]
    assert seen(turn(request={"messages": both})) == "play\nbegin"
    assert (seen(turn()), done(turn())) == ("5 6", "7 8")


def test_what_is_done_is_text_and_calls_without_reasoning() -> None:
    parts = [
        {"kind": "reasoning", "text": "surely a door"},
        {"kind": "text", "text": "I go."},
        {"kind": "call", "call": CALLED["tool_calls"][0]},
    ]
    assert done(turn(info={"parts": parts})) == 'I go.\ngo {"to": 3}'
    assert done(turn(reply={"message": CALLED})) == 'go {"to": 3}'
    assert done(turn(reply={"role": "assistant", "content": "forward"})) == "forward"


def shows(*seen: tuple[str, str]) -> Rollout:
    turns = (turn(thread, request={"messages": [{"role": "user", "content": text}]}) for thread, text in seen)
    return Rollout("r", Task("t"), "g", tuple(turns))


def test_a_step_leads_to_what_is_seen_next_in_its_thread() -> None:
    found = steps(shows(("main", "A"), ("sub-agent/1", "b"), ("main", "C"), ("sub-agent/1", "d")), state=str.lower)
    assert found == [Step("a", "c", False), Step("b", "d", False), Step("c", None, False), Step("d", None, False)]
    assert steps(Rollout("r", Task("t"), "g")) == []


def test_an_error_is_no_new_state_but_a_first_text_that_holds_the_word_is() -> None:
    found = steps(shows(("main", "fix the error"), ("main", "Invalid move."), ("main", "a wall")))
    assert found == [
        Step("fix the error", "fix the error", True),
        Step("fix the error", "a wall", False),
        Step("a wall", None, False),
    ]
    assert not any(step.refused for step in steps(shows(("main", "a"), ("main", "Invalid move.")), errors="oops"))
