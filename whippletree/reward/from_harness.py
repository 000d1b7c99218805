"""The rewards that the harness itself gave."""

from __future__ import annotations

from whippletree.types import Rollout


async def from_harness(rollout: Rollout) -> dict[str, float | None]:
    """The channels the harness returned, as they are."""
    return dict(rollout.rewards)
