"""DAPO: clip-higher, dynamic sampling, token mean, soft overlong punishment (Yu et al. 2025, arXiv:2503.14476).

accept    a group enters if its rewards are not all equal; else another is sampled
reward    channel "overlong": 0 up to limit - cache tokens, then falling evenly to -1 at the limit
A_i  = (r_i - mean(r)) / std(r)
loss = -(1 / sum_i |o_i|) sum_i sum_t min(rho_t A_i, clip(rho_t, 1 - 0.2, 1 + 0.28) A_i)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from whippletree import credit, objective
from whippletree.types import Method, Paper, Rollout
from whippletree.update.averages import token_mean


def rewards_differ(reward_R: Tensor) -> bool:
    """Whether a group of these rewards can teach anything; unknown rewards (NaN) are left out. Section 3.2, eq. 11."""
    known_R = reward_R[~reward_R.isnan()]
    return len(known_R) > 1 and bool(known_R.max() > known_R.min())


async def overlong(rollout: Rollout, *, limit: int = 20480, cache: int = 4096) -> Mapping[str, float | None]:
    """The channel `overlong`, from 0 to -1, by the longest turn of the rollout in tokens. Section 3.4, eq. 13.

    min(0, max(-1, (limit - cache - length) / cache))

    Raises:
        ValueError: `cache` is not within 1 and `limit`.
    """
    if not 0 < cache <= limit:
        raise ValueError(f"the cache of soft punishment lies before the limit of {limit} tokens, but got {cache}")
    longest = max((len(turn.reply_ids) for turn in rollout.turns), default=0)
    return {"overlong": min(0.0, max(-1.0, (limit - cache - longest) / cache))}


METHOD = Method(
    paper=Paper(
        "DAPO: An Open-Source LLM Reinforcement Learning System at Scale",
        authors="Yu et al., ByteDance Seed and Tsinghua AIR",
        year=2025,
        arxiv="2503.14476",
        source="summary",
        also_called=("decoupled clip and dynamic sampling policy optimization", "clip-higher"),
    ),
    credit=partial(credit.group_mean, scale="std"),
    objective=partial(objective.clipped_ratio, low=0.2, high=0.28),  # section 4.1
    average=token_mean,
    accept=rewards_differ,
    differs="the mean is over the tokens of the whole batch, not of one group, so groups weigh by their tokens; "
    "dynamic sampling asks whether rewards differ, which for the paper's rewards of -1 and 1 is its test; `overlong` "
    "is a channel that a recipe adds to its reward, and measures the longest turn, as a budget is that of a turn",
)
