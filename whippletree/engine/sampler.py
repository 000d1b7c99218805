"""Sampling by inverse CDF, with a stream of random numbers that belongs to one reply alone."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

BLOCK = 128  # vocabulary entries summed at once before the exact place is looked up
ROWS = 16  # rows sampled at once: what is in between stays in the processor's cache, and is no new memory


def random_stream(seed: int, name: str) -> np.random.Generator:
    """Uniform numbers of one reply; equal seed and name give the same on every machine (Philox, keyed by SHA-256)."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "big")))


def sample(logits_BV: Tensor, uniform_B: Tensor, temperature_B: Tensor, top_p_B: Tensor) -> tuple[Tensor, Tensor]:
    """([B] token ids, [B] their log-probs): the first token whose cumulated probability passes the uniform number.

    The log-prob is of the distribution that was sampled: tempered, and renormalised where `top_p` < 1. At temperature
    0 the token is the most likely one, and its log-prob is the untempered model's.

    Raises:
        FloatingPointError: the logits of a row are no distribution.
    """
    if len(logits_BV) > ROWS:
        parts = zip(*(torch.split(x, ROWS) for x in (logits_BV, uniform_B, temperature_B, top_p_B)), strict=True)
        chosen, logps = zip(*(sample(*part) for part in parts), strict=True)
        return torch.cat(chosen), torch.cat(logps)
    greedy_B = temperature_B == 0
    scale_B = torch.where(greedy_B, 1.0, temperature_B)
    scaled_BV = logits_BV.float()
    if bool((scale_B != 1).any()):
        scaled_BV = scaled_BV / scale_B[:, None]
    cut_B = (top_p_B < 1) & ~greedy_B
    if bool(cut_B.any()):
        scaled_BV = scaled_BV.clone()
        scaled_BV[cut_B] = nucleus(scaled_BV[cut_B], top_p_B[cut_B])
    prob_BV = scaled_BV.softmax(dim=1)
    chosen_B, total_B = invert(prob_BV, uniform_B)
    if not bool(total_B.isfinite().all()):
        raise FloatingPointError("logits must give a distribution, but the model gave NaN or infinite ones")
    if bool(greedy_B.any()):
        chosen_B[greedy_B] = logits_BV[greedy_B].argmax(dim=1)
    return chosen_B, (prob_BV.gather(1, chosen_B[:, None])[:, 0] / total_B).log().float()


def invert(weight_BV: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """([B] index where the cumulated weight first exceeds uniform * total, [B] total), by blocks, then inside one.

    Two short cumulative sums replace one over the whole vocabulary. Entries of weight 0 are never chosen.
    """
    if missing := -weight_BV.shape[1] % BLOCK:
        weight_BV = torch.nn.functional.pad(weight_BV, (0, missing))
    blocks_BXY = weight_BV.reshape(len(weight_BV), -1, BLOCK)
    block_BX = blocks_BXY.sum(dim=2).double().cumsum(dim=1)
    total_B = block_BX[:, -1]
    target_B = uniform_B.double() * total_B
    block_B = torch.searchsorted(block_BX, target_B[:, None], right=True)[:, 0].clamp_max(block_BX.shape[1] - 1)
    before_B = torch.where(block_B > 0, block_BX.gather(1, (block_B - 1).clamp_min(0)[:, None])[:, 0], 0.0)
    inside_BY = blocks_BXY[torch.arange(len(block_B)), block_B].double()
    within_BY = inside_BY.cumsum(dim=1)
    place_B = torch.searchsorted(within_BY, (target_B - before_B)[:, None], right=True)[:, 0]
    # the two sums round differently: a target just past the block's last weight belongs to that weight
    last_B = BLOCK - 1 - (inside_BY.flip(1) > 0).int().argmax(dim=1)
    return block_B * BLOCK + torch.minimum(place_B, last_B), total_B


def nucleus(logits_BV: Tensor, top_p_B: Tensor) -> Tensor:
    """Logits with all but the smallest set of tokens that holds probability `top_p` set to -inf."""
    order_BV = logits_BV.argsort(dim=1, descending=True)
    prob_BV = logits_BV.gather(1, order_BV).softmax(dim=1)
    dropped_BV = prob_BV.cumsum(dim=1) - prob_BV >= top_p_B[:, None]
    return logits_BV.masked_fill(torch.zeros_like(dropped_BV).scatter(1, order_BV, dropped_BV), -torch.inf)
