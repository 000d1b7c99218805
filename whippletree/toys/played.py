"""Playing a world: many episodes at once, kept as arrays, and as rollouts and turns when somebody reads them.

`Played` is a sequence of real rollouts. `Played.batch` is the table that `Batch.of` would make of them, without making
them first: a test holds the two equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whippletree.types import Batch, Ending, Forward, Json, Link, Rollout, Task, Turn

if TYPE_CHECKING:
    from whippletree.toys.world import World

Array = NDArray[Any]
Chooser = Callable[[Array, Array, int], Array]  # places [R, T], actions [R, T], actions done -> log-probs [R, V]


class Policy(Protocol):
    """Who plays: a table or a transformer. It is also a `Scorer`, of its log-probs."""

    def parameters(self) -> Sequence[Tensor]: ...

    def chooser(self, *, one_turn: bool) -> Chooser:
        """Log-probs of the next action, of the weights as they are now, no gradient."""
        ...

    def forward(self, rollouts: Sequence[Rollout], batch: Batch) -> Forward: ...

    async def logps(self, turns: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Tensor]: ...


@dataclass(frozen=True, eq=False)
class Played(Sequence[Rollout]):
    """R episodes of at most T actions. Entries beyond an episode's length are 0."""

    world: World
    group_R: Array
    length_R: Array
    ended_R: Array  # bool: the world ended it, not the limit of steps
    state_RT: Array  # before each action
    place_RT: Array  # m * P + p
    action_RT: Array
    logp_RT: Array  # float32
    version_R: Array

    @cached_property
    def taken_RT(self) -> Array:
        """bool: this action was taken."""
        return np.arange(self.action_RT.shape[1]) < self.length_R[:, None]

    def flat(self, x_RT: Array) -> Tensor:
        """[N] the numbers of the actions taken, in the order of the batch."""
        return torch.from_numpy(x_RT[self.taken_RT])

    def counted(self, name: str) -> Array:
        """[R] the sum of a channel or measure over each episode, float32."""
        gain_RT = self.world.table(name).numpy()[self.state_RT, self.action_RT]
        total: Array = np.where(self.taken_RT, gain_RT, 0).sum(1, dtype=np.float32)
        return total

    @cached_property
    def batch(self) -> Batch:
        """The table of these rollouts, as `Batch.of` makes it."""
        rollout_N = torch.from_numpy(np.repeat(np.arange(len(self)), self.length_R))
        names = tuple(sorted(self.world.rewards))
        numbers = {group: n for n, group in enumerate(dict.fromkeys(self.group_R.tolist()))}
        return Batch(
            group_R=torch.tensor([numbers[group] for group in self.group_R.tolist()]),
            rollout_K=torch.arange(len(self)) if self.world.one_turn else rollout_N,
            turn_N=rollout_N if self.world.one_turn else torch.arange(len(rollout_N)),
            id_N=self.flat(self.action_RT),
            logp_old_N=self.flat(self.logp_RT),
            version_N=torch.from_numpy(np.repeat(self.version_R, self.length_R)),
            reward_RC=torch.from_numpy(np.stack([self.counted(name) for name in names], axis=1)),
            channels=names,
            weight_C=torch.ones(len(names)),
        )

    def select(self, rollouts: Sequence[int] | Array) -> Played:
        """These episodes, in this order."""
        index = np.asarray(rollouts, dtype=np.int64)
        columns: dict[str, Any] = {f.name: getattr(self, f.name)[index] for f in fields(self) if f.name != "world"}
        return replace(self, **columns)

    def joined(self, other: Played) -> Played:
        """These episodes and then the others, of the same world."""
        names = [f.name for f in fields(self) if f.name != "world"]
        columns: dict[str, Any] = {n: np.concatenate([getattr(self, n), getattr(other, n)]) for n in names}
        return replace(self, **columns)

    # ---- as rollouts --------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.group_R)

    @overload
    def __getitem__(self, index: int) -> Rollout: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Rollout]: ...
    def __getitem__(self, index: int | slice) -> Rollout | Sequence[Rollout]:
        return self._rollouts[index]

    def __iter__(self) -> Iterator[Rollout]:
        return iter(self._rollouts)

    @cached_property
    def _rollouts(self) -> list[Rollout]:
        gains = {name: self.counted(name).tolist() for name in self.world.rewards}
        tasks = len(self.world.start_G)
        made = []
        for r, group in enumerate(self.group_R.tolist()):
            label = f"{self.version_R[r]}/{r}"
            task = Task(str(group % tasks))
            ending: Ending = "done" if self.ended_R[r] else "truncated"
            rewards: dict[str, float | None] = {name: gain[r] for name, gain in gains.items()}
            made.append(Rollout(label, task, str(group), tuple(self._turns(r, label)), rewards, ending))
        return made

    def _turns(self, r: int, label: str) -> Iterator[Turn]:
        world, n, version = self.world, int(self.length_R[r]), int(self.version_R[r])
        actions, logps = self.action_RT[r, :n].tolist(), self.logp_RT[r, :n].tolist()
        places = [world.actions + place for place in self.place_RT[r, :n].tolist()]
        width = n if world.one_turn else 1  # tokens of a reply
        prompt: tuple[int, ...] = ()
        said: list[Json] = []
        for t in range(0, n, width):
            reply = tuple(actions[t : t + width])
            prompt = (*prompt, places[t])
            words = self._words(places[t : t + 1], reply)
            request: Json = {"messages": [*said, words[0]]} if words else {}
            answer = words[1] if words else {}
            link: Link = "append" if t else "root"
            name, logp = f"{label}.{t}", tuple(logps[t : t + width])
            yield Turn(name, prompt, reply, logp, version, "stop", request=request, reply=answer, link=link)
            prompt, said = (*prompt, *reply), [*said, *words]

    def _words(self, seen: Sequence[int], done: Sequence[int]) -> list[Json]:
        """What was seen and done, as two messages; none in a world without words."""
        if not self.world.does:
            return []
        user, assistant = (" ".join(self._word(token) for token in tokens) for tokens in (seen, done))
        return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]

    def _word(self, token: int) -> str:
        world = self.world
        if token < world.actions:
            return world.does[token]
        message, place = divmod(token - world.actions, world.places)
        return world.sees[place] + (f" (message {message})" if message else "")


