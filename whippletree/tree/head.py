"""From logits to log-probabilities and entropies of sampled tokens, without a float32 copy of all logits.

The logits stay in the model's number type and are read a few rows at a time in float32, forward and backward; the
gradient of the logits is written in the model's number type too. So a head costs its three matrix products and two
readings of the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def token_logps(logits_PV: Tensor, temperature_P: Tensor, place_N: Tensor, id_N: Tensor) -> Tensor:
    """[N] float32 log-probability of token `id_N` at row `place_N`, which must not decrease.

    log p = z_id - log sum_v exp(z_v),  z = logits / temperature
    """
    return _TokenLogps.apply(logits_PV, temperature_P, place_N, id_N)  # type: ignore[no-any-return, no-untyped-call]  # torch


def entropies(logits_PV: Tensor, temperature_P: Tensor) -> Tensor:
    """[P] float32 entropy of each row in nats: log sum_v exp(z_v) - sum_v p_v z_v,  z = logits / temperature."""
    return _Entropies.apply(logits_PV, temperature_P)  # type: ignore[no-any-return, no-untyped-call]  # torch


class _TokenLogps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_PV: Tensor, temperature_P: Tensor, place_N: Tensor, id_N: Tensor) -> Tensor:
        lse_P = torch.empty_like(temperature_P)
        for rows, z in _blocks(logits_PV, temperature_P):
            lse_P[rows] = z.logsumexp(-1)
        ctx.save_for_backward(logits_PV, temperature_P, place_N, id_N, lse_P)
        return logits_PV[place_N, id_N].float() / temperature_P[place_N] - lse_P[place_N]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        """d/d logits_v = sum over the row's tokens of g * (1[v = id] - p_v) / temperature."""
        logits_PV, temperature_P, place_N, id_N, lse_P = ctx.saved_tensors
        share_N = grad_N / temperature_P[place_N]
        share_P = torch.zeros_like(lse_P).index_add_(0, place_N, share_N)
        edges = torch.searchsorted(place_N, torch.arange(len(lse_P) + 1, device=place_N.device)).tolist()
        grad_PV = torch.empty_like(logits_PV)
        for rows, z in _blocks(logits_PV, temperature_P):
            z.sub_(lse_P[rows, None]).exp_().mul_(-share_P[rows, None])
            tokens = slice(edges[rows.start], edges[rows.stop])
            z.index_put_((place_N[tokens] - rows.start, id_N[tokens]), share_N[tokens], accumulate=True)
            grad_PV[rows] = z
        return grad_PV, None, None, None


class _Entropies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_PV: Tensor, temperature_P: Tensor) -> Tensor:
        lse_P, entropy_P = torch.empty_like(temperature_P), torch.empty_like(temperature_P)
        for rows, z in _blocks(logits_PV, temperature_P):
            lse_P[rows] = z.logsumexp(-1)
            logp = z.sub_(lse_P[rows, None])
            entropy_P[rows] = -_expected(logp.exp(), logp)
        ctx.save_for_backward(logits_PV, temperature_P, lse_P, entropy_P)
        return entropy_P

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_P: Tensor) -> tuple[Tensor | None, ...]:
        """d/d logits_v = -g * p_v * (log p_v + entropy) / temperature."""
        logits_PV, temperature_P, lse_P, entropy_P = ctx.saved_tensors
        grad_PV = torch.empty_like(logits_PV)
        for rows, z in _blocks(logits_PV, temperature_P):
            logp = z.sub_(lse_P[rows, None])
            p = logp.exp()
            p.mul_(logp.add_(entropy_P[rows, None])).mul_((-grad_P / temperature_P)[rows, None])
            grad_PV[rows] = p.nan_to_num_(0.0)  # p log p is 0 where p is 0
        return grad_PV, None


def _expected(p: Tensor, x: Tensor) -> Tensor:
    """Row sums of p * x, where 0 * -inf is 0."""
    return (p * x.clamp(min=torch.finfo(x.dtype).min)).sum(-1)


def _blocks(logits_PV: Tensor, temperature_P: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """A few rows of float32 logits / temperature at a time, a new tensor each: on a CPU small enough for its cache."""
    places, words = logits_PV.shape
    step = max(1, (2**19 if logits_PV.device.type == "cpu" else 2**26) // words)
    for start in range(0, places, step):
        rows = slice(start, min(start + step, places))
        yield rows, logits_PV[rows].float() / temperature_P[rows, None]
