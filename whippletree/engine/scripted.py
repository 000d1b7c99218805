"""An engine that says what it is told to: for tests of everything that stands before or after sampling."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from whippletree.types import Piece, Sampling


def scripted_logp(token_id: int, place: int) -> float:
    """Log-probability that `ScriptedEngine` gives to `token_id` as the reply's token number `place`."""
    return -0.125 - (token_id % 7) / 8 - place / 1024


class ScriptedEngine:
    """Replies with given texts: a list in the order of the calls, or a function of the prompt's text.

    Every reply ends with the tokenizer's end-of-sequence token, unless `max_tokens` cuts it. `calls` holds the prompt
    and the sampling of each call, `closed` counts the replies that were ended from outside. A `failure` is raised after
    `fail_after` tokens of every reply.
    """

    def __init__(
        self,
        replies: Sequence[str] | Callable[[str], str],
        tokenizer: Any,
        *,
        context: int = 4096,
        delay: float = 0.0,  # seconds before each piece
        piece: int = 1,  # tokens
        failure: Exception | None = None,
        fail_after: int = 0,  # tokens
        version: int = 0,
    ) -> None:
        self.context, self.version = context, version
        self.calls: list[tuple[tuple[int, ...], Sampling]] = []
        self.closed = 0
        self.failure, self.delay = failure, delay
        self._replies, self._tokenizer, self._piece, self._fail_after = replies, tokenizer, piece, fail_after
        self._running = 0
        self._idle, self._open = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._open.set()

    @property
    def prompts(self) -> list[str]:
        """The text of each prompt that came, special tokens included."""
        return [self._tokenizer.decode(list(ids)) for ids, _ in self.calls]

    @property
    def paused(self) -> bool:
        """Whether new replies are held back."""
        return not self._open.is_set()

    async def sample(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Piece, None]:
        """The next scripted reply, piece by piece.

        Raises:
            ValueError: the prompt leaves no room in the window, or the script has ended.
        """
        ids = self._reply_ids(tuple(prompt_ids), sampling)
        await self._open.wait()
        self._running += 1
        self._idle.clear()
        ended = False
        try:
            async for piece in self._pieces(ids, sampling):
                ended = piece.finish_reason is not None
                yield piece
        finally:
            self.closed += not ended
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def pause(self) -> None:
        """Hold new replies back and wait for those that run."""
        self._open.clear()
        await self._idle.wait()

    def resume(self, version: int) -> None:
        """Serve again, as policy `version`."""
        self.version = version
        self._open.set()

    def _reply_ids(self, prompt_ids: tuple[int, ...], sampling: Sampling) -> list[int]:
        number = len(self.calls)
        self.calls.append((prompt_ids, sampling))
        if len(prompt_ids) >= self.context:
            raise ValueError(f"a prompt must leave room in {self.context} tokens, but it has {len(prompt_ids)}")
        if callable(self._replies):
            text = self._replies(self._tokenizer.decode(list(prompt_ids)))
        elif number < len(self._replies):
            text = self._replies[number]
        else:
            raise ValueError(f"the script has {len(self._replies)} replies, but reply {number + 1} was asked for")
        return [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]

    async def _pieces(self, ids: list[int], sampling: Sampling) -> AsyncGenerator[Piece, None]:
        shown = ids[: sampling.max_tokens]
        last = "stop" if len(shown) == len(ids) else "length"
        for start in range(0, len(shown), self._piece):
            await asyncio.sleep(self.delay)
            part = shown[start : start + self._piece]
            if self.failure is not None and start + len(part) > self._fail_after:
                raise self.failure
            yield Piece(
                ids=tuple(part),
                logps=tuple(scripted_logp(token, start + n) for n, token in enumerate(part)),
                version=self.version,
                finish_reason=last if start + len(part) == len(shown) else None,  # type: ignore[arg-type] # one of two
            )
