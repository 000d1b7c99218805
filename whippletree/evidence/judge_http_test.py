"""A judge behind a real server, in this process and on a local port; and the policy itself."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from whippletree.engine.scripted import ScriptedEngine
from whippletree.evidence.judge import Answer, Itself, Judge, RefusedError, Server
from whippletree.evidence.judge_test import ASKED, Score, scores
from whippletree.gateway.app import create_app
from whippletree.gateway.render import Renderer
from whippletree.gateway.server import serve
from whippletree.gateway.sessions import Sessions
from whippletree.gateway.store import Store
from whippletree.models.tiny import tiny_tokenizer
from whippletree.types import Json, Task


@dataclass
class Desk:
    """A real server on a local port: it answers with each of these in turn, the last one for good."""

    answers: list[Callable[[Json], Response]]
    bodies: list[Json] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    delay: float = 0.0
    running: int = 0

    async def complete(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        self.times.append(time.monotonic())
        await asyncio.sleep(self.delay)
        return self.answers[min(len(self.bodies), len(self.answers)) - 1](self.bodies[-1])

    @asynccontextmanager
    async def judge(self, **settings: Any) -> AsyncIterator[Judge]:
        async with serve(Starlette(routes=[Route("/v1/chat/completions", self.complete, methods=["POST"])])) as url:
            yield Judge(Server(f"{url}/v1/", "m", key="secret"), **settings)


def ok(score: float, tokens: int | None = 321) -> Callable[[Json], Response]:
    def answer(body: Json) -> Response:
        said = json.dumps(scores(score)("".join(message["content"] for message in body["messages"])))
        usage = {} if tokens is None else {"usage": {"total_tokens": tokens}}
        return JSONResponse({"choices": [{"message": {"role": "assistant", "content": said}}], **usage})

    return answer


def status(code: int, **headers: str) -> Callable[[Json], Response]:
    return lambda body: Response("busy", code, {name.replace("_", "-"): value for name, value in headers.items()})


async def test_a_server_is_asked_as_chat_completions_with_the_key() -> None:
    desk = Desk([ok(5)])
    async with desk.judge(options={"temperature": 0.25, "seed": 3}) as judge:
        assert (await judge.answer(ASKED, Score)).value == Score(score=5)
    body = desk.bodies[0]
    assert {**body, "messages": [message["role"] for message in body["messages"]]} == {
        "model": "m",
        "messages": ["system", "user"],
        "max_tokens": 1024,
        "temperature": 0.25,
        "seed": 3,
    }
    assert desk.headers[0]["authorization"] == "Bearer secret"
    assert "secret" not in repr(judge)
    assert judge.counts["tokens"] == 321  # as the server says


async def test_a_busy_server_is_asked_again_after_what_it_asks_for() -> None:
    desk = Desk([status(429, retry_after="1"), status(503, retry_after="0"), ok(5)])
    async with desk.judge(calls=1) as judge:  # what was refused does not count
        assert (await judge.answer(ASKED, Score)).value == Score(score=5)
    assert desk.times[1] - desk.times[0] >= 1.0
    assert desk.times[2] - desk.times[1] < 0.9
    assert (judge.counts["calls"], judge.counts["refused"], judge.counts["tokens"]) == (1, 2, 321)


async def test_a_server_that_stays_busy_is_given_up_and_never_waited_for_too_long() -> None:
    desk = Desk([status(429, retry_after="3600")])
    async with desk.judge(longest_wait=0.01) as judge:
        answer = await judge.answer(ASKED, Score)
    assert answer == Answer(None, "RefusedError: the server answered 429")
    assert len(desk.bodies) == 3
    assert judge.counts["calls"] == 0


async def test_a_request_refused_for_good_is_not_repeated() -> None:
    desk = Desk([status(401)])
    async with desk.judge() as judge:
        assert (await judge.answer(ASKED, Score)).reason == "ValueError: the server answered 401: busy"
    assert len(desk.bodies) == 1


@pytest.mark.parametrize("body", [{"choices": []}, {"error": "x"}, {"choices": [{"message": {"content": None}}]}])
async def test_a_body_without_a_message_is_a_missing_answer(body: Json) -> None:
    async with Desk([lambda _: JSONResponse(body)]).judge(attempts=1) as judge:
        assert (await judge.answer(ASKED, Score)).blame == "judge"


async def test_an_invalid_answer_over_http_is_asked_for_again() -> None:
    desk = Desk([ok(50), ok(5)])
    async with desk.judge() as judge:
        assert (await judge.answer(ASKED, Score)).value == Score(score=5)
    assert [message["role"] for message in desk.bodies[1]["messages"]] == ["system", "user", "assistant", "user"]


async def test_a_slow_server_is_left_and_its_answer_is_missing() -> None:
    desk = Desk([ok(5)], delay=0.5)
    async with desk.judge(timeout=0.05, attempts=2, longest_wait=0.01) as judge:
        answer = await judge.answer(ASKED, Score)
    assert (answer.value, answer.reason, judge.counts["calls"]) == (None, "TimeoutError: no answer within 0.05 s", 2)


async def test_a_server_that_is_not_there_is_refused_and_missing() -> None:
    async with Desk([ok(5)]).judge(attempts=2, longest_wait=0.01) as judge:
        assert (await judge.answer(ASKED, Score)).value
    answer = await judge.answer(ASKED, Score)  # it has ended
    assert answer.reason.startswith("RefusedError: http://127.0.0.1")
    assert judge.counts["refused"] == 2
    with pytest.raises(RefusedError):
        await judge.ask(ASKED)


async def test_the_gateway_serves_the_policy_as_a_judge(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    engine = ScriptedEngine(lambda prompt: json.dumps(scores(6)(prompt)), tokenizer, context=20_000)
    store = Store(tmp_path / "turns.sqlite")
    sessions = Sessions(store)
    session = await sessions.open("judge", group="judge", task=Task("judge"), stream="judge")
    async with serve(create_app(engine, Renderer(tokenizer), store, sessions, model_name="tiny")) as url:
        judge = Judge(Server(f"{url}/v1", "tiny", key=session.secret))
        assert (await judge.answer(ASKED, Score)).value == Score(score=6)
    prompt, sampling = engine.calls[0]
    assert (sampling.temperature, sampling.max_tokens) == (0.0, 1024)
    assert judge.counts["tokens"] == len(prompt) + len(store.turns("judge")[0].reply_ids)
    store.close()


async def test_the_policy_itself_is_asked_through_its_engine() -> None:
    tokenizer = tiny_tokenizer()
    engine = ScriptedEngine(lambda prompt: json.dumps(scores(6)(prompt)), tokenizer, context=20_000)
    judge = Judge(Itself(engine, tokenizer))
    assert (await judge.answer(ASKED, Score)).value == Score(score=6)
    # {"score": 6, "ticket": "0123456789abcdef"} is 11 + 13 + 18 characters, and each is a token; then the end
    assert judge.counts["tokens"] == len(engine.calls[0][0]) + 42 + 1
    engine.context = 10
    assert "must leave room in 10 tokens" in (await judge.answer(ASKED, Score)).reason
