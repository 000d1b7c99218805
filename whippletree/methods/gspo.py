"""GSPO: one ratio for a whole sequence (Zheng et al. 2025, arXiv:2507.18071).

A_i  = (r_i - mean(r)) / std(r)
s    = exp(mean_t (log pi(t) - log pi_old(t)))           over the tokens of a turn
loss = -(1/G) sum_i (1/|o_i|) sum_t min(s_t A_i, clip(s_t, 1 - 3e-4, 1 + 4e-4) A_i)
"""

from __future__ import annotations

from functools import partial

from whippletree import credit, objective
from whippletree.types import Method, Paper
from whippletree.update.averages import rollout_mean

METHOD = Method(
    paper=Paper(
        "Group Sequence Policy Optimization",
        authors="Zheng et al., Qwen",
        year=2025,
        arxiv="2507.18071",
        source="summary",
    ),
    credit=partial(credit.group_mean, scale="std"),
    objective=partial(objective.sequence_ratio, low=3e-4, high=4e-4, level="turn"),  # section 5.1
    average=rollout_mean,
    differs="the paper has one reply a rollout; with several turns the sequence is the turn, whose mean log-ratio the "
    "clip range was measured on, and the turns of a rollout share its weight by their tokens",
)
