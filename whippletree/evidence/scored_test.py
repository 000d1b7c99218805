from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from whippletree.evidence import reference_logps, returns, trainer_logps, values
from whippletree.types import Batch, Rollout, Services, Task, Turn


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
