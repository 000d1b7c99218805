"""Attention that trains fast in bfloat16 on a CPU, where the library's fused kernel is slow on rows of some hundreds.

Forward and backward of 8 rows of 138 tokens, 9 heads of 64: 35 ms fused, 9 ms as two matrix products (one core with
AMX, torch 2.13). Longer rows, float32 and cached decoding go through the library as before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "whippletree"
SCORES = 2**22  # most scores of one layer (rows * heads * T * T) that are kept for its backward


def use_fast_attention(model: Any) -> bool:
    """Let a model that uses sdpa take the faster of both ways at each call; says whether it now does."""
    if model.config.get_text_config()._attn_implementation == "sdpa":
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)
    return bool(model.config.get_text_config()._attn_implementation == NAME)


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """The library's attention function: query [B, H, T, E], key and value with fewer heads; gives [B, T, H, E]."""
    rows, heads, length, width = query.shape
    narrow = query.device.type == "cpu" and query.dtype == torch.bfloat16
    whole = key.shape[2] == length > 1 and rows * heads * length**2 <= SCORES
    known = _causal(module, options) if attention_mask is None else attention_mask.dtype == torch.bool
    if not (narrow and whole and known) or options.get("dropout") or options.get("position_bias") is not None:
        fused: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return fused
    scaling = options.get("scaling") or width**-0.5
    return two_products(query, key, value, attention_mask, scaling=scaling).transpose(1, 2).contiguous(), None


def two_products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float) -> Tensor:
    """softmax(scaling * query key^T where mask) value, each head of key and value serving several of query.

    `mask` is bool [B, 1, T, T]; None: causal.
    """
    rows, heads, length, width = query.shape
    shared = key.shape[1]
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril_()
    stacked = (query * scaling).reshape(rows, shared, -1, width)  # the heads that share a key, one below the other
    scores = (stacked @ key.transpose(2, 3)).view(rows, heads, length, length)
    # a row that sees nothing (padding) is uniform rather than NaN
    weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1)
    return (weights.view(rows, shared, -1, length) @ value).view(rows, heads, length, -1)


def _causal(module: Any, options: Any) -> bool:
    asked = options.get("is_causal")
    return bool(getattr(module, "is_causal", True) if asked is None else asked)
