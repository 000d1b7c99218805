"""The unit cases of the page are numbered as there."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from functools import partial

import pytest
import torch

from whippletree.evidence import Judge, Scripted
from whippletree.methods._tables import HALF, WORKED, forward_of, gradient, moves, table
from whippletree.methods.cliff import CLAIM, METHOD, UNIT, from_the_mistake, pitfalls, steps, taught, updates
from whippletree.toys.chains import chain, favour
from whippletree.toys.exact import chance
from whippletree.toys.learning import learn, negated
from whippletree.toys.table import Table
from whippletree.types import Batch, Ending, Json, Rollout, Services, Task, Turn


def marked(batch: Batch, pitfalls: Sequence[int], *, trusted: bool = True) -> Batch:
    """The batch with the first mistake of each rollout at this token of it."""
    start = (batch.lengths_R.cumsum(0) - batch.lengths_R)[batch.rollout_N]
    sound_N = torch.arange(batch.tokens) - start < torch.tensor(pitfalls)[batch.rollout_N]
    return batch.with_extra(sound_N=sound_N, trusted_R=torch.full((batch.rollouts,), trusted))


# rollouts 1 and 2 failed, the second of them at its second token
BATCH = marked(WORKED, [0, 0, 1, 0, 0])
PAIR = table([[2], [4]], rewards=[1.0, 0.0], old=HALF)
NOTHING = torch.zeros(6)


def advantages(pitfall: int, *, bonus: float = 0.0, trusted: bool = True) -> list[float]:
    """Of a rollout of two tokens that passed and one of four that failed."""
    return from_the_mistake(marked(PAIR, [0, pitfall], trusted=trusted), bonus=bonus).tolist()


# ---- credit -----------------------------------------------------------------------------------------------------


def test_case_1_what_stands_before_the_mistake_is_neutral_before_the_shift() -> None:
    # mu 1/2: raw 1 1 0 -1 -1 -1, of mean -1/6
    found = advantages(1)
    assert found == pytest.approx([7 / 6, 7 / 6, 1 / 6, -5 / 6, -5 / 6, -5 / 6])
    assert sum(found) == pytest.approx(0, abs=1e-6)


def test_case_2_with_lambda_1_a_sound_beginning_is_as_good_as_a_success() -> None:
    assert advantages(1, bonus=1.0) == [1, 1, 1, -1, -1, -1]  # of mean 0


def test_case_3_an_overlong_answer_is_all_after_its_mistake() -> None:
    # raw 1 1 -1 -1 -1 -1, of mean -1/3
    assert advantages(0) == pytest.approx([4 / 3, 4 / 3, -2 / 3, -2 / 3, -2 / 3, -2 / 3])


def test_case_4_where_the_solution_of_the_judge_failed_it_is_grpo_whatever_else_was_said() -> None:
    assert advantages(1, trusted=False) == [1, 1, -1, -1, -1, -1]
    # (r - mu) / sigma with mu 1/4, sigma sqrt(3) / 4
    batch = marked(table([[1]] * 4, rewards=[1.0, 0, 0, 0], old=HALF), [0] * 4, trusted=False)
    torch.testing.assert_close(METHOD.credit(batch), torch.tensor([3.0, -1, -1, -1]) / 3**0.5)


def test_the_worked_example_by_hand() -> None:
    # group 0: mu 1/2, tokens 3 and 1: raw 1 1 1 -1, of mean 1/2
    # group 1: mu 2/3, sigma sqrt(2)/3: good 1/sqrt(2), bad -sqrt(2): raw 0 -1.4142 0.7071 0.7071 0.7071, mean 0.1414
    good = 0.5**0.5
    group_1 = torch.tensor([0, -2 * good, good, good, good]) - good / 5
    torch.testing.assert_close(METHOD.credit(BATCH), torch.cat([torch.tensor([0.5, 0.5, 0.5, -1.5]), group_1]))


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_group_that_all_failed_or_all_passed_teaches_nothing(reward: float) -> None:
    batch = marked(table([[2], [4]], rewards=[reward] * 2, old=HALF), [1, 3])
    assert (METHOD.credit(batch) == 0).all()
    if reward:
        assert (UNIT.credit(batch) == 0).all()


def test_a_group_that_all_failed_may_teach_to_go_wrong_later() -> None:
    # raw 0 -1, 0 0 0 -1, of mean -1/3
    batch = table([[2], [4]], rewards=[0.0, 0.0], old=HALF)
    expected_N = torch.tensor([1.0, -2, 1, 1, 1, -2]) / 3
    torch.testing.assert_close(UNIT.credit(marked(batch, [1, 3])), expected_N)
    assert (UNIT.credit(marked(batch, [1, 3], trusted=False)) == 0).all()
    assert (UNIT.credit(marked(batch, [0, 0])) == 0).all()  # all wrong from the start: nothing to compare


def test_a_lone_rollout_teaches_nothing() -> None:
    for reward in (0.0, 1.0):
        assert METHOD.credit(marked(table([[3]], rewards=[reward], old=HALF), [1])).tolist() == [0, 0, 0]


def test_a_reward_that_is_no_yes_or_no_is_cut_at_one_half() -> None:
    graded = marked(table([[2], [4]], rewards=[0.5, 0.49], old=HALF), [0, 1])
    assert METHOD.credit(graded).tolist() == pytest.approx(advantages(1))


def test_a_missing_reward_is_refused() -> None:
    with pytest.raises(ValueError, match="Missing is not zero"):
        METHOD.credit(marked(table([[2], [4]], rewards=[1.0, math.nan], old=HALF), [0, 1]))


def test_tokens_that_may_not_train_and_empty_turns_do_not_enter_the_mean() -> None:
    old = [HALF, HALF, HALF, HALF, HALF, HALF, math.nan, math.nan]
    batch = marked(table([[2], [0, 4, 0], [2]], rewards=[1.0, 0.0, 0.0], groups=[0, 0, 1], old=old), [0, 1, 0])
    assert METHOD.credit(batch).tolist() == pytest.approx([*advantages(1), 0, 0])


def test_the_gradient_on_policy_by_hand() -> None:
    batch = marked(PAIR, [0, 1])
    forward = forward_of(batch.logp_old_N)
    found = gradient(forward, METHOD.objective(forward, METHOD.credit(batch), batch), METHOD.average(batch))
    torch.testing.assert_close(found, -torch.tensor([7.0, 7, 1, -5, -5, -5]) / 36)


def test_the_clip_range() -> None:
    seen = moves(METHOD.objective, (1.19, 1), (1.21, 1), (0.81, -1), (0.79, -1))
    assert seen == [True, False, True, False]


# ---- what the judge is asked ------------------------------------------------------------------------------------


class Knows:
    """Solves a task with "42" unless told otherwise, and answers about an attempt what stands under its last step."""

    def __init__(self, answers: dict[str, object], solution: object = "42") -> None:
        self.answers, self.solution = answers, solution
        self.asked: list[str] = []

    def __call__(self, text: str) -> Json:
        self.asked.append(text)
        if "Give the number" not in text:
            return {"text": self.solution}
        return {"step": self.answers[re.findall(r"^[|] (.*)$", text, re.M)[-1]]}


TASK = Task("t", ({"role": "user", "content": "6 x 7?"},), {"answer": "42"})


def rollout(*replies: str, reward: float = 0.0, ending: Ending = "done", reason: str = "stop") -> Rollout:
    """Each reply has a token for each character."""
    turns = [
        Turn("", (1,), (2,) * len(text), (HALF,) * len(text), 0, reason, reply={"role": "assistant", "content": text})
        for text in replies
    ]
    return Rollout("r", TASK, "g", tuple(turns), {"reward": reward}, ending)


async def asked(
    rollouts: Sequence[Rollout], knows: Knows, *, every: bool = False
) -> tuple[list[float], list[bool], Batch]:
    batch = Batch.of(rollouts)
    found = await pitfalls(
        rollouts, batch, Services(askers={"judge": Judge(Scripted(knows), ticketed=False, attempts=1)}), every=every
    )
    return found["pitfall_R"].tolist(), found["trusted_R"].tolist(), batch.with_extra(**dict(found))


def test_steps_are_sentences_and_calls_and_each_begins_at_its_share_of_the_reply() -> None:
    call = {"function": {"name": "f"}}
    reply = {"content": "Yes. No.", "reasoning_content": "Hm", "tool_calls": [call]}
    empty = Turn("", (1,), (2,), (HALF,), 0, "stop")
    long = Turn("", (1,), (2,) * 8, (HALF,) * 8, 0, "stop", reply=reply)
    found = steps(Rollout("r", TASK, "g", (empty, long)))
    # 2 + 4 + 3 + 27 characters over 8 tokens, after one token that says nothing: floor of 16/36, 48/36, 72/36
    assert found == [("Hm", 1), ("Yes.", 1), ("No.", 2), ('{"function": {"name": "f"}}', 3)]
    assert steps(Rollout("r", TASK, "g", (empty,))) == []


async def test_the_step_that_is_wrong_belongs_to_what_is_after_the_mistake() -> None:
    judge = Knows({"bbbb": 3, "43": 1})
    rollouts = [rollout("42", reward=1.0), rollout("aa. bb.", "bbbb"), rollout("43")]
    found, trusted, batch = await asked(rollouts, judge)
    # steps "aa.", "bb.", "bbbb": the third begins after the 7 tokens of the first reply
    assert found[1:] == [7.0, 0.0] and math.isnan(found[0]) and trusted == [True] * 3
    assert batch.extra["sound_N"].tolist() == [False] * 2 + [True] * 7 + [False] * 4 + [False] * 2


async def test_the_judge_sees_task_solution_and_steps_of_failures_and_never_a_success() -> None:
    judge = Knows({"43": 1})
    await asked([rollout("success", reward=1.0), rollout("43")], judge)
    solved, compared = judge.asked
    assert "| 6 x 7?" in solved and "43" not in solved
    shown = [line for line in compared.splitlines() if line.startswith("| ")]
    assert shown == ["| 6 x 7?", "| 42", "| 43"]


async def test_a_judge_that_cannot_solve_the_task_is_not_asked_further() -> None:
    for solution in ("41", "", None):
        judge = Knows({"43": 1}, solution=solution)
        found, trusted, _ = await asked([rollout("42", reward=1.0), rollout("43")], judge)
        assert trusted == [False, False] and all(map(math.isnan, found)) and len(judge.asked) == 1


@pytest.mark.parametrize("answer", [None, 0, -1, 2, "1", 1.5, True, math.nan, 10**20])
async def test_an_answer_that_names_no_step_leaves_nothing_sound(answer: object) -> None:
    found, trusted, batch = await asked([rollout("42", reward=1.0), rollout("43")], Knows({"43": answer}))
    assert math.isnan(found[1]) and trusted == [True, True]
    assert not batch.extra["sound_N"].any()
    # A_inc on both tokens: raw 1 1 -1 -1, of mean 0
    assert METHOD.credit(batch).tolist() == [1, 1, -1, -1]


async def test_truncated_and_empty_rollouts_are_not_shown_to_the_judge() -> None:
    cut, long, empty = rollout("43", ending="truncated"), rollout("43", reason="length"), rollout("")
    judge = Knows({"43": 1})
    found, _, _ = await asked([rollout("42", reward=1.0), cut, long, empty], judge)
    assert all(map(math.isnan, found)) and len(judge.asked) == 1


async def test_groups_without_a_success_cost_nothing_unless_they_are_to_teach() -> None:
    failures = [rollout("43"), rollout("44")]
    for rollouts in (failures, [rollout("42", reward=1.0)]):
        judge = Knows({"43": 1, "44": 1})
        assert (await asked(rollouts, judge))[1] == [False] * len(rollouts) and judge.asked == []
    judge = Knows({"43": 1, "44": 1})
    assert (await asked(failures, judge, every=True))[1] == [True, True] and len(judge.asked) == 3


# ---- learning ---------------------------------------------------------------------------------------------------


def test_the_oracle_of_the_claim_is_a_judge_that_is_always_right() -> None:
    """The same run through words, questions and answers as through the oracle."""
    world = chain()
    runs = []
    for method in (taught(0), METHOD.but(evidence=(partial(pitfalls, verify=solves),), average=taught(0).average)):
        policy, judge = Table.of(world, favour(world, 2.0)), Judge(Scripted(first_wrong_step), ticketed=False)
        learn(method, world, policy, seed=0, updates=12, groups=1, rate=0.5, askers={"judge": judge})
        runs.append(policy.theta.detach())
    torch.testing.assert_close(*runs)
    # of 12 groups of 8 at a chance of 0.13 to 0.4, some are mixed, and of those at most 7 fail
    assert 12 < judge.counts["calls"] < 12 * 8


def first_wrong_step(question: str) -> Json:
    """What a judge says who knows that each symbol is to be 0."""
    if "Give the number" not in question:
        return {"text": "000000"}
    said = re.findall(r"step \d+\n[|] (\d)", question)
    return {"step": next(n for n, symbol in enumerate(said, 1) if symbol != "0")}


async def solves(rollout: Rollout) -> dict[str, float | None]:
    return {"solved": float(rollout.turns[-1].reply["content"] == "000000")}


def test_it_learns_and_unlearns_with_the_credit_negated() -> None:
    world = chain()
    solved = chance(world)
    found = []
    for method in (taught(1), negated(taught(1))):
        policy = Table.of(world, favour(world, 2.0))
        start = solved(policy)
        learn(method, world, policy, seed=1, updates=60, groups=1, rate=0.5)
        found.append(solved(policy))
    assert found[0] > 0.8 and found[1] < start / 10


def test_fewer_updates_are_needed_and_random_places_take_the_gain_away() -> None:
    # a trial of 6 seeds elsewhere: 124 and 104.5; at random it must not be faster
    medians = {
        name: statistics.median(updates(arm, seed) for seed in range(3))
        for name, arm in {"grpo": CLAIM.baseline, "it": CLAIM.method, "random": taught_at_random}.items()
    }
    assert medians["it"] < medians["grpo"] < medians["random"]


taught_at_random = CLAIM.arms["all places at random"]


def test_a_word_that_nearly_never_succeeds_is_learned_only_where_failures_teach() -> None:
    # the same trial: never in 600, and 98.5
    assert updates(CLAIM.method, 0, start=0.0, most=60) == 60
    assert 80 <= updates(CLAIM.arms["failed groups teach too"], 0, start=0.0, most=200) <= 120
