from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from whippletree.models.tiny import tiny_model
from whippletree.update.adamw import AdamW, Updater


def parameter(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def updater(*parameters: nn.Parameter, **settings: Any) -> Updater:
    return Updater({f"p{n}": p for n, p in enumerate(parameters)}, AdamW(**{"clip_norm": 0.0, **settings}))


def push(moved: Updater, *gradients: Tensor) -> None:
    """What a backward does: add to each parameter's gradient."""
    for p, gradient in zip(moved.parameters.values(), gradients, strict=True):
        p.grad = gradient.to(p.dtype) if p.grad is None else p.grad + gradient.to(p.dtype)


def snapshot(moved: Updater) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in (moved.weights() | moved.moments()).items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


# ---- one step ---------------------------------------------------------------------------------------------------


def test_two_steps_by_hand() -> None:
    p = parameter(1.0)
    moved = updater(p, beta1=0.5, beta2=0.75, epsilon=0.0, weight_decay=0.1)
    push(moved, torch.tensor([2.0]))
    # decay: 1 - 0.01 * 0.1 * 1 = 0.999; the first corrected moments are g and g^2, so the step is rate * sign(g)
    assert moved.step(0.01) == 2.0
    torch.testing.assert_close(p.data, torch.tensor([0.999 - 0.01]))
    push(moved, torch.tensor([-4.0]))
    # m = (0.5 * 1 + 0.5 * -4) / (1 - 0.25) = -2;  v = (0.75 * 1 + 0.25 * 16) / (1 - 0.5625) = 10.857142
    assert moved.step(0.01) == 4.0
    torch.testing.assert_close(p.data, torch.tensor([0.989 * 0.999 + 0.01 * 2 / math.sqrt(10.857142)]))


def test_epsilon_is_added_to_the_root() -> None:
    p = parameter(0.0)
    moved = updater(p, epsilon=1.0)
    push(moved, torch.tensor([3.0]))
    moved.step(0.4)
    torch.testing.assert_close(p.data, torch.tensor([-0.4 * 3 / (3 + 1)]))


def test_the_whole_gradient_is_clipped_by_its_norm() -> None:
    p, q = parameter(0.0), parameter(0.0)
    moved = updater(p, q, clip_norm=1.0, beta1=0.0, beta2=0.0, epsilon=1.0)
    push(moved, torch.tensor([3.0]), torch.tensor([4.0]))
    assert moved.step(1.0) == 5.0  # the norm before clipping; afterwards 0.6 and 0.8
    torch.testing.assert_close(torch.stack([p.data, q.data]), torch.tensor([[-0.6 / 1.6], [-0.8 / 1.8]]))


@pytest.mark.parametrize("clip_norm", [0.0, 6.0])
def test_a_gradient_within_the_limit_stays_as_it_is(clip_norm: float) -> None:
    p = parameter(0.0)
    moved = updater(p, clip_norm=clip_norm, beta1=0.0, beta2=0.0, epsilon=1.0)
    push(moved, torch.tensor([4.0]))
    moved.step(1.0)
    torch.testing.assert_close(p.data, torch.tensor([-4 / 5]))


def test_without_a_gradient_nothing_moves() -> None:
    p = parameter(1.0)
    assert updater(p, weight_decay=0.5).step(0.1) == 0.0
    assert p.item() == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_is_refused_and_forgotten(bad: float, dtype: torch.dtype) -> None:
    p, q = parameter(1.0, dtype=dtype), parameter(1.0, dtype=dtype)
    moved = updater(p, q)
    push(moved, torch.tensor([1.0]), torch.tensor([1.0]))
    moved.step(0.1)
    before = snapshot(moved)
    push(moved, torch.tensor([1.0]), torch.tensor([bad]))
    with pytest.raises(FloatingPointError, match=r"norm is (nan|inf): no step was made"):
        moved.step(0.1)
    assert_same(snapshot(moved), before)
    assert moved.step(0.1) == 0.0  # nothing of it is left


def test_what_is_frozen_does_not_move_and_nothing_to_train_is_refused() -> None:
    p, q = parameter(1.0), parameter(1.0)
    q.requires_grad_(False)
    moved = updater(p, q)
    assert list(moved.weights()) == ["p0"]
    with pytest.raises(ValueError, match="nothing to train"):
        updater(q)


# ---- float32 masters --------------------------------------------------------------------------------------------


def test_tiny_updates_of_a_bfloat16_parameter_add_up_in_its_master() -> None:
    p = parameter(1.0, dtype=torch.bfloat16)
    moved = updater(p)
    for _ in range(1000):
        push(moved, torch.ones(1))
        moved.step(1e-5)
    # a constant gradient moves by the rate each step: 1 - 1000 * 1e-5. Steps of a bfloat16 below 1 are 0.0039 wide,
    # so 1 - 1e-5 rounds to 1: by itself the parameter would never have moved
    torch.testing.assert_close(moved.weights()["p0"], torch.tensor([0.99]), rtol=0, atol=1e-4)
    assert p.item() == torch.tensor(0.99).bfloat16().item() != 1.0
    assert torch.tensor(1.0).bfloat16() - 1e-5 == 1.0


def test_micro_batches_add_up_in_float32() -> None:
    p = parameter(0.0, dtype=torch.bfloat16)
    moved = updater(p)
    for _ in range(256):
        push(moved, torch.tensor([1.0]))
        moved.accumulate()
    push(moved, torch.tensor([2**-7]))
    assert moved.step(0.1) == 256 + 2**-7  # in bfloat16 256 + 1 is 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulated_micro_batches_are_one_large_batch(dtype: torch.dtype) -> None:
    parts, together = updater(parameter(1.0, 2.0, dtype=dtype)), updater(parameter(1.0, 2.0, dtype=dtype))
    for part in ([0.5, 0.25], [1.0, -2.0], [0.0, 4.0]):
        push(parts, torch.tensor(part))
        parts.accumulate()
    push(together, torch.tensor([1.5, 2.25]))
    assert parts.step(0.1) == together.step(0.1)
    assert_same(snapshot(parts), snapshot(together))


def test_a_step_leaves_no_gradient_behind() -> None:
    p = parameter(1.0, dtype=torch.bfloat16)
    moved = updater(p)
    push(moved, torch.ones(1))
    moved.step(0.1)
    assert p.grad is None
    assert moved.step(0.1) == 0.0


# ---- the learning rate ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        # warm-up 1/2, 2/2; then part = 0, 1/4, 2/4, 3/4 of the way to the end
        ("constant", [4.0, 8.0, 8.0, 8.0, 8.0, 8.0]),
        ("linear", [4.0, 8.0, 8.0, 6.0, 4.0, 2.0]),
        ("cosine", [4.0, 8.0, 8.0, 4 + 4 * math.sqrt(0.5), 4.0, 4 - 4 * math.sqrt(0.5)]),
    ],
)
def test_schedules_by_hand(schedule: Any, rates: list[float]) -> None:
    settings = AdamW(learning_rate=8.0, schedule=schedule, warmup_steps=2)
    assert [settings.rate(step, 6) for step in range(6)] == pytest.approx(rates)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_single_step_has_the_whole_rate(schedule: Any) -> None:
    assert AdamW(learning_rate=8.0, schedule=schedule).rate(0, 1) == 8.0


