from __future__ import annotations

import numpy as np
import pytest

from whippletree.toys.letters import Ask, Game, Letters, Script
from whippletree.types import Batch

LETTERS = Letters("ab ")  # 0 1 2, end 3, user 4, assistant 5, note 6


def echo(task: int) -> Script:
    """Asks "a", then what was replied, then something afresh on another thread."""
    reply = yield Ask("a")
    again = yield Ask(reply)
    side = yield Ask("b", thread="title/1", fresh=True)
    return {"reward": float(task), "length": float(len(reply + again + side))}


GAME = Game(LETTERS, echo, tasks=2, reply=2, measures=("length",))


def test_text_becomes_tokens_and_back() -> None:
    assert LETTERS.encode("b a") == (1, 2, 0) and LETTERS.decode((4, 1, 2, 5, 0, 3)) == "b a"
    with pytest.raises(ValueError, match=r"the text 'cab' also has \['c'\]"):
        LETTERS.encode("cab")


def test_a_prompt_goes_on_from_what_was_said_and_closes_a_reply_that_was_cut_off() -> None:
    assert LETTERS.ask("a") == (4, 0, 5)
    assert LETTERS.ask("b", (4, 0, 5, 1, 3)) == (4, 0, 5, 1, 3, 4, 1, 5)
    assert LETTERS.ask("b", (4, 0, 5, 1, 1)) == (4, 0, 5, 1, 1, 3, 4, 1, 5)
    assert LETTERS.noted((4, 0, 5), "ba") == (6, 1, 0, 4, 0, 5)


def test_a_script_becomes_turns_with_threads_links_and_words() -> None:
    rollouts = GAME.play(LETTERS.policy(), [0, 1, 5], np.random.default_rng(0), version=3)
    assert [rollout.group for rollout in rollouts] == ["0", "1", "5"]
    assert [rollout.rewards for rollout in rollouts] == [{"reward": 0.0}, {"reward": 1.0}, {"reward": 1.0}]
    for rollout in rollouts:
        first, second, side = rollout.turns
        assert [t.link for t in rollout.turns] == ["root", "append", "root"]
        assert [t.thread for t in rollout.turns] == ["main", "main", "title/1"]
        assert second.prompt_ids[: len(first.prompt_ids + first.reply_ids)] == first.prompt_ids + first.reply_ids
        assert second.request["messages"][1] == first.reply
        assert second.request["messages"][2]["content"] == first.reply["content"]
        assert side.prompt_ids == (4, 1, 5) and len(side.request["messages"]) == 1
        assert all(t.finish_reason == ("stop" if t.reply_ids[-1] == 3 else "length") for t in rollout.turns)
    counts = GAME.counts(rollouts)
    assert counts["reward"].tolist() == [0.0, 1.0, 1.0]
    lengths = [sum(len(turn.reply["content"]) for turn in rollout.turns) for rollout in rollouts]
    assert counts["length"].tolist() == lengths
    assert Batch.of(rollouts).channels == ("reward",)


def test_a_note_stands_before_the_first_prompt_and_so_before_all_that_go_on_from_it() -> None:
    rollout = GAME.play(LETTERS.policy(), [0], np.random.default_rng(0), notes=["ab"])[0]
    first, second, side = (turn.prompt_ids for turn in rollout.turns)
    assert first == (6, 0, 1, 4, 0, 5) and second[:6] == first and side == (6, 0, 1, 4, 1, 5)


def test_the_same_seed_is_the_same_game() -> None:
    one, other, third = (GAME.play(LETTERS.policy(), [0] * 4, np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert one == other != third
