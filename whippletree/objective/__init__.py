"""Objectives: `(Forward, advantage_N, Batch) -> loss_N`. A token that may not train has loss 0 and gradient 0."""

from whippletree.objective.addons import kl_penalty, with_entropy, with_kl, with_value
from whippletree.objective.correction import engine_weight, truncated_importance
from whippletree.objective.diagnostics import diagnose
from whippletree.objective.policy import clipped_ratio, clipped_weight, policy_gradient, sequence_ratio

__all__ = [
    "clipped_ratio",
    "clipped_weight",
    "diagnose",
    "engine_weight",
    "kl_penalty",
    "policy_gradient",
    "sequence_ratio",
    "truncated_importance",
    "with_entropy",
    "with_kl",
    "with_value",
]
