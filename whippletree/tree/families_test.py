from __future__ import annotations

import pytest
import torch

from whippletree.models.tiny import FAMILIES, tiny_model
from whippletree.tree.families import decide, layout_of, prove
from whippletree.tree.packed import Layout

DECIDED = {
    "llama": ("one", None),
    "qwen3": ("one", None),
    "gemma3": ("by_type", 6),
    "mistral": ("windowed", 6),
    "lfm2": ("none", None),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_what_the_configuration_says_is_proved(family, attention):
    model = tiny_model(family)
    model.set_attn_implementation(attention)
    layout = layout_of(model)
    assert (layout.masks, layout.window) == DECIDED[family]
    assert layout.plain_head
    assert layout.additive == (attention == "eager" and family != "lfm2")
    assert ("layers of type conv" in layout.reason) == (family == "lfm2")


@pytest.mark.parametrize(
    ("family", "wrong"),
    [
        ("gemma3", Layout("one")),  # full attention in the sliding layers
        ("mistral", Layout("one")),
        ("lfm2", Layout("one")),  # the convolution reads across branches
        ("llama", Layout("windowed", window=5)),
        ("llama", Layout("by_type", window=5)),  # a dict, which Llama refuses
        ("llama", Layout("one", additive=True, window=5)),
    ],
)
def test_a_wrong_mask_is_caught_and_replaced_by_chains(family, wrong):
    layout = prove(tiny_model(family), wrong)
    assert (layout.masks, layout.window, layout.plain_head) == ("none", None, True)
    assert f"masks {wrong.masks} with plain head" in layout.reason


def test_another_attention_is_another_layout():
    # eager attention would add a bool mask to its scores
    model = tiny_model()
    assert not layout_of(model).additive
    model.set_attn_implementation("eager")
    assert layout_of(model).additive


def test_narrow_types_are_proved_too():
    assert prove(tiny_model("gemma3").bfloat16()).masks == "by_type"
    assert prove(tiny_model("gemma3").bfloat16(), Layout("one")).masks == "none"


def test_proving_leaves_the_model_and_the_random_numbers_as_they_were():
    model = tiny_model().train()
    state = torch.random.get_rng_state()
    prove(model)
    assert model.training and torch.is_grad_enabled()
    assert torch.equal(state, torch.random.get_rng_state())


def test_attention_that_takes_no_mask_is_unrolled():
    config = tiny_model().config
    config._attn_implementation = "flash_attention_2"
    assert decide(config).masks == "none"
    assert "flash_attention_2" in decide(config).reason


def test_a_model_that_looks_ahead_is_refused():
    # without causality a reply is read with itself in view, so a packed row sees other tokens than a turn alone
    model = tiny_model()
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    model.config.is_causal = False
    with pytest.raises(ValueError, match="packed rows of LlamaForCausalLM must give"):
        prove(model)


@pytest.mark.parametrize(
    ("setting", "number", "plain"),
    [
        ("final_logit_softcapping", None, True),
        ("final_logit_softcapping", 1.0, False),
        ("final_logit_softcapping", 30.0, False),  # at logits of about 1 too slight for a proof in a narrow type
        ("logits_scaling", 1.0, True),
        ("logits_scaling", 1.5, False),
    ],
)
def test_a_head_that_bends_its_logits_is_known_by_its_setting(setting, number, plain):
    config = tiny_model("gemma3").config
    setattr(config, setting, number)
    assert decide(config).plain_head == plain


def test_a_head_that_bends_its_logits_unannounced_is_caught():
    model = tiny_model("gemma3")
    model.config.final_logit_softcapping = 2.0
    layout = prove(model, Layout("by_type", window=6))
    assert (layout.masks, layout.plain_head) == ("by_type", False)
    assert "masks by_type with plain head differs" in layout.reason
