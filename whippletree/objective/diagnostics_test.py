from __future__ import annotations

import math

import pytest
import torch

from whippletree.methods._tables import forward_of, gradient, table
from whippletree.objective import clipped_ratio, diagnose

RATIOS = [0.5, 1.5, 1.5, 0.5, 1.0]
ADVANTAGES = torch.tensor([-1.0, 1.0, -1.0, 1.0, 0.0])
BATCH = table([[3], [3]], rewards=[1.0, 0.0], old=[-2.0] * 5 + [math.nan])
LOGP = torch.tensor([*RATIOS, 1.0]).log() - 2


def test_by_hand() -> None:
    # of five trainable tokens the bad one below and the good one above are clipped; the other two keep their gradient
    advantage_N = torch.cat([ADVANTAGES, torch.tensor([9.0])])
    found = diagnose(LOGP, advantage_N, BATCH, low=0.2, high=0.2)
    # rho - 1 - log rho: 0.5 - 1 + 0.693147 = 0.193147 twice, 1.5 - 1 - 0.405465 = 0.094535 twice, and 0
    assert found == pytest.approx(
        {
            "clip_ratio/low_mean": 0.2,
            "clip_ratio/high_mean": 0.2,
            "clip_ratio/region_mean": 0.4,
            "kl": (2 * 0.193147 + 2 * 0.094535) / 5,
            "ratio_mean": 1.0,
            "ratio_max": 1.5,
        },
        abs=1e-6,
    )


def test_what_it_calls_clipped_is_what_has_no_gradient() -> None:
    advantage_N = torch.cat([ADVANTAGES, torch.zeros(1)])
    forward = forward_of(LOGP)
    slope_N = gradient(forward, clipped_ratio(forward, advantage_N, BATCH, low=0.2, high=0.6))
    stopped = ((slope_N == 0) & (advantage_N != 0)).sum().item()
    assert stopped == 1  # the good token of ratio 1.5 is now within 1.6
    assert diagnose(LOGP, advantage_N, BATCH, low=0.2, high=0.6)["clip_ratio/region_mean"] == pytest.approx(1 / 5)


def test_on_policy_nothing_is_clipped() -> None:
    found = diagnose(BATCH.logp_old_N, torch.ones(6), BATCH, low=0.2, high=0.2)
    assert found["kl"] == found["clip_ratio/region_mean"] == 0 and found["ratio_mean"] == found["ratio_max"] == 1


def test_a_batch_that_cannot_train_says_nothing() -> None:
    assert diagnose(torch.zeros(1), torch.ones(1), table([[1]], rewards=[1.0], old=math.nan), low=0.2, high=0.2) == {}
