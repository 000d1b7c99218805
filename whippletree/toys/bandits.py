"""Bandits: one action for each context, which pays at once. Contexts are tasks, places and states alike: letter P."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from whippletree.toys.world import END, World


def bandit(reward_PV: Tensor, measures: Mapping[str, Tensor] | None = None) -> World:
    """One task for each context; action v in context p pays `reward_PV[p, v]` and ends the episode."""
    context_P = torch.arange(len(reward_PV))
    return World(
        next_SV=torch.full(reward_PV.shape, END),
        rewards={"reward": reward_PV.float()},
        measures=measures or {},
        place_S=context_P,
        start_G=context_P,
        steps=1,
    )


def effort_bandit(cost: Callable[[Tensor], Tensor], *, most: int = 10) -> World:
    """Two tasks, easy and hard: action v is effort v + 1; effort 1 solves the easy one, only `most` the hard one.

    The reward is 1 if solved, less `cost(effort)`. Measures: "solved", "effort".
    """
    effort_PV = torch.arange(1.0, most + 1).expand(2, most)
    solved_PV = torch.stack([torch.ones(most), (effort_PV[1] == most).float()])
    return bandit(solved_PV - cost(effort_PV), {"solved": solved_PV, "effort": effort_PV.clone()})


@dataclass(frozen=True)
class Turns:
    """Recorded turns of an expert, each a bandit, and how well a reference policy does in them."""

    world: World  # reward: the action is acceptable; measure "exact": it is the expert's own
    expert_P: Tensor
    reference_PV: Tensor  # logits
    kind_P: Tensor  # 0: the reference is nearly always right, 1: nearly never, 2: mixed


def expert_turns(*, turns: int = 200, actions: int = 10, seed: int = 0) -> Turns:
    """Turns in which two or three actions are acceptable: the expert's and one or two equals.

    The reference has random preferences and puts about 99.9 %, 0.1 % or 10 to 60 % on what is acceptable, a third of
    the turns each.
    """
    random = torch.Generator().manual_seed(seed)
    order_PV = torch.rand(turns, actions, generator=random).argsort(1)
    equals_P = torch.randint(2, 4, (turns,), generator=random)  # with the expert's own: two or three
    rank_PV = order_PV.argsort(1)
    accepted_PV = (rank_PV < equals_P[:, None]).float()
    kind_P = torch.arange(turns) % 3
    mixed_P = 0.1 + 0.5 * torch.rand(turns, generator=random)
    mass_P = torch.stack([torch.full((turns,), 0.999), torch.full((turns,), 0.001), mixed_P])[kind_P, range(turns)]
    liked_PV = torch.randn(turns, actions, generator=random)
    # shares within the acceptable and within the others are kept; the mass of the two is set
    inside_PV = torch.where(accepted_PV > 0, liked_PV, -torch.inf).log_softmax(-1) + mass_P[:, None].log()
    outside_PV = torch.where(accepted_PV > 0, -torch.inf, liked_PV).log_softmax(-1) + (1 - mass_P)[:, None].log()
    exact_PV = (rank_PV == 0).float()
    world = bandit(accepted_PV, {"exact": exact_PV})
    return Turns(world, order_PV[:, 0], torch.where(accepted_PV > 0, inside_PV, outside_PV), kind_P)
