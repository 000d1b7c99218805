"""Many runs of a harness at once, under a limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from whippletree.harness.outcome import Harness, Outcome
from whippletree.types import Task


async def run_all(
    harness: Harness,
    runs: Sequence[tuple[Task, str, str]],
    *,
    concurrency: int,
    progress: Callable[[int, int, Outcome], None] | None = None,
) -> AsyncGenerator[tuple[int, Outcome], None]:
    """Index and outcome of each run (task, base URL, API key), as they finish; at most `concurrency` run at once.

    `progress(finished, total, outcome)` is called after each. Cancelling, closing the iterator, or a harness that
    raises ends every run that is left and waits for it. Where the loop may be left early, close it at once with
    `contextlib.aclosing`.

    Raises:
        ValueError: concurrency is below 1.
    """
    if concurrency < 1:
        raise ValueError(f"at least one rollout must run at a time, but concurrency is {concurrency}")
    places = asyncio.Semaphore(concurrency)

    async def one(index: int, task: Task, base_url: str, api_key: str) -> tuple[int, Outcome]:
        async with places:
            return index, await harness.run(task, base_url=base_url, api_key=api_key)

    running = [asyncio.create_task(one(index, *run)) for index, run in enumerate(runs)]
    try:
        for finished, first in enumerate(asyncio.as_completed(running), start=1):
            index, outcome = await first
            if progress is not None:
                progress(finished, len(running), outcome)
            yield index, outcome
    finally:
        for left in running:
            left.cancel()
        await asyncio.gather(*running, return_exceptions=True)
