"""CISPO: clip the importance weight, not the token (MiniMax 2025, MiniMax-M1, arXiv:2506.13585).

A_i  = (r_i - mean(r)) / std(r)
loss = -(1 / sum_i |o_i|) sum_i sum_t sg(min(rho_t, 1 + high)) A_i log pi(t)
"""

from __future__ import annotations

from functools import partial

from whippletree import credit, objective
from whippletree.types import Method, Paper
from whippletree.update.averages import token_mean

METHOD = Method(
    paper=Paper(
        "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention",
        authors="MiniMax",
        year=2025,
        arxiv="2506.13585",
        source="summary",
        also_called=("clipped importance-sampling-weight policy optimization",),
    ),
    credit=partial(credit.group_mean, scale="std"),
    objective=partial(objective.clipped_weight, low=float("inf"), high=4.0),
    average=token_mean,
    differs="the paper names no upper bound; a largest weight of 5 follows arXiv:2510.13786. The mean is over the "
    "tokens of the whole batch, not of one group. Its length penalty and early stop of repetition are left to rewards",
)
