from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from whippletree.methods._tables import HALF, forward_of, gradient, table
from whippletree.objective import clipped_ratio, engine_weight, policy_gradient, truncated_importance
from whippletree.types import Batch, Forward

NAN = math.nan


def two_rollouts() -> Batch:
    """Log-ratios of trainer to engine: 0.6 and -0.7 in the two turns of a rollout, then 0.3 and an unknown token."""
    return table(
        [[1, 1], [2]], rewards=[1.0, 0.0], old=[HALF] * 3 + [NAN], logp_train_N=[HALF + x for x in (0.6, -0.7, 0.3, 9)]
    )


U = torch.tensor([0.6, -0.7, 0.3, 0.0]).exp()  # 1.82, 0.50, 1.35, 1


def test_weights_by_hand() -> None:
    batch = two_rollouts()
    band = {"low": 0.8, "high": 1.5}
    torch.testing.assert_close(
        engine_weight(batch, level="token", mode="trunc", **band), torch.stack([torch.tensor(1.5), U[1], U[2], U[3]])
    )
    torch.testing.assert_close(
        engine_weight(batch, level="token", mode="clip", **band), torch.tensor([1.5, 0.8, math.exp(0.3), 1.0])
    )
    torch.testing.assert_close(
        engine_weight(batch, level="token", mode="mask", **band), torch.tensor([0.0, 0.0, math.exp(0.3), 1.0])
    )


def test_a_gate_over_the_rollout_keeps_the_weights_of_its_tokens() -> None:
    # sums over all turns: -0.1 (0.905) and 0.3 (1.35); means: -0.05 (0.951) and 0.3, its unknown token left out
    batch = two_rollouts()
    keep_first = U * torch.tensor([1.0, 1, 0, 0])
    torch.testing.assert_close(engine_weight(batch, level="rollout", mode="mask", low=0.9, high=1.2), keep_first)
    torch.testing.assert_close(engine_weight(batch, level="rollout_mean", mode="mask", low=0.92, high=1.2), keep_first)
    torch.testing.assert_close(engine_weight(batch, level="rollout", mode="mask", low=0.92, high=1.2), torch.zeros(4))


@pytest.mark.parametrize("mode", ["trunc", "clip"])
def test_a_gate_over_the_rollout_only_masks(mode: str) -> None:
    with pytest.raises(ValueError, match=f"needs mode 'mask', but got '{mode}'"):
        engine_weight(two_rollouts(), level="rollout", mode=mode, low=0.9, high=1.1)  # type: ignore[arg-type]


def test_the_ratio_is_to_the_trainer_and_the_weight_has_no_gradient() -> None:
    # token 0: policy 1.1 times the trainer, weight min(exp(0.6), 1.5): loss -1.5 * 1.1, slope the same;
    # token 1: policy 1.5 times the trainer is clipped at 1.2, weight exp(-0.7): no slope
    batch = two_rollouts()
    forward = forward_of(batch.extra["logp_train_N"] + torch.tensor([1.1, 1.5, 1.0, 1.0]).log())
    objective = partial(truncated_importance, objective=clipped_ratio, high=1.5)
    loss_N = objective(forward, torch.tensor([1.0, 1.0, -1.0, 1.0]), batch)
    torch.testing.assert_close(loss_N.detach(), torch.tensor([-1.65, -1.2 * math.exp(-0.7), math.exp(0.3), 0.0]))
    torch.testing.assert_close(gradient(forward, loss_N), torch.tensor([-1.65, 0.0, math.exp(0.3), 0.0]))


def test_the_weighted_gradient_has_the_expectation_of_the_policys_own() -> None:
    # the exact mean over three symbols sampled by the engine, with weights not truncated
    logits, engine = torch.tensor([0.5, -0.2, 0.1], requires_grad=True), torch.tensor([0.3, 0.3, 0.4])
    score, logp = torch.tensor([1.0, 0.0, 2.0]), logits.log_softmax(-1)
    batch = table([[1]] * 3, rewards=score.tolist(), old=engine.log().tolist(), logp_train_N=logp.tolist())
    loss_N = truncated_importance(Forward(logp), score, batch, objective=policy_gradient, high=math.inf)
    (got,) = torch.autograd.grad((engine * loss_N).sum(), logits, retain_graph=True)
    (exact,) = torch.autograd.grad(-(logits.softmax(-1) * score).sum(), logits)
    torch.testing.assert_close(got, exact)


def test_a_trainer_that_does_not_know_a_token_is_refused() -> None:
    batch = two_rollouts().with_extra(logp_train_N=torch.tensor([NAN, -1.0, -1.0, NAN]))
    with pytest.raises(ValueError, match="has NaN there"):
        truncated_importance(forward_of([HALF] * 4), torch.ones(4), batch, objective=policy_gradient)
    with pytest.raises(ValueError, match="reads the column 'logp_train_N'"):
        engine_weight(table([[1]], rewards=[1.0]), level="token", mode="trunc", low=0.0, high=2.0)
