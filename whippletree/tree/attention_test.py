from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from whippletree.models.tiny import tiny_model
from whippletree.tree.attention import NAME, attend, two_products, use_fast_attention
from whippletree.tree.families import layout_of
from whippletree.tree.forward import forward

MASK = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)[None, None]


def _random(heads, length=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(heads)
    return torch.randn(2, heads, length, 8, generator=generator).to(dtype).requires_grad_()


@pytest.mark.parametrize("mask", [MASK, None])
def test_two_products_are_attention_with_shared_keys(mask):
    query, key, value = _random(4), _random(2), _random(2)
    ours = two_products(query, key, value, mask, scaling=0.3)
    theirs = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(*(torch.autograd.grad((x**2).sum(), [query, key, value]) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


def test_a_row_that_sees_nothing_is_no_nan():
    out = two_products(_random(2), _random(2), _random(2), torch.zeros(1, 1, 4, 4, dtype=torch.bool), scaling=1.0)
    torch.testing.assert_close(out, _random(2).mean(2, keepdim=True).expand_as(out))


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "lfm2"])
def test_a_bfloat16_model_gives_the_same_log_probs_either_way(family):
    turns = [((*range(3, 20), 40 + r), tuple(range(50, 60)), 1.0) for r in range(3)]
    plain, fast = tiny_model(family).bfloat16(), tiny_model(family).bfloat16()
    assert use_fast_attention(fast) and fast.config._attn_implementation == NAME
    assert layout_of(fast) == layout_of(plain)
    a, b = (forward(model, turns, [0, 0, 0]).logp_N for model in (fast, plain))
    # other roundings on the way (so it was really taken), by bfloat16's 8 bits
    assert 0 < (a - b).abs().mean() < 2**-6


def test_float32_and_cached_decoding_go_through_the_library_unchanged():
    plain, fast = tiny_model("qwen3"), tiny_model("qwen3")
    use_fast_attention(fast)
    ids = torch.arange(3, 13)[None]
    read, after = [], []
    for model in (plain, fast):
        out = model(input_ids=ids, use_cache=True)
        read.append(out.logits)
        after.append(model(input_ids=ids[:, :1], cache=out.cache).logits)
    assert torch.equal(*read) and torch.equal(*after)


def test_what_is_neither_causal_nor_masked_goes_through_the_library():
    query, key, value = (_random(2, dtype=torch.bfloat16) for _ in range(3))
    module = torch.nn.Module()
    out, _ = attend(module, query, key, value, None, is_causal=False, scaling=None)
    everywhere = scaled_dot_product_attention(query, key, value).transpose(1, 2)
    torch.testing.assert_close(out, everywhere)


def test_a_mask_that_is_added_goes_through_the_library():
    query, key, value = (_random(2, dtype=torch.bfloat16) for _ in range(3))
    added = torch.zeros(1, 1, 4, 4, dtype=torch.bfloat16).masked_fill_(~MASK, -1e9)
    out, _ = attend(torch.nn.Module(), query, key, value, added, scaling=None)
    torch.testing.assert_close(out, scaled_dot_product_attention(query, key, value, attn_mask=MASK).transpose(1, 2))


def test_a_model_with_attention_of_its_own_keeps_it():
    model = tiny_model()
    model.set_attn_implementation("eager")
    assert not use_fast_attention(model)
    assert model.config._attn_implementation == "eager"
