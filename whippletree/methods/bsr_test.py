"""The unit cases of the page are numbered as there."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from whippletree.evidence import Judge, Scripted
from whippletree.methods._tables import HALF, WORKED, forward_of, gradient, moves, table
from whippletree.methods.bsr import CLAIM, METHOD, behaviour, judged, scores, self_rewarded, solved
from whippletree.toys.chains import chain, favour
from whippletree.toys.exact import chance
from whippletree.toys.learning import learn, negated
from whippletree.toys.played import Array, Played
from whippletree.toys.table import Table
from whippletree.toys.world import END
from whippletree.types import Batch, Ending, Json, Method, Rollout, Services, Task, Turn

BATCH = WORKED.with_extra(behaviour_R=torch.tensor([math.nan, 0.5, 0.75, math.nan, math.nan]))


def group(rewards: Sequence[float], b: Sequence[float]) -> Batch:
    """One token a rollout."""
    return table([[1]] * len(rewards), rewards=rewards, old=HALF, behaviour_R=b)


# ---- credit -----------------------------------------------------------------------------------------------------


def test_case_1_failures_are_ordered_below_every_success() -> None:
    # R 1, .3, .15, 0 of sum 1.45: (4 R - 1.45) / 3
    batch = group([1.0, 0, 0, 0], [math.nan, 1.0, 0.5, 0.0])
    expected_N = torch.tensor([0.85, -0.083333, -0.283333, -0.483333])
    torch.testing.assert_close(METHOD.credit(batch), expected_N, atol=1e-6, rtol=0)
    assert METHOD.credit(batch).sum().item() == pytest.approx(0, abs=1e-6)
    third = 1 / 3
    torch.testing.assert_close(self_rewarded(batch, beta=0.0), torch.tensor([1.0, -third, -third, -third]))


def test_case_2_where_all_failed_the_best_behaviour_is_reinforced() -> None:
    # R .3, .15, 0: each less the mean of the other two, .075, .15, .225
    torch.testing.assert_close(METHOD.credit(group([0.0] * 3, [1.0, 0.5, 0.0])), torch.tensor([0.225, 0.0, -0.225]))


def test_case_5_a_group_that_all_passed_teaches_nothing_and_a_lone_rollout_is_refused() -> None:
    assert METHOD.credit(group([1.0] * 3, [math.nan] * 3)).tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match=r"groups \[0\] have one"):
        METHOD.credit(group([0.0], [0.5]))


def test_a_failure_without_an_answer_is_neither_good_nor_bad() -> None:
    assert METHOD.credit(group([0.0] * 3, [1.0, math.nan, 0.0])).tolist() == pytest.approx([0.225, 0, -0.225])


def test_successes_may_be_ordered_by_less_than_what_parts_them_from_failures() -> None:
    # R 1.05, .95, .3 of sum 2.3: (3 R - 2.3) / 2
    found = self_rewarded(group([1.0, 1, 0], [1.0, 0.0, 1.0]), beta_passed=0.1)
    torch.testing.assert_close(found, torch.tensor([0.425, 0.275, -0.7]))


def test_annealed_the_bonus_fades_as_the_group_passes() -> None:
    # half passed: R 1, 1, .15, 0 of sum 2.15: (4 R - 2.15) / 3
    found = self_rewarded(group([1.0, 1, 0, 0], [math.nan, math.nan, 1.0, 0.0]), anneal=True)
    torch.testing.assert_close(found, torch.tensor([1.85, 1.85, -1.55, -2.15]) / 3)


@pytest.mark.parametrize(("beta", "beta_passed"), [(1.0, 0.0), (-0.1, 0.0), (0.95, 0.1)])
def test_a_bonus_by_which_a_failure_could_outrank_a_success_is_refused(beta: float, beta_passed: float) -> None:
    with pytest.raises(ValueError, match="a failure may not outrank a success"):
        self_rewarded(group([1.0, 0.0], [0.5, 0.5]), beta=beta, beta_passed=beta_passed)


def test_a_missing_reward_is_refused() -> None:
    with pytest.raises(ValueError, match="Missing is not zero"):
        METHOD.credit(group([1.0, math.nan], [0.5, 0.5]))


def test_the_worked_example_by_hand_and_its_gradient() -> None:
    # group 0: R 1, .15: +-.85; group 1: R .225, 1, 1: -.775, .3875, .3875; over 9 tokens, of 3 1 2 2 1
    a = torch.tensor([0.85, 0.85, 0.85, -0.85, -0.775, -0.775, 0.3875, 0.3875, 0.3875])
    torch.testing.assert_close(METHOD.credit(BATCH), a)
    forward = forward_of(BATCH.logp_old_N)
    found = gradient(forward, METHOD.objective(forward, METHOD.credit(BATCH), BATCH), METHOD.average(BATCH))
    torch.testing.assert_close(found, -a / 9)


def test_the_clip_range() -> None:
    seen = moves(METHOD.objective, (1.19, 1), (1.21, 1), (0.81, -1), (0.79, -1))
    assert seen == [True, False, True, False]


# ---- comparisons ------------------------------------------------------------------------------------------------


async def test_case_4_a_ring_of_three_gives_each_one_half() -> None:
    async def ring(i: int, j: int) -> float:
        return float((i, j) in {(1, 2), (2, 3), (3, 1)})

    assert await scores([1, 2, 3], ring, Random(0)) == [0.5] * 3


async def test_up_to_four_are_all_compared_and_of_more_each_with_three_others() -> None:
    seen: list[tuple[int, int]] = []

    async def higher(i: int, j: int) -> float:
        seen.append((i, j))
        return float(i > j)

    assert await scores([5, 6, 7, 8], higher, Random(0)) == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert sorted(seen) == [(5, 6), (5, 7), (5, 8), (6, 7), (6, 8), (7, 8)]
    seen.clear()
    found = await scores(range(8), higher, Random(0))
    assert len(set(seen)) == len(seen) <= 24 and all(sum(m in pair for pair in seen) >= 3 for m in range(8))
    assert found[0] == 0 and found[7] == 1
    seen.clear()
    assert await scores([4], higher, Random(0)) != [0.5] and await scores([], higher, Random(0)) == [] == seen


async def test_a_comparison_without_an_answer_is_left_out_of_the_mean() -> None:
    async def some(i: int, j: int) -> float | None:
        return None if j == 2 else 1.0

    first, second, third = await scores([0, 1, 2], some, Random(0))
    assert (first, second) == (1, 0) and math.isnan(third)


# ---- what the judge is asked ------------------------------------------------------------------------------------


def rollout(text: str, *, reward: float = 0.0, group: str = "g", ending: Ending = "done") -> Rollout:
    message = {"role": "assistant", "content": text, "reasoning_content": "secret thought"}
    asked = {"messages": [{"role": "user", "content": "fix it"}]}
    turn = Turn("", (1,), (2,), (HALF,), 0, "stop", request=asked, reply=message)
    return Rollout(text, Task("t"), group, (turn,), {"reward": reward}, ending)


async def asked(rollouts: Sequence[Rollout], judge: Judge, *, passed_too: bool = False) -> list[float]:
    services = Services(askers={"judge": judge})
    found = await behaviour(rollouts, Batch.of(rollouts), services, passed_too=passed_too)
    return found["behaviour_R"].tolist()


def longer(text: str) -> Json:
    """What a judge says who likes long replies."""
    first, second = (len(part.split("\n")[1]) for part in text.split("rollout, turn 1 of 1: text")[1:])
    return {"better": "tie" if first == second else "first" if first > second else "second"}


def judge_of(answer: object) -> Judge:
    return Judge(Scripted(longer if answer is None else lambda text: {"better": answer}), ticketed=False, attempts=1)


async def test_failures_of_a_group_are_compared_in_both_orders_and_successes_are_not() -> None:
    judge = judge_of(None)
    rollouts = [rollout("a" * 9, reward=1.0), rollout("aaa"), rollout("a"), rollout("aa"), rollout("b", group="h")]
    found = await asked(rollouts, judge)
    assert found[1:4] == [1, 0, 0.5] and math.isnan(found[0]) and math.isnan(found[4])
    assert judge.counts["calls"] == 2 * 3 and judge.counts["orders_agree"] == 3


async def test_case_3_a_judge_that_always_prefers_the_first_says_nothing() -> None:
    judge = judge_of("first")
    rollouts = [rollout("a"), rollout("aa"), rollout("aaa")]
    assert await asked(rollouts, judge) == [0.5] * 3
    assert judge.counts["orders_differ"] == 3
    assert METHOD.credit(group([0.0] * 3, [0.5] * 3)).tolist() == [0, 0, 0]


async def test_successes_are_compared_with_each_other_where_they_are_to_be() -> None:
    rollouts = [rollout("a", reward=1.0), rollout("aa", reward=1.0), rollout("aaa"), rollout("a")]
    assert await asked(rollouts, judge_of(None), passed_too=True) == [0, 1, 1, 0]


async def test_a_truncated_failure_has_0_and_is_not_compared() -> None:
    judge = judge_of(None)
    rollouts = [rollout("a" * 9, ending="truncated"), rollout("aa"), rollout("a")]
    assert await asked(rollouts, judge) == [0, 1, 0]
    assert judge.counts["calls"] == 2


@pytest.mark.parametrize("answer", ["neither", 1, ""])
async def test_an_answer_that_cannot_be_read_is_missing(answer: object) -> None:
    assert all(map(math.isnan, await asked([rollout("a"), rollout("aa")], judge_of(answer))))


async def test_the_judge_sees_what_was_asked_and_said_but_no_reasoning() -> None:
    seen: list[str] = []

    def note(text: str) -> Json:
        seen.append(text)
        return {"better": "tie"}

    noted = {"parts": [{"kind": "reasoning", "text": "secret thought"}, {"kind": "text", "text": "by parts"}]}
    other = rollout("x")
    by_parts = replace(other, turns=(replace(other.turns[0], info=noted),))
    await asked([rollout("done"), by_parts], Judge(Scripted(note), ticketed=False))
    assert all("| fix it" in text and "| done" in text and "| by parts" in text for text in seen) and len(seen) == 2
    assert not any("secret" in text for text in seen)


# ---- learning ---------------------------------------------------------------------------------------------------


def test_it_learns_and_unlearns_with_the_credit_negated() -> None:
    world = chain()
    now, found = chance(world), []
    for method in (judged(0), negated(judged(0))):
        policy = Table.of(world, favour(world, 2.0))
        start = now(policy)
        learn(method, world, policy, seed=0, updates=60, groups=1, rate=0.5)
        found.append(now(policy))
    assert found[0] > 0.6 and found[1] < start / 5


def test_where_failures_dominate_the_word_is_sooner_right_and_a_random_judge_does_not_help() -> None:
    # a trial elsewhere: 0.106 and 0.358 of 6 seeds, 0.15 and 0.28 of 24 more
    arms = {"tests": CLAIM.baseline, "it": CLAIM.method, "random": CLAIM.arms["judged at random"]}
    medians = {name: statistics.median(solved(arm, seed) for seed in range(3)) for name, arm in arms.items()}
    assert medians["random"] < medians["tests"] < 0.2 < medians["it"]


def test_where_all_fail_the_tests_alone_never_start() -> None:
    # the same trial, no bonus on the right symbol: (1/4)^6 = 0.00024 at first
    assert solved(CLAIM.baseline, 0, start=0.0, updates=120) < 0.001 < solved(CLAIM.method, 0, start=0.0, updates=120)


def test_a_judge_that_likes_length_makes_failures_longer() -> None:
    """The hacking check, on a chain that a wrong symbol may end early."""
    plain = chain()
    ends_SV = plain.next_SV.clone()
    ends_SV[:, 3] = END
    world = replace(plain, next_SV=ends_SV)

    def length(method: Method) -> float:
        policy = Table.of(world)
        learn(method, world, policy, seed=0, updates=120, groups=1, rate=0.5)
        return float(world.play(policy, [0] * 400, np.random.default_rng(1)).length_R.mean())

    # a fair stop of 1 in 4: the mean of the first stop up to 6 is (1 - 0.75^6) / 0.25 = 3.29
    fair, hacked = length(judged(0, beta=0.0)), length(judged(0, flip=0.0, better=length_of))
    assert fair < 4
    assert hacked > 4.5


def length_of(rollouts: Played) -> Array:
    return rollouts.length_R
