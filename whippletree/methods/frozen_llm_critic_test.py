"""The exact cases of the page are numbered as there."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from whippletree import credit
from whippletree.analysis.chances import turn_labels
from whippletree.evidence import Judge
from whippletree.methods import _corridor
from whippletree.methods._tables import HALF, WORKED, forward_of, gradient, moves, table
from whippletree.methods.frozen_llm_critic import (
    ADDED,
    CLAIM,
    METHOD,
    TRAINED,
    chances,
    critic_advantage,
    learned,
    turn_advantage,
)
from whippletree.toys.corridors import corridor
from whippletree.toys.learning import learn, negated
from whippletree.toys.table import Table
from whippletree.types import Batch, Json, Rollout, Services, Task, Turn
from whippletree.update.averages import rollout_mean

REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.5])[:, None]
BATCH = replace(WORKED, reward_RC=REWARDS).with_extra(chance_K=torch.tensor([0.5, 0.3, 0.7, 0.4, 0.6, 0.2, 0.9]))


def one(values: Sequence[float], reward: float) -> Batch:
    """A rollout of one token a turn, with these chances before its turns."""
    return table([[1] * len(values)], rewards=[reward], old=HALF, chance_K=values)


def approx(expected: Sequence[float]) -> Any:
    return pytest.approx(expected, abs=1e-6)


# ---- the numbers of the page ------------------------------------------------------------------------------------


def test_case_1_the_changes_add_up_to_outcome_less_first_chance_and_are_labelled() -> None:
    found = turn_advantage(one([0.5, 0.3, 0.8], 1.0), lam=0.0).tolist()
    assert found == approx([-0.2, 0.5, 0.2]) and sum(found) == pytest.approx(0.5)
    assert turn_labels([0.5, 0.3, 0.8, 1.0]) == ["mistake", "recovery", "productive"]


@pytest.mark.parametrize(
    # 0.5 + 0.95 * 0.2 = 0.69, -0.2 + 0.95 * 0.69 = 0.4555
    ("lam", "expected"),
    [(0.95, [0.4555, 0.69, 0.2]), (1.0, [0.5, 0.7, 0.2]), (0.0, [-0.2, 0.5, 0.2])],
)
def test_case_2_what_lam_does(lam: float, expected: list[float]) -> None:
    assert turn_advantage(one([0.5, 0.3, 0.8], 1.0), lam=lam).tolist() == approx(expected)


def test_case_3_a_failure_blames_the_turns_where_the_chance_fell() -> None:
    assert turn_advantage(one([0.6, 0.6, 0.1], 0.0), lam=0.0).tolist() == approx([0.0, -0.5, -0.1])


def test_case_4_anchored_at_the_mean_of_the_group_changes_add_up_to_its_baseline() -> None:
    # rewards 1, 0, 0, 0: mean 1/4
    batch = table([[1, 1]] * 4, rewards=[1.0, 0, 0, 0], chance_K=[0.9, 0.4, 0.5, 0.5, 0.1, 0.3, 0.6, 0.6])
    found = turn_advantage(batch, lam=0.0, anchor=True)
    assert found[:2].tolist() == approx([0.15, 0.6])
    assert found.view(4, 2).sum(1).tolist() == approx([0.75, -0.25, -0.25, -0.25])
    torch.testing.assert_close(found.view(4, 2).sum(1), credit.group_mean(batch, scale="none").view(4, 2)[:, 0])


def test_case_5_a_lone_turn_has_the_outcome_less_its_chance() -> None:
    assert turn_advantage(one([0.3], 1.0), lam=0.95).tolist() == approx([0.7])


# ---- credit -----------------------------------------------------------------------------------------------------


def test_chances_are_held_off_certainty_but_the_outcome_is_not() -> None:
    assert turn_advantage(one([0.0, 1.0], 1.0), lam=0.0).tolist() == approx([0.96, 0.02])


def test_the_z_score_is_over_turns_and_not_over_tokens() -> None:
    # turns of 3 and 1 tokens with A = 0.4 and 0 at lam 0: mean 0.2, deviation 0.2
    batch = table([[3, 1]], rewards=[0.6], old=HALF, chance_K=[0.2, 0.6])
    assert critic_advantage(batch, lam=0.0).tolist() == approx([1, 1, 1, -1])


def test_a_rollout_without_a_sound_answer_has_the_advantage_of_its_group_alone() -> None:
    # changes at lam 0 of the first and third: 0.5, 0.2 and -0.5, -0.2: mean 0, deviation sqrt(0.145)
    batch = table(
        [[1, 1], [1, 1], [1, 1]], rewards=[1.0, 1.0, 0.0], old=HALF, chance_K=[0.3, 0.8, math.nan, 0.5, 0.7, 0.2]
    )
    z, plain = torch.tensor([0.5, 0.2, 0, 0, -0.5, -0.2]) / 0.145**0.5, credit.group_mean(batch)
    # rewards 1, 1, 0: 1/3 over a deviation of sqrt(1/3)
    assert plain.tolist() == approx([3**-0.5] * 4 + [-2 * 3**-0.5] * 2)
    missing = torch.tensor([0, 0, 1.0, 1, 0, 0])
    torch.testing.assert_close(critic_advantage(batch, lam=0.0), z + missing * plain)
    torch.testing.assert_close(critic_advantage(batch, lam=0.0, alpha=0.5), plain + 0.5 * z)


def test_without_any_sound_answer_it_is_grpo() -> None:
    unknown = BATCH.with_extra(chance_K=torch.full((7,), math.nan))
    for method in (METHOD, ADDED):
        torch.testing.assert_close(method.credit(unknown), credit.group_mean(BATCH))


def test_equal_changes_teach_nothing_and_a_lone_rollout_teaches() -> None:
    assert critic_advantage(one([0.5, 0.5], 0.5)).tolist() == [0.0, 0.0]
    assert critic_advantage(one([0.5], 1.0)).tolist() == [0.0]
    # a lone rollout of two turns: changes 0.4 and 0.2 at lam 0
    assert critic_advantage(one([0.4, 0.8], 1.0), lam=0.0).tolist() == approx([1, -1])


def test_a_group_that_failed_throughout_still_learns_where_it_went_wrong() -> None:
    batch = table([[1, 1], [1, 1]], rewards=[0.0, 0.0], old=HALF, chance_K=[0.5, 0.1, 0.5, 0.5])
    # changes -0.4, -0.1, 0, -0.5 at lam 0
    found = critic_advantage(batch, lam=0.0)
    assert found.argmax() == 2 and found.argmin() == 3


def test_a_turn_without_tokens_carries_its_change_and_is_no_turn_of_the_statistics() -> None:
    # lam 1: A = r - V = 0.5, 0.9, 0.1, of which the second has no token: mean 0.3, deviation 0.2
    batch = table([[1, 0, 2]], rewards=[1.0], old=HALF, chance_K=[0.5, 0.1, 0.9])
    assert critic_advantage(batch, lam=1.0).tolist() == approx([1, -1, -1])


def test_rollouts_without_turns_are_as_if_not_there() -> None:
    batch = table([[], [1, 1]], rewards=[0.0, 1.0], old=HALF, chance_K=[0.4, 0.8])
    assert critic_advantage(batch, lam=0.0).tolist() == approx([1, -1])
    assert critic_advantage(table([[]], rewards=[1.0], chance_K=[])).tolist() == []


def test_a_reward_that_is_no_chance_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be 0 to 1, but are \[2.0\]: scale"):
        critic_advantage(one([0.5], 2.0))
    with pytest.raises(ValueError, match="Missing is not zero"):
        critic_advantage(one([0.5], math.nan))
    with pytest.raises(ValueError, match="'chance_K'"):
        critic_advantage(table([[1]], rewards=[1.0]))


def test_the_gradient_on_policy_by_hand_and_the_clip_range() -> None:
    # A = 1 on a turn of three tokens and -1 on one of one: -A / 4
    batch = table([[3, 1]], rewards=[0.6], old=HALF, chance_K=[0.2, 0.6])
    forward = forward_of(batch.logp_old_N)
    loss_N = METHOD.objective(forward, critic_advantage(batch, lam=0.0), batch)
    assert gradient(forward, loss_N, METHOD.average(batch)).tolist() == approx([-0.25, -0.25, -0.25, 0.25])
    assert moves(METHOD.objective, (1.19, 1), (1.21, 1), (0.81, -1), (0.79, -1)) == [True, False, True, False]
    assert METHOD.average is rollout_mean


# ---- the critic -------------------------------------------------------------------------------------------------


class Says:
    """An asker that gives one list of chances, or one text, after the other, and keeps what it was asked."""

    def __init__(self, *answers: list[float] | str) -> None:
        self.answers, self.asked = list(answers), list[str]()

    async def ask(self, messages: Sequence[Json], **options: Any) -> str:
        self.asked.append("\n".join(message["content"] for message in messages))
        told = self.answers[(len(self.asked) - 1) % len(self.answers)]
        return told if isinstance(told, str) else json.dumps({"chances": told})


def turn(sees: str, does: str) -> Turn:
    parts = [{"kind": "reasoning", "text": "I am sure to win"}, {"kind": "text", "text": does}]
    request = {"messages": [{"role": "user", "content": sees}]}
    return Turn("", (1,), (2,), (HALF,), 0, "stop", request=request, info={"parts": parts})


RUN = Rollout("r", Task("t"), "g", (turn("a door", "open it"), turn("a wall", "go back")), {"reward": 1.0})


async def asked(says: Says, *rollouts: Rollout, **settings: Any) -> list[float]:
    judge = Judge(says, ticketed=False, attempts=1, at_once=1)
    found = await chances(rollouts, Batch.of(rollouts), Services(askers={"judge": judge}), **settings)
    return found["chance_K"].tolist()


async def test_one_question_shows_what_was_seen_and_done_and_no_reasoning() -> None:
    says = Says([50, 80.5, 10])
    assert await asked(says, RUN) == approx([0.5, 0.805])
    (question,) = says.asked
    places = [question.index(text) for text in ("a door", "open it", "a wall", "go back")]
    assert places == sorted(places) and "sure to win" not in question
    assert "Give 3 chances" in question and "what had happened by then" in question and "a reward of 1 out" in question


async def test_asked_moment_by_moment_it_never_sees_what_came_later() -> None:
    says = Says([50], [20])
    assert await asked(says, RUN, mode="prefix") == approx([0.5, 0.2])
    before, later = says.asked
    assert "a door" in before and "open it" not in before and "a wall" not in before
    assert "open it" in later and "a wall" in later and "go back" not in later and "reward" not in before + later


async def test_long_texts_are_cut() -> None:
    says = Says([1, 2, 3])
    long = replace(RUN, turns=(turn("x" * 9000, "open it"), RUN.turns[1]))
    await asked(says, long, limit=300)
    assert says.asked[0].count("x") < 400 and "left out here" in says.asked[0] and "go back" in says.asked[0]


@pytest.mark.parametrize(
    "answer",
    [
        *("", "likely", [50, 60], [50, 60, 70, 80], [50, 60, 101], [50, -1, 60], [50, math.nan, 60], [50, 50, 50]),
        *('{"chances": [50, "60", 70]}', '{"chances": [50, 60, 70', '{"chances": [50, true, 60]}', "[50, 60, 70]"),
    ],
)
async def test_an_answer_that_cannot_be_relied_upon_is_missing_for_its_rollout_alone(answer: list[float] | str) -> None:
    other = replace(RUN, id="s", rewards={"reward": 0.0})
    found = await asked(Says(answer, [10, 20, 30]), RUN, other)
    assert [math.isnan(x) for x in found] == [True, True, False, False] and found[2:] == approx([0.1, 0.2])


async def test_one_bad_moment_leaves_the_rollout_to_grpo() -> None:
    found = await asked(Says([50], "no idea"), RUN, mode="prefix")
    assert found[0] == 0.5 and math.isnan(found[1])
    batch = Batch.of([RUN, replace(RUN, rewards={"reward": 0.0})]).with_extra(chance_K=torch.tensor(found * 2))
    torch.testing.assert_close(METHOD.credit(batch), credit.group_mean(batch))


async def test_nothing_is_asked_about_a_rollout_without_turns_and_a_judge_is_needed() -> None:
    says = Says([50])
    assert await asked(says, replace(RUN, turns=())) == [] and says.asked == []
    with pytest.raises(ValueError, match="needs the asker 'judge'"):
        await chances([RUN], Batch.of([RUN]), Services())


# ---- learning ---------------------------------------------------------------------------------------------------


def test_a_rough_critic_saves_updates_and_noise_takes_the_gain_away() -> None:
    # six seeds elsewhere: 29.5 by groups, 23 with the critic
    assert [learned(CLAIM.baseline, seed) for seed in range(2)] == approx([35, 30])
    assert all(learned(CLAIM.method, seed) < 26 for seed in range(2))
    assert learned(CLAIM.arms["noise 1"], 0) > 26 and learned(CLAIM.arms["shuffled chances"], 0) > 35


def test_with_the_credit_negated_it_unlearns() -> None:
    world, judge = corridor(), _corridor.critic(_corridor.noisy, 0)
    blind = negated(METHOD.but(average=_corridor.SUMMED))
    assert learn(blind, world, Table.of(world), seed=0, updates=30, askers={"judge": judge}).last() < 0.05
    assert judge.counts["calls"] == 30 * 16  # one question a rollout


def test_the_trained_value_of_the_claim_learns_too() -> None:
    assert learned((TRAINED, _corridor.noisy), 0) < 40


async def test_the_critic_of_the_claim_reads_what_is_shown() -> None:
    world = corridor()
    played = world.play(Table.of(world), [0], np.random.default_rng(0))
    judge = _corridor.critic(partial(_corridor.noisy, noise=0.0), 0)
    found = await chances(played, played.batch, Services(askers={"judge": judge}))
    torch.testing.assert_close(found["chance_K"], played.flat(played.state_RT) / 8, atol=1e-4, rtol=0)
