"""From logits to log-probabilities and entropies of sampled tokens, without a float32 copy of all logits.

The logits stay in the model's number type and are read a few rows at a time in float32, forward and backward; the
gradient of the logits is written in the model's number type too. So a head costs its three matrix products and two
readings of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = {"cpu": 2**19}  # logits read at a time: in a cache on a CPU, 2**26 elsewhere


def token_logps(logits_PV: Tensor, temperature_P: Tensor, place_N: Tensor, id_N: Tensor) -> Tensor:
    """[N] float32 log-probability of token `id_N` at row `place_N`.

    log p = z_id - log sum_v exp(z_v),  z = logits / temperature
    """
    apply: Callable[..., Tensor] = _TokenLogps.apply
    return apply(logits_PV, temperature_P, place_N, id_N)


def entropies(logits_PV: Tensor, temperature_P: Tensor) -> Tensor:
    """[P] float32 entropy of each row in nats: log sum_v exp(z_v) - sum_v p_v z_v,  z = logits / temperature."""
    apply: Callable[..., Tensor] = _Entropies.apply
    return apply(logits_PV, temperature_P)


class _TokenLogps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_PV: Tensor, temperature_P: Tensor, place_N: Tensor, id_N: Tensor) -> Tensor:
        lse_P = _logsumexp(logits_PV, temperature_P)
        logp_N = logits_PV[place_N, id_N] / temperature_P[place_N] - lse_P[place_N]
        ctx.save_for_backward(logits_PV, temperature_P, place_N, id_N, lse_P, logp_N)
        return logp_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        """d/d logits_v = sum over the row's tokens of g * (1[v = id] - p_v) / temperature."""
        logits_PV, temperature_P, place_N, id_N, lse_P, logp_N = ctx.saved_tensors
        share_N = grad_N / temperature_P[place_N]
        share_P = torch.zeros_like(lse_P).index_add_(0, place_N, share_N)
        grad_PV = torch.empty_like(logits_PV)
        for rows, z in _blocks(logits_PV, temperature_P, lse_P):
            torch.mul(z.exp_(), -share_P[rows, None], out=grad_PV[rows])
        # rounded after the difference, not before: 1 - p is small where the model is sure
        chosen, at_N = torch.unique(place_N * logits_PV.shape[1] + id_N, return_inverse=True)
        same_N = share_N.new_zeros(len(chosen)).index_add_(0, at_N, share_N)[at_N]
        grad_PV[place_N, id_N] = (same_N - share_P[place_N] * logp_N.exp()).to(grad_PV.dtype)
        return grad_PV, None, None, None


class _Entropies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_PV: Tensor, temperature_P: Tensor) -> Tensor:
        lse_P = _logsumexp(logits_PV, temperature_P)
        entropy_P = torch.empty_like(lse_P)
        for rows, logp in _blocks(logits_PV, temperature_P, lse_P):
            entropy_P[rows] = -_times_logp(logp.exp(), logp).sum(-1)
        ctx.save_for_backward(logits_PV, temperature_P, lse_P, entropy_P)
        return entropy_P

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_P: Tensor) -> tuple[Tensor | None, ...]:
        """d/d logits_v = -g * p_v * (log p_v + entropy) / temperature."""
        logits_PV, temperature_P, lse_P, entropy_P = ctx.saved_tensors
        share_P, grad_PV = -grad_P / temperature_P, torch.empty_like(logits_PV)
        for rows, logp in _blocks(logits_PV, temperature_P, lse_P):
            p = logp.exp()
            torch.mul(_times_logp(p, logp.add_(entropy_P[rows, None])), share_P[rows, None], out=grad_PV[rows])
        return grad_PV, None


def _times_logp(p: Tensor, logp: Tensor) -> Tensor:
    """p * logp in place of p, 0 where p is 0."""
    return p.mul_(logp.clamp_(min=torch.finfo(logp.dtype).min))


def _logsumexp(logits_PV: Tensor, temperature_P: Tensor) -> Tensor:
    most_P = logits_PV.amax(-1) / temperature_P if len(logits_PV) else torch.empty_like(temperature_P)
    sum_P = torch.empty_like(most_P)
    for rows, z in _blocks(logits_PV, temperature_P, most_P):
        sum_P[rows] = z.exp_().sum(-1)
    return sum_P.log_().add_(most_P)


def _blocks(logits_PV: Tensor, temperature_P: Tensor, shift_P: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """A few rows of float32 logits / temperature - shift at a time, a new tensor each."""
    places, words = logits_PV.shape
    step = max(1, BLOCK.get(logits_PV.device.type, 2**26) // words)
    tempered = bool((temperature_P != 1).any())
    for start in range(0, places, step):
        rows = slice(start, min(start + step, places))
        z = logits_PV[rows] / temperature_P[rows, None] if tempered else logits_PV[rows]
        yield rows, z - shift_P[rows, None]
