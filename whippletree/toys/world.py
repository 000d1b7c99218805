"""Worlds that are known exactly: tables of what each action does in each state.

Letters here: S states, P places (what is seen of a state), V actions, T steps, M messages. A token is an action or a
place: ids 0 to V - 1 are actions, V + p is place p, and V + m * P + p is place p with message m beside it.
A turn's prompt is all that was seen and done so far, (place, action, place, ..., place), so it tells the state exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from whippletree.toys.played import Array, Played, Policy, play
from whippletree.types import Rollout

END = -1  # in `next_SV`: the episode is over


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """A deterministic task with finitely many states, played for at most `steps` actions.

    With `one_turn` nothing is seen between actions, so a whole episode is one reply; places then count up by one.
    """

    next_SV: Tensor  # int64, the state that follows, or END
    rewards: Mapping[str, Tensor]  # [S, V] a channel: what arrives with the action; a rollout's reward is the sum
    place_S: Tensor  # int64, what is seen
    steps: int  # most actions of an episode
    start_G: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))  # state in which a task starts
    measures: Mapping[str, Tensor] = field(default_factory=dict)  # [S, V] as rewards, but never rewarded
    one_turn: bool = False
    messages: int = 0  # M, kinds of message that may stand beside a place
    does: tuple[str, ...] = ()  # a word for each action; without any, turns hold no messages
    sees: tuple[str, ...] = ()  # a word for each place

    def __post_init__(self) -> None:
        starts = self.place_S[self.start_G].tolist()
        if len(set(starts)) < len(set(self.start_G.tolist())):
            raise ValueError(
                f"tasks must be told apart by the first place seen, but their states {self.start_G.tolist()} show "
                f"places {starts}: give each a place of its own"
            )
        on_SV = self.next_SV != END
        follows_SV = self.place_S[self.next_SV.clamp(min=0)] == self.place_S[:, None] + 1
        if self.one_turn and not bool(follows_SV[on_SV].all()):
            raise ValueError("in a world of one turn nothing is seen between actions, so the place counts up by one")

    @property
    def states(self) -> int:
        return self.next_SV.shape[0]

    @property
    def actions(self) -> int:
        return self.next_SV.shape[1]

    @cached_property
    def places(self) -> int:
        """P, without messages."""
        return int(self.place_S.max()) + 1

    @property
    def reward_SV(self) -> Tensor:
        """[S, V] all channels together."""
        return torch.stack(list(self.rewards.values())).sum(0)

    def table(self, name: str) -> Tensor:
        """[S, V] what the channel or measure of this name counts with each action."""
        tables = {**self.measures, **self.rewards}
        if name not in tables:
            raise ValueError(f"this world counts {sorted(tables)}, but not {name!r}")
        return tables[name]

    def place_of(self, prompt_ids: Sequence[int]) -> int:
        """The place that a prompt shows last, counted on for each message: m * P + p."""
        return prompt_ids[-1] - self.actions

    def without_messages(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """The same prompt as if no message had been given."""
        V, P = self.actions, self.places
        return tuple(i if i < V else V + (i - V) % P for i in prompt_ids)

    @cached_property
    def _starts(self) -> dict[int, int]:
        """The state of each task by the place that it shows first."""
        return {int(self.place_S[state]): int(state) for state in self.start_G}

    @cached_property
    def _moves(self) -> list[list[int]]:
        moves: list[list[int]] = self.next_SV.tolist()
        return moves

    def walk(self, prompt_ids: Sequence[int], reply_ids: Sequence[int]) -> list[int]:
        """The state before each token of a reply, found by doing again what the prompt says was done."""
        state, states, moves = self._starts[(prompt_ids[0] - self.actions) % self.places], [], self._moves
        for action in prompt_ids[1::2]:
            state = moves[state][action]
        for action in reply_ids:
            states.append(state)
            state = moves[state][action]
        return states

    def play(
        self,
        policy: Policy,
        groups: Sequence[int] | Array,
        random: np.random.Generator,
        *,
        version: int = 0,
        forced_RT: Array | None = None,
        message_RT: Array | None = None,
    ) -> Played:
        """One episode for each entry of `groups`, as `played.play` says."""
        return play(self, policy, groups, random, version=version, forced_RT=forced_RT, message_RT=message_RT)

    def counts(self, rollouts: Sequence[Rollout]) -> Mapping[str, Array]:
        """[R] of each channel and measure: its sum over each episode that was played here."""
        assert isinstance(rollouts, Played), type(rollouts)
        return {name: rollouts.counted(name) for name in (*self.rewards, *self.measures)}
