"""RLOO: REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024, arXiv:2402.14740).

A_i  = r_i - mean of the other rollouts' rewards
loss = -mean over rollouts of (mean over tokens of rho_t * A_i), with no clip
"""

from __future__ import annotations

from functools import partial

from whippletree import credit, objective
from whippletree.types import Method, Paper
from whippletree.update.averages import rollout_mean

METHOD = Method(
    paper=Paper(
        "Back to Basics: Revisiting REINFORCE-Style Optimization for Learning from Human Feedback in LLMs",
        authors="Ahmadian et al., Cohere",
        year=2024,
        arxiv="2402.14740",
        source="reconstructed",
        also_called=("REINFORCE leave-one-out",),
    ),
    credit=credit.leave_one_out,
    objective=partial(objective.clipped_ratio, low=float("inf"), high=float("inf")),
    average=rollout_mean,
    differs="the paper takes a reply as one action and sums its tokens; we average, so length does not scale it. The "
    "paper's reward holds a KL penalty to the reference; here that is left to reward channels",
)
