"""How an agent is started: an async Python function, a command in a scratch folder, or a harness that a file describes.

A harness that returns a reward returns a number (channel "reward"), a mapping of channels, or a mapping with "info".
"""

from whippletree.harness.command import CommandHarness
from whippletree.harness.function import FunctionHarness, load_agent
from whippletree.harness.launched import LaunchedHarness, load_launcher
from whippletree.harness.outcome import Harness, Outcome

__all__ = [
    "CommandHarness",
    "FunctionHarness",
    "Harness",
    "LaunchedHarness",
    "Outcome",
    "load_agent",
    "load_launcher",
]
