from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from whippletree.models.pretrained import load, number_type, quietly, recompute
from whippletree.models.tiny import save_tiny, tiny_model
from whippletree.update.adamw import AdamW, Updater
from whippletree.update.lora import Lora, add_lora


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "tiny")


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_a_folder_loads_with_what_is_known_of_it(folder: Path) -> None:
    loaded = load(str(folder), dtype="float32")
    assert (loaded.dtype, loaded.why, loaded.end_ids, loaded.context) == (torch.float32, "by configuration", (2,), 4096)
    assert not loaded.model.training
    torch.testing.assert_close(dict(loaded.model.state_dict()), dict(tiny_model().state_dict()), rtol=0, atol=0)
    assert load(str(folder), dtype="bfloat16").model.get_parameter("model.norm.weight").dtype == torch.bfloat16


def test_the_terminal_stays_quiet(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(str(folder), dtype="float32")
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "value_head.weight": torch.zeros(1, 64)}, folder / "model.safetensors", {"format": "pt"})
    load(str(folder), dtype="float32")  # a value head beside the model is no matter for a report
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


@pytest.mark.parametrize("shown", [True, False])
def test_bars_and_reports_are_afterwards_as_they_were(shown: bool) -> None:
    before, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    try:
        (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
        with pytest.raises(KeyError), quietly():
            assert not logging.is_progress_bar_enabled()
            raise KeyError
        assert (logging.is_progress_bar_enabled(), logging.get_verbosity()) == (shown, level)
    finally:
        (logging.enable_progress_bar if before else logging.disable_progress_bar)()


@pytest.mark.parametrize(("ends", "expected"), [([5, 2, 5], (2, 5)), (7, (2, 7)), (None, (2,))])
def test_every_end_that_generation_settings_and_tokenizer_name_ends_a_reply(
    ends: object, expected: tuple[int, ...], folder: Path
) -> None:
    change(folder / "generation_config.json", eos_token_id=ends)
    change(folder / "config.json", eos_token_id=None)
    assert load(str(folder), dtype="float32").end_ids == expected


def test_a_shorter_context_is_taken_and_a_longer_one_refused_before_weights_are_read(folder: Path) -> None:
    assert load(str(folder), dtype="float32", context=100).context == 100
    (folder / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(ValueError, match="context must be at most the model's 4096 positions, but got 5000"):
        load(str(folder), dtype="float32", context=5000)


def test_a_folder_without_a_model_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"Hugging Face folder with a config\.json, or 'smollm2.*, but got '.*nothing'"
    ):
        load(str(tmp_path / "nothing"))


def test_pickled_weights_are_refused_and_not_read(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="no weights as safetensors, and other formats are not read"):
        load(str(folder))


def test_a_folder_that_lacks_some_weights_is_refused_and_not_filled_at_random(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"must hold every weight of the model, but 1 are missing, such as model\.norm"
    ):
        load(str(folder), dtype="float32")


def test_a_checkpoint_of_adapters_is_refused_as_what_it_is(folder: Path) -> None:
    model = add_lora(tiny_model(), Lora(rank=2, alpha=4.0))
    adapters = Updater(dict(model.named_parameters()), AdamW()).weights()
    save_file(adapters, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="it is a checkpoint of LoRA adapters, which is resumed by its run"):
        load(str(folder), dtype="float32")


def test_number_types_by_name_by_measurement_and_unknown() -> None:
    assert number_type("bfloat16") == (torch.bfloat16, "by configuration")
    chosen, why = number_type("auto")
    assert chosen in (torch.float32, torch.bfloat16)
    ratio = float(why.removeprefix("measured: bfloat16 multiplies ").split()[0])
    assert (chosen == torch.bfloat16) == (ratio > 1.2) or ratio == 1.2  # told to one digit
    with pytest.raises(ValueError, match="must be auto, float32 or bfloat16, but got 'float16'"):
        number_type("float16")


def test_recomputing_layers_costs_a_second_forward_and_changes_no_gradient() -> None:
    ids = torch.tensor([[5, 6, 7]])
    found, calls = [], []
    for again in (False, True):
        model = tiny_model(layers=2)
        if again:
            recompute(model)
        count: list[int] = []
        for layer in model.model.layers:
            layer.mlp.register_forward_pre_hook(lambda *_, count=count: count.append(1))
        model(input_ids=ids, use_cache=False).logits.logsumexp(-1).sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
        calls.append(len(count))
    assert calls == [2, 4]  # each of the two layers once, and once more in the backward pass
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_recomputing_turns_no_dropout_on() -> None:
    model = tiny_model(layers=2)
    recompute(model)
    assert [name for name, module in model.named_modules() if module.training] == ["model.layers.0", "model.layers.1"]


def test_a_model_that_cannot_recompute_says_so() -> None:
    with pytest.raises(ValueError, match="Linear has no layers that can be recomputed: leave model"):
        recompute(torch.nn.Linear(1, 1))
