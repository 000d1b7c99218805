"""Which layout a model takes: read off its configuration, then proved against turns computed one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from whippletree.tree.attention import NAME
from whippletree.tree.pack import Sampled
from whippletree.tree.packed import Layout, packed_forward

# settings by which logits are more than a linear map; None switches each off, and so does 1 for those that scale
BENT_HEADS = (
    "final_logit_softcapping",
    "output_logit_soft_cap",
    "logits_soft_cap",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "output_multiplier",
)

_proved: WeakKeyDictionary[Any, dict[str, Layout]] = WeakKeyDictionary()


def decide(config: Any) -> Layout:
    """The best layout that a model of this configuration should take; `prove` says whether it really does."""
    config = config.get_text_config()
    attention = config._attn_implementation
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    plain = all(getattr(config, name, None) in ((None,) if "cap" in name else (None, 1)) for name in BENT_HEADS)
    others = kinds - {"full_attention", "sliding_attention"}
    if attention not in ("sdpa", "eager", NAME):
        return Layout("none", plain_head=plain, reason=f"{attention} attention takes no mask of one's own")
    if others:
        return Layout(
            "none", plain_head=plain, reason=f"layers of type {', '.join(sorted(others))} read their row in order"
        )
    best = Layout("one", additive=attention == "eager", plain_head=plain)
    if "sliding_attention" in kinds:
        return replace(best, masks="by_type", window=window)
    if window is not None and not kinds:
        return replace(best, masks="windowed", window=window)
    return best


def layout_of(model: Any) -> Layout:
    """The proved layout of this model, proved once for each attention it is set to."""
    attention = model.config.get_text_config()._attn_implementation
    proved = _proved.setdefault(model, {})
    if attention not in proved:
        proved[attention] = prove(model)
    return proved[attention]


def prove(model: Any, layout: Layout | None = None) -> Layout:
    """The layout (decided from the configuration, or the one given) if it is exact on this model, else the next best.

    A prompt with three branches, one of them forked again, is computed packed and turn by turn. In float32 the
    log-probabilities may differ by at most 1e-3, in narrower types by 0.1 on average. What fails is replaced: first the
    short way through the head, then the masks.

    Raises:
        ValueError: not even plain rows agree with single turns.
    """
    best = layout or decide(model.config)
    chains = replace(best, masks="none", window=None)
    tried: list[str] = []
    candidates = (best, replace(best, plain_head=False), chains, replace(chains, plain_head=False))
    for candidate in dict.fromkeys(candidates):
        with _quiet(model):
            turns = _example(model, candidate.window or 0)
            error = _error(model, turns, candidate)
        if not error:
            return replace(candidate, reason="; ".join(filter(None, [best.reason, *tried])))
        tried.append(f"masks {candidate.masks} with {'plain' if candidate.plain_head else 'own'} head {error}")
    raise ValueError(
        f"packed rows of {type(model).__name__} must give the log-probabilities of single turns, but {'; '.join(tried)}"
    )


def _error(model: Any, turns: Sequence[Sampled], layout: Layout) -> str:
    """What is wrong with this layout; nothing, if it is exact."""
    exact = torch.cat([_alone(model, *turn) for turn in turns])
    try:
        packed = packed_forward(model, turns, [0] * len(turns), layout=layout).logp_N
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError) as refusal:
        return f"was refused ({refusal})"
    gap = (packed - exact).abs()
    narrow = next(model.parameters()).dtype != torch.float32
    differs = float(gap.mean()) if narrow else float(gap.max())
    return "" if differs <= (0.1 if narrow else 1e-3) else f"differs by {differs:.2g}"


def _alone(model: Any, prompt: Sequence[int], reply: Sequence[int], temperature: float) -> Tensor:
    ids = torch.tensor([[*prompt, *reply]], device=next(model.parameters()).device)
    logp: Tensor = model(input_ids=ids, use_cache=False).logits[0].float().div(temperature).log_softmax(-1)
    return logp[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0]


def _example(model: Any, window: int) -> list[Sampled]:
    """Turns that share prompts and begin alike, written by the model: on foreign text narrow types differ anyway."""
    length = window + 6 if window <= 64 else 12
    words = model.config.get_text_config().vocab_size
    start = torch.randint(words, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    first, second, third = _write(model, start, (0, 1, 2))
    forked = [*start, *first[:3]]
    (again,) = _write(model, forked, (1,))
    return [(start, first, 1.0), (start, second, 0.5), (start, third, 1.0), (forked, again, 1.0)]


def _write(model: Any, prompt: Sequence[int], ranks: Sequence[int], tokens: int = 6) -> list[list[int]]:
    """The most likely continuations of a prompt, but for their first tokens, which are the ones of these ranks."""
    rows = torch.tensor([prompt] * len(ranks), device=next(model.parameters()).device)
    for n in range(tokens):
        likely = model(input_ids=rows, use_cache=False).logits[:, -1].topk(3).indices
        next_B = likely[range(len(ranks)), ranks] if n == 0 else likely[:, 0]
        rows = torch.cat([rows, next_B[:, None]], dim=1)
    return rows[:, len(prompt) :].tolist()


@contextmanager
def _quiet(model: Any) -> Iterator[None]:
    """No gradients and no dropout."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
