from __future__ import annotations

from typing import Any

import pytest
import torch

from whippletree.models.tiny import tiny_model
from whippletree.update.adamw import AdamW, Updater
from whippletree.update.lora import Lora, add_lora

IDS = torch.tensor([[5, 6, 7, 8]])


def trained(model: Any, rate: float = 1e-2) -> Updater:
    """One step of the adapters towards any other function."""
    moved = Updater(dict(model.named_parameters()), AdamW())
    model(input_ids=IDS).logits.logsumexp(-1).sum().backward()
    moved.step(rate)
    return moved


def test_adapters_compute_what_the_model_computed_until_they_are_trained() -> None:
    before = tiny_model()(input_ids=IDS).logits
    model = add_lora(tiny_model(), Lora(rank=4, alpha=8.0))
    torch.testing.assert_close(model(input_ids=IDS).logits, before, rtol=0, atol=0)
    trained(model)
    assert not torch.allclose(model(input_ids=IDS).logits, before, atol=1e-3)


def test_only_adapters_train_and_only_they_are_kept() -> None:
    base, model = tiny_model().state_dict(), add_lora(tiny_model(), Lora(rank=4, alpha=8.0))
    moved = trained(model)
    # two layers, each with linear maps q, k, v, o, gate, up, down, each with A [4, in] and B [out, 4]
    assert len(moved.weights()) == 2 * 7 * 2
    assert {name.rsplit(".", 3)[1] for name in moved.weights()} == {"lora_A", "lora_B"}
    assert all(4 in x.shape for x in moved.weights().values())
    now = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): x for name, x in model.state_dict().items()
    }
    for name, x in base.items():
        assert torch.equal(now[name], x), name


def test_alpha_over_rank_scales_the_addition() -> None:
    outputs = []
    for alpha in (4.0, 8.0):
        torch.manual_seed(0)
        model = add_lora(tiny_model(layers=1), Lora(rank=4, alpha=alpha, targets=("o_proj",)))
        layer: Any = next(m for name, m in model.named_modules() if name.endswith("o_proj"))
        torch.nn.init.ones_(layer.lora_B["default"].weight)
        x = torch.ones(1, layer.in_features)
        outputs.append(layer(x) - layer.base_layer(x))
    torch.testing.assert_close(outputs[1], 2 * outputs[0])
    # W x + (alpha / rank) B A x, with B all ones: each output is (8 / 4) * the sum of A x
    torch.testing.assert_close(outputs[1], 2 * (x @ layer.lora_A["default"].weight.T).sum().expand(1, 64))


def test_a_target_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="no_such_map"):
        add_lora(tiny_model(), Lora(targets=("no_such_map",)))


def test_trained_adapters_restore_bit_by_bit() -> None:
    torch.manual_seed(0)
    model = add_lora(tiny_model(), Lora(rank=4, alpha=8.0))
    moved = trained(model)
    torch.manual_seed(1)  # other adapters at the start
    again = add_lora(tiny_model(), Lora(rank=4, alpha=8.0))
    Updater(dict(again.named_parameters()), AdamW()).restore(moved.weights(), moved.moments())
    torch.testing.assert_close(again(input_ids=IDS).logits, model(input_ids=IDS).logits, rtol=0, atol=0)
