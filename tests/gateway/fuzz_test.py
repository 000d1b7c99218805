"""Mutated requests over all routes: no 5xx, no hang, no secret in a log, and no row from what was refused.

`WHIPPLETREE_FUZZ` is how many (`make test-gateway`: 100,000), `WHIPPLETREE_FUZZ_SEED` repeats a run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import re
import sqlite3
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from starlette.types import Message

from tests.gateway import mutated
from tests.gateway.mutated import Headers, Sent
from tests.gateway.valid import GENERATE, ROUTES, continued
from whippletree.engine.scripted import ScriptedEngine
from whippletree.gateway.app import create_app
from whippletree.gateway.budget import Budget
from whippletree.gateway.render import Renderer
from whippletree.gateway.sessions import Sessions
from whippletree.gateway.store import Store
from whippletree.models.templates import family_tokenizer
from whippletree.models.tiny import tiny_tokenizer
from whippletree.types import Json, Task

COUNT = int(os.environ.get("WHIPPLETREE_FUZZ", "3000"))
SEED = os.environ.get("WHIPPLETREE_FUZZ_SEED", "0")
BLOCK = 250  # requests to one gateway, which is then given up
ADMIN = "the key of the admin"
PATIENCE = 10.0  # seconds after which a request hangs
REPLIES = (
    *("hello", "", "END", "so END more", "<think>\nhm\n</think>\n\nhello", "<think>", "</think>"),
    *('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', '<tool_call>\n{"name": "add"'),
    *('{"name": "add", "parameters": {}}', '[TOOL_CALLS] [{"name": "add", "arguments": {}}]', "[TOOL_CALLS]", "{}"),
)


@dataclass
class Answer:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


async def answer_of(app: Any, sent: Sent) -> Answer:
    """What the app answers, without a network."""
    path, _, query = sent.path.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": sent.method.upper(),
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.encode(), text.encode("latin-1")) for name, text in sent.headers],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    half = len(sent.body) // 2
    parts, answer, gone = [sent.body[half:], sent.body[:half]], Answer(), asyncio.Event()

    async def receive() -> Message:
        if parts:
            return {"type": "http.request", "body": parts.pop(), "more_body": bool(parts)}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode(): text.decode() for name, text in message["headers"]}
        else:
            answer.body += message.get("body", b"")

    async with asyncio.timeout(PATIENCE):
        await app(scope, receive, send)
    return answer


class Place:
    """A gateway to send requests to, and what stands in its store."""

    def __init__(self, path: Path, chance: random.Random) -> None:
        family = chance.choice(("plain", "tools", "qwen3", "llama3", "gemma", "mistral"))
        named = {"plain": lambda: tiny_tokenizer(), "tools": lambda: tiny_tokenizer(tools=True)}
        tokenizer = named[family]() if family in named else family_tokenizer(family)
        engine = ScriptedEngine(lambda _: chance.choice(REPLIES), tokenizer, piece=chance.choice((1, 3, 1000)))
        self.store, self.chance = Store(path), chance
        self.sessions = Sessions(self.store)
        images = (lambda part: "<image>") if chance.random() < 0.3 else None
        self.app = create_app(
            engine,
            Renderer(tokenizer, images=images),
            self.store,
            self.sessions,
            model_name="tiny",
            max_request_bytes=2**20,
        )
        self.sessions.admit(ADMIN)
        self.engine, self.secrets, self.ids = engine, [ADMIN], set[str]()
        self.talks: list[tuple[str, Json]] = []
        self.last: Sent | None = None
        self._reader = sqlite3.connect(path)

    async def open(self) -> None:
        """Two rollouts, one of them with a small budget."""
        for name, budget in (("wide", Budget(turns=10**6)), ("narrow", Budget(turns=20, tokens=500))):
            task = Task(id="t")
            self.secrets.append(
                (await self.sessions.open(name, group="g", task=task, stream=name, budget=budget)).secret
            )

    def request(self) -> Sent:
        """A mutated request: a new one, the last one again, or one that goes on from a reply."""
        how = self.chance.random()
        if how > 0.04 or self.last is None:
            key = self.chance.choice(self.secrets[1:])
            talk = self.chance.choice(self.talks[-8:]) if how < 0.3 and self.talks else None
            self.last = mutated.mutated(self.chance, *talk, key) if talk else mutated.request(self.chance, key, ADMIN)
        return self.last

    def hear(self, sent: Sent, answer: Answer) -> None:
        """Take in a reply, to go on from it."""
        whole = answer.headers["content-type"] == "application/json"
        if whole and sum(sent.body.count(mark) for mark in (b"[", b"{")) < 300:  # else a copy might be too deep
            talk = continued(sent.path, json.loads(sent.body), json.loads(answer.body))
            self.talks += [talk] if talk else []

    def rows(self) -> tuple[int, ...]:
        """How many turns, rollouts and events there are."""
        counted = "SELECT (SELECT COUNT(*) FROM turns), (SELECT COUNT(*) FROM rollouts), (SELECT COUNT(*) FROM events)"
        return tuple(self._reader.execute(counted).fetchone())

    def close(self) -> None:
        self._reader.close()
        self.store.close()


ONCE_BROKE: list[tuple[int, str, Json, Headers]] = [  # (status, path, what is added to a good request, headers)
    (400, "/v1/messages", {"temperature": 10**400}, ()),
    (400, "/v1/responses", {"metadata": [float("nan")]}, ()),
    (400, GENERATE, {"tools": [{"functionDeclarations": 1}]}, ()),
    (400, GENERATE, {"systemInstruction": "You add."}, ()),
    (200, "/v1/messages", {}, (("x-codex-turn-metadata", "[" * 9000),)),
]


@pytest.mark.parametrize(("status", "path", "added", "headers"), ONCE_BROKE)
async def test_what_once_broke_the_gateway_is_answered(
    status: int, path: str, added: Json, headers: Headers, tmp_path: Path
) -> None:
    place = Place(tmp_path / "t.sqlite", random.Random(0))
    await place.open()
    body = next(bodies for _, at, bodies in ROUTES if at == path)[0] | added
    sent = Sent("POST", path, (("x-api-key", place.secrets[1]), *headers), json.dumps(body).encode())
    assert await check(place, sent) == status
    place.close()


@pytest.mark.slow
async def test_no_mutated_request_breaks_the_gateway(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    statuses: Counter[int] = Counter()
    began, slowest = time.perf_counter(), 0.0
    for block in range(-(-COUNT // BLOCK)):
        chance = random.Random(f"{SEED}/{block}")
        place = Place(tmp_path / f"{block}.sqlite", chance)
        await place.open()
        for number in range(min(BLOCK, COUNT - block * BLOCK)):
            sent = place.request()
            start = time.perf_counter()
            try:
                statuses[await check(place, sent)] += 1
            except BaseException as error:
                error.add_note(f"seed {SEED!r}, block {block}, request {number}: {str(sent)[:3000]}")
                raise
            slowest = max(slowest, time.perf_counter() - start)
        place.close()
        (tmp_path / f"{block}.sqlite").unlink()
        logged = caplog.text + "".join(capfd.readouterr())
        assert not any(secret in logged for secret in place.secrets), logged[-3000:]
        caplog.clear()
    with capfd.disabled():
        seconds = time.perf_counter() - began
        print(f"\n{COUNT} requests in {seconds:.0f} s, the slowest {slowest:.2f} s:", dict(sorted(statuses.items())))


async def check(place: Place, sent: Sent) -> int:
    """Send it, and check what came and what was kept; gives the status."""
    before = place.rows()
    answer = await answer_of(place.app, sent)
    place.engine.calls.clear()
    after = place.rows()
    assert 200 <= answer.status < 500, (answer.status, answer.body)
    told = answer.body if not any(secret in sent.path for secret in place.secrets) else b""
    assert not any(secret.encode() in told for secret in place.secrets)
    if answer.status >= 400:
        check_error(unquote(sent.path.partition("?")[0]), answer)
        assert after == before, "a refused request left something"
        return answer.status
    kept = kept_by(answer)
    assert after[0] - before[0] == len(kept - place.ids), (before, after, kept, answer.body[:500])
    place.ids |= kept
    if kept:
        place.hear(sent, answer)
    return answer.status


def check_error(path: str, answer: Answer) -> None:
    """The error is in the shape of the API that was asked."""
    path = path.rstrip("/")
    said = strictly(answer.body)
    assert answer.headers["content-type"] == "application/json"
    error = said["error"]
    assert isinstance(error["message"], str) and error["message"]
    if re.fullmatch(r".*/models/[^/:]+:(generateContent|streamGenerateContent|countTokens)", path):
        assert set(error) == {"code", "message", "status"} and error["code"] == answer.status, said
    elif path.endswith(("/messages", "/messages/count_tokens")):
        assert set(said) == {"type", "error"} and said["type"] == "error" and set(error) == {"type", "message"}, said
    else:
        assert set(error) == {"message", "type", "param", "code"}, said


def kept_by(answer: Answer) -> set[str]:
    """Ids of the turns that this answer shows."""
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        rows = re.findall(rb"^data: (.*)$", answer.body, re.MULTILINE)
        events = [strictly(row) for row in rows if row != b"[DONE]"]
        assert events and not any("error" in event or event.get("type") == "response.failed" for event in events), (
            events
        )
        return {name for event in events for name in turns_in(event)}
    return set(turns_in(strictly(answer.body))) if answer.body else set()


def turns_in(body: Any) -> list[str]:
    """Ids of the turns in a reply, or in an event."""
    if not isinstance(body, dict):
        return []
    body = body.get("response") or body.get("message") or body
    call = re.fullmatch(r"(?:chatcmpl-|resp_|msg_|)([0-9a-f]{24})", str(body.get("responseId") or body.get("id")))
    if not call:
        return []
    rows = body.get("choices")
    return [f"{call[1]}.{choice['index']}" for choice in rows] if rows is not None else [f"{call[1]}.0"]


def strictly(body: bytes) -> Any:
    """The body read as JSON, and as nothing else."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(body, parse_constant=refuse)
