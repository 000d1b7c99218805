"""Anthropic Messages by type: each event and reply has the fields, of the types, that clients in typed languages need.

The models below are those of the vendor's published schema, written here by hand: required fields only, so that a
missing one or one of another type is an error.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from whippletree.gateway.conftest import MakeDesk
from whippletree.gateway.render import Renderer
from whippletree.models.templates import family_tokenizer

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
BODY: dict[str, Any] = {
    "model": "m",
    "max_tokens": 500,
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"name": "add", "input_schema": {"type": "object", "properties": {}}}],
}


class Row(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class Text(Row):
    type: Literal["text"]
    text: str


class Thinking(Row):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUse(Row):
    type: Literal["tool_use"]
    id: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]+$")]
    name: str
    input: dict[str, Any]


class Usage(Row):
    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int | None
    cache_read_input_tokens: int | None


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "refusal"]
Block = Annotated[Text | Thinking | ToolUse, Field(discriminator="type")]


class Message(Row):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: Usage


class MessageStart(Row):
    type: Literal["message_start"]
    message: Message


class BlockStart(Row):
    type: Literal["content_block_start"]
    index: int
    content_block: Block


class TextDelta(Row):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(Row):
    type: Literal["thinking_delta"]
    thinking: str


class InputDelta(Row):
    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(Row):
    type: Literal["content_block_delta"]
    index: int
    delta: Annotated[TextDelta | ThinkingDelta | InputDelta, Field(discriminator="type")]


class BlockStop(Row):
    type: Literal["content_block_stop"]
    index: int


class Why(Row):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Row):
    type: Literal["message_delta"]
    delta: Why
    usage: Usage


class MessageStop(Row):
    type: Literal["message_stop"]


class Ping(Row):
    type: Literal["ping"]


class Fault(Row):
    type: Literal["api_error", "overloaded_error", "invalid_request_error", "authentication_error"]
    message: str


class Error(Row):
    type: Literal["error"]
    error: Fault


Event = TypeAdapter[Any](
    Annotated[
        MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping | Error,
        Field(discriminator="type"),
    ]
)
REPLIES = [f"<think>\nhm\n</think>\n\nSo: {CALL}{CALL}", "plain", "", f"{CALL} and more"]


def rebuilt(events: list[Any]) -> list[Any]:
    """The blocks that a client puts together from these events, as they do: by index, one open at a time."""
    blocks: list[Any] = []
    opened: int | None = None
    for event in events:
        if isinstance(event, BlockStart):
            assert (opened, event.index) == (None, len(blocks))
            opened, given = event.index, ""
            blocks.append(event.content_block)
        if isinstance(event, BlockDelta):
            assert event.index == opened
            if isinstance(event.delta, InputDelta):
                given += event.delta.partial_json
                blocks[-1].input = json.loads(given)
            elif isinstance(event.delta, ThinkingDelta):
                blocks[-1].thinking += event.delta.thinking
            else:
                blocks[-1].text += event.delta.text
        if isinstance(event, BlockStop):
            assert event.index == opened
            opened = None
    assert opened is None
    return blocks


@pytest.mark.parametrize("reply", REPLIES)
@pytest.mark.parametrize("cut", [500, 9])
async def test_replies_and_streams_are_of_the_vendors_types_and_say_the_same(desk: MakeDesk, reply: str, cut: int):
    made = desk(lambda _: reply, renderer=Renderer(family_tokenizer("qwen3")), delay=0.001, app={"keepalive": 0.0005})
    session = await made.open()
    async with made.http(session) as client:
        whole = (await client.post("/v1/messages", json={**BODY, "max_tokens": cut})).json()
        text = (await client.post("/v1/messages", json={**BODY, "max_tokens": cut, "stream": True})).text
    message = Message.model_validate(whole)
    rows = [row.split("\n") for row in text.split("\n\n") if row]
    events = [Event.validate_json(data.removeprefix("data: ")) for _, data in rows]
    assert [name for name, _ in rows] == [f"event: {event.type}" for event in events]
    events = [event for event in events if not isinstance(event, Ping)]
    first, *_, delta, last = events
    assert isinstance(first, MessageStart) and (first.message.content, first.message.stop_reason) == ([], None)
    assert isinstance(delta, MessageDelta) and isinstance(last, MessageStop)
    assert (delta.delta.stop_reason, delta.usage) == (message.stop_reason, message.usage)

    def said(blocks: list[Any]) -> list[Any]:
        return [block.model_dump(exclude={"id"}) for block in blocks]  # ids follow the sample

    assert said(rebuilt(events)) == said(message.content)


async def test_an_error_in_a_stream_is_of_the_vendors_type(desk: MakeDesk):
    made = desk(["hello"], failure=RuntimeError("broke"), fail_after=2)
    async with made.http(await made.open()) as client:
        text = (await client.post("/v1/messages", json={**BODY, "tools": [], "stream": True})).text
    last = Event.validate_json(text.strip().rpartition("data: ")[2])
    assert isinstance(last, Error)
    assert (last.error.type, "broke" in last.error.message) == ("api_error", True)


def test_the_types_refuse_what_is_missing():
    for event in ({"type": "content_block_stop"}, {"type": "content_block_start", "index": 0, "content_block": {}}):
        with pytest.raises(ValidationError):
            Event.validate_python(event)
