"""Whether the last reply is the expected answer, letter for letter."""

from __future__ import annotations

import re
import unicodedata

from whippletree.reward.text import final_text
from whippletree.types import Rollout


async def exact_answer(rollout: Rollout, *, column: str = "answer", pattern: str | None = None) -> dict[str, float]:
    """1 where the last reply equals the task's answer, else 0; both without case, outer space and a final full stop.

    With `pattern`, a regular expression with one group, the reply's answer is what the group holds where it matches
    last (such as r"<answer>(.*?)</answer>"); a reply where it matches nowhere is wrong.

    Raises:
        ValueError: the task has no such column, or the rollout no reply.
    """
    if rollout.task.columns.get(column) is None:
        raise ValueError(f"task {rollout.task.id} has no answer in its column {column!r}")
    reply: str | None = final_text(rollout)
    if pattern is not None:
        matches = re.findall(pattern, reply or "", flags=re.DOTALL)
        reply = matches[-1] if matches else None
    equal = reply is not None and normalised(reply) == normalised(str(rollout.task.columns[column]))
    return {"exact_answer": float(equal)}


def normalised(text: str) -> str:
    """Compatible characters made equal, lower case, single spaces, no outer space and no final full stop."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).removesuffix(".").rstrip()
