"""Credit by turns: one number a turn to its tokens and back, and a rollout's advantage laid out over its turns anew.

Only trainable tokens carry credit, so "tokens" here are those, and a turn without any is empty: it has no share. NaN is
a missing number, never 0: a turn without a number has no credit and is in no mean.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from whippletree.credit.temporal import discounted_sum
from whippletree.types import Batch

# ---- turns and their tokens -------------------------------------------------------------------------------------


def turn_position(batch: Batch) -> Tensor:
    """[K] int64: how many turns of its rollout stand before each turn; 0 for the first."""
    size_R = turn_count(batch)
    first_R = size_R.cumsum(0) - size_R
    return torch.arange(batch.turns, device=size_R.device) - first_R[batch.rollout_K]


def turn_count(batch: Batch) -> Tensor:
    """[R] int64: turns of each rollout."""
    return torch.bincount(batch.rollout_K, minlength=batch.rollouts)


def turn_tokens(batch: Batch) -> Tensor:
    """[K] int64: trainable tokens of each turn."""
    return torch.bincount(batch.turn_N[batch.trainable_N], minlength=batch.turns)


def turn_to_tokens(x_K: Tensor, batch: Batch) -> Tensor:
    """[N] float32: the number of each token's turn; 0 where it is missing and on tokens that may not train."""
    x_N = x_K.float()[batch.turn_N]
    return torch.where(batch.trainable_N & ~x_N.isnan(), x_N, 0.0)


def turn_sum(x_N: Tensor, batch: Batch) -> Tensor:
    """[K] float64: sum over the trainable tokens of each turn, 0 in an empty turn; NaN if one of them is missing."""
    return _sum(torch.where(batch.trainable_N, x_N.double(), 0.0), batch.turn_N, batch.turns)


def turn_mean(x_N: Tensor, batch: Batch) -> Tensor:
    """[K] float64: mean over the trainable tokens of each turn that are known; NaN in a turn without any."""
    known_N = batch.trainable_N & ~x_N.isnan()
    total_K = _sum(torch.where(known_N, x_N.double(), 0.0), batch.turn_N, batch.turns)
    return total_K / torch.bincount(batch.turn_N[known_N], minlength=batch.turns)  # 0 / 0 is NaN


# ---- how a rollout is weighed -----------------------------------------------------------------------------------


def uniform(batch: Batch) -> Tensor:
    """[K] the same weight for each turn of a rollout that is not empty; they sum to 1. The control without targets."""
    return proportional(torch.ones(batch.turns, device=batch.turn_N.device), batch)


def proportional(weight_K: Tensor, batch: Batch) -> Tensor:
    """[K] float64: weights divided by their sum over the rollout; empty turns and missing weights have 0.

    Where no turn of a rollout weighs anything, its turns weigh the same. A rollout of empty turns has weights of 0.

    Raises:
        ValueError: a weight is negative or infinite, so it is no share.
    """
    full_K = turn_tokens(batch) > 0
    filled_K = _filled(weight_K, full_K, batch.rollout_K, batch.rollouts)
    return filled_K / _sum(filled_K, batch.rollout_K, batch.rollouts).clamp(min=_LEAST)[batch.rollout_K]


def softmax_within(score_K: Tensor, batch: Batch, *, temperature: float = 1.0) -> Tensor:
    """[K] exp(score / temperature), divided by its sum over the rollout; else as `proportional`."""
    scaled_K = score_K.double() / temperature
    scaled_K = torch.where((turn_tokens(batch) > 0) & ~scaled_K.isnan(), scaled_K, -torch.inf)
    lowest_R = scaled_K.new_full((batch.rollouts,), -torch.inf)
    most_R = lowest_R.scatter_reduce(0, batch.rollout_K, scaled_K, "amax")
    return proportional((scaled_K - most_R[batch.rollout_K]).exp(), batch)  # all missing: -inf + inf, which is NaN


