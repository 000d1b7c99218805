"""What one rollout may use, and what is left of it."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

WINDOW = 10.0  # seconds over which calls a second are counted


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits of one rollout; `None` is no limit."""

    turns: int = 1000
    tokens: int | None = None  # sampled, of all replies together
    reply_tokens: int | None = None  # of one reply, however many a call asks for
    seconds: float | None = None  # from the opening of the rollout
    calls_per_second: float | None = None  # over ten seconds: a harness in a loop asks for ever

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value > 0:
                raise ValueError(f"a budget is above 0, or None for no limit, but {name} is {value}")


class Spent:
    """What a rollout has used of its budget. `opened` is when it was opened, in seconds since the epoch."""

    def __init__(self, budget: Budget, *, opened: float, clock: Callable[[], float] = time.time) -> None:
        self.budget, self.turns, self.tokens = budget, 0, 0
        self._opened, self._clock = opened, clock
        self._calls: deque[float] = deque()

    @property
    def tokens_left(self) -> float:
        """Tokens that may yet be sampled."""
        return math.inf if self.budget.tokens is None else self.budget.tokens - self.tokens

    @property
    def seconds_left(self) -> float:
        """Until the rollout must end."""
        return math.inf if self.budget.seconds is None else self._opened + self.budget.seconds - self._clock()

    def over(self) -> str:
        """Which limit a running reply has met; "" for none."""
        if self.tokens_left < 1:
            return f"a rollout may sample {self.budget.tokens} tokens, and this one has used them"
        if self.seconds_left <= 0:
            return f"a rollout may take {self.budget.seconds:g} seconds, and this one has used them"
        return ""

    def exhausted(self, turns: int) -> tuple[str, str] | None:
        """(code, why) where the budget does not hold so many more turns; else they are counted."""
        budget, now = self.budget, self._clock()
        if self.turns + turns > budget.turns:
            return "turn_limit_exceeded", f"a rollout may take {budget.turns} turns, and this one has used them"
        if over := self.over():
            return "token_limit_exceeded" if self.tokens_left < 1 else "time_limit_exceeded", over
        while self._calls and self._calls[0] <= now - WINDOW:
            self._calls.popleft()
        if budget.calls_per_second is not None and len(self._calls) >= budget.calls_per_second * WINDOW:
            return "rate_limit_exceeded", (
                f"a rollout may make {budget.calls_per_second:g} calls a second over {WINDOW:g} seconds, and this one "
                f"made {len(self._calls)}: its harness is in a loop"
            )
        if budget.calls_per_second is not None:
            self._calls.append(now)
        self.turns += turns
        return None
