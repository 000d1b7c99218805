"""Reinforcement learning of language-model agents inside the harness they already run in."""

__version__ = "0.1.0"
