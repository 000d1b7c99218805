"""How an agent is started: an async Python function, or a command in a scratch folder; many of them at once.

A harness that returns a reward returns a number (channel "reward"), a mapping of channels, or a mapping with "info".
"""

from whippletree.harness.command import CommandHarness
from whippletree.harness.function import FunctionHarness, load_agent
from whippletree.harness.outcome import Harness, Outcome

__all__ = ["CommandHarness", "FunctionHarness", "Harness", "Outcome", "load_agent"]
