"""Asking a model for a verdict: validated answers, limits, a cache. An answer that fails is missing, never a 0."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import httpx
from pydantic import BaseModel, ValidationError

from whippletree.evidence.quoting import FENCE
from whippletree.types import Asker, Blame, Engine, Json, Sampling

T = TypeVar("T", bound=BaseModel)
Read = TypeVar("Read")
LONGEST = (
    20_000  # characters of an answer that are read, from its end: what can be asked for fits, and reading is quick
)


class RefusedError(Exception):
    """A server did not take the question; `wait` is how many seconds it asks for, where it says so."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


class Said(str):
    """What an asker said, and how many tokens question and answer took, where that is known."""

    tokens: int | None = None


@dataclass(frozen=True)
class Answer(Generic[T]):
    """A valid answer, or None and why; a missing one is the judge's fault, never the rollout's."""

    value: T | None
    reason: str = ""

    @property
    def blame(self) -> Blame | None:
        return "judge" if self.value is None else None


# ---- who is asked -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """A model behind any OpenAI-compatible server: `url` is what stands before `/chat/completions`."""

    url: str
    model: str
    key: str = field(default="", repr=False)
    tls: Any = field(default_factory=httpx.create_ssl_context, repr=False, compare=False)

    @property
    def name(self) -> str:
        return self.model

    async def ask(self, messages: Sequence[Json], **options: Any) -> Said:
        """One request, not repeated.

        Raises:
            RefusedError: the server cannot be reached, is busy (408, 429) or fails (5xx).
            ValueError: it refuses the request for good.
        """
        body = {"model": self.model, "messages": list(messages), **options}
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            async with httpx.AsyncClient(verify=self.tls, timeout=None) as client:  # `Judge` keeps the time
                got = await client.post(f"{self.url.rstrip('/')}/chat/completions", json=body, headers=headers)
        except httpx.TransportError as error:
            raise RefusedError(f"{self.url} cannot be reached: {error!r}") from error
        if got.status_code in (408, 429) or got.status_code >= 500:
            wait = got.headers.get("retry-after", "")  # seconds, or a date, which is passed over
            raise RefusedError(f"the server answered {got.status_code}", float(wait) if wait.isdigit() else None)
        if got.status_code != 200:
            raise ValueError(f"the server answered {got.status_code}: {got.text:.200}")
        said = Said(got.json()["choices"][0]["message"]["content"] or "")
        said.tokens = (got.json().get("usage") or {}).get("total_tokens")
        return said


@dataclass(frozen=True)
class Itself:
    """The policy as its own judge. It has no name, so it is never cached: its weights change."""

    engine: Engine
    tokenizer: Any

    async def ask(self, messages: Sequence[Json], **options: Any) -> Said:
        """A reply of the current weights."""
        ids = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
        reply: list[int] = []
        async with contextlib.aclosing(self.engine.sample(ids, Sampling(**options))) as pieces:
            async for piece in pieces:
                reply += piece.ids
        said = Said(self.tokenizer.decode(reply, skip_special_tokens=True))
        said.tokens = len(ids) + len(reply)
        return said


@dataclass(frozen=True)
class Scripted:
    """A function, async or not, in place of a model: it gets the text of all messages, gives a text or an object."""

    answer: Callable[[str], str | Json | Awaitable[str | Json]]
    name: str = ""

    async def ask(self, messages: Sequence[Json], **options: Any) -> str:
        said = self.answer("\n\n".join(message["content"] for message in messages))
        said = await said if isinstance(said, Awaitable) else said
        return said if isinstance(said, str) else json.dumps(said)


