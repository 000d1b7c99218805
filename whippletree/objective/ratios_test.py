from __future__ import annotations

import math

import torch

from whippletree.methods._tables import table
from whippletree.objective.ratios import log_ratio, masked, mean_over, sum_over

NAN = math.nan
BATCH = table([[2, 1], [1]], rewards=[1.0, 0.0], old=[-1.0, NAN, -1.0, -1.0])


def test_a_log_ratio_is_0_where_unknown_and_held_within_20() -> None:
    new_N = torch.tensor([-0.5, NAN, -90.0, 40.0])
    assert log_ratio(new_N, BATCH.logp_old_N, BATCH).tolist() == [0.5, 0.0, -20.0, 20.0]


def test_sums_and_means_over_turns_and_rollouts_by_hand() -> None:
    x_N = masked(torch.tensor([3.0, 100.0, 5.0, 7.0]), BATCH)
    assert sum_over(x_N, BATCH, level="turn").tolist() == [3, 3, 5, 7]
    assert sum_over(x_N, BATCH, level="rollout").tolist() == [8, 8, 8, 7]
    assert mean_over(x_N, BATCH, level="turn").tolist() == [3, 3, 5, 7]  # one trainable token in the first turn
    nothing = table([[1]], rewards=[1.0], old=NAN)
    assert mean_over(masked(torch.ones(1), nothing), nothing, level="turn").tolist() == [0]
    assert mean_over(x_N, BATCH, level="rollout").tolist() == [4, 4, 4, 7]
