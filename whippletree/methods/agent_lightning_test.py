"""The exact cases of the page are numbered as there."""

from __future__ import annotations

import asyncio
import math
from functools import partial

import pytest
import torch

from whippletree.methods._tables import HALF, WORKED, forward_of, gradient, table
from whippletree.methods._toy import learn, negated
from whippletree.methods.agent_lightning import METHOD, last_of_each_prompt, learned, over_rows, rows
from whippletree.types import Rollout, Services, Task, Turn
from whippletree.update.averages import rollout_mean, token_mean

BATCH = WORKED.with_extra(logp_train_N=WORKED.logp_old_N + torch.tensor([0.1, 0, -0.1, 0.2, 0, 0.9, 0, -0.3, 0]))

BLIND = METHOD.but(credit=partial(negated, credit=METHOD.credit))


def turn(name: str, prompt: list[int], reply: list[int], finish_reason: str = "stop") -> Turn:
    return Turn(name, tuple(prompt), tuple(reply), (-0.1,) * len(reply), 0, finish_reason)


def rollout(*turns: Turn) -> Rollout:
    return Rollout("r", Task("t"), "g", turns, {"reward": 1.0})


def test_case_1_a_turn_joins_the_row_that_it_begins_with() -> None:
    one = rollout(turn("a.0", [1, 2], [3, 4]), turn("b.0", [1, 2, 3, 4, 5], [6]), turn("c.0", [1, 2, 9, 5, 6, 7], [8]))
    batch = table([[2, 1, 1]], rewards=[1.0])
    assert asyncio.run(_awaited(rows([one], batch, Services())))["row_K"].tolist() == [0, 0, 1]


async def _awaited(found: object) -> dict[str, torch.Tensor]:
    return dict(await found)  # type: ignore[misc] # evidence is awaitable


def test_case_2_the_baseline_counts_a_broken_rollout_once() -> None:
    # A in three rows with reward 1, B in one with 0: over rollouts the mean is 1/2 and the std 0.7071
    batch = table([[1, 1, 1], [1]], rewards=[1.0, 0.0], row_K=[0.0, 1.0, 2.0, 3.0])
    torch.testing.assert_close(METHOD.credit(batch), 0.5**0.5 * torch.tensor([1.0, 1, 1, -1]), atol=1e-4, rtol=0)
    # over rows the mean is 3/4 and the std 1/2
    torch.testing.assert_close(over_rows(batch), torch.tensor([0.5, 0.5, 0.5, -1.5]), atol=1e-4, rtol=0)


def test_case_3_each_rollout_weighs_the_same() -> None:
    loss_N = torch.tensor([1.0] * 4 + [4.0] * 2 + [5.0] * 3)
    batch = table([[4, 2], [3]], rewards=[1.0, 0.0])
    assert (token_mean(batch) * loss_N).sum().item() == pytest.approx(3.0)  # (4 + 8 + 15) / 9
    assert (rollout_mean(batch) * loss_N).sum().item() == pytest.approx(3.5)  # ((4 + 8) / 6 + 5) / 2


def test_case_4_the_mass_of_a_rollout_is_that_of_any_other() -> None:
    # 2 + 1 trained tokens in two turns, 3 in one: 1/6 each, and each rollout 1/2
    batch = table([[2, 1], [3]], rewards=[1.0, 0.0])
    torch.testing.assert_close(METHOD.average(batch), torch.full((6,), 1 / 6))


def test_case_5_of_retries_the_last_trains() -> None:
    kept = last_of_each_prompt(rollout(turn("a.0", [1, 2], [3]), turn("b.0", [1, 2], [4])))
    assert [t.reply_ids for t in kept.turns] == [(4,)]
    assert kept.removed == {"tree/empty": 0, "tree/retries": 1}


def test_replies_that_one_request_asked_for_all_train_and_an_abandoned_one_does_not() -> None:
    kept = last_of_each_prompt(
        rollout(turn("a.0", [1], [3]), turn("a.1", [1], [4]), turn("b.0", [2], [5], "abandoned"), turn("c.0", [6], []))
    )
    assert [t.id for t in kept.turns] == ["a.0", "a.1"]
    assert kept.removed == {"tree/empty": 2, "tree/retries": 0}


@pytest.mark.parametrize(("trainer", "engine", "weight"), [(-1.0, -2.0, 2.0), (-2.0, -1.0, math.exp(-1))])
def test_case_5_the_weight_between_trainer_and_engine(trainer: float, engine: float, weight: float) -> None:
    # e = 2.718 is cut to 2; the policy is still the trainer's, so the gradient of -w A at A = 1 is -w
    batch = table([[1]], rewards=[1.0], old=engine, logp_train_N=[trainer])
    forward = forward_of([trainer])
    found = gradient(forward, METHOD.objective(forward, torch.tensor([1.0]), batch))
    torch.testing.assert_close(found, torch.tensor([-weight]))


def test_a_token_whose_engine_log_prob_is_unknown_does_not_train_and_the_others_do() -> None:
    batch = table([[2]], rewards=[1.0], old=[math.nan, HALF], logp_train_N=[HALF, HALF])
    forward = forward_of([HALF, HALF])
    weight_N = METHOD.average(batch)
    assert weight_N.tolist() == [0.0, 1.0]
    found = gradient(forward, METHOD.objective(forward, torch.ones(2), batch).nan_to_num(), weight_N)
    torch.testing.assert_close(found, torch.tensor([0.0, -1.0]))


def test_a_bad_token_is_cut_by_the_dual_clip() -> None:
    # A = -1 at ratio 4: the clipped loss is 4, and the dual clip holds it at 3, without a gradient
    batch = table([[1]], rewards=[1.0], old=HALF, logp_train_N=[HALF])
    forward = forward_of([HALF + math.log(4)])
    loss_N = METHOD.objective(forward, torch.tensor([-1.0]), batch)
    torch.testing.assert_close(loss_N, torch.tensor([3.0]))
    assert gradient(forward, loss_N).tolist() == [0.0]


def test_the_harness_of_the_claim_is_learned_and_a_blind_arm_learns_nothing() -> None:
    # the last of 60 updates; a digit of ten that is right within three calls at random: about 0.2
    seen = {name: learned(arm, 2, updates=60) for name, arm in {"on": METHOD, "off": BLIND}.items()}
    assert seen["on"] > seen["off"] + 0.2


def test_it_learns_the_toy_and_unlearns_it_with_the_credit_negated() -> None:
    # chance is 1/4
    assert learn(METHOD) > 0.9
    assert learn(BLIND) < 0.05
