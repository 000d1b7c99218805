from __future__ import annotations

import json
import zlib
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from whippletree.gateway.rows import CANDIDATES, COLUMNS, LEAST, Recent, stamp, turns_of
from whippletree.types import Json, Turn


def turn(prompt: range | list[int], reply: range | list[int] = range(0), request: Json | None = None) -> Turn:
    return Turn(
        id="t",
        prompt_ids=tuple(prompt),
        reply_ids=tuple(reply),
        reply_logps=(-0.5,) * len(reply),
        version=1,
        finish_reason="stop",
        request=request or {},
    )


def named(row: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(COLUMNS.split(", "), row, strict=True))


def referring(row: tuple[Any, ...]) -> tuple[int | None, int, int]:
    """(parent, tokens taken of it, tokens that the row holds itself)"""
    kept = named(row)
    return kept["parent"], kept["taken"], len(kept["prompt_ids"]) // 4


# ---- what is shared ---------------------------------------------------------------------------------------------


def test_a_prompt_that_goes_on_from_a_turn_holds_only_what_is_new():
    recent = Recent()
    assert referring(recent.row("r", 0, 0, turn(range(100), range(100, 110)))) == (None, 0, 100)
    assert referring(recent.row("r", 0, 1, turn(range(130), range(130, 135)))) == (0, 110, 20)  # 100 + 10 are there
    # a fork after 90 tokens takes 90 of whichever turn has them: turn 1 begins with all of turn 0 and stands for it
    assert referring(recent.row("r", 0, 2, turn([*range(90), -1, -2]))) == (1, 90, 2)


def test_the_turn_with_the_longest_beginning_is_taken():
    recent = Recent()
    for number, reply in enumerate(([7, 7], [8, 8], [9, 9])):  # three samples of one prompt
        recent.row("r", 0, number, turn(range(50), reply))
    assert referring(recent.row("r", 0, 3, turn([*range(50), 8, 8, 5]))) == (1, 52, 1)


def test_a_short_beginning_is_not_worth_a_reference():
    for shared, expected in ((LEAST - 1, (None, 0, LEAST)), (LEAST, (0, LEAST, 1))):
        recent = Recent()
        recent.row("r", 0, 0, turn(range(100)))
        assert referring(recent.row("r", 0, 1, turn([*range(shared), -1]))) == expected


def test_nothing_is_shared_with_another_rollout_or_attempt_or_after_it_is_forgotten():
    recent = Recent()
    recent.row("r", 0, 0, turn(range(100)))
    assert referring(recent.row("other", 0, 0, turn(range(100))))[0] is None
    assert referring(recent.row("r", 1, 0, turn(range(100))))[0] is None
    recent.forget("r")
    assert referring(recent.row("r", 1, 1, turn(range(100))))[0] is None
    recent.clear()
    assert referring(recent.row("r", 1, 2, turn(range(100))))[0] is None


def test_threads_that_take_turns_each_go_on_from_their_own():
    recent = Recent()
    for number in range(CANDIDATES):
        recent.row("r", 0, number, turn([number] * 100))
    for number in range(CANDIDATES):  # each is the oldest when its turn comes
        row = recent.row("r", 0, CANDIDATES + number, turn([number] * 120))
        assert referring(row) == (number, 100, 20)


def test_past_its_memory_the_rollout_that_was_written_longest_ago_is_forgotten():
    recent = Recent(memory=1000)  # a turn here is 100 tokens of 4 bytes and a request of 2: two fit
    for name in ("a", "b", "a", "c"):
        recent.row(name, 0, 0, turn(range(100)))
    parents = {name: referring(recent.row(name, 0, 1, turn(range(100))))[0] for name in ("a", "b")}
    assert parents == {"a": 0, "b": None}


def test_a_request_holds_what_stands_between_the_ends_it_shares():
    recent = Recent()
    first = {"messages": ["hi"], "tools": ["x" * 1000]}
    recent.row("r", 0, 0, turn(range(50), request=first))
    kept = named(recent.row("r", 0, 1, turn(range(50), request={**first, "messages": ["hi", "ho"]})))
    # '{"messages": ["hi"' is the 18 bytes that both begin with; '], "tools": ["xx...x"]}' is the end of both
    assert zlib.decompress(kept["request"]) == b', "ho"'
    assert (kept["head"], kept["tail"]) == (18, len(json.dumps(first)) - 18)


# ---- and back ---------------------------------------------------------------------------------------------------


@st.composite
def conversations(draw: st.DrawFn) -> list[Turn | None]:
    """Turns that begin with a part of an earlier one, or with nothing of one; None: the process starts anew."""
    tokens = st.lists(st.integers(0, 2**31 - 1), max_size=20)
    texts = st.lists(st.text(max_size=5), max_size=3)
    made: list[Turn] = []
    steps: list[Turn | None] = []
    for _ in range(draw(st.integers(0, 12))):
        if draw(st.integers(0, 5)) == 0:
            steps.append(None)
        begin, said = [], []
        if bool(made) and draw(st.booleans()):
            other = draw(st.sampled_from(made))
            whole = other.prompt_ids + other.reply_ids
            begin = list(whole[: draw(st.integers(0, len(whole)))])
            said = other.request["messages"][: draw(st.integers(0, 5))]
        new = turn(begin + draw(tokens), draw(tokens), {"messages": said + draw(texts), "model": draw(st.text())})
        versions = tuple(range(len(new.reply_ids))) if draw(st.booleans()) else ()
        made.append(replace(new, id=str(len(made)), versions=versions, link="fork", thread="title/1", info={"a": said}))
        steps.append(made[-1])
    return steps


@settings(max_examples=200, deadline=None)
@given(conversations(), st.sampled_from([0, 2000, 1 << 20]))
def test_turns_come_back_exactly(steps: list[Turn | None], memory: int):
    recent = Recent(memory)
    rows: list[tuple[Any, ...]] = []
    for step in steps:
        if step is None:
            recent = Recent(memory)
        else:
            rows.append(recent.row("r", 0, len(rows), step))
    assert list(turns_of(rows)) == [step for step in steps if step is not None]


def test_time_is_text_that_sorts():
    assert stamp(0) == "1970-01-01T00:00:00.000Z"
    assert stamp(1_700_000_000.5) == "2023-11-14T22:13:20.500Z"
    assert stamp(1_700_000_000.5) < stamp()