def top_turns(score_K: Tensor, batch: Batch, *, turns: int) -> Tensor:
    """[K] the same weight for the `turns` best turns of each rollout, the earlier of equals; 0 for the others.

    Raises:
        ValueError: `turns` is below 1.
    """
    if turns < 1:
        raise ValueError(f"top_turns chooses 1 or more turns of each rollout, but turns is {turns}")
    known_K = (turn_tokens(batch) > 0) & ~score_K.isnan()
    best = torch.argsort(torch.where(known_K, score_K.double(), -torch.inf), descending=True, stable=True)
    best = best[torch.argsort(known_K[best].logical_not(), stable=True)]  # a known -inf before what is missing
    best = best[torch.argsort(batch.rollout_K[best], stable=True)]
    chosen_K = torch.zeros_like(known_K).index_put((best,), turn_position(batch) < turns)
    return proportional((chosen_K & known_K).double(), batch)


def shuffled(x_K: Tensor, batch: Batch, *, seed: int) -> Tensor:
    """[K] the numbers of each rollout's turns dealt to them anew, missing ones too; empty turns keep theirs.

    The control of matched concentration: what a rollout's numbers are stays, at which turns is chance. It is drawn from
    the seed, the ids of the rollout and the policy's version, and not from its reward or its place in the batch: each
    update draws anew, the same batch gives the same, and equal rollouts of one version are dealt alike.

    Source: Zhou et al. 2026, Coverage, Not Targeting (arXiv:2609.02417), the shuffled arm.
    """
    place_K = turn_position(batch)
    known = batch.trainable_N
    word_M = _scrambled(_scrambled(batch.id_N[known]) + batch.version_N[known])
    word_M = _scrambled(word_M + place_K[batch.turn_N[known]])
    print_R = torch.zeros_like(batch.group_R).index_add_(0, batch.rollout_N[known], word_M)
    draw_K = _scrambled(_scrambled(print_R + seed)[batch.rollout_K] + place_K)
    full = (turn_tokens(batch) > 0).nonzero()[:, 0]
    order = full[torch.argsort(draw_K[full])]
    order = order[torch.argsort(batch.rollout_K[order], stable=True)]
    return x_K.index_put((full,), x_K[order])


# ---- an advantage laid out anew ---------------------------------------------------------------------------------


def redistributed(
    advantage_N: Tensor, weight_K: Tensor, batch: Batch, *, by: Literal["turns", "tokens"] = "turns"
) -> Tensor:
    """[N] each rollout's advantage, summed over its tokens, laid out over its turns by weight. The sum is kept.

        A'_t = (sum over the rollout of A) * w_k / (n_k * sum_j w_j)          by="turns"
        A'_t = (sum over the rollout of A) * w_k / (sum_j w_j n_j)            by="tokens"

    for a token t of turn k, which has n_k tokens. By turns a weight is what a turn has in all, and long replies dilute
    it; by tokens it is what each of its tokens has. Where no turn weighs anything, all turns (tokens) get the same.

    Raises:
        ValueError: a weight is negative or infinite.

    Source: the matched budget of Zhou et al. 2026, Coverage, Not Targeting (arXiv:2609.02417), is by tokens.
    """
    size_K = turn_tokens(batch)
    mass_K = _filled(weight_K, size_K > 0, batch.rollout_K, batch.rollouts)
    each_K = mass_K / size_K.clamp(min=1) if by == "turns" else mass_K
    return redistributed_over_tokens(advantage_N, each_K[batch.turn_N], batch)


