"""The embedded engine: any causal language model of transformers, with weights shared with the trainer.

Requests join and leave a running batch at every step (continuous batching). Equal prompts are computed once, a prompt
that extends something computed before only computes the rest, and every reply has random numbers of its own, so what
is sampled does not depend on what else is in the batch.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from whippletree.engine.cohorts import CohortRows
from whippletree.engine.sampler import random_stream, sample
from whippletree.engine.slots import Mask, SlotRows, plain_mask
from whippletree.types import Piece, Sampling

T = TypeVar("T")
MARGIN = 64  # tokens by which running rows may grow before a further one comes in


class Rows(Protocol):
    """Running rows: admit prompts, feed one token to every row, drop finished rows."""

    places: int  # rows times their longest length stay below this, unless there is a single row
    computed: int  # tokens that went through the model, for the metrics

    def admit(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], Tensor]:
        """(which prompt each new row holds, [B', V] logits after it); the new rows stand behind the others."""
        ...

    def step(self, ids: Sequence[int]) -> Tensor:
        """[B, V] logits after feeding one more token to every row."""
        ...

    def drop(self, rows: Sequence[int]) -> list[int]:
        """End some rows; gives the former place of each row that stays, in order."""
        ...

    def clear(self) -> None:
        """End every row, forget what was computed."""
        ...


@dataclass(eq=False)
class Reply:
    """One reply on its way."""

    ids: list[int]  # the prompt, and what was sampled so far
    sampling: Sampling
    random: np.random.Generator
    deliver: Callable[[Piece | Exception], None]
    loop: asyncio.AbstractEventLoop
    count: int = 0  # tokens sampled so far
    cancelled: bool = False
    finish: Literal["stop", "length"] | None = None


class TorchEngine:
    """Samples from `model` in a thread of its own. Implements `types.Engine`.

    Args:
        end_ids: tokens that end a reply; the end token is part of the reply.
        context: most tokens of prompt and reply together.
        rows: most replies that run at once; more wait in order.
        seed: of the run; with the stream's name it fixes every random number.
        mask: how the model takes masks; None for a family without such masks (then `CohortRows`).
        gather: seconds to wait for further requests when nothing runs, so that a burst is computed as one batch.
        running_bytes: about the most memory for keys and values of running replies; more replies wait.
        kept_bytes: the most memory for keys and values of replies that ended, for prompts that extend them.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        end_ids: Sequence[int],
        context: int,
        rows: int = 64,
        seed: int = 0,
        version: int = 0,
        mask: Mask | None = plain_mask,
        gather: float = 0.01,
        running_bytes: int = 4 << 30,
        kept_bytes: int = 1 << 30,
    ) -> None:
        self.model, self.context, self.version = model, context, version
        self.end_ids, self.limit, self.seed, self.gather = frozenset(end_ids), rows, seed, gather
        self.rows: Rows
        self.sampled = 0  # tokens, for the metrics
        self.busy_seconds = 0.0
        self._inbox: queue.SimpleQueue[Reply | None] = queue.SimpleQueue()  # None: look again
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._waiting: list[Reply] = []
        self._running: list[Reply] = []  # in the order of the rows
        self._held = threading.Event()  # set while paused
        self._idle = threading.Event()  # set while the thread has nothing to do
        self._closed = False
        made: Future[Rows] = Future()  # by the thread itself, for it asks the model about its keys

        def make() -> Rows:
            if mask is None:
                return CohortRows(model)
            return SlotRows(model, mask=mask, running_bytes=running_bytes, kept_bytes=kept_bytes)

        self._work.put((make, made))
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()
        self._inbox.put(None)
        self.rows = made.result()

    async def sample(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Piece, None]:
        """Pieces of the reply as they are sampled. Closing the iterator early ends the reply.

        Raises:
            ValueError: the prompt is empty or leaves no room for a reply, or the sampling is impossible.
            RuntimeError: the model failed, or the engine was closed.
        """
        self._check(prompt_ids, sampling)
        pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        stream = random_stream(self.seed, sampling.stream)
        reply = Reply(list(prompt_ids), sampling, stream, pieces.put_nowait, asyncio.get_running_loop())
        self._inbox.put(reply)
        if self._closed:  # looked at after the put: whatever came before the end gets its error from the thread
            raise RuntimeError("the engine is closed")
        try:
            while True:
                piece = await pieces.get()
                if isinstance(piece, Exception):
                    raise RuntimeError(f"sampling ended with {piece!r}") from piece
                yield piece
                if piece.finish_reason:
                    return
        finally:
            reply.cancelled = True

    @property
    def paused(self) -> bool:
        """Whether new replies are held back."""
        return self._held.is_set()

    async def pause(self) -> None:
        """Let running replies end and hold new ones back; returns when nothing runs. Forgets keys and values."""
        self._held.set()
        self._inbox.put(None)
        while not self._idle.is_set():
            await asyncio.sleep(0.002)
        self.rows.clear()

    async def run(self, work: Callable[[], T]) -> T:
        """Have the engine's thread do other work with the model between two steps, and give what comes of it.

        A process in which several threads compute has more helper threads than cores, and then each of a step's two
        thousand products waits to be woken: sampling takes 1.6 times as long. So one thread computes everything.

        Raises:
            RuntimeError: the engine was closed; and whatever the work raises.
        """
        if self._closed:
            raise RuntimeError("the engine is closed")
        done: Future[T] = Future()
        self._work.put((work, done))
        self._inbox.put(None)
        return await asyncio.wrap_future(done)

    def resume(self, version: int) -> None:
        """Serve again as policy `version`."""
        self.version = version
        self._held.clear()
        self._inbox.put(None)

    def close(self) -> None:
        """End the thread; replies on their way fail."""
        self._closed = True
        self._inbox.put(None)
        self._thread.join()

    def _check(self, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        if not 0 < len(prompt_ids) < self.context:
            raise ValueError(f"a prompt needs 1 to {self.context - 1} tokens, but got {len(prompt_ids)}")
        if sampling.max_tokens < 1 or not sampling.temperature >= 0 or not 0 < sampling.top_p <= 1:
            raise ValueError(
                f"max_tokens must be 1 or more, temperature 0 or more, top_p in (0, 1], but got {sampling}"
            )

    def _serve(self) -> None:
        while not self._closed:
            self._collect()
            self._do_work()
            self._idle.clear()  # before looking again whether work is held: `pause` sets held, then looks at idle
            if not self._busy():
                continue
            started = time.perf_counter()
            try:
                self._turn()
            except Exception as error:  # the batch is lost, the engine lives: each caller gets the error
                self._fail(error)
            self.busy_seconds += time.perf_counter() - started
        self._fail(RuntimeError("the engine is closed"))
        self._idle.set()

    def _do_work(self) -> None:
        while not self._work.empty():
            work, done = self._work.get()
            try:
                done.set_result(work())
            except BaseException as error:  # whoever waits for it is told
                done.set_exception(error)

    def _busy(self) -> bool:
        return bool(self._running or self._ready())

    def _ready(self) -> list[Reply]:
        """Waiting replies that may run: while paused only those that had begun."""
        return [reply for reply in self._waiting if not self._held.is_set() or reply.count]

    def _collect(self) -> None:
        """Move what came in to the waiting list; with nothing to do, sleep until something comes, and a moment more."""
        if not self._busy():
            self._idle.set()
            self._take(None)
            deadline = time.perf_counter() + 20 * self.gather
            while time.perf_counter() < deadline and len(self._waiting) < self.limit and self._take(self.gather):
                pass
        while self._take(0):
            pass

    def _take(self, timeout: float | None) -> bool:
        """Wait at most so many seconds (None: for ever) for one entry of the inbox; whether there was one."""
        try:
            reply = self._inbox.get(timeout != 0, timeout)
        except queue.Empty:
            return False
        if reply is not None:
            self._waiting.append(reply)
        return True

    def _turn(self) -> None:
        """One step: decode the running, admit the waiting, sample, deliver; those that end or must wait leave."""
        self._drop([row for row, reply in enumerate(self._running) if reply.cancelled])
        self._waiting = [reply for reply in self._waiting if not reply.cancelled]
        self._give_way()
        logits = [self.rows.step([reply.ids[-1] for reply in self._running])] if self._running else []
        if fresh := self._admissible():
            order, logits_BV = self.rows.admit([reply.ids for reply in fresh])
            logits.append(logits_BV)
            self._running += [fresh[number] for number in order]
            self._waiting = [reply for reply in self._waiting if reply not in fresh]
        if logits:
            self._draw(torch.cat(logits) if len(logits) > 1 else logits[0])
            self._drop([row for row, reply in enumerate(self._running) if reply.finish])

    def _give_way(self) -> None:
        """Where the running rows outgrow the memory, the last ones wait, and later go on where they were."""
        longest, rows = max((len(reply.ids) for reply in self._running), default=0), len(self._running)
        stay = min(rows, max(1, self.rows.places // max(longest, 1)))
        self._waiting[:0] = self._running[stay:]
        self._drop(range(stay, rows))

    def _admissible(self) -> list[Reply]:
        """Ready replies, in order, as many as there is room for; one if nothing runs."""
        fresh: list[Reply] = []
        longest = max((len(reply.ids) for reply in self._running), default=0)
        for reply in self._ready():
            rows, longest = len(self._running) + len(fresh), max(longest, len(reply.ids))
            if rows == self.limit or (rows and (rows + 1) * (longest + MARGIN) > self.rows.places):
                break
            fresh.append(reply)
        return fresh

    def _draw(self, logits_BV: Tensor) -> None:
        """Sample one token for every row and hand it out."""
        batch, device = self._running, logits_BV.device
        chosen_B, logp_B = sample(
            logits_BV,
            torch.tensor([reply.random.random() for reply in batch], dtype=torch.float64, device=device),
            torch.tensor([reply.sampling.temperature for reply in batch], device=device),
            torch.tensor([reply.sampling.top_p for reply in batch], device=device),
        )
        ready: dict[asyncio.AbstractEventLoop, list[tuple[Reply, Piece | Exception]]] = {}
        for reply, token, logp in zip(batch, chosen_B.tolist(), logp_B.tolist(), strict=True):
            reply.ids.append(token)
            reply.count += 1
            full = reply.count >= reply.sampling.max_tokens or len(reply.ids) >= self.context
            reply.finish = "stop" if token in self.end_ids else "length" if full else None
            ready.setdefault(reply.loop, []).append((reply, Piece((token,), (logp,), self.version, reply.finish)))
        self.sampled += len(batch)
        _post(ready)

    def _drop(self, rows: Sequence[int]) -> None:
        if rows:
            self._running = [self._running[row] for row in self.rows.drop(rows)]

    def _fail(self, error: Exception) -> None:
        """Every reply ends with the error; keys of a failed step are worth nothing."""
        while self._take(0):
            pass
        ready: dict[asyncio.AbstractEventLoop, list[tuple[Reply, Piece | Exception]]] = {}
        for reply in self._running + self._waiting:
            ready.setdefault(reply.loop, []).append((reply, error))
        self._running, self._waiting = [], []
        self.rows.clear()
        _post(ready)


def _post(ready: dict[asyncio.AbstractEventLoop, list[tuple[Reply, Piece | Exception]]]) -> None:
    """Hand pieces to their event loops, one wake-up for each; in a loop that is gone nobody waits."""

    def deliver(pairs: Sequence[tuple[Reply, Piece | Exception]]) -> None:
        for reply, piece in pairs:
            reply.deliver(piece)

    for loop, pairs in ready.items():
        try:
            loop.call_soon_threadsafe(deliver, pairs)
        except RuntimeError:
            for reply, _ in pairs:
                reply.cancelled = True
