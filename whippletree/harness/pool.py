"""Many runs of a harness at once, under a limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from whippletree.harness.outcome import Harness, Outcome
from whippletree.types import Task


class Session(Protocol):
    """Where one rollout finds the gateway."""

    @property
    def base_url(self) -> str: ...

    @property
    def api_key(self) -> str: ...


async def run_all(
    harness: Harness,
    pairs: Sequence[tuple[Task, Session]],
    *,
    concurrency: int,
    progress: Callable[[int, int, Outcome], None] | None = None,
) -> AsyncIterator[tuple[int, Outcome]]:
    """Each pair's index and outcome, as they finish; at most `concurrency` run at once.

    `progress(finished, total, outcome)` is called after each. Cancelling, closing the iterator, or a harness that
    raises ends every run that is left and waits for it. Where the loop may be left early, close it at once with
    `contextlib.aclosing`.

    Raises:
        ValueError: concurrency is below 1.
    """
    if concurrency < 1:
        raise ValueError(f"at least one rollout must run at a time, but concurrency is {concurrency}")
    places = asyncio.Semaphore(concurrency)

    async def one(index: int, task: Task, session: Session) -> tuple[int, Outcome]:
        async with places:
            return index, await harness.run(task, base_url=session.base_url, api_key=session.api_key)

    runs = [asyncio.create_task(one(index, *pair)) for index, pair in enumerate(pairs)]
    try:
        for finished, run in enumerate(asyncio.as_completed(runs), start=1):
            index, outcome = await run
            if progress is not None:
                progress(finished, len(runs), outcome)
            yield index, outcome
    finally:
        for left in runs:
            left.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
