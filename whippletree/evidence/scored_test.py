from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from whippletree.evidence import logp_under, outcomes, outcomes_of, reference_logps, returns, trainer_logps, values
from whippletree.models.tiny import VOCABULARY, tiny_model
from whippletree.tree.packed import Layout
from whippletree.tree.scorer import PackedScorer
from whippletree.types import Batch, Rollout, Scored, Services, Task, Turn


class SumOfIds:
    """A scripted scorer: the n-th sampled token scores the sum of its prompt, its id and `plus`."""

    def __init__(self, plus: float) -> None:
        self.plus = plus

    async def logps(self, turns: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Tensor]:
        return [torch.tensor([sum(prompt) + token + self.plus for token in reply]) for prompt, reply in turns]


class TooShort:
    async def logps(self, turns: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Tensor]:
        return [torch.zeros(len(reply) - 1) for _, reply in turns]


def turn(prompt: tuple[int, ...], reply: tuple[int, ...], logp: float = -1.0) -> Turn:
    return Turn("", prompt, reply, (logp,) * len(reply), 0, "stop")


ROLLOUTS = [
    Rollout("a", Task("t"), "g", turns=(turn((10,), (1, 2)), turn((20, 30), (3,), math.nan)), rewards={"reward": 1.0}),
    Rollout("b", Task("t"), "g", turns=(turn((40,), (4,)),), rewards={"reward": 0.0}),
]
BATCH = Batch.of(ROLLOUTS)
SERVICES = Services({"reference": SumOfIds(0.5), "policy": SumOfIds(0.25), "value": SumOfIds(0.0)})


async def test_each_scorer_fills_its_column_in_the_order_of_the_batch() -> None:
    # prompt + id: 10 + 1, 10 + 2, 50 + 3, 40 + 4
    numbers = torch.tensor([11.0, 12.0, 53.0, 44.0])
    found = {
        **await reference_logps(ROLLOUTS, BATCH, SERVICES),
        **await trainer_logps(ROLLOUTS, BATCH, SERVICES),
        **await values(ROLLOUTS, BATCH, SERVICES),
    }
    assert set(found) == {"ref_logp_N", "logp_train_N", "value_N"}
    torch.testing.assert_close(found["ref_logp_N"], numbers + 0.5)
    torch.testing.assert_close(found["logp_train_N"], numbers + 0.25)
    torch.testing.assert_close(found["value_N"], numbers)


def ones(batch: Batch) -> Tensor:
    return batch.trainable_N.float()


async def test_the_return_is_advantage_and_value_and_0_where_nothing_trains() -> None:
    batch = BATCH.with_extra(value_N=torch.tensor([1.0, 2.0, math.nan, 3.0]))
    found = await returns(ROLLOUTS, batch, SERVICES, credit=ones)
    assert found["return_N"].tolist() == [2.0, 3.0, 0.0, 4.0]


async def test_a_return_without_a_value_is_refused() -> None:
    with pytest.raises(ValueError, match="reads the column 'value_N'"):
        await returns(ROLLOUTS, BATCH, SERVICES, credit=ones)


async def test_a_scorer_that_is_not_there_or_gives_too_little_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the scorer 'reference'"):
        await reference_logps(ROLLOUTS, BATCH, Services())
    with pytest.raises(ValueError, match=r"\[2, 1, 1\] a turn, but it gave \[1, 0, 0\]"):
        await reference_logps(ROLLOUTS, BATCH, Services({"reference": TooShort()}))


async def test_no_turns_give_an_empty_column() -> None:
    empty = [Rollout("a", Task("t"), "g", rewards={"reward": 1.0})]
    assert (await values(empty, Batch.of(empty), SERVICES))["value_N"].tolist() == []


# ---- distributions, other prompts, what is missing --------------------------------------------------------------


