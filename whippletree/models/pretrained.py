"""Loading a policy: a causal language model with its tokenizer, in the number type this processor is fast in."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
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
        ValueError: there is no such folder, it lacks weights as safetensors or some of them, or the context asked for
            is longer than the model's.
    """
    from transformers import AutoConfig, AutoTokenizer

    folder = smollm2() if name == SMOLLM2 else Path(name)
    if not (folder / "config.json").exists():
        raise ValueError(f"model must be a Hugging Face folder with a config.json, or {SMOLLM2!r}, but got {name!r}")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{folder} has no weights as safetensors, and other formats are not read, as they can run code: convert it "
            f"with model.save_pretrained(folder) of transformers"
        )
    longest = int(getattr(AutoConfig.from_pretrained(folder).get_text_config(), "max_position_embeddings", 0))
    if context and longest and context > longest:
        raise ValueError(f"context must be at most the model's {longest} positions, but got {context}")
    chosen, why = number_type(dtype, device)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), weights(folder, chosen).to(device).eval()
    return Pretrained(model, tokenizer, folder, chosen, why, end_ids(model, tokenizer), context or longest or 1 << 20)


def weights(folder: Path, dtype: torch.dtype) -> Any:
    """The model of a folder with every weight from its files.

    Raises:
        ValueError: some are not there, as in a checkpoint of adapters; transformers would draw them at random.
    """
    from transformers import AutoModelForCausalLM

    with quietly():
        model, found = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, output_loading_info=True
        )
    if missing := sorted(found["missing_keys"]):
        adapters = any("lora_" in key for key in found["unexpected_keys"])
        why = (
            "it is a checkpoint of LoRA adapters, which is resumed by its run and cannot stand alone"
            if adapters
            else ""
        )
        raise ValueError(
            f"{folder} must hold every weight of the model, but {len(missing)} are missing, such as {missing[0]}"
            + (f": {why}" if why else "")
        )
    return model


def recompute(model: Any) -> None:
    """Have layers recompute their activations in the backward pass: less memory, more time.

    Transformers asks a layer whether it is training; only the layers themselves are told so, so dropout stays off.

    Raises:
        ValueError: the model has no layer that can.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layers that can be recomputed: leave model.gradient_checkpointing false"
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers:
        layer.training = True


@contextmanager
def quietly() -> Iterator[None]:
    """No bars and no reports of transformers meanwhile: they would run through the view of a run; errors still rise."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def end_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a reply: the tokenizer's end and every end the generation settings name."""
    ends = model.generation_config.eos_token_id if model.generation_config else None
    listed = ends if isinstance(ends, list | tuple) else [ends]
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
    return chosen, f"measured: bfloat16 multiplies {ratio:.1f} times as fast as float32 here"


def multiply_seconds(dtype: torch.dtype, device: str = "cpu") -> float:
    """Seconds of one product of the size that decoding does, the best of several."""
    rows, weight = torch.ones(64, 1024, dtype=dtype, device=device), torch.ones(1024, 1024, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(12):
        started = time.perf_counter()
        float(torch.nn.functional.linear(rows, weight)[0, 0])  # reading one number waits for the product
        best = min(best, time.perf_counter() - started)
    return best
