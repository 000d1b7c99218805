"""The packed forward under a known layout: hidden states where a sampled token is predicted, then the head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from whippletree.tree.head import entropies, token_logps
from whippletree.tree.pack import Call, Packed, Sampled, ancestors, pack
from whippletree.types import Forward

# gives f(logits of some places, those places) for all places, in order
Reader = Callable[[Callable[[Tensor, slice], Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Layout:
    """How a model takes a tree, and how its logits come from its last hidden states.

    `masks`: `one` tensor; a dict `by_type` of layer; one tensor `windowed` by position; `none`, so rows are chains.
    """

    masks: Literal["one", "by_type", "windowed", "none"]
    window: int | None = None  # tokens, by depth
    additive: bool = False  # eager attention adds its mask to the scores
    plain_head: bool = True  # logits are one linear map of the last hidden states
    reason: str = ""  # why not the better layout


def packed_forward(
    model: Any,
    turns: Sequence[Sampled],
    group_K: Sequence[int],
    *,
    layout: Layout,
    token_budget: int | None = None,
    value_head: Any = None,
    kept_bytes: int = 2**28,
) -> Forward:
    """The forward of these turns under a layout; see `forward`, which finds the layout itself.

    Up to `kept_bytes` of logits are kept from forward to backward; where there are more, they are computed again.
    """
    device = model.get_input_embeddings().weight.device
    packed = pack(turns, group_K, unroll=layout.masks == "none", most=token_budget)
    place_N, id_N, heat_P = (x.to(device) for x in (packed.place_N, packed.id_N, packed.temperature_P))
    hidden_PD, read = reader(model, packed, layout, kept_bytes)
    order = place_N.argsort()
    sorted_N = place_N[order]

    def logps(logits: Tensor, at: slice) -> Tensor:
        a, b = torch.searchsorted(sorted_N, torch.tensor([at.start, at.stop], device=device)).tolist()
        return token_logps(logits, heat_P[at], sorted_N[a:b] - at.start, id_N[order[a:b]])

    ask: dict[str, Callable[[], Tensor]] = {
        "entropy_N": lambda: torch.cat(read(lambda logits, at: entropies(logits, heat_P[at])))[place_N],
        "logits_NV": lambda: torch.cat(read(lambda z, at: z.float() / heat_P[at, None]))[place_N],
        "hidden_ND": lambda: hidden_PD[place_N],
    }
    if value_head is not None:
        number_type = next(value_head.parameters()).dtype
        ask["value_N"] = lambda: value_head(hidden_PD.to(number_type)).float().view(-1)[place_N]

    def under(prompts: Sequence[Sequence[int]]) -> Forward:
        again = [(prompt, reply, heat) for prompt, (_, reply, heat) in zip(prompts, turns, strict=True)]
        same = {"layout": layout, "token_budget": token_budget, "value_head": value_head, "kept_bytes": kept_bytes}
        return packed_forward(model, again, group_K, **same)

    logp_N = torch.cat(read(logps))[order.argsort()]
    return Forward(logp_N=logp_N, ask=ask, second_pass=under)


def output_head(model: Any) -> nn.Linear | None:
    """The model's head, if it is a linear layer and nothing more; an adapter on it or quantised weights are more."""
    head = _inner(model).get_output_embeddings()
    return head if type(head) is nn.Linear else None


def _inner(model: Any) -> Any:
    """The causal language model itself, with its adapters, inside a peft wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def reader(model: Any, packed: Packed, layout: Layout, kept_bytes: int) -> tuple[Tensor, Reader]:
    """Hidden states at the places, and the way to read their logits.

    Few logits are computed once and kept for all readers. Many are computed a block at a time for each reader, and
    again in its backward.
    """
    head = output_head(model) if layout.plain_head else None
    passed = [_run(model, call, layout, plain=head is not None) for call in packed.calls]
    # without any place the result is empty, and still belongs to the graph
    hidden_PD = torch.cat([hidden for hidden, _ in passed] or [model.get_input_embeddings().weight[:0]])
    places = slice(0, len(hidden_PD))
    if head is None:
        width = model.config.get_text_config().vocab_size
        logits_PV = torch.cat([logits for _, logits in passed] or [hidden_PD.new_empty(0, width)])
        return hidden_PD, lambda f: [f(logits_PV, places)]
    weight, bias = (None if x is None else x.to(hidden_PD.dtype) for x in (head.weight, head.bias))
    step = max(1, kept_bytes // (len(head.weight) * hidden_PD.element_size()))
    if len(hidden_PD) <= step:
        logits_PV = linear(hidden_PD, weight, bias)
        return hidden_PD, lambda f: [f(logits_PV, places)]

    def blocks(f: Callable[[Tensor, slice], Tensor]) -> list[Tensor]:
        def block(at: slice) -> Tensor:
            read = checkpoint(lambda h: f(linear(h, weight, bias), at), hidden_PD[at], use_reentrant=False)
            assert isinstance(read, Tensor)
            return read

        return [block(slice(a, min(a + step, places.stop))) for a in range(0, places.stop, step)]

    return hidden_PD, blocks


def _run(model: Any, call: Call, layout: Layout, *, plain: bool) -> tuple[Tensor, Tensor]:
    """Hidden states [P, D] at the places of one call, and logits [P, V] where the head is not plain, else empty."""
    device = model.get_input_embeddings().weight.device
    place_P = call.place_P.to(device)
    inputs = {"input_ids": call.id_BT.to(device), "use_cache": False}
    if call.end_BT is not None:
        position_BT = call.position_BT.to(device)
        masks = _masks(call.end_BT.to(device), position_BT, layout, _inner(model).dtype)
        inputs |= {"position_ids": position_BT, "attention_mask": masks}
    decoder = _inner(model).get_decoder()
    if plain:
        hidden = decoder(**inputs).last_hidden_state.flatten(0, 1)[place_P]
        return hidden, hidden.new_empty(0)
    seen: list[Tensor] = []
    hook = decoder.register_forward_hook(lambda module, args, output: seen.append(output.last_hidden_state))
    try:
        width = call.id_BT.shape[1]
        columns, column_P = torch.unique(place_P % width, return_inverse=True)
        logits_BCV = model(**inputs, logits_to_keep=columns).logits
    finally:
        hook.remove()
    return seen[0].flatten(0, 1)[place_P], logits_BCV[place_P // width, column_P]


def _masks(end_BT: Tensor, position_BT: Tensor, layout: Layout, number_type: torch.dtype) -> Tensor | dict[str, Tensor]:
    def form(mask_BTT: Tensor) -> Tensor:
        mask = mask_BTT[:, None]
        if not layout.additive:
            return mask
        low = torch.finfo(number_type).min
        return torch.zeros(mask.shape, dtype=number_type, device=mask.device).masked_fill_(~mask, low)

    tree = ancestors(end_BT)
    if layout.window is None:
        return form(tree)
    near = position_BT[:, :, None] - position_BT[:, None, :] < layout.window
    if layout.masks == "windowed":
        return form(tree & near)
    return {"full_attention": form(tree), "sliding_attention": form(tree & near)}
