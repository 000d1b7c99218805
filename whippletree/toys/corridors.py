"""Corridors: cells in a row, walked by steps forward and back, with and without a key that is needed at the end."""

from __future__ import annotations

import torch
from torch import Tensor

from whippletree.toys.world import END, World

FORWARD, STAY, BACK, TAKE = range(4)
DOES = ("forward", "stay", "back", "take")


def corridor(*, cells: int = 9, steps: int = 20) -> World:
    """Reach the last cell: reward 1 on arrival, which ends the episode, else 0. States and places are the cells."""
    cell_S = torch.arange(cells)
    goal = cells - 1
    next_SV = torch.stack([cell_S + 1, cell_S, cell_S - 1], dim=1).clamp(0, goal)
    there_S = cell_S == goal
    arrives_SV = (next_SV == goal) & ~there_S[:, None]
    return World(
        next_SV=torch.where(arrives_SV | there_S[:, None], END, next_SV),
        rewards={"reward": arrives_SV.float()},
        place_S=cell_S,
        steps=steps,
        does=DOES[:3],
        sees=tuple(f"cell {cell}" for cell in range(cells)),
    )


def key_corridor(*, cells: int = 9, key: int = 3, steps: int = 20, messages: int = 0) -> World:
    """Reach the last cell with the key, which is taken in its cell: reward 1, which ends the episode.

    The place is the state: `cell`, and `cells + cell` with the key. Without it the last cell is a cell like any other.
    The measure "key" counts the taking of it.
    """
    goal, cell_S, holds_S = cells - 1, torch.arange(cells).repeat(2), torch.arange(2 * cells) >= cells
    takes_S = (cell_S == key) & ~holds_S
    moved_SV = torch.stack([cell_S + 1, cell_S, cell_S - 1, cell_S], dim=1).clamp(0, goal)
    there_S = holds_S & (cell_S == goal)
    arrives_SV = holds_S[:, None] & (moved_SV == goal) & ~there_S[:, None]
    key_SV = torch.zeros(2 * cells, 4)
    key_SV[takes_S, TAKE] = 1.0
    after_SV = moved_SV + cells * (holds_S[:, None] | (key_SV > 0))
    return World(
        next_SV=torch.where(arrives_SV | there_S[:, None], END, after_SV),
        rewards={"reward": arrives_SV.float()},
        measures={"key": key_SV},
        place_S=torch.arange(2 * cells),
        steps=steps,
        messages=messages,
        does=DOES,
        sees=tuple(f"cell {c}{', key' * k}" for k in (0, 1) for c in range(cells)),
    )


def on_taking(world: World, logit: float, *, cell: int | None = None) -> Tensor:
    """[P, V] logits that are `logit` on taking, in every place or in this cell without the key, else 0."""
    start_PV = torch.zeros(world.places, world.actions)
    start_PV[slice(None) if cell is None else cell, TAKE] = logit
    return start_PV
