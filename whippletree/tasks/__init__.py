"""Where tasks come from: JSON lines, Hugging Face data sets, reasoning-gym."""

from whippletree.tasks.gym import reasoning_gym_tasks
from whippletree.tasks.hub import hub_tasks
from whippletree.tasks.jsonl import read_jsonl
from whippletree.tasks.load import KINDS, load
from whippletree.tasks.split import asked, disjoint

__all__ = ["KINDS", "asked", "disjoint", "hub_tasks", "load", "read_jsonl", "reasoning_gym_tasks"]
