"""Anthropic Messages: what is read, what is written, and the order of the events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from whippletree.gateway.conftest import Desk, MakeDesk
from whippletree.gateway.errors import ApiError
from whippletree.gateway.messages import ask_of, error_body
from whippletree.gateway.sessions import Session

HI: list[Any] = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {}}
TOOLS = [{"name": "add", "input_schema": SCHEMA}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def ask(**fields: Any) -> Any:
    return ask_of({"messages": HI, "max_tokens": 100, **fields}, "tiny")


async def post(made: Desk, session: Session, path: str = "/v1/messages", **fields: Any) -> Any:
    async with made.http() as client:
        body = {"model": "m", "max_tokens": 500, "messages": HI, **fields}
        return await client.post(path, headers={"x-api-key": session.secret}, json=body)


def events_of(text: str) -> list[Any]:
    rows = [line.split("\n") for line in text.split("\n\n") if line]
    parsed = [json.loads(data.removeprefix("data: ")) for _, data in rows]
    assert [name for name, _ in rows] == [f"event: {event['type']}" for event in parsed]
    return parsed


# ---- requests ----


def test_system_results_and_thinking_are_read_as_chat():
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": "So", "cache_control": {}},
        {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "2"}]},
        {"type": "text", "text": "go on"},
    ]
    said = ask(
        system=[{"type": "text", "text": "brief"}],
        messages=[*HI, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}],
    ).messages
    assert [message["role"] for message in said] == ["system", "user", "assistant", "tool", "user"]
    assert said[2]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    ]
    assert said[2]["content"] == blocks[:2]
    assert (said[3]["tool_call_id"], said[3]["content"]) == ("c1", [{"type": "text", "text": "2"}])
    assert said[4]["content"] == results[1:]


def test_a_tool_that_failed_without_a_word_is_told_to_have_failed():
    def result(**fields: Any) -> Any:
        block = {"type": "tool_result", "tool_use_id": "c1", **fields}
        return ask(messages=[*HI, {"role": "user", "content": [block]}]).messages[1]["content"]

    assert result(is_error=True) == "error"
    assert result(is_error=True, content="no such file") == "no such file"
    assert result() == ""
    with pytest.raises(ApiError, match="a string or a list"):
        result(content=7)


def test_a_block_that_cannot_be_read_is_refused_where_the_client_sent_it():
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "see"}, pdf]}
    for block, where in ((pdf, "messages[1].content[0]"), (result, "messages[1].content[0].content[1]")):
        with pytest.raises(ApiError, match="'document'") as caught:
            ask(system="brief", messages=[*HI, {"role": "user", "content": [block]}])
        assert (caught.value.status, caught.value.param) == (400, where)


@pytest.mark.parametrize("message", [{"role": "user", "content": 7}, {"content": "hi"}])
def test_a_message_that_is_none_is_refused_where_the_client_sent_it(message: Any):
    with pytest.raises(ApiError) as caught:
        ask(system="brief", messages=[*HI, message])
    assert (caught.value.status, caught.value.param) == (400, "messages[1].content")


def test_a_last_message_of_the_assistants_text_is_the_beginning_of_the_reply():
    said = {"role": "assistant", "content": [{"type": "text", "text": "So"}]}
    for last in (said, {"role": "assistant", "content": "So"}):
        assert ask(messages=[*HI, last]).messages[-1] == last | {"prefix": True}
    used = {"type": "tool_use", "id": "c1", "name": "add", "input": {}}
    for last in (HI[0], {"role": "assistant", "content": [used]}, {"role": "system", "content": "late"}):
        assert "prefix" not in ask(messages=[*HI, last]).messages[-1]


def test_tools_and_their_choice_are_read():
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    asked = ask(tools=[*TOOLS, hosted], tool_choice={"type": "any"})
    assert asked.tools == ({"type": "function", "function": {"name": "add", "parameters": SCHEMA}},)
    assert asked.tool_choice == "required"
    assert ask(tools=TOOLS, tool_choice={"type": "tool", "name": "add"}).tool_choice == "add"
    assert ask(tools=TOOLS, tool_choice={"type": "none"}).tools == ()


def test_unknown_fields_are_harmless_and_others_are_refused_by_name():
    ask(thinking={"type": "adaptive"}, context_management={}, metadata={"user_id": "{}"}, output_config={})
    wrong = [("top_k", 5), ("tool_choice", {"type": "tool", "name": "x"}), ("max_tokens", 0), ("stop_sequences", [1])]
    for name, given in wrong:
        with pytest.raises(ApiError) as caught:
            ask(**{name: given})
        assert (caught.value.status, caught.value.param) == (400, name)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((400, "invalid_request_error"), (401, "authentication_error"), (500, "api_error")),
        *((503, "overloaded_error"), (529, "overloaded_error")),
    ],
)
def test_errors_have_anthropics_shape(status: int, kind: str):
    assert error_body(ApiError(status, "no")) == {"type": "error", "error": {"type": kind, "message": "no"}}


# ---- replies ----


async def test_a_reply_in_one_piece(desk: MakeDesk):
    made = desk(["hello"])
    answer = await post(made, await made.open())
    reply = answer.json()
    (turn,) = made.turns()
    assert (answer.status_code, reply["type"], reply["role"], reply["model"]) == (200, "message", "assistant", "m")
    assert reply["content"] == [{"type": "text", "text": "hello"}]
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("end_turn", None)
    assert reply["usage"]["input_tokens"] == len(turn.prompt_ids)
    assert reply["usage"]["output_tokens"] == len(turn.reply_ids) == 6
    assert (turn.info["api"], turn.reply["content"]) == ("messages", reply["content"])


async def test_why_a_reply_stopped(desk: MakeDesk):
    made = desk(lambda _: "one, two")
    session = await made.open()
    cut = (await post(made, session, max_tokens=2)).json()
    stopped = (await post(made, session, stop_sequences=[", t"])).json()
    assert cut["stop_reason"] == "max_tokens"
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", ", t")
    assert stopped["content"] == [{"type": "text", "text": "one"}]


async def test_a_call_that_a_stop_string_follows_is_still_to_be_run(desk: MakeDesk):
    made = desk([f"{CALL} STOP"], tools=True)
    reply = (await post(made, await made.open(), tools=TOOLS, stop_sequences=["STOP"])).json()
    assert (reply["stop_reason"], reply["content"][-1]["type"]) == ("tool_use", "tool_use")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_tool_loop_continues_the_exact_ids(desk: MakeDesk, stream: bool):
    made = desk([f"So: {CALL}", "2"], tools=True)
    session = await made.open()
    answer = await post(made, session, tools=TOOLS, stream=stream)
    reply = made.turns()[0].reply if stream else answer.json()
    text, used = reply["content"]
    assert (text["type"], used["type"], used["name"], used["input"]) == ("text", "tool_use", "add", {"a": 1})
    assert reply["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": used["id"], "content": "2"}
    chat = [*HI, {"role": "assistant", "content": reply["content"]}, {"role": "user", "content": [result]}]
    await post(made, session, tools=TOOLS, messages=chat, stream=stream)
    one, two = made.turns()
    assert two.prompt_ids[: len(one.prompt_ids + one.reply_ids)] == one.prompt_ids + one.reply_ids
    assert (two.link, two.info["parent"], two.thread) == ("append", one.id, "main")


async def test_a_stream_opens_and_closes_each_block(desk: MakeDesk):
    made = desk([f"So {CALL}"], tools=True)
    answer = await post(made, await made.open(), tools=TOOLS, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.text)
    kinds = [event["type"] for event in events]
    assert kinds == [
        "message_start",
        *("content_block_start", *["content_block_delta"] * kinds[:5].count("content_block_delta")),
        *("content_block_stop", "content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"]["input_tokens"] == len(made.turns()[0].prompt_ids)
    assert events[1]["content_block"] == {"type": "text", "text": ""}
    said = "".join(e["delta"]["text"] for e in events if e.get("delta", {}).get("type") == "text_delta")
    assert said.strip() == "So"
    (given,) = [e for e in events if e.get("delta", {}).get("type") == "input_json_delta"]
    assert (given["index"], json.loads(given["delta"]["partial_json"])) == (1, {"a": 1})
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["output_tokens"] == len(made.turns()[0].reply_ids)


@pytest.mark.parametrize("stream", [True, False])
async def test_the_reply_goes_on_with_what_the_client_began(desk: MakeDesk, stream: bool):
    made = desk([" 3", "more"])
    session = await made.open()
    begun = {"role": "assistant", "content": "It is"}
    answer = await post(made, session, messages=[*HI, begun], stream=stream)
    assert answer.status_code == 200
    assert made.engine.prompts[0].endswith("<|im_start|>assistant\nIt is")
    (turn,) = made.turns()
    assert turn.reply["content"] == [{"type": "text", "text": " 3"}]  # the continuation alone
    if stream:
        said = [event["delta"]["text"] for event in events_of(answer.text) if event["type"] == "content_block_delta"]
        assert "".join(said) == " 3"
    whole = {"role": "assistant", "content": "It is 3"}
    await post(made, session, messages=[*HI, whole, {"role": "user", "content": "sure?"}])
    one, two = made.turns()
    assert two.prompt_ids[: len(one.prompt_ids + one.reply_ids)] == one.prompt_ids + one.reply_ids
    assert (two.link, two.info["parent"], two.info.get("drift", 0)) == ("append", one.id, 0)


async def test_a_begun_reply_is_another_step_than_a_free_one(desk: MakeDesk):
    made = desk(lambda _: "x")
    session = await made.open()
    for messages in (HI, [*HI, {"role": "assistant", "content": "It is"}]):
        await post(made, session, messages=messages)
    one, two = made.turns()
    assert one.info["step"] != two.info["step"]
    assert "sibling" not in two.info and "retry_of" not in two.info


async def test_counting_tokens_is_exact_and_leaves_no_turn(desk: MakeDesk):
    made = desk(["hello"], tools=True)
    session = await made.open()
    counted = await post(made, session, "/v1/messages/count_tokens", tools=TOOLS)
    assert made.turns() == ()
    await post(made, session, tools=TOOLS)
    assert counted.json() == {"input_tokens": len(made.turns()[0].prompt_ids)}


async def test_any_prefix_and_query_are_served_and_errors_are_anthropics(desk: MakeDesk):
    made = desk(lambda _: "x")
    session = await made.open()
    assert (await post(made, session, f"/any/r/{session.secret}/v1/messages?beta=true")).status_code == 200
    refused = await post(made, session, top_k=1)
    assert refused.json()["error"]["type"] == "invalid_request_error"
    async with made.http() as client:
        unknown = await client.post("/v1/messages", headers={"x-api-key": "wrong"}, json={})
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (401, "authentication_error")
