"""Chains: a word of symbols, sampled one after another, in which one symbol is right at each position."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from whippletree.toys.world import END, World

RIGHT = 0  # the symbol that is right, everywhere


def chain(
    *,
    positions: int = 6,
    symbols: int = 4,
    reward: Literal["all", "share"] = "all",
    one_turn: bool = False,
) -> World:
    """A word of `positions` symbols. The reward is 1 if all are right, else 0, or it is the share that is right.

    The place is the position. State n is position n with all right so far, `positions + n` is position n after a
    mistake. The measures are "solved" (all are right) and "right_share".
    """
    n, V = positions, symbols
    right_SV = torch.zeros(2 * n, V)
    right_SV[:, RIGHT] = 1.0
    position_S = torch.arange(n).repeat(2)
    failed_S = torch.arange(2 * n) >= n
    fails_SV = failed_S[:, None] | (right_SV == 0)
    last_S = position_S == n - 1
    next_SV = torch.where(last_S[:, None], END, position_S[:, None] + 1 + n * fails_SV)
    solved_SV = (last_S[:, None] & ~fails_SV).float()
    share_SV = right_SV / n
    return World(
        next_SV=next_SV,
        rewards={"reward": solved_SV if reward == "all" else share_SV},
        measures={"solved": solved_SV, "right_share": share_SV},
        place_S=position_S,
        steps=n,
        one_turn=one_turn,
        does=tuple(str(symbol) for symbol in range(V)),
        sees=tuple(f"position {position}" for position in range(n)),
    )


def favour(world: World, bonus: float) -> Tensor:
    """[P, V] logits that are `bonus` on the right symbol everywhere, else 0."""
    start_PV = torch.zeros(world.places, world.actions)
    start_PV[:, RIGHT] = bonus
    return start_PV
