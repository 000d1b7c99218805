from __future__ import annotations

import json
import math
from html import unescape
from re import findall, sub
from typing import Any

import pytest

from whippletree.report.rollouts import rollout_view, rollouts_html, token_texts
from whippletree.types import Rollout, Task, Turn

WORDS = ["<", "script", ">", "what?", " no", "\n", "again", " yes"]


def decode(ids: list[int]) -> str:
    return "".join(WORDS[i] for i in ids)


def turn(prompt: tuple[int, ...], reply: tuple[int, ...], logps: tuple[float, ...]) -> Turn:
    return Turn("t", prompt, reply, logps, version=1, finish_reason="stop")


TURNS = (turn((3,), (4, 5), (-0.5, math.nan)), turn((3, 4, 5, 6), (7,), (-1.0,)))
ROLLOUT = Rollout("r", Task("q1"), "g", TURNS, {"correct": 0.5, "format": 0.25, "judge": None})


def view(**changes: Any) -> dict[str, Any]:
    return rollout_view(ROLLOUT, [[-2.0, -2.0], [1.0]], decode) | changes


def test_a_view_shows_each_prompt_from_where_the_turn_before_ended() -> None:
    assert [(part["kind"], part["text"]) for part in view()["segments"]] == [
        ("prompt", "what?"),
        ("sampled", " no\n"),
        ("prompt", "again"),  # ids 3, 4, 5 stand above already
        ("sampled", " yes"),
    ]


def test_a_rewritten_context_is_shown_whole() -> None:
    rewritten = Rollout("r", Task("q"), "g", (TURNS[0], turn((6, 3), (7,), (-1.0,))))
    assert rollout_view(rewritten, [[0, 0], [0]], decode)["segments"][2]["text"] == "againwhat?"


def test_tokens_carry_log_prob_and_advantage_and_an_unknown_one_is_not_trained() -> None:
    first, unknown = view()["segments"][1]["tokens"]
    assert first == {"text": " no", "logp": -0.5, "advantage": -2.0}
    assert unknown == {"text": "\n", "logp": None, "advantage": None}


def test_the_reward_is_the_sum_of_the_channels_that_apply() -> None:
    assert (view()["reward"], view()["rewards"]) == (0.75, {"correct": 0.5, "format": 0.25})
    nothing = Rollout("r", Task("q"), "g", (), {"judge": None})
    assert rollout_view(nothing, [], decode)["reward"] is None


def test_a_view_is_json() -> None:
    assert json.loads(json.dumps(view(), allow_nan=False)) == view()


def test_advantages_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rollout r: .*\[2, 1\] tokens and the advantages \[2\]"):
        rollout_view(ROLLOUT, [[1.0, 1.0]], decode)


def test_a_character_of_several_tokens_is_told_at_its_last() -> None:
    # é is two bytes and the smile four; each byte is a token
    texts = token_texts(list("aé😀b".encode()), lambda ids: bytes(ids).decode(errors="replace"))
    assert texts == ["a", "", "é", "", "", "", "😀", "b"]


def test_a_character_that_never_ends_is_told_as_broken() -> None:
    assert token_texts(list("é".encode())[:1], lambda ids: bytes(ids).decode(errors="replace")) == ["\ufffd"]


def test_a_space_that_a_first_token_would_lose_is_kept() -> None:
    assert token_texts([4, 7, 7], lambda ids: decode(ids).lstrip()) == ["no", " yes", " yes"]


def test_shades_follow_the_sign_and_the_share_of_the_greatest_advantage() -> None:
    # the greatest shown is 2: -2 is the fifth shade of minus, 1 is half of five, rounded up
    html = rollouts_html([view()])
    spans = dict(findall(r'class="t ?(\w*)" title="(\S+)', html))
    assert list(spans) == ["n5", "off", "p3"]
    assert "−2 <i class=" in html and "+2</span>" in html


def test_equal_rewards_give_no_colour_and_no_error() -> None:
    html = rollouts_html([rollout_view(ROLLOUT, [[0.0, 0.0], [0.0]], decode)])
    assert findall(r'class="t ?(\w*)" title', html) == ["", "off", ""]


def test_a_tooltip_tells_token_log_prob_and_advantage() -> None:
    tips = [unescape(tip) for tip in findall(r'title="([^"]*)"', rollouts_html([view()]))]
    assert tips[0] == "' no'  log-prob -0.500  advantage -2.000"
    assert tips[1] == "'\\n'  log-prob unknown  not trained"


def test_a_rollout_that_holds_a_script_shows_it_as_text() -> None:
    prompt_and_reply = Rollout(
        "<script>", Task("<script>"), "g", (turn((0, 1, 2), (0, 1, 2), (-1.0,) * 3),), {"<b>": 1}
    )
    html = rollouts_html([rollout_view(prompt_and_reply, [[1.0, 0.0, -1.0]], decode)])
    assert "<script" not in html and "<b>" not in html
    assert unescape(sub("<[^>]*>", "", html)).count("<script>") == 4  # task, rollout, prompt, reply


def test_only_the_first_rollout_stands_open() -> None:
    html = rollouts_html([view(), view(ending="truncated", reward=None)])
    assert (html.count("<details"), html.count("open>")) == (2, 1)
    assert "truncated" in html and "no reward" in html
