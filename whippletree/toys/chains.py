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


def criteria(*, length: int = 8, symbols: int = 6, needed: int = 1, banned: int = 5) -> World:
    """A word that is paid for two things: channel "has", the needed symbol stands somewhere in its first half, and
    channel "lacks", the banned one nowhere in its second half. Each is 0 or 1 and arrives with the last symbol.

    One turn; the place is the position. Messages 1 and 2 are the two criteria. State: position, + length if the needed
    symbol was met, + 2 length if the banned one was.
    """
    n, S = length, 4 * length
    state_S = torch.arange(S)
    position_S, has_S, broken_S = state_S % n, state_S // n % 2 == 1, state_S // (2 * n) == 1
    symbol_V, early_S = torch.arange(symbols), position_S < n // 2
    has_SV = has_S[:, None] | (early_S[:, None] & (symbol_V == needed))
    broken_SV = broken_S[:, None] | (~early_S[:, None] & (symbol_V == banned))
    last_SV = (position_S == n - 1)[:, None].expand(S, symbols)
    return World(
        next_SV=torch.where(last_SV, END, position_S[:, None] + 1 + n * has_SV + 2 * n * broken_SV),
        rewards={"has": (last_SV & has_SV).float(), "lacks": (last_SV & ~broken_SV).float()},
        place_S=position_S,
        steps=n,
        one_turn=True,
        messages=2,
    )
