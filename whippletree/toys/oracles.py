"""What a toy knows and a run does not: true values, states, first mistakes; and judges that err at a given rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random

import numpy as np
import torch
from torch import Tensor

from whippletree.toys.exact import values
from whippletree.toys.played import Array, Played
from whippletree.toys.table import Table
from whippletree.toys.world import World
from whippletree.types import Batch, Evidence, Json, Rollout, Services


def states_of(world: World, rollouts: Sequence[Rollout]) -> Tensor:
    """[N] the state before each sampled token."""
    if isinstance(rollouts, Played):
        return rollouts.flat(rollouts.state_RT)
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    return torch.tensor([s for turn in turns for s in world.walk(turn.prompt_ids, turn.reply_ids)], dtype=torch.int64)


def looked_up(world: World, name: str, table: Tensor) -> Evidence:
    """Evidence that reads a column off a table by state [S], or by state and action [S, V].

    A name that ends in N gives a number a token, one that ends in K a number a turn, of its first token.
    """

    async def found(rollouts: Sequence[Rollout], batch: Batch, services: Services) -> Mapping[str, Tensor]:
        state_N = states_of(world, rollouts)
        column_N = table[state_N] if table.dim() == 1 else table[state_N, batch.id_N]
        first_K = batch.lengths_K.cumsum(0) - batch.lengths_K
        return {name: column_N[first_K] if name.endswith("K") else column_N}

    return found


class TrueValue:
    """A scorer that gives the exact value before each token, under a policy as it is when asked, plus noise.

    The noise is Gaussian with this standard deviation, drawn anew for each token.
    """

    def __init__(self, world: World, policy: Table, *, noise: float = 0.0, seed: int = 0) -> None:
        self.world, self.policy, self.noise = world, policy, noise
        self.random = torch.Generator().manual_seed(seed)

    async def logps(self, turns: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Tensor]:
        value_TS = values(self.world, self.policy.logp_PV().detach())
        states = [state for prompt, reply in turns for state in self.world.walk(prompt, reply)]
        done = [len(prompt) // 2 + n for prompt, reply in turns for n in range(len(reply))]
        value_N = value_TS[done, states] + self.noise * torch.randn(len(states), generator=self.random)
        return list(value_N.split([len(reply) for _, reply in turns]))


def first_wrong(rollouts: Played, right: int = 0) -> Array:
    """[R] the index of the first action that is not `right`; the length where there is none."""
    wrong_RT = (rollouts.action_RT != right) & rollouts.taken_RT
    return np.where(wrong_RT.any(1), wrong_RT.argmax(1), rollouts.length_R)


def flipped(truth: Array, probability: float, random: np.random.Generator) -> Array:
    """The same yes and no, each turned around with this probability."""
    return np.asarray(truth, dtype=bool) ^ (random.random(np.shape(truth)) < probability)


def misplaced(place_R: Array, length_R: Array, probability: float, random: np.random.Generator) -> Array:
    """[R] the same indices, each replaced with this probability by a uniform one below its length."""
    elsewhere_R = random.integers(0, length_R)
    return np.where(random.random(len(place_R)) < probability, elsewhere_R, place_R)


class Judge:
    """An asker that knows the answer, and errs with a given probability.

    `answer` reads the last message and gives the true answer; `wrong` gives what is said in its place. Whether it errs
    depends on the seed and the question alone, so asking again, in any order, gives the same; `asked` counts.
    """

    def __init__(
        self, answer: Callable[[str], str], wrong: Callable[[str, Random], str], *, flip: float = 0.0, seed: int = 0
    ) -> None:
        self.answer, self.wrong, self.flip, self.seed = answer, wrong, flip, seed
        self.asked = 0

    async def ask(self, messages: Sequence[Json], **options: object) -> str:
        self.asked += 1
        question = str(messages[-1]["content"])
        random = Random(f"{self.seed}/{question}")
        return self.wrong(question, random) if random.random() < self.flip else self.answer(question)