# ---- asking -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Judge:
    """Asks an asker within limits, and takes only answers that it can have meant.

    The text `FENCE` in messages becomes a word drawn anew for each question (see `quoting`). An answer counts only with
    that word as its "ticket", so what a judge repeats from a rollout is no answer. `ticketed=False` is for a function
    that cannot be talked to: it needs no ticket, and the same question gets the same word.

    `calls` and `tokens` (of questions and answers) limit this object's life; what a server did not take is not counted.
    A call that may not fit is not made: it counts as a quarter of its characters and `reply_tokens` until it ends.

    `counts` holds calls, tokens, cached, failed (and failed/KIND), refused, unreadable, and what evidence adds.

    Raises:
        ValueError: there is a cache, but the asker has no `name` that says which model answers.
    """

    asker: Asker
    cache: str | Path | None = None  # a folder with one JSON file an answer; processes may share it
    attempts: int = 3  # at one question: where the answer is unreadable, late, or refused
    at_once: int = 8
    timeout: float = 120.0  # seconds for each attempt
    longest_wait: float = 60.0  # seconds before the next attempt, whatever a server asks for
    reply_tokens: int = 1024
    calls: float = math.inf
    tokens: float = math.inf
    options: Json = field(default_factory=lambda: {"temperature": 0.0})  # and whatever else the asker takes
    ticketed: bool = True
    counts: Counter[str] = field(default_factory=Counter)
    reason: str = ""  # of the last answer that failed
    _gates: WeakKeyDictionary[Any, asyncio.Semaphore] = field(default_factory=WeakKeyDictionary, repr=False)

    def __post_init__(self) -> None:
        if self.cache and not getattr(self.asker, "name", ""):
            asker = type(self.asker).__name__
            raise ValueError(f"a cache is of one fixed model, but {asker} has no name that says which; leave it out")

    async def answer(self, messages: Sequence[Json], schema: type[T]) -> Answer[T]:
        """The answer to these messages in this schema, from the cache or the asker; missing with its reason else."""
        chat = self._with_form(messages, schema)
        key = sha256(json.dumps([getattr(self.asker, "name", ""), chat, self._sampling()]).encode()).hexdigest()
        if (kept := self._kept(key, schema)) is not None:
            self.counts["cached"] += 1
            return Answer(kept)
        fence = secrets.token_hex(8) if self.ticketed else key[:16]
        ticket = fence if self.ticketed else None
        try:
            value = await self._asked(_filled(chat, fence), lambda said: _read(said, schema, ticket))
            self._keep(key, value)
        except Exception as error:  # whatever went wrong with a judge, the run goes on without this answer
            self.reason = f"{type(error).__name__}: {error}"[:400]
            self.counts.update(["failed", f"failed/{type(error).__name__}"])
            return Answer(None, self.reason)
        return Answer(value)

    async def ask(self, messages: Sequence[Json], **options: Any) -> str:
        """The words of the asker, within the same limits; no schema, no cache, and errors rise."""
        return await self._asked(_filled(messages, secrets.token_hex(8)), str, options)

    def metrics(self, prefix: str = "judge") -> dict[str, float]:
        """All counts, by metric name."""
        counts = {**dict.fromkeys(("calls", "cached", "failed", "tokens"), 0), **self.counts}
        return {f"{prefix}/{name}": float(count) for name, count in counts.items()}

    async def _asked(self, chat: list[Json], read: Callable[[str], Read], options: Json | None = None) -> Read:
        """What is read from the first answer that can be."""
        problem: Exception = ValueError(f"a judge has at least one attempt, but attempts is {self.attempts}")
        async with self._gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.at_once)):
            for attempt in range(self.attempts):
                try:
                    return read(said := await self._call(chat, {**self._sampling(), **(options or {})}))
                except (RefusedError, TimeoutError) as error:
                    problem = error if str(error) else TimeoutError(f"no answer within {self.timeout:g} s")
                    wait = getattr(error, "wait", None)
                    if attempt + 1 < self.attempts:
                        await asyncio.sleep(min(2.0**attempt if wait is None else wait, self.longest_wait))
                except UnreadableError as error:
                    problem = error
                    self.counts["unreadable"] += 1
                    again = f"That is no valid answer: {error}. Answer again, in the form asked for."
                    chat = [
                        *chat,
                        {"role": "assistant", "content": said[:4000] or "-"},
                        {"role": "user", "content": again},
                    ]
        raise problem

    async def _call(self, chat: list[Json], options: Json) -> str:
        """One call, if it fits what is left."""
        characters = sum(len(message["content"]) for message in chat)
        held = characters // 4 + options["max_tokens"]
        if self.counts["calls"] >= self.calls or self.counts["tokens"] + held > self.tokens:
            raise BudgetError(f"the judge had {self.calls:g} calls with {self.tokens:g} tokens, and they are used up")
        self.counts.update(calls=1, tokens=held)
        try:
            async with asyncio.timeout(self.timeout):
                said = await self.asker.ask(chat, **options)
        except RefusedError:
            self.counts.update(calls=-1, tokens=-held, refused=1)
            raise
        used = getattr(said, "tokens", None)
        self.counts["tokens"] += ((characters + len(said)) // 4 if used is None else used) - held
        return said

    def _sampling(self) -> Json:
        return {"max_tokens": self.reply_tokens, **self.options}

    def _with_form(self, messages: Sequence[Json], schema: type[BaseModel]) -> list[Json]:
        """The messages, and after all that is quoted the form of the answer."""
        form = f"Answer with one JSON object of this schema:\n{json.dumps(schema.model_json_schema())}"
        if self.ticketed:
            form += f'\nThe object must also hold "ticket": "{FENCE}"; without it, it is not taken as your answer.'
        last = messages[-1]
        return [*messages[:-1], {**last, "content": f"{last['content']}\n\n#{FENCE} all is shown\n{form}"}]

    def _kept(self, key: str, schema: type[T]) -> T | None:
        with contextlib.suppress(FileNotFoundError, ValidationError):  # not asked yet, or torn
            return schema.model_validate_json(self._path(key).read_bytes()) if self.cache else None
        return None

    def _keep(self, key: str, value: BaseModel) -> None:
        if self.cache:
            aside = self._path(f"{key}-{secrets.token_hex(4)}")
            aside.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(value.model_dump_json())
            os.replace(aside, self._path(key))

    def _path(self, key: str) -> Path:
        return Path(self.cache or "", key[:2], f"{key}.json")


class UnreadableError(ValueError):
    """An answer that is not in the form asked for."""


class BudgetError(RuntimeError):
    """The limit on calls or tokens is reached."""


def judge_of(asker: Asker) -> Judge:
    """The asker itself where it is a judge, else a judge without limits on it."""
    return asker if isinstance(asker, Judge) else Judge(asker)


def _filled(chat: Sequence[Json], fence: str) -> list[Json]:
    return [{**message, "content": message["content"].replace(FENCE, fence)} for message in chat]


def _read(said: str, schema: type[T], ticket: str | None) -> T:
    """The first object of an answer, with this ticket if there is one, as the schema says."""
    found = [row for row in _objects(said) if ticket in (None, row.get("ticket"))]
    if not found:
        raise UnreadableError("it has no JSON object" + (f' with "ticket": "{ticket}"' if ticket else ""))
    row = {name: value for name, value in found[0].items() if name != "ticket"}
    try:
        return schema.model_validate(row)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)
        raise UnreadableError("; ".join(f"{p['loc']}: {p['msg']}" for p in problems[:5])) from error


def _objects(text: str) -> Iterator[Json]:
    """The outermost JSON objects at the end of a text, whatever stands around them."""
    text, place = text[-LONGEST:], 0
    while (place := text.find("{", place)) >= 0:
        try:
            row, place = json.JSONDecoder().raw_decode(text, place)
            yield row
        except RecursionError:
            return
        except ValueError:
            place += 1
