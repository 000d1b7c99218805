"""A toy on which methods learn in a moment: two turns of two tokens, paid for the share of one symbol.

The policy is a table of logits, one row a place (letter P), so the expected reward is known exactly. Rollouts, turns
and evidence take the same way as in a run; the length of a prompt only says which turn it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from whippletree.types import Batch, Credit, Forward, Method, Rollout, Services, Task, Turn

PLACES, SYMBOLS, PAID = 4, 4, 0


@dataclass(frozen=True)
class Scores:
    """A scorer that reads the number of a place and symbol off a table."""

    number_PV: Tensor

    async def logps(self, turns: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Tensor]:
        return [self.number_PV.detach()[_places(prompt, reply), list(reply)] for prompt, reply in turns]


@dataclass
class Policy:
    logits_PV: Tensor = field(default_factory=lambda: torch.zeros(PLACES, SYMBOLS, requires_grad=True))
    value_P: Tensor = field(default_factory=lambda: torch.zeros(PLACES, requires_grad=True))

    def reward(self) -> float:
        """The exact expected reward: the mean probability of the paid symbol."""
        return self.logits_PV.softmax(-1)[:, PAID].mean().item()

    def services(self) -> Services:
        value_PV = self.value_P[:, None].expand(PLACES, SYMBOLS)
        start = Scores(torch.full((PLACES, SYMBOLS), 1 / SYMBOLS).log())
        return Services(
            {"policy": Scores(self.logits_PV.log_softmax(-1)), "reference": start, "value": Scores(value_PV)}
        )

    def forward(self, batch: Batch) -> Forward:
        place_N = torch.arange(batch.tokens) % PLACES
        logp_NV = self.logits_PV.log_softmax(-1)[place_N]
        return Forward(
            logp_NV[torch.arange(batch.tokens), batch.id_N],
            ask={
                "logits_NV": lambda: self.logits_PV[place_N],
                "entropy_N": lambda: -(logp_NV.exp() * logp_NV).sum(-1),
                "value_N": lambda: self.value_P[place_N],
            },
        )


def learn(method: Method, *, steps: int = 20, passes: int = 2, seed: int = 0) -> float:
    """The expected reward, 1/4 at first, after some steps of `method` on 4 groups of 8, each used `passes` times."""
    policy, random = Policy(), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam([policy.logits_PV, policy.value_P], lr=0.1)
    for _ in range(steps):
        rollouts = [r for g in range(4) for r in _accepted(method, _sample(policy, str(g), random))]
        if not rollouts:
            continue
        batch = Batch.of(rollouts)
        for evidence in method.evidence:
            batch = batch.with_extra(**asyncio.run(_found(evidence(rollouts, batch, policy.services()))))
        advantage_N, weight_N = method.credit(batch), method.average(batch)
        for _ in range(passes):
            optimizer.zero_grad()
            (weight_N * method.objective(policy.forward(batch), advantage_N, batch)).sum().backward()
            optimizer.step()
    return policy.reward()


def negated(batch: Batch, *, credit: Credit) -> Tensor:
    """[N] the credit with its sign turned: what was good is now bad."""
    return -credit(batch)


def _sample(policy: Policy, group: str, random: torch.Generator, size: int = 8) -> list[Rollout]:
    logp_PV = policy.logits_PV.detach().log_softmax(-1)
    rollouts = []
    for ids_P in torch.multinomial(logp_PV.exp(), size, replacement=True, generator=random).T.tolist():
        logp_P = [logp_PV[place, symbol].item() for place, symbol in enumerate(ids_P)]
        halves = [((9,), slice(0, 2)), ((9, *ids_P[:2], 9), slice(2, 4))]  # 9: what the harness says
        turns = [Turn("", prompt, tuple(ids_P[s]), tuple(logp_P[s]), 0, "stop") for prompt, s in halves]
        reward = ids_P.count(PAID) / PLACES
        rollouts.append(Rollout("", Task(group), group, turns=tuple(turns), rewards={"reward": reward}))
    return rollouts


def _accepted(method: Method, group: list[Rollout]) -> list[Rollout]:
    reward_R = torch.tensor([rollout.rewards["reward"] for rollout in group])
    return group if method.accept is None or method.accept(reward_R) else []


def _places(prompt: Sequence[int], reply: Sequence[int]) -> list[int]:
    start = 0 if len(prompt) == 1 else 2
    return list(range(start, start + len(reply)))


async def _found(columns: Any) -> dict[str, Tensor]:
    return dict(await columns)
