"""Asking rewards about a rollout. What raises or is no number is missing, with its reason, and never a 0."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any

from whippletree.types import Reward, Rollout


async def score(rollout: Rollout, rewards: Mapping[str, Reward] | Sequence[Reward], *, timeout: float) -> Rollout:
    """The same rollout with the channels that these rewards give, and no others; a failed one is left as it is.

    In a mapping, a reward that gives one channel gives it under its key; in a sequence, under the channel's own name.
    A reward that raises, takes longer than `timeout` seconds or gives no channel, and a value that is not a finite
    number, make that channel None; `info["reward_errors"]` then holds {channel: reason}.

    Raises:
        ValueError: there are no rewards, or two of them give the same channel.
    """
    if rollout.ending == "failed":
        return rollout
    keyed = isinstance(rewards, Mapping)
    named = list(rewards.items()) if isinstance(rewards, Mapping) else [(name_of(reward), reward) for reward in rewards]
    if not named:
        raise ValueError("a rollout is scored by at least one reward, but there is none")
    answers = await asyncio.gather(*(_ask(reward, rollout, name, timeout=timeout) for name, reward in named))
    channels: dict[str, float | None] = {}
    errors: dict[str, str] = {}
    for (name, _), answer in zip(named, answers, strict=True):
        given = dict(zip([name], answer.values(), strict=True)) if keyed and len(answer) == 1 else answer
        if twice := given.keys() & channels.keys():
            raise ValueError(f"each channel has one reward, but {sorted(twice)} came from two; name them in a mapping")
        for channel, value in given.items():
            channels[channel], reason = _number(value)
            errors |= {channel: reason} if reason else {}
    info = {key: value for key, value in rollout.info.items() if key != "reward_errors"}
    return replace(rollout, rewards=channels, info={**info, "reward_errors": errors} if errors else info)


def error_counts(rollouts: Iterable[Rollout]) -> dict[str, int]:
    """How often each channel was missing because its reward went wrong."""
    return dict(Counter(name for rollout in rollouts for name in rollout.info.get("reward_errors", ())))


async def _ask(reward: Reward, rollout: Rollout, name: str, *, timeout: float) -> Mapping[str, Any]:
    """The channels a reward gives; an exception stands where a value would."""
    clock = asyncio.timeout(timeout)
    try:
        async with clock:
            given = await reward(rollout)
        if not isinstance(given, Mapping) or not given:
            raise ValueError(f"a reward gives a mapping with one channel or more, but it gave {given!r:.80}")
    except Exception as error:
        return {name: TimeoutError(f"timed out after {timeout:g} s") if clock.expired() else error}
    return given


def _number(value: Any) -> tuple[float | None, str]:
    """The value as a float, or None and why; None itself says that the channel does not apply."""
    if value is None:
        return None, ""
    if isinstance(value, Exception):
        return None, f"{type(value).__name__}: {value}"
    try:
        value = value.item() if hasattr(value, "item") else value  # a number of numpy or torch
    except (RuntimeError, ValueError) as error:
        return None, f"a reward is one number, but it is a {type(value).__name__}: {error}"
    if not isinstance(value, Real) or not math.isfinite(value):
        return None, f"a reward is a finite number or None, but it is {value!r:.80}"
    return float(value), ""


def name_of(reward: Any) -> str:
    """What a reward is called: its `name`, or that of its function."""
    while isinstance(reward, partial):
        reward = reward.func
    return str(getattr(reward, "name", None) or getattr(reward, "__name__", None) or type(reward).__name__)
