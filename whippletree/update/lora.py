"""LoRA through peft: only low-rank additions to the linear layers are trained (Hu et al. 2021, arXiv:2106.09685)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, kw_only=True)
class Lora:
    """W + (alpha / rank) * B A, with A [rank, in] random and B [out, rank] zero at the start."""

    rank: int = 16
    alpha: float = 32.0
    targets: str | tuple[str, ...] = "all-linear"


def add_lora(model: Any, lora: Lora) -> nn.Module:
    """The model with adapters that train and a base that does not; at the start it computes what it computed before.

    Raises:
        ImportError: peft is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError("LoRA needs the library peft; install it with: pip install 'whippletree[lora]'") from error
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM")
    adapted: nn.Module = get_peft_model(model, config)
    return adapted
