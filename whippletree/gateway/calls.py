"""One call of a harness, in no API's words: sample, show, keep."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np

from whippletree.gateway.errors import ApiError, bad_request
from whippletree.gateway.render import Renderer, thread_key
from whippletree.gateway.sessions import Session
from whippletree.gateway.store import Store, StoreError
from whippletree.gateway.text import ShownText
from whippletree.types import Engine, Json, Piece, Sampling, Turn

Hear = Callable[["Choice", list[str | Json]], None]
Form = Callable[["Call", "Choice"], Json]


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a request asks for; `None` leaves it to the rollout's defaults."""

    model: str
    messages: tuple[Json, ...]
    tools: tuple[Json, ...] = ()
    n: int = 1
    temperature: float | None = None
    top_p: float = 1.0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    stream: bool = False
    usage_chunk: bool = False
    logprobs: bool = False
    token_ids: bool = False
    request: Json = field(default_factory=dict)  # as the harness sent it


class Choice:
    """One reply while it is sampled: the exact ids, and what may be shown of them."""

    def __init__(self, index: int, stream: str, text: ShownText) -> None:
        self.index, self.stream, self._text = index, stream, text
        self.ids: list[int] = []
        self.logps: list[float] = []
        self.version = 0
        self.ended = ""  # "stop", "length" or "abandoned"; "" while it runs
        self.content = ""
        self.tool_calls: list[Json] = []
        self._read = 0  # ids whose text was taken in

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for how it ended: a reply that calls tools and was not cut ends for them."""
        return "tool_calls" if self.tool_calls and self.ended == "stop" else self.ended

    @property
    def message(self) -> Json:
        """The reply as a chat message."""
        calls: Json = {"tool_calls": self.tool_calls} if self.tool_calls else {}
        content = self.content if self.content or not calls else None
        return {"role": "assistant", "content": content, **calls}

    def take(self, piece: Piece) -> None:
        """Append what was sampled. A reply that saw several policies counts as the oldest's."""
        self.version = min(self.version, piece.version) if self.ids else piece.version
        self.ids += piece.ids
        self.logps += piece.logps
        self.ended = piece.finish_reason or ""

    def show(self) -> list[str | Json]:
        """Take in the text of the ids since the last time; returns what is new of it. A stop string ends the reply."""
        new = self._text.feed(self.ids[self._read :], last=bool(self.ended))
        self._read = len(self.ids)
        self.content += "".join(part for part in new if isinstance(part, str))
        self.tool_calls += [part for part in new if not isinstance(part, str)]
        if self._text.stopped:
            self.ended = "stop"
        return new


@dataclass(frozen=True)
class Gateway:
    """What every call needs."""

    engine: Engine
    renderer: Renderer
    store: Store
    model_name: str


