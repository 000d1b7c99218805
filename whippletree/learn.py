"""One update: credit, then packed micro-batches of whole rollouts forward and backward, then the step.

Weights come from the whole batch, so micro-batches add up to exactly its gradient. Rollouts that cannot teach (no
advantage, under an objective that then is 0) are left out before the forward, and change nothing by it.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from whippletree.objective.diagnostics import diagnose
from whippletree.types import Batch, Forward, Method, Rollout
from whippletree.update.adamw import Updater

Sampled = tuple[Sequence[int], Sequence[int], float]  # prompt ids, reply ids, temperature
Pass = Callable[[Sequence[Sampled], Tensor], Forward]  # turns and their group_K -> one differentiable pass
Plan = Callable[[Sequence[Sampled], Tensor, Tensor], list[Tensor]]  # turns, rollout_K, group_R -> micro-batches [R']


@dataclass
class Learned:
    """What an update found: its metrics, and the numbers by sampled token for fidelity and the report."""

    metrics: dict[str, float]
    advantage_N: Tensor
    logp_N: Tensor  # at training, before the update; NaN where a rollout was left out
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))


class Learner:
    """Turns scored rollouts into a step of the policy.

    Args:
        forward: one differentiable packed pass (policy and layout inside).
        plan: micro-batches of whole rollouts under the token budget.
        check: is given the rollouts, the batch and the log-probs at training before the step is made, and may refuse
            it by raising.
    """

    def __init__(
        self,
        method: Method,
        updater: Updater,
        forward: Pass,
        plan: Plan,
        *,
        epochs: int = 1,
        minibatches: int = 1,
        seed: int = 0,
        check: Callable[[Sequence[Rollout], Batch, Tensor], None] = lambda rollouts, batch, logp_N: None,
    ) -> None:
        self.method, self.updater, self.forward, self.plan = method, updater, forward, plan
        self.epochs, self.minibatches, self.seed, self.check = epochs, minibatches, seed, check

    def update(self, rollouts: Sequence[Rollout], batch: Batch, *, step: int, rate: float) -> Learned:
        """Move the policy by what this batch teaches.

        Raises:
            FloatingPointError: an advantage, the loss or the gradient is not finite; no step was made.
        """
        advantage_N = self.method.credit(batch).detach()
        if not bool(advantage_N[batch.trainable_N].isfinite().all()):
            raise FloatingPointError(f"credit gave an advantage that is not finite on step {step}: no step was made")
        advantage_N = torch.where(batch.trainable_N, advantage_N, 0.0)
        learned = Learned({}, advantage_N, torch.full((batch.tokens,), math.nan))
        turns = [(turn.prompt_ids, turn.reply_ids, turn.temperature) for r in rollouts for turn in r.turns]
        losses, norms = [], []
        for number, part_R in enumerate(self._minibatches(batch, step)):
            first = number < self.minibatches  # the first pass over each rollout is the one before any update of it
            losses.append(self._accumulate(turns, batch, advantage_N, part_R, learned, first=first))
            if first:
                self.check(rollouts, batch, learned.logp_N)
            with clocked(learned.seconds, "time/update"):
                norms.append(self.updater.step(rate))
        learned.metrics |= {
            "loss": sum(losses) / len(losses),
            "grad_norm": sum(norms) / len(norms),
            "learning_rate": rate,
        }
        seen_N = ~learned.logp_N.isnan() & batch.trainable_N
        learned.metrics |= {
            name: float(value)
            for name, value in diagnosed(self.method, learned.logp_N, advantage_N, batch, seen_N).items()
        }
        return learned

    def _minibatches(self, batch: Batch, step: int) -> Iterator[Tensor]:
        """Rollouts [R'] of each optimizer step: all at once, or shuffled parts, once an epoch."""
        if self.minibatches == 1:
            yield from [torch.arange(batch.rollouts)] * self.epochs
            return
        random = torch.Generator().manual_seed(hash((self.seed, step)) & 0x7FFFFFFF)
        for _ in range(self.epochs):
            for part_R in torch.randperm(batch.rollouts, generator=random).chunk(self.minibatches):
                yield part_R.sort().values

    def _accumulate(
        self,
        turns: Sequence[Sampled],
        batch: Batch,
        advantage_N: Tensor,
        part_R: Tensor,
        learned: Learned,
        *,
        first: bool,
    ) -> float:
        """Add the gradient of one optimizer step's rollouts; returns their loss."""
        part = batch.select(part_R)
        weight_N = self.method.average(part)
        mine_N = places(batch.rollout_N, part_R)
        teaches_R = teaching(self.method, part, advantage_N[mine_N])
        total = 0.0
        for chosen_R in self._plan(turns, batch, part_R[teaches_R]):
            micro = batch.select(chosen_R)
            token_N, turn_K = places(batch.rollout_N, chosen_R), places(batch.rollout_K, chosen_R)
            with clocked(learned.seconds, "time/forward"):
                forward = self.forward([turns[k] for k in turn_K.tolist()], micro.group_R[micro.rollout_K])
                local_N = torch.searchsorted(mine_N, token_N)
                loss_N = self.method.objective(forward, advantage_N[token_N], micro)
                loss = (weight_N[local_N] * loss_N).sum()
            if not bool(loss.detach().isfinite()):
                raise FloatingPointError(
                    f"the loss is {float(loss.detach())}: no step was made; look at the advantages"
                )
            with clocked(learned.seconds, "time/backward"):
                loss.backward()
                self.updater.accumulate()
            if first:
                learned.logp_N[token_N] = forward.logp_N.detach().float().cpu()
            total += float(loss.detach())
        return total

    def _plan(self, turns: Sequence[Sampled], batch: Batch, chosen_R: Tensor) -> list[Tensor]:
        """Micro-batches, as ascending indices of the whole batch's rollouts."""
        if not len(chosen_R):
            return []
        part = batch.select(chosen_R)
        mine = [turns[k] for k in places(batch.rollout_K, chosen_R).tolist()]
        return [chosen_R[micro_R.sort().values] for micro_R in self.plan(mine, part.rollout_K, part.group_R)]


def places(owner_N: Tensor, chosen_R: Tensor) -> Tensor:
    """Indices of the entries that belong to the chosen (ascending) owners, ascending."""
    return torch.isin(owner_N, chosen_R).nonzero()[:, 0]


def teaching(method: Method, batch: Batch, advantage_N: Tensor) -> Tensor:
    """[R] bool: rollouts whose forward can move the policy.

    A rollout without advantage teaches nothing if the objective is 0 there whatever the policy says. That is found out,
    not declared: the objective is asked at zero advantage, away from the sampling policy. An objective that reads more
    than log-probs (an entropy bonus, a value, a reference) has something to say everywhere.
    """
    active_R = torch.zeros(batch.rollouts, dtype=torch.bool)
    active_R[batch.rollout_N[advantage_N != 0]] = True
    if bool(active_R.all()):
        return active_R
    away_N = batch.logp_old_N.nan_to_num() - torch.linspace(0.01, 0.5, batch.tokens)
    try:
        loss_N = method.objective(Forward(away_N), torch.zeros_like(advantage_N), batch)
    except AttributeError:  # it asked the forward pass for more than log-probs
        return torch.ones_like(active_R)
    return active_R if bool((loss_N == 0).all()) else torch.ones_like(active_R)


def setting(part: Any, name: str, default: float) -> float:
    """A keyword of a part, looked for through the parts it wraps."""
    while isinstance(part, partial):
        if name in part.keywords:
            return float(part.keywords[name])
        part = part.keywords.get("objective", part.func)
    return default


def diagnosed(method: Method, logp_N: Tensor, advantage_N: Tensor, batch: Batch, seen_N: Tensor) -> dict[str, float]:
    """The objective's usual diagnostics over the tokens that were trained; nothing where none was."""
    if not bool(seen_N.any()):
        return {}
    shown_N = torch.where(seen_N, logp_N, batch.logp_old_N.nan_to_num())
    low, high = setting(method.objective, "low", 0.2), setting(method.objective, "high", 0.2)
    return diagnose(shown_N, advantage_N, batch, low=low, high=high)


@contextmanager
def clocked(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the time of the block to `seconds[name]`."""
    started = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started
