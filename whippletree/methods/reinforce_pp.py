"""REINFORCE++: PPO's tricks without its critic (Hu et al. 2025, arXiv:2501.03262).

evidence   log ref(t) of the frozen reference
A_t  = r - beta sum_{i >= t} kl_i,   kl_i = log pi_old(i) - log ref(i)
A'_t = (A_t - mean(A)) / std(A)                          over all tokens of the batch
loss = -min(rho_t A'_t, clip(rho_t, 1 - 0.2, 1 + 0.2) A'_t)      averaged over all tokens
"""

from __future__ import annotations

from functools import partial

from whippletree import credit, evidence, objective
from whippletree.types import Method, Paper
from whippletree.update.averages import token_mean

METHOD = Method(
    paper=Paper(
        "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization",
        authors="Hu et al.",
        year=2025,
        arxiv="2501.03262",
        source="summary",
        also_called=("REINFORCE plus plus",),
    ),
    evidence=(evidence.reference_logps,),
    credit=partial(credit.whitened, credit=partial(credit.reward_to_go, gamma=1.0, kl_beta=0.01)),
    objective=partial(objective.clipped_ratio, low=0.2, high=0.2),
    average=token_mean,
    needs=("reference",),
    excused=("equal rewards teach nothing",),
    differs="beta is a choice of ours, the paper's tables vary it; reward clipping is left to the reward. Excused: its "
    "baseline is the batch and its advantage holds the KL, so a task with equal rewards still teaches",
)
