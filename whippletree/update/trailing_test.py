from __future__ import annotations

import pytest
import torch
from torch import nn

from whippletree.models.tiny import tiny_model
from whippletree.update.adamw import AdamW
from whippletree.update.trailing import Trailing

# the first step of Adam without a memory moves by the rate, down the gradient's sign
PLAIN = AdamW(beta1=0.0, beta2=0.0, epsilon=0.0, clip_norm=0.0)


def parameter(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(1, dtype=dtype))


def trailing(p: nn.Parameter, decay: float = 0.5, every: int = 1) -> Trailing:
    return Trailing({"w": p}, PLAIN, decay=decay, every=every)


def push(moved: Trailing, rate: float) -> float:
    """Move the weight down by `rate`; what the copy then is."""
    for p in moved.parameters.values():
        p.grad = torch.ones_like(p)
    moved.step(rate)
    return moved.copies["w"].item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_average_over_three_updates_by_hand(dtype: torch.dtype) -> None:
    moved = trailing(parameter(dtype), decay=0.75)
    assert moved.copies["w"].item() == 1.0  # at the start it is the policy
    # the weight: 1, then .5, 0, -.5; the copy: .75 * 1 + .25 * .5 = .875; .75 * .875 + 0 = .65625;
    # .75 * .65625 - .25 * .5 = .3671875
    assert [push(moved, 0.5) for _ in range(3)] == pytest.approx([0.875, 0.65625, 0.3671875])


def test_without_decay_it_is_the_policy_of_some_steps_ago() -> None:
    moved = trailing(parameter(), decay=0.0, every=3)
    # the weight is 1, .5, 0, -.5, -1, -1.5, -2; copied after the third and sixth step
    assert [push(moved, 0.5) for _ in range(6)] == pytest.approx([1.0, 1.0, -0.5, -0.5, -0.5, -2.0])


def test_the_average_is_kept_in_float32() -> None:
    p = parameter(torch.bfloat16)
    moved = trailing(p, decay=0.99)
    # 1 - 1e-3 rounds to 1 in bfloat16, whose steps below 1 are 0.0039 wide; the copy moves by a hundredth of it
    assert push(moved, 1e-3) == pytest.approx(1 - 1e-5, abs=1e-7)
    assert p.item() == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_copy_stands_in_the_policy_while_it_is_held_and_no_longer(dtype: torch.dtype) -> None:
    p = parameter(dtype)
    moved = trailing(p)
    push(moved, 0.5)
    with pytest.raises(KeyError), moved.held():
        assert (p.item(), p.dtype) == (0.75, dtype)
        raise KeyError
    assert p.item() == 0.5
    assert push(moved, 0.5) == pytest.approx(0.375)  # half of .75 and of 0: what was held changed nothing


def test_a_tied_head_holds_the_copy_too() -> None:
    model = tiny_model()
    moved = Trailing(dict(model.named_parameters()), PLAIN, decay=0.5)
    ids = torch.tensor([[4, 5, 6]])
    before = model(ids).logits
    for q in model.parameters():
        q.grad = torch.ones_like(q)
    moved.step(0.1)
    moved.copies = {name: weight + 0.1 for name, weight in moved.weights().items()}  # where they began
    after = model(ids).logits
    with moved.held():
        torch.testing.assert_close(model(ids).logits, before)
    assert torch.equal(model(ids).logits, after)


def test_a_resumed_run_goes_on_with_the_copy() -> None:
    moved, resumed = trailing(parameter(), every=2), trailing(parameter(), every=2)
    push(moved, 0.5)
    resumed.restore(moved.weights(), {name: x.clone() for name, x in moved.moments().items()})
    assert push(resumed, 0.5) == push(moved, 0.5) == 0.5  # .5 * 1 + .5 * 0, at the second step of both


def test_a_checkpoint_without_the_copy_is_refused() -> None:
    moved = trailing(parameter())
    push(moved, 0.5)
    moments = moved.moments()
    del moments["w/trailing"]
    with pytest.raises(ValueError, match=r"lacks \['w/trailing'\]"):
        moved.restore({"w": torch.zeros(1)}, moments)
    assert moved.weights()["w"].item() == 0.5


@pytest.mark.parametrize(("decay", "every"), [(1.0, 1), (-0.1, 1), (float("nan"), 1), (0.5, 0)])
def test_a_share_or_a_rhythm_that_is_none_is_refused(decay: float, every: int) -> None:
    with pytest.raises(ValueError, match="0 <= decay < 1"):
        trailing(parameter(), decay, every)
