from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from whippletree.methods._tables import HALF, forward_of, gradient, table
from whippletree.objective import kl_penalty, policy_gradient, with_entropy, with_kl, with_value
from whippletree.objective.addons import Kind
from whippletree.types import Objective

NAN = math.nan
X = math.log(2)  # log pi - log ref of a token twice as likely as under the reference


@pytest.mark.parametrize(
    ("kind", "penalty", "slope"),
    [("k1", X, 1.0), ("k2", X**2 / 2, X), ("k3", 1 / 2 - 1 + X, 1 - 1 / 2)],  # slope of k3: 1 - exp(-x)
)
def test_the_penalty_is_added_by_hand(kind: Kind, penalty: float, slope: float) -> None:
    batch = table([[1]], rewards=[1.0], old=HALF, ref_logp_N=[2 * HALF])
    forward = forward_of([HALF])
    objective = partial(with_kl, objective=policy_gradient, kind=kind, beta=0.1)
    loss_N = objective(forward, torch.tensor([2.0]), batch)
    torch.testing.assert_close(loss_N.detach(), torch.tensor([-2.0 * HALF + 0.1 * penalty]))
    torch.testing.assert_close(gradient(forward, loss_N), torch.tensor([-2.0 + 0.1 * slope]))


@pytest.mark.parametrize(("kind", "expected"), [("k1", "kl"), ("k3", "kl"), ("k2", "other")])
def test_k1_and_k3_are_unbiased_and_k2_is_not(kind: Kind, expected: str) -> None:
    # the exact mean over three symbols, sampled by the policy
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    batch = table([[3]], rewards=[1.0])
    mean = (policy * kl_penalty(policy.log(), reference.log(), batch, kind=kind)).sum()
    exact = (policy * (policy / reference).log()).sum()
    assert (abs(mean - exact).item() < 1e-6) == (expected == "kl")


def test_as_a_loss_k2_has_the_gradient_of_the_kl_and_k1_has_none() -> None:
    # the mean over the policy's own samples of the slope, at the logits
    logits = torch.tensor([0.5, -0.2, 0.1], requires_grad=True)
    reference, batch = torch.tensor([0.3, 0.3, 0.4]).log(), table([[3]], rewards=[1.0])
    policy = logits.softmax(-1)
    (exact,) = torch.autograd.grad((policy * (policy.log() - reference)).sum(), logits, retain_graph=True)
    for kind, wanted in (("k1", torch.zeros(3)), ("k2", exact)):
        penalty = kl_penalty(logits.log_softmax(-1), reference, batch, kind=kind)  # type: ignore[arg-type]  # a literal
        (got,) = torch.autograd.grad((policy.detach() * penalty).sum(), logits, retain_graph=True)
        torch.testing.assert_close(got, wanted)


def test_an_unknown_estimate_and_a_missing_reference_are_refused() -> None:
    batch = table([[1]], rewards=[1.0], ref_logp_N=[0.0])
    with pytest.raises(ValueError, match=r"\['k1', 'k2', 'k3'\], but got 'k4'"):
        with_kl(forward_of([0.0]), torch.ones(1), batch, objective=policy_gradient, kind="k4", beta=1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reads the column 'ref_logp_N'"):
        with_kl(
            forward_of([0.0]), torch.ones(1), table([[1]], rewards=[1.0]), objective=policy_gradient, kind="k3", beta=1
        )


def test_the_entropy_is_rewarded() -> None:
    batch = table([[2]], rewards=[1.0], old=HALF)
    forward = forward_of([HALF, HALF], entropy_N=[0.5, 1.5])
    loss_N = with_entropy(forward, torch.zeros(2), batch, objective=policy_gradient, bonus=0.01)
    torch.testing.assert_close(loss_N.detach(), torch.tensor([-0.005, -0.015]))
    (slope_N,) = torch.autograd.grad(loss_N.sum(), forward.entropy_N)
    torch.testing.assert_close(slope_N, torch.tensor([-0.01, -0.01]))


def test_the_error_of_the_value_is_added() -> None:
    # (2 - 1)^2 and (0 - 1)^2, half of each; slope 2 * 0.5 * (V - G)
    batch = table([[2]], rewards=[1.0], return_N=[1.0, 1.0])
    forward = forward_of([HALF, HALF], value_N=[2.0, 0.0])
    loss_N = with_value(forward, torch.zeros(2), batch, objective=policy_gradient, coefficient=0.5)
    torch.testing.assert_close(loss_N.detach(), torch.tensor([0.5, 0.5]))
    torch.testing.assert_close(torch.autograd.grad(loss_N.sum(), forward.value_N)[0], torch.tensor([1.0, -1.0]))


def test_a_clipped_value_takes_the_larger_error() -> None:
    # from 0 to 0.5, held at 0.2: to the return 1 errors are 0.25 and 0.64 (no slope); away from it, at return -1,
    # 2.25 and 1.44: slope 2 * 1.5
    batch = table([[2]], rewards=[1.0], return_N=[1.0, -1.0], value_N=[0.0, 0.0])
    forward = forward_of([HALF, HALF], value_N=[0.5, 0.5])
    loss_N = with_value(forward, torch.zeros(2), batch, objective=policy_gradient, coefficient=1.0, clip=0.2)
    torch.testing.assert_close(loss_N.detach(), torch.tensor([0.64, 2.25]))
    torch.testing.assert_close(torch.autograd.grad(loss_N.sum(), forward.value_N)[0], torch.tensor([0.0, 3.0]))


def test_additions_add_up_in_any_order() -> None:
    batch = table([[2]], rewards=[1.0], old=HALF, ref_logp_N=[-1.0, -2.0])
    forward = forward_of([HALF, HALF], entropy_N=[0.5, 1.5])
    kl = partial(with_kl, kind="k3", beta=0.1)
    entropy = partial(with_entropy, bonus=0.2)
    one = kl(forward, torch.ones(2), batch, objective=partial(entropy, objective=policy_gradient))
    other = entropy(forward, torch.ones(2), batch, objective=partial(kl, objective=policy_gradient))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "objective",
    [
        partial(with_kl, objective=policy_gradient, kind="k1", beta=1.0),
        partial(with_kl, objective=policy_gradient, kind="k2", beta=1.0),
        partial(with_kl, objective=policy_gradient, kind="k3", beta=1.0),
        partial(with_entropy, objective=policy_gradient, bonus=1.0),
        partial(with_value, objective=policy_gradient, coefficient=1.0, clip=0.1),
    ],
)
def test_an_untrainable_token_adds_nothing(objective: Objective) -> None:
    unknown = [NAN, -1.0]
    batch = table([[2]], rewards=[1.0], old=[NAN, HALF], ref_logp_N=unknown, return_N=unknown, value_N=unknown)
    forward = forward_of([NAN, HALF], entropy_N=[NAN, 1.0], value_N=[NAN, 0.05])
    loss_N = objective(forward, torch.ones(2), batch)
    assert loss_N[0] == 0 and loss_N[1].isfinite()
    leaves = [forward.logp_N, forward.entropy_N, forward.value_N]
    for slope_N in torch.autograd.grad(loss_N.sum(), leaves, allow_unused=True):
        assert slope_N is None or (slope_N[0] == 0 and slope_N[1].isfinite())