# ---- to disk and back -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_updater_goes_on_bit_by_bit(dtype: torch.dtype) -> None:
    def start() -> Updater:
        return updater(parameter(0.3, -0.7, dtype=dtype), parameter(0.1, dtype=dtype), clip_norm=0.5, weight_decay=0.01)

    def train(moved: Updater, steps: range) -> Updater:
        for step in steps:
            random = torch.Generator().manual_seed(step)
            push(moved, torch.randn(2, generator=random), torch.randn(1, generator=random))
            moved.step(0.01)
        return moved

    undisturbed = train(start(), range(6))
    halfway = train(start(), range(3))
    resumed = train(start(), range(1))  # whatever it did before is replaced
    resumed.restore(halfway.weights(), halfway.moments())
    train(resumed, range(3, 6))
    assert_same(snapshot(resumed), snapshot(undisturbed))
    for one, other in zip(resumed.parameters.values(), undisturbed.parameters.values(), strict=True):
        assert torch.equal(one, other)


def test_a_checkpoint_from_before_the_first_step_restores_to_the_start() -> None:
    untouched, moved = updater(parameter(1.0)), updater(parameter(1.0))
    push(moved, torch.ones(1))
    moved.step(0.1)
    moved.restore(untouched.weights(), untouched.moments())
    for each in (untouched, moved):
        push(each, torch.ones(1))
        each.step(0.1)
    assert_same(snapshot(moved), snapshot(untouched))


@pytest.mark.parametrize("names", [["p0"], ["p0", "p2"], ["p0", "p1", "p2"]])
def test_the_weights_of_other_parameters_are_refused(names: list[str]) -> None:
    moved = updater(parameter(1.0), parameter(2.0))
    with pytest.raises(ValueError, match="must hold the parameters that are trained"):
        moved.restore({name: torch.zeros(1) for name in names}, {})
    assert [x.item() for x in moved.weights().values()] == [1.0, 2.0]


def test_weights_of_another_shape_are_refused_before_any_is_taken() -> None:
    moved = updater(parameter(1.0), parameter(2.0, 3.0))
    with pytest.raises(ValueError, match=r"p1 must be \[2\], but the checkpoint has \[1\]"):
        moved.restore({"p0": torch.zeros(1), "p1": torch.zeros(1)}, {})
    assert moved.weights()["p0"].item() == 1.0


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_transformers_loads_what_was_trained_with_tied_weights(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_model(family).bfloat16()
    moved = Updater(dict(model.named_parameters()), AdamW())
    model(input_ids=torch.tensor([[5, 6, 7]])).logits.float().logsumexp(-1).sum().backward()
    moved.step(1e-2)
    model.config.save_pretrained(tmp_path)
    save_file(moved.weights(), tmp_path / "model.safetensors", {"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))
