"""What a gateway must do to serve real harnesses, item by item: 19 to 29. The rest is in `checklist_run_test.py`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from whippletree.gateway.checklist_test import (
    CALL,
    PATHS,
    TOOLS,
    body_of,
    each_api,
    events_of,
    post,
    said,
)
from whippletree.gateway.conftest import Desk, MakeDesk
from whippletree.gateway.render import Renderer
from whippletree.gateway.samples import samples
from whippletree.gateway.server import serve
from whippletree.gateway.sessions import Session
from whippletree.gateway.text_test import byte_tokenizer
from whippletree.models.templates import family_tokenizer
from whippletree.models.tiny import PLAIN_TEMPLATE
from whippletree.types import Json, Rollout, Task, Turn

HI: Json = {"role": "user", "content": "hi"}
MORE: Json = {"role": "user", "content": "more"}


def assistant(text: str | None, **fields: Any) -> Json:
    return {"role": "assistant", "content": text, **fields}


def called(arguments: str, name: str = "add", call_id: str = "c1") -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


async def begun(made: Desk, session: Session, api: str, *, events: int, **fields: Any) -> None:
    """Ask for a stream over a real connection, and go away after so many events."""
    path = PATHS[api].replace(":generate", ":streamGenerate")
    async with serve(made.app) as url, httpx.AsyncClient() as client:
        body = body_of(api, **fields) | {"stream": True}
        async with client.stream("POST", f"{url}/r/{session.secret}{path}", json=body) as answer:
            seen = 0
            async for text in answer.aiter_text():
                seen += text.count("data: ")
                if seen >= events:
                    break
        async with asyncio.timeout(10):
            while session.running:
                await asyncio.sleep(0.005)


def continues(turn: Turn, before: Turn) -> bool:
    """Whether its prompt begins with exactly what was seen and sampled before."""
    seen = before.prompt_ids + before.reply_ids
    return turn.prompt_ids[: len(seen)] == seen and turn.info["parent"] == before.id


# 19
@each_api
async def test_each_event_is_sent_as_it_is_made_and_every_character_arrives_whole(desk: MakeDesk, api: str):
    text = "h\u00e9\u2028\U0001f600\r\n!"
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = PLAIN_TEMPLATE
    made = desk(lambda _: text, renderer=Renderer(tokenizer), delay=0.005)
    session = await made.open()
    path, sampling = PATHS[api].replace(":generate", ":streamGenerate"), []
    async with serve(made.app) as url, httpx.AsyncClient() as client:
        body = body_of(api) | {"stream": True}
        async with client.stream("POST", f"{url}/r/{session.secret}{path}", json=body) as answer:
            raw = b""
            async for part in answer.aiter_bytes():
                raw += part
                sampling.append(bool(made.engine._running))
    assert sum(sampling) > 3  # events came while the reply was being sampled
    assert said(api, (await post(made, session, api)).json())[0] == text
    events = [json.loads(row.rpartition(b"data: ")[2]) for row in raw.split(b"\n\n") if row and b"[DONE]" not in row]
    assert text in "".join(texts_of(events))


def texts_of(events: list[Any]) -> list[str]:
    """The text of each event that adds some."""
    found: list[str] = []
    for event in events:
        if "choices" in event:
            found += [choice["delta"].get("content", "") for choice in event["choices"]]
        elif "candidates" in event:
            found += [part["text"] for row in event["candidates"] for part in row["content"]["parts"]]
        elif event["type"] == "content_block_delta":
            found.append(event["delta"]["text"])
        elif event["type"] == "response.output_text.delta":
            found.append(event["delta"])
    return found


# 20
@each_api
async def test_while_the_model_thinks_data_events_that_change_nothing_are_sent(desk: MakeDesk, api: str):
    made = desk(["ok"], delay=0.05, app={"keepalive": 0.01})
    answer = await post(made, await made.open(), api, stream=True)
    events = events_of(answer)
    alive = {
        "chat": lambda e: e != "[DONE]" and e["choices"][0]["delta"] == {} and not e["choices"][0]["finish_reason"],
        "responses": lambda e: e["type"] == "response.keepalive",
        "messages": lambda e: e["type"] == "ping",
        "gemini": lambda e: e["candidates"][0] == {"content": {"role": "model", "parts": [{"text": ""}]}, "index": 0},
    }[api]
    assert sum(map(alive, events)) >= 2
    assert all("data: " in row for row in answer.text.split("\n\n") if row)  # no comments
    assert "".join(texts_of([event for event in events if event != "[DONE]"])) == "ok"


# 21
@each_api
async def test_a_busy_policy_queues_and_what_is_sent_away_says_when_to_come_again(desk: MakeDesk, api: str):
    made = desk(lambda _: "ok", delay=0.001, app={"hold": 0.2})
    session = await made.open()
    answers = await asyncio.gather(*(post(made, session, api, f"ask {n}") for n in range(30)))
    await made.engine.pause()  # weights change
    waiting = asyncio.create_task(post(made, session, api, "waits"))
    await asyncio.sleep(0.06)
    made.engine.resume(1)
    assert [answer.status_code for answer in (*answers, await waiting)] == [200] * 31
    await made.engine.pause()
    refused = await post(made, session, api, "too long")
    assert (refused.status_code, refused.headers["retry-after"].isdigit()) == (503, True)


# 22
@each_api
async def test_errors_have_the_apis_shape_and_a_full_context_says_so(desk: MakeDesk, api: str):
    made = desk(context=60)
    answer = await post(made, await made.open(), api, "x" * 60)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert "prompt is too long" in error["message"] and "maximum context length is 60" in error["message"]
    openai = {"type": "invalid_request_error", "code": "context_length_exceeded", "param": "messages"}
    shape: dict[str, Json] = {
        "chat": openai,
        "responses": openai,
        "messages": {"type": "invalid_request_error"},
        "gemini": {"code": 400, "status": "INVALID_ARGUMENT"},
    }
    assert {name: value for name, value in error.items() if name != "message"} == shape[api]
    assert (answer.json().get("type") == "error") is (api == "messages")


# 23
@each_api
async def test_a_dropped_connection_ends_the_sampling_and_leaves_an_abandoned_turn(desk: MakeDesk, api: str):
    made = desk(lambda _: "a long reply " * 40, delay=0.002)
    await begun(made, await made.open(), api, events=4)
    (turn,) = made.turns()
    assert made.engine.closed == 1 and 0 < len(turn.reply_ids) < 500
    assert (turn.finish_reason, turn.trainable) == ("abandoned", False)
    rollout = Rollout("r", Task("t"), "g", turns=(turn,), rewards={"r": 1.0})
    assert list(samples(rollout, "trl")) == []


# 24
async def test_a_repeat_is_a_retry_after_a_failure_and_a_sibling_after_a_whole_answer(desk: MakeDesk):
    replies = ["a long reply " * 40, "ok", "ok"]
    made = desk(replies, delay=0.002)
    session = await made.open()
    await begun(made, session, "responses", events=4, metadata={"turn": "1"})
    again = dict(
        reversed(body_of("responses", metadata={"turn": "2"}).items())
    )  # other metadata, keys in another order
    for _ in range(2):
        async with made.http(session) as client:
            assert (await client.post(PATHS["responses"], json=again)).status_code == 200
    gone, retry, sibling = made.turns()
    assert (retry.info["retry_of"], retry.info.get("sibling")) == ([gone.id], None)
    assert (sibling.info["sibling"], sibling.info.get("retry_of")) == ([retry.id], None)
    streams = [sampling.stream for _, sampling in made.engine.calls]
    assert streams[0] == streams[1] != streams[2]  # the retry samples what the step would have


# 25
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_the_json_repeat_of_a_failed_stream_is_the_same_step(desk: MakeDesk, api: str):
    made = desk(lambda _: "hello", failure=RuntimeError("broke"), fail_after=2)
    session = await made.open()
    failed = events_of(await post(made, session, api, stream=True, most=30))
    assert "broke" in json.dumps(failed[-1])
    made.engine.failure = None
    assert (await post(made, session, api, most=400)).status_code == 200
    (turn,) = made.turns()
    assert "sibling" not in turn.info and "retry_of" not in turn.info
    assert len({sampling.stream for _, sampling in made.engine.calls}) == 1


# 26
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_messages_that_say_the_same_extend_each_other(desk: MakeDesk, api: str):
    made = desk([CALL, "ok"], tools=True)
    session = await made.open()
    cached = {"cache_control": {"type": "ephemeral"}}
    parts = [
        {"type": "input_text" if api == "responses" else "text", "text": "hi", **({} if api == "chat" else cached)}
    ]
    first: list[Json] = [{"role": "user", "content": parts}]
    field = "input" if api == "responses" else "messages"
    asked: Json = {field: first}
    reply = (await post(made, session, api, tools=TOOLS[api], **asked)).json()
    if api == "chat":
        (call,) = reply["choices"][0]["message"]["tool_calls"]
        spaced = {**call, "function": {"name": "add", "arguments": '{ "a":1 }'}}
        back: list[Json] = [
            assistant("", tool_calls=[spaced], refusal=None, annotations=[]),
            {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "2"}]},
        ]
    elif api == "responses":
        (item,) = reply["output"]
        kept = {name: value for name, value in item.items() if name not in ("id", "status")}
        back = [
            kept | {"arguments": '{"a":1}'},
            {"type": "function_call_output", "call_id": item["call_id"], "output": "2"},
        ]
    else:
        (block,) = reply["content"]
        result = {"type": "tool_result", "tool_use_id": block["id"], "content": "2", **cached}
        back = [assistant(None) | {"content": [block]}, {"role": "user", "content": [result]}]
    asked = {field: [HI, *back], "metadata": {"user_id": "x"}, "output_config": {"effort": "low"}}
    await post(made, session, api, tools=TOOLS[api], **asked)
    one, two = made.turns()
    assert two.link == "append" and continues(two, one)


# 27
async def test_a_sampled_reply_is_spliced_in_as_it_was_though_args_are_spaced_anew_and_reasoning_dropped(
    desk: MakeDesk,
):
    sampled = '<think>\nhm\n</think>\n\n<tool_call>\n{"name":  "add","arguments":{"a":1}}\n</tool_call>'
    made = desk([sampled, "  two  "], renderer=Renderer(family_tokenizer("qwen3")))
    session = await made.open()
    tools = TOOLS["chat"]
    reply = (await post(made, session, "chat", tools=tools)).json()["choices"][0]["message"]
    (call,) = reply["tool_calls"]
    said_back = assistant(None, tool_calls=[{**call, "function": {"name": "add", "arguments": '{"a":    1}'}}])
    result = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
    await post(made, session, "chat", tools=tools, messages=[HI, said_back, result])
    one, two = made.turns()
    assert continues(two, one) and (two.link, two.info.get("drift", 0)) == ("append", 0)
    assert two.info["dropped_reasoning"] is True


# 28
@pytest.mark.parametrize(
    "back",
    [
        [assistant(None, tool_calls=[called('{"a": 2}')]), {"role": "tool", "tool_call_id": "c1", "content": "2"}],
        [
            assistant(None, tool_calls=[called('{"a": 1}', "invalid")]),
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ],
        [assistant("I call a tool, says the harness, and here is what it gave"), MORE],
        [assistant("a context message that moved"), assistant(None, tool_calls=[called('{"a": 2}')]), MORE],
    ],
)
async def test_a_reply_that_the_harness_changed_starts_a_segment_and_gets_no_loss_there(
    desk: MakeDesk, back: list[Json]
):
    made = desk([CALL, "ok"], tools=True)
    session = await made.open()
    await post(made, session, "chat", tools=TOOLS["chat"])
    await post(made, session, "chat", tools=TOOLS["chat"], messages=[HI, *back])
    one, two = made.turns()
    assert (two.link, two.info["parent"], two.info["drift"]) == ("fork", one.id, len(one.reply_ids))
    first, second = samples(Rollout("r", Task("t"), "g", turns=(one, two), rewards={"r": 1.0}), "trl")
    assert [sum(sample["env_mask"]) for sample in (first, second)] == [len(one.reply_ids), len(two.reply_ids)]
    assert second["prompt_ids"] == list(two.prompt_ids)


# 29
async def test_several_messages_of_one_role_and_results_in_any_order_are_accepted(desk: MakeDesk):
    made = desk([f"{CALL}{CALL}", "ok", "ok"], tools=True)
    session, tools = await made.open(), TOOLS["chat"]
    reply = (await post(made, session, "chat", tools=tools)).json()["choices"][0]["message"]
    ids = [call["id"] for call in reply["tool_calls"]]
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in reversed(ids)]
    rows = [HI, reply, *results, assistant("an aside"), assistant("another"), MORE, MORE]
    for chat in (rows[:4], rows):
        assert (await post(made, session, "chat", tools=tools, messages=chat)).status_code == 200
    one, two, three = made.turns()
    assert continues(two, one) and two.link == "append"
    assert three.prompt_ids[: len(one.prompt_ids + one.reply_ids)] == one.prompt_ids + one.reply_ids
