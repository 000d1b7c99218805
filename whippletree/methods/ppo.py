"""PPO: clipped policy gradient with a learned value (Schulman et al. 2017, arXiv:1707.06347).

evidence   V_t from the value head; G_t = A_t + V_t
A_t   = delta_t + gamma lam A_{t+1},  delta_t = r_t + gamma V_{t+1} - V_t,   then whitened over tokens
loss  = -min(rho_t A_t, clip(rho_t, 1 - 0.2, 1 + 0.2) A_t) + 0.5 (V_t - G_t)^2      averaged over all tokens
"""

from __future__ import annotations

from functools import partial

from whippletree import credit, evidence, objective
from whippletree.types import Method, Paper
from whippletree.update.averages import token_mean

ADVANTAGE = partial(credit.gae, gamma=1.0, lam=0.95)  # lam: table 3 of the paper

METHOD = Method(
    paper=Paper(
        "Proximal Policy Optimization Algorithms",
        authors="Schulman et al., OpenAI",
        year=2017,
        arxiv="1707.06347",
        source="reconstructed",
        also_called=("PPO-clip",),
    ),
    evidence=(evidence.values, partial(evidence.returns, credit=ADVANTAGE)),
    credit=partial(credit.whitened, credit=ADVANTAGE),
    objective=partial(objective.with_value, objective=objective.clipped_ratio, coefficient=0.5),
    average=token_mean,
    needs=("value_head",),
    excused=("equal rewards teach nothing",),
    differs="gamma is 1, as a reply has no reason to be paid less for its reward coming later; no entropy bonus, which "
    "raises the noise of sampled text; advantages are whitened, as usual in code though not in the paper; coefficient "
    "0.5 for the value, which the paper leaves to the task. Excused: with equal rewards it still learns from how the "
    "value was wrong",
)
