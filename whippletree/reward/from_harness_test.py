from __future__ import annotations

from whippletree.reward import from_harness
from whippletree.types import Rollout, Task


async def test_the_harness_s_own_rewards():
    assert await from_harness(Rollout("r", Task("t"), "g", rewards={"a": 0.5, "b": None})) == {"a": 0.5, "b": None}
