"""A policy that is a table of logits, one row a place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy

import numpy as np
import torch
from torch import Tensor

from whippletree.toys.played import Array, Chooser, Played
from whippletree.toys.world import World
from whippletree.types import Batch, Forward, Rollout


class Table:
    """Softmax over actions at each place: logits are fixed numbers plus parameters that begin at 0.

        logits[p, v] = start[p, v] + theta[index[p, v]]

    Without `index_PV` each entry has its own parameter; entries that share one learn together. Beside each place p
    stands a learned value, for objectives that ask for `value_N`. P counts places with messages as well.
    """

    def __init__(self, world: World, start_PV: Tensor, index_PV: Tensor | None = None) -> None:
        places = world.places * (1 + world.messages)
        if start_PV.shape != (places, world.actions):
            raise ValueError(
                f"a table of this world needs logits for {places} places (messages counted) and {world.actions} "
                f"actions, but got {tuple(start_PV.shape)}"
            )
        self.world, self.start_PV = world, start_PV.float()
        self.index_PV = torch.arange(start_PV.numel()).view(start_PV.shape) if index_PV is None else index_PV
        self.theta = torch.zeros(int(self.index_PV.max()) + 1, requires_grad=True)
        self.value_P = torch.zeros(places, requires_grad=True)

    @classmethod
    def of(
        cls,
        world: World,
        start_PV: Tensor | None = None,
        *,
        index_PV: Tensor | None = None,
        message_MPV: Tensor | None = None,
        apart: bool = False,
    ) -> Table:
        """The table of a world, uniform unless told; `message_MPV` is what each message adds to the logits.

        What is learned beside a message is learned without it as well, unless messages are kept `apart`.
        """
        start_PV = torch.zeros(world.places, world.actions) if start_PV is None else start_PV
        index_PV = torch.arange(start_PV.numel()).view(start_PV.shape) if index_PV is None else index_PV
        added_MPV = torch.zeros(world.messages, *start_PV.shape) if message_MPV is None else message_MPV
        step = int(index_PV.max()) + 1 if apart else 0
        indices = [index_PV + step * m for m in range(1 + world.messages)]
        return cls(world, torch.cat([start_PV, *(start_PV + added_MPV)]), torch.cat(indices))

    def parameters(self) -> list[Tensor]:
        return [self.theta, self.value_P]

    def frozen(self) -> Table:
        """A copy that no longer changes."""
        return deepcopy(self)

    def logp_PV(self) -> Tensor:
        """[P, V] log-probs of each action at each place; differentiable."""
        return (self.start_PV + self.theta[self.index_PV]).log_softmax(-1)

    def chooser(self, *, one_turn: bool = False) -> Chooser:
        logp_PV = self.logp_PV().detach().numpy()

        def choose(place_RT: Array, action_RT: Array, t: int) -> Array:
            chosen: Array = logp_PV[place_RT[:, t]]
            return chosen

        return choose

    def forward(self, rollouts: Sequence[Rollout], batch: Batch) -> Forward:
        if isinstance(rollouts, Played):
            return self._at(rollouts.flat(rollouts.place_RT), batch)
        prompts = [turn.prompt_ids for rollout in rollouts for turn in rollout.turns]
        return self._at(self._places(prompts, batch.lengths_K), batch)

    async def logps(self, turns: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Tensor]:
        logp_PV = self.logp_PV().detach()
        return self._read(turns, lambda place_N, id_N: logp_PV[place_N, id_N])

    def values(self) -> _Values:
        """A scorer that gives the learned value before each token."""
        return _Values(self)

    def _at(self, place_N: Tensor, batch: Batch) -> Forward:
        logits_PV = self.start_PV + self.theta[self.index_PV]
        logp_NV = logits_PV.log_softmax(-1)[place_N]
        return Forward(
            logp_NV.gather(1, batch.id_N[:, None])[:, 0],
            ask={
                "logits_NV": lambda: logits_PV[place_N],
                "entropy_N": lambda: -(logp_NV.exp() * logp_NV).sum(-1),
                "value_N": lambda: self.value_P[place_N],
            },
            second_pass=lambda prompts: self._at(self._places(prompts, batch.lengths_K), batch),
        )

    def _places(self, prompts: Sequence[Sequence[int]], length_K: Tensor) -> Tensor:
        """[N] the place of each token: the one that its prompt shows last, counted on within a reply."""
        first_K = torch.tensor([self.world.place_of(prompt) for prompt in prompts], dtype=torch.int64)
        start_K = length_K.cumsum(0) - length_K
        within_N = torch.arange(int(length_K.sum())) - torch.repeat_interleave(start_K, length_K)
        return torch.repeat_interleave(first_K, length_K) + within_N

    def _read(
        self, turns: Sequence[tuple[Sequence[int], Sequence[int]]], read: Callable[[Tensor, Tensor], Tensor]
    ) -> list[Tensor]:
        lengths = [len(reply) for _, reply in turns]
        place_N = self._places([prompt for prompt, _ in turns], torch.tensor(lengths, dtype=torch.int64))
        id_N = torch.from_numpy(np.array([i for _, reply in turns for i in reply], dtype=np.int64))
        return list(read(place_N, id_N).split(lengths))


class _Values:
    def __init__(self, table: Table) -> None:
        self.table = table

    async def logps(self, turns: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Tensor]:
        value_P = self.table.value_P.detach()
        return self.table._read(turns, lambda place_N, id_N: value_P[place_N])
