"""One call of a harness, in no API's words: find its step, sample, show, keep."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np

from whippletree.gateway.choices import Choice
from whippletree.gateway.errors import ApiError, bad_request
from whippletree.gateway.memory import Memory
from whippletree.gateway.parts import Part
from whippletree.gateway.render import Prompt, Renderer
from whippletree.gateway.retries import Attempt, step_of
from whippletree.gateway.sessions import Session
from whippletree.gateway.store import Store, StoreError
from whippletree.gateway.text import ShownText, Thinking
from whippletree.gateway.threads import Speaker
from whippletree.types import Engine, Json, Sampling, Turn

Hear = Callable[[Choice, list[Part]], None]
Form = Callable[["Call", Choice], Json]
POLL = 0.05  # seconds between looks at an engine that is paused
RETRY_AFTER = 5  # seconds, while weights change


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a request asks for, in the form of chat completions; `None` leaves it to the rollout's defaults."""

    model: str
    messages: tuple[Json, ...]
    tools: tuple[Json, ...] = ()
    tool_choice: str = "auto"  # or "none", "required", or the name of the tool to call
    n: int = 1
    temperature: float | None = None
    top_p: float = 1.0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    stream: bool = False
    options: Json = field(default_factory=dict)  # what the API needs again to write the reply
    headers: Mapping[str, str] = field(default_factory=dict)  # lower case
    request: Json = field(default_factory=dict)  # as the harness sent it


@dataclass(frozen=True)
class Gateway:
    """What every call needs. While weights change, a call waits for `hold` seconds before it is sent away (503)."""

    engine: Engine
    renderer: Renderer
    store: Store
    model_name: str
    hold: float = 60.0

    def counted(self, ask: Ask) -> int:
        """Tokens of the prompt that these messages and tools make."""
        return len(self.renderer.prompt(ask.messages, ask.tools, Memory(), tool_choice=ask.tool_choice).ids)