class Call:
    """One request of a rollout, rendered and ready to run.

    Raises:
        ApiError: the messages cannot be rendered, or leave no room in the model's window (400).
    """

    def __init__(self, gateway: Gateway, session: Session, ask: Ask) -> None:
        self.gateway, self.session, self.ask = gateway, session, ask
        self.id = secrets.token_hex(12)
        self.prompt_ids, self._key = gateway.renderer.prompt(ask.messages, ask.tools, session.threads)
        room = gateway.engine.context - len(self.prompt_ids)
        if not self.prompt_ids:
            raise bad_request("a prompt needs at least one token, but these messages render to none", param="messages")
        if room < 1:
            raise session.refused(
                f"this model's maximum context length is {gateway.engine.context} tokens, but the messages are "
                f"{len(self.prompt_ids)} and a reply needs at least one",
                code="context_length_exceeded",
            )
        session.count_call(ask.n)
        wanted = ask.max_tokens or session.defaults.max_tokens or room
        self.max_tokens = min(wanted, room)
        self.temperature = session.defaults.temperature if ask.temperature is None else ask.temperature
        self.choices: list[Choice] = []

    @property
    def usage(self) -> Json:
        """Tokens seen and sampled, as they were."""
        prompt, completion = len(self.prompt_ids), sum(len(choice.ids) for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    async def run(self, form: Form, hear: Hear | None = None) -> None:
        """Sample every choice and keep it; when this returns, all of it is on disk.

        `form` is the reply as the API writes it, to be kept with the turn; `hear` gets text as it becomes certain. If
        the task is cancelled, what was sampled so far is kept as abandoned turns.

        Raises:
            ApiError: the engine failed (500), or the store did (503). Then `session.failure` says so too.
        """
        digest = sha256(np.asarray(self.prompt_ids, "<i4").tobytes()).hexdigest()[:32]
        with self.session.occurrences(digest, self.ask.n) as numbers:
            self.choices = [self._choice(index, f"{digest}/{number}") for index, number in enumerate(numbers)]
            try:
                async with asyncio.TaskGroup() as group:
                    for choice in self.choices:
                        group.create_task(self._sample(choice, hear))
            except ExceptionGroup as errors:
                raise self._failed(500, "the engine failed", errors.exceptions[0]) from errors.exceptions[0]
            except asyncio.CancelledError:
                await self._abandon(form)
                raise
            await self._keep(self.choices, form)
        for choice in self.choices:
            self.session.remember(thread_key(self._key, choice.message), self.prompt_ids + tuple(choice.ids))

    def _choice(self, index: int, name: str) -> Choice:
        """A choice whose random numbers are its own, whatever else runs and in whatever order it arrived."""
        own = f"{self.session.stream}/{name}"
        seeded = f"seed {self.ask.seed}" + (f"/{index}" if index else "")
        renderer = self.gateway.renderer
        tools = renderer.tool_format if self.ask.tools else None
        text = ShownText(renderer.tokenizer, stop=self.ask.stop, tools=tools, name=own)
        return Choice(index, own if self.ask.seed is None else seeded, text)

    async def _sample(self, choice: Choice, hear: Hear | None) -> None:
        sampling = Sampling(
            max_tokens=self.max_tokens, temperature=self.temperature, top_p=self.ask.top_p, stream=choice.stream
        )
        pieces: Any = self.gateway.engine.sample(self.prompt_ids, sampling)
        async with aclosing(pieces):
            async for piece in pieces:
                choice.take(piece)
                if not (hear or self.ask.stop or choice.ended):
                    continue  # text that nobody waits for is decoded once, at the end
                new = choice.show()
                if hear and new:
                    hear(choice, new)
                if choice.ended:
                    return
        raise RuntimeError(f"a reply must end with a finish reason, but this one ended after {len(choice.ids)} tokens")

    async def _abandon(self, form: Form) -> None:
        """Keep what was sampled of replies that nobody will read."""
        begun = [choice for choice in self.choices if choice.ids]
        for choice in begun:
            choice.ended = "abandoned"
            choice.show()
        with suppress(ApiError):  # nobody is there to be told, but `failure` says it
            await self._keep(begun, form)

    async def _keep(self, choices: Sequence[Choice], form: Form) -> None:
        turns = [
            Turn(
                id=f"{self.id}.{choice.index}",
                prompt_ids=self.prompt_ids,
                reply_ids=tuple(choice.ids),
                reply_logps=tuple(choice.logps),
                version=choice.version,
                finish_reason=choice.finish_reason,
                temperature=self.temperature,
                top_p=self.ask.top_p,
                request=self.ask.request,
                reply=form(self, choice),
            )
            for choice in choices
        ]
        try:
            await self.gateway.store.add_turns(self.session.rollout_id, self.session.attempt, turns)
        except StoreError as error:
            raise self._failed(503, "the reply could not be kept", error) from error

    def _failed(self, status: int, what: str, error: Exception) -> ApiError:
        self.session.failure = f"{what}: {type(error).__name__}: {error}"
        return ApiError(status, self.session.failure, code="server_error", retry_after=int(status == 503))
