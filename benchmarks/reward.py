"""The reward of both sides. Standard library only: TRL's environment reads this file too."""

from __future__ import annotations

import re

KINDS = ("exact", "dense")


def reward(text: str, answer: str, *, kind: str) -> float:
    """What a reply earns.

    `exact`: 1 if its last number is the answer, else 0, as in the quickstart. Many groups are then equal and teach
    nothing; TRL computes them all the same.
    `dense`: 1 / (1 + distance to the answer), and a thousandth for each character, so that groups are hardly ever equal
    and both sides compute all of them.
    """
    number = re.findall(r"-?\d+", text)[-1:]
    if kind == "exact":
        return float(number == [answer])
    near = 1 / (1 + abs(int(number[0][:9]) - int(answer))) if number else 0.0
    return near + len(text) / 1000
