from __future__ import annotations

from typing import Any

import pytest

from whippletree.reward import assistant_texts, final_text
from whippletree.reward.text import conversation, reply_message
from whippletree.types import Json, Rollout, Task, Turn


def said(reply: str, *, answer: Any = None, **columns: Any) -> Rollout:
    """A rollout of one turn with this reply, on a task with these columns."""
    turn = Turn("k", (1,), (2,), (-0.5,), 0, "stop", reply={"message": {"role": "assistant", "content": reply}})
    return Rollout("r", Task("t", (), {"answer": answer, **columns}), "g", (turn,))


ASK, REPLY = {"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "5"}
AGAIN, BETTER = {"role": "user", "content": "No. Again."}, {"role": "assistant", "content": "4"}


def turn(messages: list[Json], reply: Json, *, finish_reason: str = "stop") -> Turn:
    return Turn("k", (1,), (2,), (-0.5,), 0, finish_reason, request={"messages": messages}, reply={"message": reply})


def rollout(*turns: Turn) -> Rollout:
    return Rollout("r", Task("t", (ASK,)), "g", turns)


TWO = rollout(turn([ASK], REPLY), turn([ASK, REPLY, AGAIN], BETTER))


def test_the_last_reply_and_all_of_them():
    assert (final_text(TWO), assistant_texts(TWO)) == ("4", ["5", "4"])


def test_content_may_be_parts_or_nothing():
    parts = [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}, {"type": "image"}]
    calls: Json = {"role": "assistant", "content": None, "tool_calls": [{}]}
    both = rollout(turn([], {"content": parts}), turn([], calls), turn([], {"role": "assistant"}))
    assert assistant_texts(both) == ["42", "", ""]
    bare = Turn("k", (1,), (2,), (-0.5,), 0, "stop", reply={"role": "assistant", "content": "4"})
    assert final_text(rollout(bare)) == "4"


def test_a_reply_nobody_read_does_not_count_and_no_reply_is_no_answer():
    assert final_text(rollout(*TWO.turns, turn([ASK], {"content": "6"}, finish_reason="abandoned"))) == "4"
    with pytest.raises(ValueError, match="rollout r has none"):
        final_text(rollout())


def test_a_conversation_is_what_began_and_what_followed():
    assert conversation(TWO) == ([ASK], [REPLY, AGAIN, BETTER])
    assert conversation(rollout()) == ([ASK], [])


def test_of_a_rewritten_history_only_the_replies_are_known_to_follow():
    summary = {"role": "user", "content": "So far: 5 was wrong."}
    assert conversation(rollout(turn([ASK], REPLY), turn([summary], BETTER))) == ([ASK], [REPLY, BETTER])


def test_a_reply_reads_the_same_whatever_api_it_was_written_in():
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    parts = [{"kind": "reasoning", "text": "hm"}, {"kind": "text", "text": "4"}, {"kind": "text", "text": "2"}]
    kept: Json = {"id": "resp_1", "output": [{"type": "message", "content": []}], "status": "completed"}
    said_all = {"parts": [*parts, {"kind": "call", "call": call}]}
    spoken = Turn("k", (1,), (2,), (-0.5,), 0, "tool_calls", info=said_all, reply=kept)
    assert final_text(rollout(spoken)) == "42"
    assert reply_message(spoken) == {
        "role": "assistant",
        "content": "42",
        "reasoning_content": "hm",
        "tool_calls": [call],
    }
    lone = Turn("k", (1,), (2,), (-0.5,), 0, "tool_calls", info={"parts": [{"kind": "call", "call": call}]})
    assert reply_message(lone) == {"role": "assistant", "content": None, "tool_calls": [call]}


def test_what_a_side_thread_was_told_is_no_answer_of_the_agent():
    title = Turn("t", (1,), (2,), (-0.5,), 0, "stop", thread="title/1", reply={"content": "Sums"})
    assert assistant_texts(rollout(*TWO.turns, title)) == ["5", "4"]
    assert assistant_texts(rollout(title)) == []
