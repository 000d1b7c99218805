from __future__ import annotations

import itertools

import numpy as np
import pytest

from whippletree.methods import grpo
from whippletree.toys.games import (
    RULES,
    digits,
    first_difference,
    reach,
    relay,
    relay_examples,
    rule_examples,
    rules,
    running_totals,
    sum_examples,
    sums,
)
from whippletree.toys.learning import learn
from whippletree.toys.letters import Game
from whippletree.toys.transformer import pretrain
from whippletree.types import Kept, Rollout


def told(game: Game, task: int, *replies: str) -> tuple[list[str], dict[str, float]]:
    """(what was asked, what is counted) when these replies are given."""
    script = game.script(task)
    asked = [next(script).text]
    for reply in replies:
        try:
            asked.append(script.send(reply).text)
        except StopIteration as ended:
            return asked, ended.value
    raise AssertionError(f"the game goes on: {asked}")


def test_reaching_by_hand() -> None:
    game = reach()
    assert game.tasks == 12
    task = next(n for n in range(12) if next(game.script(n)).text == "1>3")
    assert told(game, task, "rr") == (["1>3"], {"reward": 1.0, "first": 1.0})
    assert told(game, task, "rrr") == (["1>3"], {"reward": 1.0, "first": 1.0})  # the wall holds
    assert told(game, task, "l", "rr", "r") == (["1>3", "no 0>3", "no 2>3"], {"reward": 1.0, "first": 0.0})
    assert told(game, task, "l", "o", "") == (["1>3", "no 0>3", "no 0>3"], {"reward": 0.0, "first": 0.0})


def test_sums_by_hand() -> None:
    game = sums()
    task = 3 * 25 + 1 * 5 + 4  # 3 + 1 + 4 in base 5: 3, 4, 8 - 5
    assert told(game, task, "343") == (["3+1+4"], {"reward": 1.0, "steps": 1.0})
    assert told(game, task, "303") == (["3+1+4"], {"reward": 1.0, "steps": pytest.approx(1 / 3)})
    assert told(game, task, "344") == (["3+1+4"], {"reward": 0.0, "steps": pytest.approx(2 / 3)})
    assert told(game, task, "3") == (["3+1+4"], {"reward": 0.0, "steps": pytest.approx(1 / 3)})
    assert running_totals([3, 1, 4], 5) == "343" and digits(task, 3, 5) == [3, 1, 4]
    assert [first_difference(text, "343") for text in ("", "0", "34", "3439", "353")] == [0, 0, 2, 3, 1]


def test_rules_by_hand() -> None:
    game = rules()
    assert game.tasks == 27 and [RULES[rule]("012") for rule in "crf"] == ["012", "210", "000"]
    for kind, right in enumerate(["02", "20", "00"]):
        assert told(game, 9 * kind + 2, right) == ([f"{'ABC'[kind]}02"], {"reward": 1.0})
        assert told(game, 9 * kind + 2, right[::-1] + "x")[1] == {"reward": 0.0}


def test_a_relay_by_hand() -> None:
    game = relay(length=2)
    assert told(game, 6, "12", "12") == (["12", "12?"], {"reward": 1.0, "noted": 1.0})
    assert told(game, 6, "0", "12") == (["12", "0?"], {"reward": 1.0, "noted": 0.0})  # by luck, or by a code
    assert told(game, 6, "12", "21") == (["12", "12?"], {"reward": 0.0, "noted": 1.0})


def test_the_chance_of_random_replies_is_exact() -> None:
    # "0>1" in one try, four letters at most of which r moves: count every reply of the uniform start
    game = reach(cells=2, tries=1)
    letters = game.letters
    outputs = letters.end + 1
    chance = sum(
        outputs ** -float(n + (n < game.reply))  # an end is sampled unless the reply is as long as may be
        for n in range(game.reply + 1)
        for word in itertools.product(letters.alphabet, repeat=n)
        if told(game, 0, "".join(word))[1]["reward"]
    )
    counts = game.counts(game.play(letters.policy(), [0] * 8000, np.random.default_rng(0)))
    assert abs(counts["reward"].mean() - chance) < 4 * (chance * (1 - chance) / 8000) ** 0.5 and chance > 0.05


def test_reaching_is_learned_from_random_weights() -> None:
    game = reach(cells=3)
    policy = game.letters.policy()
    curve = learn(grpo.METHOD, game, policy, seed=0, updates=60, groups=6, rate=3e-3, optimizer="adam")
    assert curve.mean["reward"][0] < 0.6 and curve.last() > 0.9


def test_sums_are_learned_from_examples() -> None:
    game = sums(terms=2, base=4)
    policy = game.letters.policy()
    pretrain(policy, sum_examples(game, terms=2, base=4), steps=150)
    counts = game.counts(game.play(policy, range(game.tasks), np.random.default_rng(0)))
    assert counts["reward"].mean() > 0.9 and counts["steps"].mean() > 0.9


@pytest.mark.parametrize("heeded", [True, False])
def test_notes_help_who_has_learned_to_heed_them(heeded: bool) -> None:
    game = rules()
    policy = game.letters.policy()
    pretrain(policy, rule_examples(game, noted=0.5, heeded=heeded), steps=200)
    groups = list(range(game.tasks)) * 6
    notes = ["crf"[group // 9] for group in groups]
    without = game.counts(game.play(policy, groups, np.random.default_rng(0)))["reward"].mean()
    told = game.counts(game.play(policy, groups, np.random.default_rng(0), notes=notes))["reward"].mean()
    assert (told - without > 0.25) == heeded and abs(without - 0.5) < 0.15


def no_summaries(rollout: Rollout) -> Kept:
    return Kept(tuple(turn for turn in rollout.turns if turn.kind == "main"))


@pytest.mark.slow
def test_a_relay_is_learned_only_if_summaries_are_trained() -> None:
    game, ends = relay(), []
    for method in (grpo.METHOD, grpo.METHOD.but(keep=no_summaries)):
        policy = game.letters.policy()
        pretrain(policy, relay_examples(game), steps=100)
        ends.append(learn(method, game, policy, seed=0, updates=50, groups=4, rate=1e-3, optimizer="adam").last())
    assert ends[0] > 0.5 and ends[1] < 0.4  # chance is 1/4