class Fails:
    """A reader that cannot read turns whose prompt begins with 20, and gives one likeliest token, 9, of log-prob -2."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def logps(self, turns: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Tensor]:
        return [torch.zeros(len(reply)) for _, reply in turns]

    async def score(self, turns: Sequence[Any], kind: Any = "sampled") -> list[Scored | None]:
        self.asked = [*turns]
        return [None if prompt[0] == 20 else self._said(len(reply), kind) for prompt, reply, _ in turns]

    def _said(self, n: int, kind: Any) -> Scored:
        width = 0 if kind == "sampled" else 1
        return Scored(torch.full((n,), -1.0), torch.full((n, width), 9), torch.full((n, width), -2.0), torch.zeros(n))


NAN = pytest.approx(math.nan, nan_ok=True)
SEEN = [-1.0, -1.0, NAN, -1.0]  # the second turn is the third token


async def test_a_turn_that_a_scorer_fails_on_is_nan_and_counted() -> None:
    found = await logp_under(ROLLOUTS, BATCH, Services({"teacher": Fails()}), name="teacher", kind=1)
    assert set(found) == {
        "logp_teacher_N",
        "missing_teacher_K",
        "top_id_teacher_NM",
        "top_logp_teacher_NM",
        "log_tail_teacher_N",
    }
    assert found["missing_teacher_K"].tolist() == [False, True, False]
    assert found["logp_teacher_N"].tolist() == SEEN
    assert found["top_id_teacher_NM"].tolist() == [[9], [9], [0], [9]]
    assert found["top_logp_teacher_NM"].tolist() == [[-2.0], [-2.0], [NAN], [-2.0]]
    assert found["log_tail_teacher_N"].tolist() == [0.0, 0.0, NAN, 0.0]
    assert outcomes(BATCH.with_extra(**found), "teacher").isnan().all(1).tolist() == [False, False, True, False]


async def test_a_turn_without_a_prompt_is_left_out_and_not_counted() -> None:
    scorer = Fails()
    prompts = lambda rollouts, batch, services: [None, (20, 5), (7, 40)]  # noqa: E731
    evidence = partial(logp_under, name="teacher", prompts=prompts, column="hinted")
    found = await evidence(ROLLOUTS, BATCH, Services({"teacher": scorer}))
    assert scorer.asked == [((20, 5), (3,), 1.0), ((7, 40), (4,), 1.0)]  # the same replies
    assert found["logp_hinted_N"].tolist() == [NAN, NAN, NAN, -1.0]
    assert found["missing_hinted_K"].tolist() == [False, True, False]
    nobody = partial(logp_under, name="teacher", prompts=lambda rollouts, batch, services: [None] * 3, kind="full")
    found = await nobody(ROLLOUTS, BATCH, Services({"teacher": scorer}))
    assert found["logp_teacher_N"].isnan().all()
    assert not found["missing_teacher_K"].any()


async def test_prompts_are_one_for_each_turn() -> None:
    short = partial(logp_under, name="policy", prompts=lambda rollouts, batch, services: [None])
    with pytest.raises(ValueError, match="one for each of 3 turns, or None, but there are 1"):
        await short(ROLLOUTS, BATCH, SERVICES)


async def test_a_scorer_of_sampled_tokens_alone_says_so() -> None:
    found = await logp_under(ROLLOUTS, BATCH, SERVICES, name="policy")
    torch.testing.assert_close(found["logp_policy_N"], torch.tensor([11.25, 12.25, 53.25, 44.25]))
    with pytest.raises(ValueError, match="SumOfIds gives the sampled tokens' log-probs alone, but kind is 8"):
        await logp_under(ROLLOUTS, BATCH, SERVICES, name="policy", kind=8)


def plain(model: Any, batch: Batch, rollouts: Sequence[Rollout], hint: tuple[int, ...] = ()) -> Tensor:
    """[N, V] of each turn in a row of its own, at its temperature."""
    rows = []
    for prompt, reply, heat in [(t.prompt_ids, t.reply_ids, t.temperature) for r in rollouts for t in r.turns]:
        with torch.no_grad():
            logits = model(torch.tensor([[*hint, *prompt, *reply]])).logits[0]
        at = len(hint) + len(prompt) - 1
        rows.append((logits[at : at + len(reply)].float() / heat).log_softmax(-1))
    return torch.cat(rows)


def local(model: Any) -> PackedScorer:
    return PackedScorer(model, Layout("one"), temperature=1.0, token_budget=64)


WARM = Turn("", (5, 6), (7, 8), (-1.0, -1.0), 0, "stop", temperature=0.6)
QUIET = Turn("", (5, 6), (), (), 0, "stop")
REAL = [
    Rollout("a", Task("t"), "g", turns=(WARM, QUIET, turn((5, 6, 7, 8, 9), (10,))), rewards={"reward": 1.0}),
    Rollout("b", Task("t"), "g", turns=(turn((40,), (4,)),), rewards={"reward": 0.0}),
]


async def test_models_are_read_at_each_turns_temperature_under_a_hint_and_at_the_students_ids() -> None:
    student, teacher, batch = tiny_model(), tiny_model(seed=3), Batch.of(REAL)
    services = Services({"policy": local(student), "teacher": local(teacher)})
    hinted = lambda rollouts, batch, services: [(1, 2, *t.prompt_ids) for r in rollouts for t in r.turns]  # noqa: E731
    method_evidence = (
        partial(logp_under, name="policy", kind=4),
        partial(logp_under, name="teacher", kind="top_id_policy_NM", prompts=hinted),
        partial(logp_under, name="teacher", kind="full", column="bare"),
        trainer_logps,
    )
    for evidence in method_evidence:
        batch = batch.with_extra(**await evidence(REAL, batch, services))
    student_NV, bare_NV = (plain(model, batch, REAL) for model in (student, teacher))
    hinted_NV = plain(teacher, batch, REAL, hint=(1, 2))

    def close(name: str, expected: Tensor) -> None:
        torch.testing.assert_close(batch.extra[name], expected, rtol=0, atol=1e-5)

    ids = batch.extra["top_id_policy_NM"]
    assert torch.equal(ids, student_NV.topk(4).indices)
    assert torch.equal(batch.extra["top_id_teacher_NM"], ids)
    close("top_logp_teacher_NM", hinted_NV.gather(1, ids))
    close("logp_teacher_N", hinted_NV.gather(1, batch.id_N[:, None])[:, 0])
    close("logp_bare_NV", bare_NV)
    close("logp_train_N", student_NV.gather(1, batch.id_N[:, None])[:, 0])
    # what evidence found of the policy is what a student with these logits is
    torch.testing.assert_close(outcomes_of(student_NV, batch, "teacher"), outcomes(batch, "policy"), atol=1e-5, rtol=0)
    assert outcomes(batch, "bare").shape == (4, VOCABULARY)


async def test_the_columns_follow_a_choice_of_rollouts() -> None:
    found = await logp_under(ROLLOUTS, BATCH, Services({"teacher": Fails()}), name="teacher", kind=1)
    part = BATCH.with_extra(**found).select(torch.tensor([1]))
    assert part.extra["top_logp_teacher_NM"].tolist() == [[-2.0]]
    assert part.extra["missing_teacher_K"].tolist() == [False]
