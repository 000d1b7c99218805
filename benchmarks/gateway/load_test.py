"""The client reads what servers send, and the check of the store sees what would be wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gateway import compare, latency, memory, stages
from benchmarks.gateway.client import Connection, whole
from benchmarks.gateway.load import Called, Route, everybody, faults, spread
from benchmarks.gateway.serve import CONTEXT, Always, Orders, Paced, Upstream
from benchmarks.gateway.upstream import TEXT, WORDS, Answers, completion, events
from whippletree.engine.scripted import ScriptedEngine
from whippletree.gateway.app import create_app
from whippletree.gateway.render import Renderer
from whippletree.gateway.server import serve
from whippletree.gateway.sessions import Sessions
from whippletree.gateway.store import Store
from whippletree.models.tiny import tiny_tokenizer
from whippletree.types import Sampling, Task, Turn

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n6\r\ndata: \r\n4\r\n{}\n\n\r\n0\r\n\r\n"
SIZED = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    kept = Store(tmp_path / "turns.sqlite")
    yield kept
    kept.close()


@pytest.mark.parametrize("answer", [CHUNKED, SIZED])
def test_an_answer_is_whole_with_its_last_byte_and_not_before(answer: bytes):
    assert [whole(answer[:size]) for size in range(len(answer))] == [False] * len(answer)
    assert whole(answer)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_client_reads_the_upstream_streamed_or_not(stream: bool):
    made = Answers(completion([1, 2]), events())
    server = await asyncio.get_running_loop().create_server(lambda: made, "127.0.0.1", 0)
    connection = await Connection(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1").opened()
    answer = await connection.post(b'{"stream": true}' if stream else b"{}")
    assert answer.reply() == {"id": "chatcmpl-dummy", "text": TEXT, "finish_reason": "stop", "done": True}
    assert answer.body.startswith(b"data:") == stream and 0 < answer.first <= answer.last
    connection.close()
    server.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_engine_over_http_gives_the_ids_of_the_text_one_for_each_token(stream: bool):
    server = await asyncio.get_running_loop().create_server(lambda: Answers(completion([]), events()), "127.0.0.1", 0)
    engine = Upstream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", tiny_tokenizer(), use_httpx=False)
    engine.streams = stream
    pieces = [piece async for piece in engine.sample((1,), Sampling(max_tokens=99))]
    ids = [token for piece in pieces for token in piece.ids]
    assert tiny_tokenizer().decode(ids, skip_special_tokens=True) == TEXT
    assert len(pieces) == (len(WORDS) + 1 if stream else 1) and pieces[-1].finish_reason == "stop"
    await engine.close()
    server.close()


async def test_every_call_of_every_session_is_one_turn_that_continues_the_one_before(store: Store):
    tokenizer = tiny_tokenizer()
    engine = Paced(ScriptedEngine(Always(TEXT), tokenizer, context=CONTEXT))
    sessions = Sessions(store)
    orders = Orders(engine, store, sessions, tokens=len(TEXT) + 1)
    assert await orders.do({"pace": 0, "streams": True}) == {"tokens": len(TEXT) + 1}
    keys = (await orders.do({"open": ["a", "b"]}))["keys"]
    async with serve(create_app(engine, Renderer(tokenizer), store, sessions, model_name="dummy")) as url:
        routes = [Route(n, f"{url}/v1/chat/completions", key) for n, key in zip("ab", keys, strict=True)]
        calls, seconds = await everybody(routes, calls=3, stream=True)
    assert await orders.do({"end": ["a", "b"]}) == {"ended": 2}
    assert [(call.session, call.number) for call in calls] == [(n, k) for n in "ab" for k in range(3)]
    assert faults(store, calls) == [] and max(call.last for call in calls) < seconds
    assert [rollout.ending for rollout in store.finished()] == ["done", "done"]


async def test_a_lost_a_doubled_and_a_loose_turn_are_seen(store: Store):
    await store.open_rollout("a", group="a", task=Task(id="a"), secret_hash="")
    first = Turn(id="1.0", prompt_ids=(1, 2), reply_ids=(3,), reply_logps=(-1.0,), version=0, finish_reason="stop")
    second = replace(first, id="2.0", prompt_ids=(1, 2, 3, 4), link="append")
    loose = replace(second, id="3.0", prompt_ids=(1, 2, 4))
    await store.add_turns("a", 0, [first, second])
    calls = [Called("a", n, f"chatcmpl-{n + 1}", 0.1, 0.2) for n in range(3)]
    assert faults(store, calls[:2]) == []
    assert faults(store, calls) == ["a: 3 calls, 2 turns, 1 lost, 0 doubled or unknown"]
    assert faults(store, calls[:1]) == ["a: 1 calls, 2 turns, 0 lost, 1 doubled or unknown"]
    await store.add_turns("a", 0, [loose])
    assert faults(store, calls) == ["a: turn 3.0 does not continue 2.0 token for token"]


def test_figures_by_hand():
    assert spread([0.001 * n for n in range(101)]) == pytest.approx({"p50": 50, "p90": 90, "p99": 99, "max": 100})
    # 1 MB in 1024 calls is 1 KB a call
    assert memory.slope([{"calls": n, "rss_mb": 7 + n / 1024} for n in (0, 512, 1024)]) == pytest.approx(1)
    sides = {"over HTTP": {"calls_per_second": 300, "p50": 2}, "other": {"calls_per_second": 100, "p50": 5}}
    assert compare.ratios(sides) == {"other": {"times_calls": 3, "times_p50": 2.5}}
    row = {"sessions": 1, "pace_ms": 0, "calls": 20, "calls_per_second": 1, "gateway_cpu_ms": 1, "client_cpu_ms": 1}
    rows = [row | {"wrong": [], "added_ms": {"p50": n, "p90": n, "p99": n, "max": n}} for n in (1, 9, 2)]
    rows = [row | {"added_first_token_ms": row["added_ms"]} for row in rows]
    assert latency.summary(rows)["added_ms"] == {"p50": 2, "p90": 2, "p99": 2}


def test_a_look_belongs_to_the_first_stage_on_its_stack():
    stacks = [
        "main (a.py:1);Call._sample (calls.py:1);Paced.sample (serve.py:1) 6",  # inside the engine, so the engine's
        "main (a.py:1);Call._sample (calls.py:1);Spent.over (budget.py:2) 3",
        "Thread.run (threading.py:9);Thread.other (threading.py:3) 1",
        "Thread.run (threading.py:9);Store._write_all (store.py:3) 7",  # waits
    ]
    marks = ("Paced.sample", "Call._sample")
    engine, sampling = (next(stage for stage, known in stages.STAGES if mark in known) for mark in marks)
    assert stages.shares(stacks) == {engine: 0.6, sampling: 0.3, "other": 0.1}
