"""Credit through time: a rollout's trainable tokens in turn order, with prompts and tool output transparent.

The reward arrives at the last trainable token. The end of a rollout is terminal: nothing is bootstrapped beyond it,
also when the rollout was truncated. The letter M here: the trainable ones among the N sampled tokens, in order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whippletree.credit.groups import known_reward
from whippletree.types import Batch


def reward_to_go(batch: Batch, *, gamma: float = 1.0, kl_beta: float = 0.0) -> Tensor:
    """[N] discounted sum of what is still to come: the rollout's reward, less a per-token KL penalty.

        A_t = gamma^(T-t) r - beta * sum_{i=t..T} gamma^(i-t) kl_i,    kl_i = log pi_old(i) - log pi_ref(i)

    With `kl_beta` above 0 it reads the evidence `ref_logp_N`. `gamma` is a token, not a turn.

    Raises:
        ValueError: a reward is missing, or the reference log-probabilities are.

    Source: Williams 1992 (reward to go); Hu et al. 2025, REINFORCE++ (arXiv:2501.03262) for the penalty.
    """
    owner_M, reward_M = _times(batch)
    if kl_beta:
        kl_N = batch.logp_old_N - batch.column("ref_logp_N")
        reward_M = reward_M - kl_beta * kl_N[batch.trainable_N].double()
    return _back(discounted_sum(reward_M, owner_M, gamma), batch)


def gae(batch: Batch, *, gamma: float = 1.0, lam: float = 1.0) -> Tensor:
    """[N] generalised advantage estimation over each rollout's tokens, from the evidence `value_N`.

        delta_t = r_t + gamma * V_{t+1} - V_t          V after the last token is 0
        A_t     = delta_t + gamma * lam * A_{t+1}

    `value_N` is the value before the token is sampled. `gamma` and `lam` are a token, not a turn.

    Raises:
        ValueError: a reward is missing, or `value_N` is.

    Source: Schulman et al. 2016, High-Dimensional Continuous Control Using GAE (arXiv:1506.02438).
    """
    owner_M, reward_M = _times(batch)
    value_M = batch.column("value_N")[batch.trainable_N].double()
    last_M = _is_last(owner_M)
    next_M = torch.where(last_M, 0.0, value_M.roll(-1))
    return _back(discounted_sum(reward_M + gamma * next_M - value_M, owner_M, gamma * lam), batch)


def _times(batch: Batch) -> tuple[Tensor, Tensor]:
    """Of the M trainable tokens: the rollout each belongs to, and the reward that arrives there (float64)."""
    owner_M = batch.rollout_N[batch.trainable_N]
    return owner_M, torch.where(_is_last(owner_M), known_reward(batch).double()[owner_M], 0.0)


def _is_last(owner_M: Tensor) -> Tensor:
    """[M] bool: the next token belongs to another rollout, or there is none."""
    return torch.cat([owner_M.diff() != 0, owner_M.new_ones(min(1, len(owner_M)), dtype=torch.bool)])


def _back(x_M: Tensor, batch: Batch) -> Tensor:
    """[N] the numbers of the trainable tokens at their places, 0 elsewhere."""
    x_N = torch.zeros(batch.tokens)
    x_N[batch.trainable_N] = x_M.float()
    return x_N


def discounted_sum(x_M: Tensor, owner_M: Tensor, decay: float) -> Tensor:
    """[M] sum of `decay^j * x[t + j]` over the tokens of the same owner from t on, in log2(longest) steps.

    After k steps each entry holds the sum of the next 2^k terms; adding the entry 2^k ahead doubles the reach.
    """
    total_M, reach, longest = x_M.clone(), 1, int(torch.bincount(owner_M).max()) if len(owner_M) else 0
    while reach < longest:
        ahead_M = torch.where(owner_M[reach:] == owner_M[:-reach], total_M[reach:], 0.0)
        total_M[:-reach] += ahead_M.mul_(decay**reach)
        reach *= 2
    return total_M
