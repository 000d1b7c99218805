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
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from whippletree.engine.cohorts import CohortRows
from whippletree.engine.sampler import random_stream, sample
from whippletree.engine.slots import Mask, SlotRows, plain_mask
from whippletree.types import Piece, Sampling


class Rows(Protocol):
    """Running rows: admit prompts, feed one token to every row, drop finished rows."""

    computed: int

    def admit(self, prompts: Sequence[Sequence[int]]) -> Tensor: ...
    def step(self, ids: Sequence[int]) -> Tensor: ...
    def keep(self, rows: Sequence[int]) -> None: ...
    def forget(self) -> None: ...


@dataclass
class Reply:
    """One reply on its way."""

    prompt_ids: list[int]
    sampling: Sampling
    random: np.random.Generator
    deliver: Callable[[Piece | BaseException], None]
    loop: asyncio.AbstractEventLoop
    count: int = 0
    cancelled: bool = False
    last: int = -1
    finish: Literal["stop", "length"] | None = None
    out: list[tuple[int, float]] = field(default_factory=list)


class TorchEngine:
    """Samples from `model` in a thread of its own. Implements `types.Engine`.

    Args:
        end_ids: tokens that end a reply; the end token is part of the reply.
        context: most tokens of prompt and reply together.
        rows: most replies that run at once; more wait in order.
        seed: of the run; with the stream's name it fixes every random number.
        mask: how the model takes masks; None for a family without such masks (then `CohortRows`).
        gather: seconds to wait for further requests when nothing runs, so that a burst is computed as one batch.
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
    ) -> None:
        self.model, self.context, self.version = model, context, version
        self.end_ids, self.limit, self.seed, self.gather = frozenset(end_ids), rows, seed, gather
        self.rows: Rows = SlotRows(model, mask=mask) if mask else CohortRows(model)
        self.sampled = 0  # tokens, for the metrics
        self.busy_seconds = 0.0
        self._running: list[Reply] = []
        self._inbox: queue.SimpleQueue[Reply | None] = queue.SimpleQueue()
        self._waiting: list[Reply] = []
        self._held = threading.Event()  # set while paused
        self._idle = threading.Event()
        self._idle.set()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    async def sample(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncIterator[Piece]:
        """Pieces of the reply as they are sampled. Closing the iterator early ends the reply.

        Raises:
            ValueError: the prompt is empty, or leaves no room for a reply.
        """
        if not 0 < len(prompt_ids) < self.context:
            raise ValueError(f"a prompt needs 1 to {self.context - 1} tokens, but got {len(prompt_ids)}")
        if self._closed:
            raise RuntimeError("the engine is closed")
        pieces: asyncio.Queue[Piece | BaseException] = asyncio.Queue()
        stream = random_stream(self.seed, sampling.stream)
        reply = Reply(list(prompt_ids), sampling, stream, pieces.put_nowait, asyncio.get_running_loop())
        self._inbox.put(reply)
        try:
            while True:
                piece = await pieces.get()
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
                if piece.finish_reason:
                    return
        finally:
            reply.cancelled = True

    async def pause(self) -> None:
        """Let running replies end and hold new ones back; returns when nothing runs."""
        self._held.set()
        self._inbox.put(None)
        while not self._idle.is_set():
            await asyncio.sleep(0.002)

    def resume(self, version: int) -> None:
        """Serve again as policy `version`; keys and values of older weights are forgotten."""
        if version != self.version:
            self.rows.forget()
        self.version = version
        self._held.clear()
        self._inbox.put(None)

    def close(self) -> None:
        """End the thread; replies on their way fail."""
        self._closed = True
        self._inbox.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while not self._closed:
            self._collect()
            if not self._waiting or (self._held.is_set() and not self._running):
                if not self._running:
                    continue
            self._idle.clear()
            started = time.perf_counter()
            try:
                self._turn()
            except Exception as error:  # the batch is lost, the engine lives: each caller gets the error
                self._fail(error)
            self.busy_seconds += time.perf_counter() - started
        self._fail(RuntimeError("the engine is closed"))

    def _collect(self) -> None:
        """Move what came in to the waiting list; with nothing to do, sleep until something comes."""
        idle = not self._running and (not self._waiting or self._held.is_set())
        if idle:
            self._idle.set()
            self._take(block=True)
            deadline = time.perf_counter() + 20 * self.gather
            while time.perf_counter() < deadline and len(self._waiting) < self.limit and self._take(timeout=self.gather):
                pass
        while self._take():
            pass

    def _take(self, *, block: bool = False, timeout: float | None = None) -> bool:
        try:
            reply = self._inbox.get(block or timeout is not None, timeout)
        except queue.Empty:
            return False
        if reply is not None:
            self._waiting.append(reply)
        return not block

    def _turn(self) -> None:
        """One step: drop the cancelled, decode the running, admit the waiting, sample, deliver."""
        self._drop([reply.cancelled for reply in self._running])
        logits = [self.rows.step([reply.last for reply in self._running])] if self._running else []
        if not self._held.is_set() and (room := self.limit - len(self._running)) > 0:
            fresh = [reply for reply in self._waiting if not reply.cancelled][:room]
            self._waiting = [r for r in self._waiting if not r.cancelled and not any(r is f for f in fresh)]
            if fresh:
                logits.append(self.rows.admit([reply.prompt_ids for reply in fresh]))
                self._running += fresh
        if self._running:
            self._draw(torch.cat(logits))
            self._drop([reply.finish is not None for reply in self._running])

    def _draw(self, logits_BV: Tensor) -> None:
        batch = self._running
        chosen_B, logp_B = sample(
            logits_BV,
            torch.tensor([reply.random.random() for reply in batch], dtype=torch.float64),
            torch.tensor([reply.sampling.temperature for reply in batch]),
            torch.tensor([reply.sampling.top_p for reply in batch]),
        )
        pieces: dict[asyncio.AbstractEventLoop, list[tuple[Reply, Piece]]] = {}
        for reply, token, logp in zip(batch, chosen_B.tolist(), logp_B.tolist(), strict=True):
            reply.count += 1
            reply.last = token
            full = reply.count >= reply.sampling.max_tokens or len(reply.prompt_ids) + reply.count >= self.context
            reply.finish = "stop" if token in self.end_ids else "length" if full else None
            piece = Piece((token,), (logp,), self.version, reply.finish)
            pieces.setdefault(reply.loop, []).append((reply, piece))
        self.sampled += len(batch)
        for loop, ready in pieces.items():
            _post(loop, ready)

    def _drop(self, gone: list[bool]) -> None:
        if any(gone):
            stay = [row for row, leaves in enumerate(gone) if not leaves]
            self.rows.keep(stay)
            self._running = [self._running[row] for row in stay]

    def _fail(self, error: Exception) -> None:
        everyone = self._running + self._waiting
        while (reply := self._next()) is not None:
            everyone.append(reply)
        for reply in everyone:
            _post(reply.loop, [(reply, error)])
        if self._running:
            self.rows.keep([])
        self._running, self._waiting = [], []

    def _next(self) -> Reply | None:
        while True:
            try:
                reply = self._inbox.get_nowait()
            except queue.Empty:
                return None
            if reply is not None:
                return reply


def _post(loop: asyncio.AbstractEventLoop, ready: Sequence[tuple[Reply, Piece | Exception]]) -> None:
    """Hand pieces to the event loop, one wake-up for all; a loop that is gone has nobody waiting."""

    def deliver(*_: Any) -> None:
        for reply, piece in ready:
            reply.deliver(piece)

    try:
        loop.call_soon_threadsafe(deliver)
    except RuntimeError:
        return
