"""OpenAI Responses through the app: the SDK reads its replies and streams, and a conversation continues exactly."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from whippletree.gateway.conftest import Desk, MakeDesk
from whippletree.gateway.errors import ApiError
from whippletree.gateway.render import Renderer
from whippletree.gateway.responses import ask_of
from whippletree.gateway.server import serve
from whippletree.gateway.sessions import Session
from whippletree.models.templates import family_tokenizer
from whippletree.models.tiny import tiny_tokenizer

SCHEMA: Any = {"type": "object", "properties": {}}
TOOLS: Any = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": None}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@asynccontextmanager
async def sdk(made: Desk, session: Session) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serve(made.app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=session.secret, max_retries=0) as client,
    ):
        yield client


def ask(**fields: Any) -> Any:
    return ask_of({"input": "hi", **fields}, "tiny")


def test_items_are_read_as_chat():
    said = ask(
        instructions="brief",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "add"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So"}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c2", "output": "3"},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
        ],
    ).messages
    assert [message["role"] for message in said] == ["system", "user", "assistant", "tool", "tool"]
    assert [call["id"] for call in said[2]["tool_calls"]] == ["c1", "c2"]
    assert [message["tool_call_id"] for message in said[3:]] == ["c2", "c1"]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("previous_response_id", "resp_1"),
        ("text", {"format": {"type": "json_object"}}),
        ("background", True),
        ("top_logprobs", 3),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(name: str, given: Any):
    with pytest.raises(ApiError, match=name) as caught:
        ask(**{name: given})
    assert caught.value.status == 400


IGNORED = {"type": "compaction", "encrypted_content": "x"}


def test_items_that_say_nothing_are_left_out_but_not_all_of_them():
    (said,) = ask(input=[IGNORED, {"role": "user", "content": "hi"}, {"type": "reasoning", "summary": []}]).messages
    assert said == {"role": "user", "content": "hi"}
    for more in ({}, {"instructions": "brief"}):
        with pytest.raises(ApiError, match="each of its items") as caught:
            ask(input=[IGNORED, {"type": "reasoning", "summary": []}], **more)
        assert (caught.value.status, caught.value.param) == (400, "input")


@pytest.mark.parametrize("kind", ["input_file", "input_audio"])
def test_a_part_that_cannot_be_read_is_refused_where_the_client_sent_it(kind: str):
    parts = [{"type": "input_text", "text": "see"}, {"type": kind, "file_id": "x"}]
    items = [IGNORED, {"role": "user", "content": "hi"}]
    for item, where in (
        ({"role": "user", "content": parts}, "input[2].content[1]"),
        ({"type": "function_call_output", "call_id": "c", "output": parts}, "input[2].output[1]"),
    ):
        with pytest.raises(ApiError, match=kind) as caught:
            ask(instructions="brief", input=[*items, item])
        assert (caught.value.status, caught.value.param) == (400, where)


@pytest.mark.parametrize("content", [{"a": 1}, 7, True])
def test_content_that_is_none_is_refused_where_the_client_sent_it(content: Any):
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    with pytest.raises(ApiError, match="a string or a list") as caught:
        ask(input=[thought, {"role": "assistant", "content": content}])
    assert (caught.value.status, caught.value.param) == (400, "input[1].content")
    ignored = [{"type": "reasoning", "content": content}, {"role": "user", "content": "hi"}]
    assert ask(input=ignored).messages == ({"role": "user", "content": "hi"},)


def test_harmless_fields_and_hosted_tools_are_taken():
    asked = ask(store=False, include=["x"], reasoning={"effort": "low"}, tools=[*TOOLS, {"type": "web_search"}])
    assert [tool["function"]["name"] for tool in asked.tools] == ["add"]


async def test_the_sdk_reads_a_reply(desk: MakeDesk):
    made = desk(["hello"])
    async with sdk(made, await made.open()) as client:
        reply = await client.responses.create(model="m", input="hi")
    (turn,) = made.turns()
    assert (reply.output_text, reply.status) == ("hello", "completed")
    assert reply.usage is not None
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (len(turn.prompt_ids), len(turn.reply_ids))


@pytest.mark.parametrize("stream", [True, False])
async def test_the_sdk_runs_a_tool_loop_on_exact_ids(desk: MakeDesk, stream: bool):
    made = desk([f"So:\n{CALL}", "2"], tools=True)
    async with sdk(made, await made.open()) as client:
        chat: Any = [{"role": "user", "content": "add"}]
        for _ in range(2):
            if stream:
                async with client.responses.stream(model="m", input=chat, tools=TOOLS) as events:
                    reply: Any = await events.get_final_response()
            else:
                reply = await client.responses.create(model="m", input=chat, tools=TOOLS)
            calls = [item for item in reply.output if item.type == "function_call"]
            chat += [item.model_dump(exclude_none=True) for item in reply.output]
            chat += [{"type": "function_call_output", "call_id": call.call_id, "output": "2"} for call in calls]
    assert reply.output_text == "2"
    one, two = made.turns()
    assert two.prompt_ids[: len(one.prompt_ids + one.reply_ids)] == one.prompt_ids + one.reply_ids
    assert (two.link, two.info.get("drift", 0)) == ("append", 0)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_empty_reply_is_an_empty_message_that_is_known_again(desk: MakeDesk, stream: bool):
    made = desk(["", "more"])
    async with sdk(made, await made.open()) as client:
        chat: Any = [{"role": "user", "content": "hi"}]
        if stream:
            async with client.responses.stream(model="m", input=chat) as events:
                reply: Any = await events.get_final_response()
        else:
            reply = await client.responses.create(model="m", input=chat)
        assert (reply.output_text, len(reply.output)) == ("", 1)
        chat += [item.model_dump(exclude_none=True) for item in reply.output]
        await client.responses.create(model="m", input=[*chat, {"role": "user", "content": "go on"}])
    one, two = made.turns()
    assert (two.link, two.info["parent"]) == ("append", one.id)


async def test_a_cut_reply_is_incomplete(desk: MakeDesk):
    made = desk(["hello"])
    async with sdk(made, await made.open()) as client:
        reply = await client.responses.create(model="m", input="hi", max_output_tokens=2)
    assert reply.status == "incomplete"
    assert reply.incomplete_details is not None and reply.incomplete_details.reason == "max_output_tokens"


# ---- namespaces ----


def spaced(*names: str) -> list[Any]:
    return [{"type": "namespace", "name": name, "tools": TOOLS} for name in names]


async def post(made: Desk, session: Session, **fields: Any) -> Any:
    async with made.http(session) as client:
        return await client.post("/v1/responses", json={"input": "hi", **fields})


async def test_the_call_of_a_tool_in_a_namespace_names_it(desk: MakeDesk):
    made = desk([CALL], tools=True)
    reply = (await post(made, await made.open(), tools=spaced("mine"))).json()
    assert [(item["name"], item["namespace"]) for item in reply["output"]] == [("add", "mine")]


async def test_a_name_in_two_namespaces_is_called_in_the_right_one_and_continued(desk: MakeDesk):
    made = desk([CALL.replace('"add"', '"yours__add"'), "2"], tools=True)
    session, tools = await made.open(), [*spaced("mine", "yours"), *TOOLS]
    (item,) = (await post(made, session, tools=tools)).json()["output"]
    assert (item["name"], item["namespace"]) == ("add", "yours")
    for shown in ('"mine__add"', '"yours__add"', '"add"'):
        assert made.engine.prompts[0].count(f'"name": {shown}') == 1
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "2"}
    await post(made, session, tools=tools, input=[{"role": "user", "content": "hi"}, item, result])
    one, two = made.turns()
    assert (two.link, two.info["parent"]) == ("append", one.id)
    assert "unknown_tools" not in one.info


def test_a_tool_choice_names_its_namespace_too():
    tools = spaced("mine", "yours")
    named = {"type": "function", "name": "add"}
    assert ask(tools=tools, tool_choice=named | {"namespace": "mine"}).tool_choice == "mine__add"
    with pytest.raises(ApiError, match="'yours__add'"):
        ask(tools=tools, tool_choice=named)


def test_names_that_cannot_be_told_apart_are_refused():
    both = [*spaced("mine", "yours"), {"type": "function", "name": "mine__add", "parameters": SCHEMA}]
    with pytest.raises(ApiError, match="a name of its own") as caught:
        ask(tools=both)
    assert (caught.value.status, caught.value.param) == (400, "tools")


# ---- events ----


async def events_of(made: Desk, session: Session, **fields: Any) -> list[Any]:
    answer = await post(made, session, stream=True, **fields)
    rows = [row.split("\n") for row in answer.text.split("\n\n") if row]
    events = [json.loads(data.removeprefix("data: ")) for _, data in rows]
    assert [name for name, _ in rows] == [f"event: {event['type']}" for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def kinds_of(events: list[Any]) -> list[str]:
    """The types of events, one for a run of equal ones."""
    kinds = [event["type"].removeprefix("response.") for event in events]
    return [kind for n, kind in enumerate(kinds) if n == 0 or kinds[n - 1] != kind]


def inside(kind: str, name: str) -> list[str]:
    part = ["content_part.added", f"{name}.delta", f"{name}.done", "content_part.done"]
    return ["output_item.added", *(part if kind == "text" else [f"{name}.delta", f"{name}.done"]), "output_item.done"]


def thinking() -> Renderer:
    return Renderer(family_tokenizer("qwen3"))


async def test_events_open_fill_and_close_each_item_in_turn(desk: MakeDesk):
    made = desk([f"<think>\nhm\n</think>\n\nSo: {CALL}"], renderer=thinking())
    events = await events_of(made, await made.open(), tools=TOOLS)
    assert kinds_of(events) == [
        *("created", "in_progress"),
        *inside("text", "reasoning_text"),
        *inside("text", "output_text"),
        *inside("call", "function_call_arguments"),
        "completed",
    ]
    whole = events[-1]["response"]
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]
    assert [event["item"] for event in events if event["type"].endswith("item.done")] == whole["output"]
    deltas = {0: "", 1: "", 2: ""}
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["output_index"]] += event["delta"]
            assert event["item_id"] == whole["output"][event["output_index"]]["id"]
    assert list(deltas.values()) == ["hm", "So: ", '{"a": 1}']
    assert all(event["content_index"] == 0 for event in events if "text" in event["type"] or "part" in event["type"])
    (turn,) = made.turns()
    assert turn.reply == {"id": whole["id"], "output": whole["output"], "status": "completed"}
    assert whole["usage"]["output_tokens"] == len(turn.reply_ids)


@pytest.mark.parametrize("tail", ["", " and more"])
async def test_a_whole_call_is_complete_though_the_reply_was_cut_after_it(desk: MakeDesk, tail: str):
    cut = len(tiny_tokenizer(tools=True).encode(CALL, add_special_tokens=False)) + len(tail) // 2
    made = desk(lambda _: CALL + tail, tools=True)
    session = await made.open()
    events = await events_of(made, session, tools=TOOLS, max_output_tokens=cut)
    whole = (await post(made, session, tools=TOOLS, max_output_tokens=cut)).json()
    streamed = events[-1]["response"]
    assert (events[-1]["type"], streamed["status"], whole["status"]) == ("response.incomplete", *["incomplete"] * 2)
    done = [event["item"] for event in events if event["type"].endswith("item.done")]
    assert done == streamed["output"] == made.turns()[0].reply["output"]
    for output in (streamed["output"], whole["output"]):
        assert [item["status"] for item in output] == ["completed", "incomplete"][: 1 + bool(tail)]


async def test_a_reply_that_broke_off_is_a_failed_response(desk: MakeDesk):
    made = desk(["hello"], failure=RuntimeError("broke"), fail_after=2)
    *_, before, last = await events_of(made, await made.open())
    assert (before["type"], last["type"]) == ("response.output_text.delta", "response.failed")
    assert (last["response"]["status"], last["response"]["output"]) == ("failed", [])
    assert last["response"]["error"] == {"code": "server_error", "message": "the engine failed: RuntimeError: broke"}
    assert made.turns() == ()


@pytest.mark.parametrize("stream", [True, False])
async def test_reasoning_goes_out_and_comes_back(desk: MakeDesk, stream: bool):
    made = desk([f"<think>\nhm\n</think>\n\n{CALL}", "2"], renderer=thinking())
    async with sdk(made, await made.open()) as client:
        chat: Any = [{"role": "user", "content": "add"}]
        for _ in range(2):
            if stream:
                async with client.responses.stream(model="m", input=chat, tools=TOOLS) as events:
                    reply: Any = await events.get_final_response()
            else:
                reply = await client.responses.create(model="m", input=chat, tools=TOOLS)
            chat += [item.model_dump(exclude_none=True) for item in reply.output]
            calls = [item for item in reply.output if item.type == "function_call"]
            chat += [{"type": "function_call_output", "call_id": call.call_id, "output": "2"} for call in calls]
    assert [(item["type"], item["content"][0]["text"]) for item in chat[1:2]] == [("reasoning", "hm")]
    one, two = made.turns()
    assert two.prompt_ids[: len(one.prompt_ids + one.reply_ids)] == one.prompt_ids + one.reply_ids
    assert (two.link, two.info.get("dropped_reasoning", False)) == ("append", False)


async def test_what_stands_with_an_abandoned_turn_is_incomplete(desk: MakeDesk):
    made = desk(lambda _: "a long reply " * 50, delay=0.002)
    session = await made.open()
    async with serve(made.app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=session.secret) as client:
        stream = await client.responses.create(model="m", input="hi", stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        await made.sessions.close("r")
    (turn,) = made.turns()
    (item,) = turn.reply["output"]
    assert (turn.finish_reason, turn.reply["status"], item["status"]) == ("abandoned", *["incomplete"] * 2)
    assert ("a long reply " * 50).startswith(item["content"][0]["text"])
