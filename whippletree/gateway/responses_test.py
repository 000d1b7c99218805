"""OpenAI Responses through the app: the SDK reads its replies and streams, and a conversation continues exactly."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from whippletree.gateway.conftest import Desk, MakeDesk
from whippletree.gateway.errors import ApiError
from whippletree.gateway.responses import ask_of
from whippletree.gateway.server import serve
from whippletree.gateway.sessions import Session

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


async def test_the_call_of_a_tool_in_a_namespace_names_it(desk: MakeDesk):
    made = desk([CALL], tools=True)
    space = {"type": "namespace", "name": "mine", "tools": TOOLS}
    async with made.http(await made.open()) as client:
        reply = (await client.post("/v1/responses", json={"input": "hi", "tools": [space]})).json()
    assert [(item["name"], item["namespace"]) for item in reply["output"]] == [("add", "mine")]
