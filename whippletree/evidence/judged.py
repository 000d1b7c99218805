"""Evidence from judges: a score for each turn, the first mistake, which of two is better. Missing is NaN or None."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from whippletree.evidence.judge import Answer, Judge, T, judge_of
from whippletree.evidence.quoting import numbered, question
from whippletree.types import Batch, Rollout, Services

LIMIT = 24_000  # characters of a rollout that a judge is shown


class Form(BaseModel):
    """The form of an answer: numbers and fixed words alone, so that nothing a rollout says can pass through it."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class TurnScore(Form):
    turn: int
    score: float = Field(ge=0, le=1)


class TurnScores(Form):
    scores: list[TurnScore]


class FirstMistake(Form):
    turn: int | None


class Better(Form):
    better: Literal["first", "second", "tie"]


async def turn_scores(
    rollouts: Sequence[Rollout], batch: Batch, services: Services, *, asker: str = "judge", **settings: Any
) -> Mapping[str, Tensor]:
    """`per_turn` as evidence: the judge is the asker of this name, and the settings are those of `per_turn`."""
    return await per_turn(rollouts, batch, judge_of(services.asker(asker)), **settings)


async def first_mistake(
    rollouts: Sequence[Rollout], batch: Batch, services: Services, *, asker: str = "judge", **settings: Any
) -> Mapping[str, Tensor]:
    """`first_wrong` as evidence: the judge is the asker of this name, and the settings are those of `first_wrong`."""
    return await first_wrong(rollouts, batch, judge_of(services.asker(asker)), **settings)


async def per_turn(
    rollouts: Sequence[Rollout], batch: Batch, judge: Judge, *, criteria: str, name: str = "score_K", limit: int = LIMIT
) -> dict[str, Tensor]:
    """A column [K] of scores from 0 to 1, one question a rollout; NaN where the judge failed or left a turn out.

    A turn that is not there is ignored (`out_of_range` of the judge's counts), and one that got two different scores
    has none (`contradicted`).
    """
    asked = f"Score each turn of the rollout, from 0 (bad) to 1 (good), by these criteria:\n{criteria}"
    column: list[float] = []
    for rollout, answer in zip(rollouts, await about(rollouts, judge, asked, TurnScores, limit=limit), strict=True):
        found: dict[int, float] = {}
        for row in answer.value.scores if answer.value else ():
            if not 1 <= row.turn <= len(rollout.turns):
                judge.counts["out_of_range"] += 1
            elif found.setdefault(row.turn, row.score) != row.score:
                judge.counts["contradicted"] += 1
                found[row.turn] = math.nan
        column += [found.get(number, math.nan) for number in range(1, len(rollout.turns) + 1)]
    return {name: torch.tensor(column, dtype=torch.float32)}


async def first_wrong(
    rollouts: Sequence[Rollout], batch: Batch, judge: Judge, *, criteria: str, limit: int = LIMIT
) -> dict[str, Tensor]:
    """`mistake_R`: the index (from 0) of the first wrong turn, the number of turns where none is, NaN where unknown.

    A turn that is not there makes it unknown (`out_of_range` of the judge's counts).
    """
    asked = f"Give the number of the first turn that is wrong, or null if none is, by these criteria:\n{criteria}"
    column: list[float] = []
    for rollout, answer in zip(rollouts, await about(rollouts, judge, asked, FirstMistake, limit=limit), strict=True):
        turns = len(rollout.turns)
        turn = math.nan if answer.value is None else turns + 1 if answer.value.turn is None else answer.value.turn
        beyond = answer.value is not None and answer.value.turn is not None and not 1 <= turn <= turns
        judge.counts["out_of_range"] += beyond
        column.append(math.nan if beyond else turn - 1)
    return {"mistake_R": torch.tensor(column, dtype=torch.float32)}


async def better(first: Rollout, second: Rollout, judge: Judge, *, criteria: str, limit: int = LIMIT) -> float | None:
    """1 if the first is better, 0 if the second is, 1/2 for a tie; None if either answer is missing.

        (said of (first, second) + 1 - said of (second, first)) / 2

    Asked in both orders, so a judge that prefers a place gives 1/2; `orders_differ` of its counts says how often.
    """
    asked = f"Two rollouts are quoted. Say which is better, or that it is a tie, by these criteria:\n{criteria}"

    async def said(*pair: Rollout) -> float:
        named = zip(("first", "second"), pair, strict=True)
        blocks = [numbered(rollout, limit=limit // 2, label=f"{place} rollout, ") for place, rollout in named]
        answer = await judge.answer(question(asked, *blocks), Better)
        return {"first": 1.0, "tie": 0.5, "second": 0.0}[answer.value.better] if answer.value else math.nan

    forth, back = await asyncio.gather(said(first, second), said(second, first))
    if math.isnan(forth + back):
        return None
    judge.counts["orders_agree" if forth + back == 1 else "orders_differ"] += 1
    return (forth + 1 - back) / 2


async def about(
    rollouts: Sequence[Rollout], judge: Judge, instructions: str, schema: type[T], *, limit: int = LIMIT
) -> list[Answer[T]]:
    """One answer about each rollout, quoted with its turns numbered; nothing is asked about one without turns."""

    async def one(rollout: Rollout) -> Answer[T]:
        if not rollout.turns:
            return Answer(None, "the rollout has no turns")
        return await judge.answer(question(instructions, numbered(rollout, limit=limit)), schema)

    return list(await asyncio.gather(*map(one, rollouts)))