class Call:
    """One request of a rollout. `run` does everything; what came of it stands in `prompt` and `choices`."""

    def __init__(self, gateway: Gateway, session: Session, ask: Ask, *, api: str) -> None:
        self.gateway, self.session, self.ask, self.api = gateway, session, ask, api
        self.id = secrets.token_hex(12)
        self.created = int(time.time())
        self.prompt = Prompt((), b"")
        self.choices: list[Choice] = []
        self.sampling = False  # the engine has it
        self.temperature = session.defaults.temperature if ask.temperature is None else ask.temperature
        self._attempt: Attempt | None = None
        self._noted: Json = {}  # of every turn of this call
        self._thread = "main"

    @property
    def prompt_tokens(self) -> int:
        """Tokens that the model saw before it sampled."""
        return len(self.prompt.ids)

    @property
    def completion_tokens(self) -> int:
        """Tokens that were sampled, of all choices."""
        return sum(len(choice.ids) for choice in self.choices)

    async def run(self, form: Form, hear: Hear | None = None) -> None:
        """Sample every choice and keep it; when this returns, all of it is on disk.

        `form` is the reply as the API writes it, to be kept with the turn; `hear` gets text as it becomes certain. If
        the task is cancelled, what was sampled so far is kept as abandoned turns.

        Raises:
            ApiError: the messages cannot be rendered or leave no room, or the budget is used up (400); weights change
                for longer than the call may wait (503); the engine failed (500), or the store did (503). Of the last
                two `session.failure` tells.
        """
        ask, session = self.ask, self.session
        renderer = self.gateway.renderer
        self.prompt = renderer.prompt(ask.messages, ask.tools, session.memory, tool_choice=ask.tool_choice)
        sampled = (ask.tool_choice, self.temperature, ask.top_p, ask.stop, ask.seed, ask.n)
        step = step_of(self.prompt.key, *sampled)
        attempt, earlier = await session.steps.begun(step, ask.headers)
        if attempt is earlier:
            self._replay(attempt, hear)
            return
        self._attempt = attempt
        self._noted = self._note(step, attempt, earlier)
        try:
            await self._run(form, hear)
            attempt.becomes("delivering")
        finally:  # refused, failed or cancelled; an abandoned call has said so itself
            if attempt.state == "running":
                attempt.becomes("refused")

    def delivered(self, whole: bool) -> None:
        """Note whether the last byte of the reply went out."""
        if self._attempt and self._attempt.state in ("delivering", "undelivered", "delivered"):
            self._attempt.becomes("delivered" if whole else "undelivered")
            if whole:
                self.gateway.store.mark_delivered(self._attempt.turn_ids)

    def _replay(self, attempt: Attempt, hear: Hear | None) -> None:
        """Give the reply that is on disk."""
        turns = {turn.id: turn for turn in self.gateway.store.turns(self.session.rollout_id)}
        self._attempt = attempt
        self.choices = [Choice.replayed(place, turns[name]) for place, name in enumerate(attempt.turn_ids)]
        first = turns[attempt.turn_ids[0]]
        self.id = first.id.rpartition(".")[0]
        self.prompt = Prompt(first.prompt_ids, self.prompt.key, first.link)
        for choice in self.choices:
            if hear:
                hear(choice, choice.parts)

    def _note(self, step: str, attempt: Attempt, earlier: Attempt | None) -> Json:
        """What the gateway knows of this call's turns before they are sampled."""
        prompt, session = self.prompt, self.session
        parent = session.memory.thread_of(prompt.parent) if prompt.parent else None
        speaker = Speaker.of(self.ask.messages, self.ask.tools, self.ask.model)
        self._thread, who = session.threads.name(speaker, self.ask.headers, parent)
        noted = {"api": self.api, "step": step, "who": who, **prompt.noted()}
        noted |= {"idempotency": attempt.idempotency, "tools": self.gateway.renderer.digest_of_tools(self.ask.tools)}
        if earlier is not None:
            again = earlier.state == "abandoned"
            noted |= {"retry_of": earlier.turn_ids} if again else {"sibling": earlier.turn_ids[:1]}
        return noted

    def _room(self) -> int:
        """Tokens that the reply may have.

        Raises:
            ApiError: there is none (400).
        """
        session, context = self.session, self.gateway.engine.context
        if not self.prompt.ids:
            raise bad_request("a prompt needs at least one token, but these messages render to none", param="messages")
        if self.prompt_tokens >= context:
            raise session.refused(
                f"prompt is too long: this model's maximum context length is {context} tokens, but the messages are "
                f"{self.prompt_tokens} and a reply needs at least one",
                code="context_length_exceeded",
            )
        session.count_call(self.ask.n)
        room = min(context - self.prompt_tokens, session.spent.budget.reply_tokens or context)
        return min(self.ask.max_tokens or session.defaults.max_tokens or room, room)

    async def _run(self, form: Form, hear: Hear | None) -> None:
        before = self.session.truncated
        try:
            room, self.session.truncated = self._room(), ""  # a call that is let in shows that the harness went on
        finally:
            if self._thread != "main":  # whether a refusal of a side thread ends the run is the harness's to say
                self.session.truncated = before
        await self._serving()
        self.sampling = True
        digest = sha256(np.asarray(self.prompt.ids, "<i4").tobytes()).hexdigest()[:32]
        try:
            with self.session.occurrences(digest, self.ask.n) as numbers:
                self._noted["prompt"] = digest
                self.choices = [self._choice(index, digest, number) for index, number in enumerate(numbers)]
                async with asyncio.TaskGroup() as group:
                    for choice in self.choices:
                        group.create_task(self._sample(choice, room, hear))
                turns = await self._keep(self.choices, form)
        except ExceptionGroup as errors:
            raise self._failed(500, "the engine failed", errors.exceptions[0]) from errors.exceptions[0]
        except asyncio.CancelledError:
            await self._abandon(form)
            raise
        for turn in turns:
            self.session.learn(turn)

    async def _serving(self) -> None:
        """Wait while weights change.

        Raises:
            ApiError: they change for longer than a call may wait (503).
        """
        end = asyncio.get_running_loop().time() + self.gateway.hold
        while self.gateway.engine.paused:
            if asyncio.get_running_loop().time() >= end:
                why = f"the policy's weights are changing; ask again in {RETRY_AFTER} seconds"
                raise ApiError(503, why, code="weights_changing", retry_after=RETRY_AFTER)
            await asyncio.sleep(POLL)

    def _choice(self, index: int, digest: str, number: int) -> Choice:
        """A choice whose random numbers are its own, whatever else runs and in whatever order it arrived."""
        own = f"{self.session.stream}/{digest}/{number}"
        seeded = f"seed {self.ask.seed}" + (f"/{index}" if index else "")
        renderer = self.gateway.renderer
        marks = renderer.thinking
        text = ShownText(
            renderer.tokenizer,
            stop=self.ask.stop,
            tools=renderer.tool_format if self.ask.tools else None,
            thinking=Thinking(marks, opened=self.prompt.thinking) if marks else None,
            forced=self.prompt.forced,
            name=own,
        )
        choice = Choice(index, own if self.ask.seed is None else seeded, text)
        choice.number, choice.turn_id = number, f"{self.id}.{index}"
        return choice

    async def _sample(self, choice: Choice, room: int, hear: Hear | None) -> None:
        spent = self.session.spent
        sampling = Sampling(
            max_tokens=int(min(room, max(spent.tokens_left, 1))),
            temperature=self.temperature,
            top_p=self.ask.top_p,
            stream=choice.stream,
        )
        pieces: Any = self.gateway.engine.sample(self.prompt.ids, sampling)
        async with aclosing(pieces):
            async for piece in pieces:
                choice.take(piece)
                spent.tokens += len(piece.ids)
                if over := spent.over():
                    self.session.truncated, choice.ended = over, choice.ended or "length"
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
        assert self._attempt
        begun = [choice for choice in self.choices if choice.ids]
        for choice in begun:
            choice.ended = "abandoned"
            choice.show()
        self._attempt.becomes("abandoned")
        self._attempt.turn_ids = tuple(choice.turn_id for choice in begun)
        with suppress(ApiError):  # nobody is there to be told, but `failure` says it
            await self._keep(begun, form)

    async def _keep(self, choices: Sequence[Choice], form: Form) -> list[Turn]:
        """Keep these replies. What is handed to the store happens, so a call that is cancelled waits for it too."""
        turns = [self._turn(choice, form) for choice in choices]
        adding = self.gateway.store.add_turns(self.session.rollout_id, self.session.attempt, turns)
        kept = asyncio.ensure_future(adding)
        try:
            while not kept.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({kept})
            kept.result()
        except StoreError as error:
            raise self._failed(503, "the reply could not be kept", error) from error
        assert self._attempt
        self._attempt.turn_ids = tuple(turn.id for turn in turns)
        return turns

    def _turn(self, choice: Choice, form: Form) -> Turn:
        info = {**self._noted, "number": choice.number, **choice.noted(self.ask.tools)}
        info = {name: value for name, value in info.items() if value or name in ("number", "parts", "place")}
        return Turn(
            id=choice.turn_id,
            prompt_ids=self.prompt.ids,
            reply_ids=tuple(choice.ids),
            reply_logps=tuple(choice.logps),
            version=choice.version,
            versions=tuple(choice.versions) if len(set(choice.versions)) > 1 else (),
            finish_reason=choice.finish_reason,
            temperature=self.temperature,
            top_p=self.ask.top_p,
            request=self.ask.request,
            reply=form(self, choice),
            thread=self._thread,
            link=self.prompt.link,
            info=info,
        )

    def _failed(self, status: int, what: str, error: Exception) -> ApiError:
        self.session.failure = f"{what}: {type(error).__name__}: {error}"
        return ApiError(status, self.session.failure, code="server_error", retry_after=RETRY_AFTER * (status == 503))
