"""Small flat tables for tests, written by hand: lengths of turns, rewards, log-probs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from whippletree.types import Batch, Forward, Objective


def table(
    lengths: Sequence[Sequence[int]],
    *,
    rewards: Sequence[float],
    groups: Sequence[int] | None = None,
    old: Sequence[float] | float = 0.0,
    **extra: Sequence[float],
) -> Batch:
    """The batch of rollouts whose turns have these `lengths`, in one group unless said; `extra` are columns."""
    turns = [length for rollout in lengths for length in rollout]
    turn_N = torch.repeat_interleave(torch.arange(len(turns)), torch.tensor(turns, dtype=torch.int64))
    tokens = len(turn_N)
    return Batch(
        group_R=torch.tensor(groups if groups is not None else [0] * len(lengths)),
        rollout_K=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor([len(x) for x in lengths])),
        turn_N=turn_N,
        id_N=torch.arange(tokens) % 3,
        logp_old_N=torch.tensor([old] * tokens if isinstance(old, float) else list(old)),
        version_N=torch.zeros(tokens, dtype=torch.int64),
        reward_RC=torch.tensor(rewards)[:, None],
        extra={name: torch.tensor(column) for name, column in extra.items()},
    )


def forward_of(logp: Sequence[float] | Tensor, **ask: Sequence[float] | Tensor) -> Forward:
    """A pass with these log-probs, and further columns when asked; each is a leaf that takes a gradient."""
    leaves = {name: torch.as_tensor(x).clone().requires_grad_() for name, x in ask.items()}
    given = {name: partial(_itself, leaf) for name, leaf in leaves.items()}
    return Forward(torch.as_tensor(logp).clone().requires_grad_(), ask=given)


def _itself(leaf: Tensor) -> Tensor:
    return leaf


def gradient(forward: Forward, loss_N: Tensor, weight_N: Tensor | None = None) -> Tensor:
    """[N] the gradient of the (weighted) sum of the loss at `logp_N`; 0 where the loss does not reach it."""
    total = (loss_N if weight_N is None else loss_N * weight_N).sum()
    if not total.requires_grad:
        return torch.zeros_like(forward.logp_N)
    (found,) = torch.autograd.grad(total, forward.logp_N, allow_unused=True, retain_graph=True)
    return torch.zeros_like(forward.logp_N) if found is None else found


def moves(objective: Objective, *cases: tuple[float, float]) -> list[bool]:
    """For each (ratio to the sampler, advantage): whether a token in a turn of its own gets a gradient."""
    zeros = [0.0] * len(cases)
    columns = dict.fromkeys(("return_N", "value_N", "ref_logp_N", "logp_train_N"), zeros)
    batch = table([[1] * len(cases)], rewards=[1.0]).with_extra(**{n: torch.tensor(x) for n, x in columns.items()})
    forward = forward_of([math.log(ratio) for ratio, _ in cases], value_N=zeros, entropy_N=zeros)
    loss_N = objective(forward, torch.tensor([advantage for _, advantage in cases]), batch)
    return [slope != 0 for slope in gradient(forward, loss_N).tolist()]


# Two groups, unequal rewards and lengths, several turns. Sampled at probability 1/2, but for one token at 1/4.
#   rollout  group  turns   tokens   reward
#   0        0      2, 1    0 1 2    1
#   1        0      1       3        0
#   2        1      1, 1    4 5      0
#   3        1      2       6 7      2
#   4        1      1       8        1
HALF, QUARTER = math.log(1 / 2), math.log(1 / 4)
WORKED = table(
    [[2, 1], [1], [1, 1], [2], [1]],
    groups=[0, 0, 1, 1, 1],
    rewards=[1.0, 0.0, 0.0, 2.0, 1.0],
    old=[HALF, HALF, HALF, HALF, HALF, HALF, QUARTER, HALF, HALF],
)
