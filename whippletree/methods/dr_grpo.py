"""Dr. GRPO: the group baseline without the two biases (Liu et al. 2025, arXiv:2503.20783).

A_i  = r_i - mean(r)                                    no std: hard and easy tasks are not raised
loss = -(1/G) sum_i sum_t min(rho_t A_i, clip(rho_t, 1 - 0.2, 1 + 0.2) A_i) / budget
                                                        no 1/|o_i|: long wrong replies are not spared
"""

from __future__ import annotations

from functools import partial

from whippletree import credit, objective
from whippletree.types import Method, Paper
from whippletree.update.averages import constant

METHOD = Method(
    paper=Paper(
        "Understanding R1-Zero-Like Training: A Critical Perspective",
        authors="Liu et al., Sea AI Lab",
        year=2025,
        arxiv="2503.20783",
        source="summary",
        also_called=("GRPO done right",),
    ),
    credit=partial(credit.group_mean, scale="none"),
    objective=partial(objective.clipped_ratio, low=0.2, high=0.2),
    average=partial(constant, tokens=3000),  # the token budget of the paper's runs
    differs="the divisor is a constant of the method, 3000 as in the paper's runs, and not read from the recipe's "
    "budget: it only scales the loss, so set it near your own budget with METHOD.but(average=...)",
)
