"""Corridors: cells in a row, walked by steps forward and back, with and without a key that is needed at the end."""

from __future__ import annotations

import torch

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
