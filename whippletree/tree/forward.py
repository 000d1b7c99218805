"""One differentiable pass over the sampled tokens of some turns, each shared token computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from whippletree.tree.families import layout_of
from whippletree.tree.pack import Sampled
from whippletree.tree.packed import Layout, packed_forward
from whippletree.types import Forward, Turn


def forward(
    model: Any,
    turns: Sequence[Turn | Sampled],
    group_K: Sequence[int] | Tensor,
    *,
    token_budget: int | None = None,
    value_head: Any = None,
    layout: Layout | None = None,
) -> Forward:
    """Log-probs of all sampled tokens, in turn order, with turns of one group merged where they share a prefix.

    Log-probs, entropies and `logits_NV` are of the tempered distribution, softmax(logits / temperature), each turn at
    its own temperature; at temperature 0 of the distribution itself. `value_N` is `value_head` of the hidden state at
    the predicting position. `token_budget` bounds the tokens of one call of the model, not what backward keeps: for
    that, see `micro_batches`. Without `layout` the model's own is proved at the first call.
    """
    triples = sampled(turns)
    groups = group_K.tolist() if isinstance(group_K, Tensor) else group_K
    layout = layout or layout_of(model)
    return packed_forward(model, triples, groups, layout=layout, token_budget=token_budget, value_head=value_head)


def sampled(turns: Sequence[Turn | Sampled]) -> list[Sampled]:
    """(prompt ids, reply ids, temperature) of each turn; the most likely token (temperature 0) is read at 1."""
    triples = [(t.prompt_ids, t.reply_ids, t.temperature) if isinstance(t, Turn) else t for t in turns]
    return [(prompt, reply, temperature or 1.0) for prompt, reply, temperature in triples]
