"""REINFORCE: the policy gradient of the whole episode (Williams 1992).

A_t  = r                                             the reward that is still to come, gamma 1
loss = -(1 / R) sum_i sum_t A_t log pi(t)            all tokens of all turns of rollout i
"""

from __future__ import annotations

from functools import partial

from whippletree import credit, objective
from whippletree.types import Method, Paper
from whippletree.update.averages import constant

METHOD = Method(
    paper=Paper(
        "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning",
        authors="Williams",
        year=1992,
        source="reconstructed",
        also_called=("vanilla policy gradient", "Monte-Carlo policy gradient"),
    ),
    credit=credit.reward_to_go,
    objective=objective.policy_gradient,
    average=partial(constant, tokens=1),
    excused=("equal rewards teach nothing",),
    differs="the baseline, which the paper allows, is 0: so equal rewards do teach (excused), and a batch of equal "
    "rewards raises all that was sampled; the batch is one step where the paper updates after each episode",
)
