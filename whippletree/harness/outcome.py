"""What one run of a harness came to, and what every harness must offer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Protocol

from whippletree.types import Blame, Ending, Json, Task


@dataclass(frozen=True)
class Outcome:
    """How a run ended, whose fault a failure was, and the rewards the harness itself gave (none: another scores it)."""

    ending: Ending = "done"
    blame: Blame | None = None
    reason: str = ""
    rewards: dict[str, float | None] = field(default_factory=dict)
    info: Json = field(default_factory=dict)


class Harness(Protocol):
    """An agent that can be run on a task against a gateway.

    `run` returns an `Outcome` whatever the agent does; it raises only when it is cancelled, or for its own bug.
    """

    async def run(self, task: Task, *, base_url: str, api_key: str) -> Outcome: ...


def failure(reason: str, *, blame: Blame = "harness", info: Json | None = None) -> Outcome:
    """A failed outcome: it has no reward, so that nothing can read one as 0."""
    return Outcome("failed", blame, reason, info=info or {})


def outcome_of(returned: object) -> Outcome:
    """The outcome an agent's answer stands for.

    Nothing; a number (channel "reward"); a mapping of channels to numbers or null; the same with a mapping "info".

    Raises:
        ValueError: it is none of these.
    """
    if returned is None:
        return Outcome()
    if isinstance(returned, Mapping):
        found = returned.get("info", {})
        if not isinstance(found, Mapping):
            raise ValueError(f"a result's 'info' must be a mapping, but it is {type(found).__name__}")
        channels = {name: _number(name, value) for name, value in returned.items() if name != "info"}
        return Outcome(rewards=channels, info=dict(found))
    return Outcome(rewards={"reward": _number("reward", returned)})


def _number(name: object, value: object) -> float | None:
    """The reward as a float; NaN passes, for whoever scores the rollout names and counts it."""
    if not isinstance(name, str) or not (value is None or isinstance(value, Real)):
        raise ValueError(
            f"an agent returns nothing, a number, or a mapping of channel names to numbers, but for {name!r} it "
            f"returned a {type(value).__name__}"
        )
    return None if value is None else float(value)
