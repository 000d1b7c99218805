"""Attention of decoding rows against the library's own, and when it is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from whippletree.build import engine_mask
from whippletree.engine.attention import DecodingKeys, two_products
from whippletree.engine.slots import SlotRows, Slots
from whippletree.models.tiny import tiny_model
from whippletree.tree.families import decide

B, H, Q, L, E = 5, 2, 3, 40, 8


def tensors_of(*, places: int = L) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(query, key, value, mask): keys and values are slices of longer blocks, row b sees b + 3 places."""
    torch.manual_seed(0)
    blocks = torch.randn(2, B, places + 7, H, E)
    key, value = blocks[:, :, :places].transpose(2, 3)
    mask = torch.arange(places) < torch.arange(3, 3 + B)[:, None, None, None]
    return torch.randn(B, H, Q, E), key, value, mask


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("places", [1, L])
def test_two_products_are_the_fused_attention(scale: float | None, places: int):
    query, key, value, mask = tensors_of(places=places)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    torch.testing.assert_close(two_products(query, key, value, mask, scale), expected, atol=1e-6, rtol=1e-5)


def test_a_row_that_sees_nothing_gives_numbers():
    query, key, value, mask = tensors_of()
    assert bool(two_products(query, key, value, torch.zeros_like(mask)).isfinite().all())


def test_marked_keys_take_the_two_products_and_nothing_stays_marked():
    query, key, value, mask = (x.bfloat16() if x.is_floating_point() else x for x in tensors_of())
    marked = key.as_subclass(DecodingKeys)
    taken = scaled_dot_product_attention(query, marked, value, attn_mask=mask)
    assert type(taken) is Tensor
    assert torch.equal(taken, two_products(query, key, value, mask))
    assert type(marked.transpose(2, 3)) is type(marked + 1) is Tensor


@pytest.mark.parametrize("options", [{}, {"attn_mask": torch.zeros(B, 1, 1, L)}, {"is_causal": True}])
def test_what_the_two_products_cannot_do_is_left_to_the_library(options: dict[str, Any]):
    query, key, value, _ = tensors_of()
    given = scaled_dot_product_attention(query, key.as_subclass(DecodingKeys), value, **options)
    assert torch.equal(given, scaled_dot_product_attention(query, key, value, **options))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "mistral"])
def test_decoding_in_bfloat16_stays_as_near_to_float32_as_the_library_does(family: str):
    ids = [[1 + (7 * row + place) % 90 for place in range(20 + row)] for row in range(9)]
    exact, narrow = tiny_model(family, layers=3), tiny_model(family, layers=3).bfloat16()
    mask = engine_mask(decide(narrow.config), torch.bfloat16)
    assert mask is not None
    rows = SlotRows(narrow, mask=mask)
    order, _ = rows.admit(ids)
    ours_BV = rows.step([3] * 9).float()
    for number, ours_V in zip(order, ours_BV, strict=True):
        whole = torch.tensor([[*ids[number], 3]])
        with torch.no_grad():
            true_V, library_V = exact(input_ids=whole).logits[0, -1], narrow(input_ids=whole).logits[0, -1].float()
        assert (ours_V - true_V).norm() <= 2 * (library_V - true_V).norm() + 0.01 * true_V.norm()


@pytest.mark.parametrize(
    ("dtype", "length", "marked"), [("bfloat16", 1, True), ("bfloat16", 2, False), ("float32", 1, False)]
)
def test_only_keys_of_decoding_rows_in_bfloat16_are_marked(dtype: str, length: int, marked: bool):
    slots = Slots(tiny_model().to(getattr(torch, dtype)))
    slots.fit(8, 64, rows=0)
    slots.aim(0, 8, torch.arange(length).expand(8, length), torch.ones(8, length, dtype=torch.bool), 16)
    heads, width, kind = next(iter(slots.blocks))
    new = torch.zeros(8, heads, length, width, dtype=kind)
    keys, values = slots.update(new, new, 0)
    assert (type(keys) is DecodingKeys, type(values)) == (marked, Tensor)
