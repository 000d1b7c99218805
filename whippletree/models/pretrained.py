"""Loading a policy: a causal language model with its tokenizer, in the number type this processor is fast in."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whippletree.models.smollm2 import NAME as SMOLLM2
from whippletree.models.smollm2 import smollm2


@dataclass(frozen=True)
class Pretrained:
    """A model in evaluation mode, its tokenizer, and what is known of both."""

    model: nn.Module
    tokenizer: Any
    folder: Path
    dtype: torch.dtype
    why: str  # how the number type was chosen
    end_ids: tuple[int, ...]  # tokens that end a reply
    context: int  # most tokens of prompt and reply together


def load(name: str, *, dtype: str = "auto", context: int | None = None, device: str = "cpu") -> Pretrained:
    """A causal language model by folder, or by the name of the quickstart's model. Weights are safetensors only.

    Raises:
        ValueError: there is no such folder, or the context asked for is longer than the model's.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2() if name == SMOLLM2 else Path(name)
    if not (folder / "config.json").exists():
        raise ValueError(f"model must be a Hugging Face folder with a config.json, or {SMOLLM2!r}, but got {name!r}")
    chosen, why = number_type(dtype, device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=chosen, use_safetensors=True).to(device).eval()
    longest = int(getattr(model.config, "max_position_embeddings", 0)) or 1 << 20
    if context and context > longest:
        raise ValueError(f"context must be at most the model's {longest} positions, but got {context}")
    return Pretrained(model, tokenizer, folder, chosen, why, end_ids(model, tokenizer), context or longest)


def end_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a reply: the tokenizer's end and every end the generation settings name."""
    ends = model.generation_config.eos_token_id if model.generation_config else None
    listed = ends if isinstance(ends, list) else [ends]
    return tuple(sorted({i for i in [*listed, tokenizer.eos_token_id] if i is not None}))


def number_type(wanted: str, device: str = "cpu") -> tuple[torch.dtype, str]:
    """(number type, how it was chosen): "float32", "bfloat16", or "auto", which measures both on this processor.

    Raises:
        ValueError: another word.
    """
    named = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if wanted in named:
        return named[wanted], "by configuration"
    if wanted != "auto":
        raise ValueError(f"dtype must be auto, float32 or bfloat16, but got {wanted!r}")
    ratio = multiply_seconds(torch.float32, device) / multiply_seconds(torch.bfloat16, device)
    chosen = torch.bfloat16 if ratio > 1.2 else torch.float32
    return chosen, f"measured: a bfloat16 product takes 1/{ratio:.1f} of the time of a float32 one here"


def multiply_seconds(dtype: torch.dtype, device: str = "cpu") -> float:
    """Seconds of one product of the size that decoding does, the best of several."""
    rows, weight = torch.ones(64, 1024, dtype=dtype, device=device), torch.ones(1024, 1024, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(12):
        started = time.perf_counter()
        float(torch.nn.functional.linear(rows, weight)[0, 0])  # reading one number waits for the product
        best = min(best, time.perf_counter() - started)
    return best