def play(
    world: World,
    policy: Policy,
    groups: Sequence[int] | Array,
    random: np.random.Generator,
    *,
    version: int = 0,
    forced_RT: Array | None = None,
    message_RT: Array | None = None,
) -> Played:
    """One episode for each entry of `groups`; group g is of task g modulo the number of tasks.

    `forced_RT` holds actions to be taken again (-1: sampled), so that an episode is replayed up to a turn and goes on
    from there; `message_RT` says which message stands beside the place at each step (0: none). Log-probs are of what
    was seen, messages included.
    """
    group_R = np.asarray(groups, dtype=np.int64)
    R, T, P = len(group_R), world.steps, world.places
    next_SV, place_S = world.next_SV.numpy(), world.place_S.numpy()
    state_R = world.start_G.numpy()[group_R % len(world.start_G)]
    alive_R, length_R = np.ones(R, dtype=bool), np.zeros(R, dtype=np.int64)
    state_RT, place_RT, action_RT = (np.zeros((R, T), dtype=np.int64) for _ in range(3))
    logp_RT, row_R = np.zeros((R, T), dtype=np.float32), np.arange(R)
    choose, draw_RT = policy.chooser(one_turn=world.one_turn), random.random((R, T))
    for t in range(T):
        seen_R = place_S[state_R] if message_RT is None else place_S[state_R] + P * message_RT[:, t]
        state_RT[:, t], place_RT[:, t] = state_R, seen_R
        logp_RV = choose(place_RT, action_RT, t)
        up_to_RV = np.exp(logp_RV, dtype=np.float64).cumsum(1)
        action_R = (draw_RT[:, t : t + 1] * up_to_RV[:, -1:] >= up_to_RV).sum(1)
        if forced_RT is not None:
            action_R = np.where(forced_RT[:, t] >= 0, forced_RT[:, t], action_R)
        action_RT[:, t], logp_RT[:, t] = action_R, logp_RV[row_R, action_R]
        length_R += alive_R
        after_R = next_SV[state_R, action_R]
        alive_R &= after_R >= 0  # END is -1
        if not alive_R.any():
            break
        state_R = np.where(alive_R, after_R, state_R)
    taken_RT = np.arange(T) < length_R[:, None]
    kept: Mapping[str, Array] = {
        name: np.where(taken_RT, x, 0)
        for name, x in (("state_RT", state_RT), ("place_RT", place_RT), ("action_RT", action_RT), ("logp_RT", logp_RT))
    }
    return Played(world, group_R, length_R, ~alive_R, version_R=np.full(R, version), **kept)