def redistributed_over_tokens(advantage_N: Tensor, weight_N: Tensor, batch: Batch) -> Tensor:
    """[N] each rollout's advantage, summed over its tokens, laid out over them by weight. The sum is kept.

        A'_t = (sum over the rollout of A) * w_t / sum_u w_u

    Where no token weighs anything, all get the same.

    Raises:
        ValueError: a weight is negative or infinite.
    """
    rollouts, rollout_N = batch.rollouts, batch.rollout_N
    mass_N = _filled(weight_N, batch.trainable_N, rollout_N, rollouts)
    total_R = _sum(torch.where(batch.trainable_N, advantage_N.double(), 0.0), rollout_N, rollouts)
    rate_R = total_R / _sum(mass_N, rollout_N, rollouts).clamp(min=_LEAST)
    return (rate_R[rollout_N] * mass_N).float()


# ---- turns against turns ----------------------------------------------------------------------------------------


def turn_baseline(x_K: Tensor, batch: Batch, *, key_K: Tensor | None = None, others: bool = True) -> Tensor:
    """[K] float64: the mean of what is known at the turns of the group with the same key; NaN where there is none.

    The key is an integer that says in which state a turn began, such as a hash of what it saw; without one it is the
    turn's position. Turns of the same rollout are no comparison and left out, unless `others` is False.

    Source: Feng et al. 2025, GiGPO (arXiv:2505.10978), for keys of states, there with the own rollout counted.
    """
    key_K = turn_position(batch) if key_K is None else numbered(key_K)
    cell_K = numbered(batch.group_R)[batch.rollout_K] * (batch.turns + 1) + key_K
    return mean_of(x_K, cell_K, besides=cell_K * batch.rollouts + batch.rollout_K if others else None)


def turn_returns(reward_K: Tensor, batch: Batch, *, gamma: float = 1.0) -> Tensor:
    """[K] float64: discounted sum of the rewards of a turn and of those after it; `gamma` is a turn.

        G_k = r_k + gamma * G_{k+1}

    Where a reward is missing, the sums from there back to the first turn are missing.
    """
    return discounted_sum(reward_K.double(), batch.rollout_K, gamma) if gamma else reward_K.double()


# ---- by scatter -------------------------------------------------------------------------------------------------

_LEAST = torch.finfo(torch.float64).tiny  # a sum of weights below it is 0


def _sum(x: Tensor, owner: Tensor, owners: int) -> Tensor:
    return x.new_zeros(owners).index_add_(0, owner, x)


def _filled(weight: Tensor, full: Tensor, owner: Tensor, owners: int) -> Tensor:
    """Weights in float64, 0 where missing or not `full`; all 1 where those of one owner are all 0."""
    if ((weight < 0) | weight.isinf()).any():
        wrong = weight[(weight < 0) | weight.isinf()][:5].tolist()
        raise ValueError(f"a weight is a share, 0 or more and finite (NaN: missing), but some are {wrong}")
    filled = torch.where(full & ~weight.isnan(), weight.double(), 0.0)
    none = _sum(filled, owner, owners) < _LEAST
    return torch.where(none[owner], full.double(), filled)


def numbered(x: Tensor) -> Tensor:
    """Each number's rank among the distinct ones."""
    rank: Tensor = torch.unique(x, return_inverse=True)[1]
    return rank


def mean_of(x: Tensor, cell: Tensor, *, besides: Tensor | None = None) -> Tensor:
    """For each entry, in float64: the mean of what is known in its cell; NaN where nothing is.

    `besides` parts each cell further: then the entries of the same part, the entry itself among them, are left out.
    """
    known, cell = ~x.isnan(), numbered(cell)
    part = None if besides is None else numbered(besides)

    def summed(of: Tensor) -> Tensor:
        whole = _sum(of, cell, len(x))[cell]
        return whole if part is None else whole - _sum(of, part, len(x))[part]

    return summed(torch.where(known, x.double(), 0.0)) / summed(known.double())  # 0 / 0 is NaN


def _scrambled(x: Tensor) -> Tensor:
    """int64 numbers as good as random, one for each of `x`; the finaliser of SplitMix64, where products wrap around."""
    x = x + -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ (x >> shift)) * factor
    return x ^ (x >> 31)
