"""GRPO: a group of rollouts is its own baseline (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300).

A_i  = (r_i - mean(r)) / std(r)                        over the group
loss = -(1/G) sum_i (1/|o_i|) sum_t min(rho_t A_i, clip(rho_t, 1 - eps, 1 + eps) A_i)
with the reference of the paper: + beta KL_t,  KL = exp(-x) - 1 + x,  x = log pi(t) - log ref(t)
"""

from __future__ import annotations

from functools import partial

from whippletree import credit, evidence, objective
from whippletree.types import Method, Paper
from whippletree.update.averages import rollout_mean

CLIPPED = partial(objective.clipped_ratio, low=0.2, high=0.2)

METHOD = Method(
    paper=Paper(
        "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
        authors="Shao et al., DeepSeek",
        year=2024,
        arxiv="2402.03300",
        source="reconstructed",
        also_called=("group relative policy optimization",),
    ),
    credit=partial(credit.group_mean, scale="std"),
    objective=CLIPPED,
    average=rollout_mean,
    differs="no KL to a reference, as later practice found it of no use where rewards are verified (arXiv:2503.14476, "
    "2503.20783) and it costs a second model; WITH_REFERENCE in this file has it, with the paper's 0.04. The paper "
    "gives no clip range; 0.2 is that of PPO. |o_i| counts the tokens of all turns of a rollout",
)

WITH_REFERENCE = METHOD.but(
    evidence=(evidence.reference_logps,),
    objective=partial(objective.with_kl, objective=CLIPPED, kind="k3", beta=0.04),  # section 4.2
    needs=("reference",),
)
