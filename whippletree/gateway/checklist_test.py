"""What a gateway must do to serve real harnesses, item by item: 1 to 18; `checklist_stream_test.py` goes on with 19."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from whippletree.gateway.conftest import Desk, MakeDesk
from whippletree.gateway.sessions import Session
from whippletree.models.tiny import tiny_tokenizer
from whippletree.types import Json

SCHEMA: Json = {"type": "object", "properties": {}}
ADD: Json = {"name": "add", "parameters": SCHEMA}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
APIS = ("chat", "responses", "messages", "gemini")
each_api = pytest.mark.parametrize("api", APIS)
PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "gemini": "/v1beta/models/m:generateContent",
}
TOOLS: dict[str, Any] = {
    "chat": [{"type": "function", "function": ADD}],
    "responses": [{"type": "function", **ADD}],
    "messages": [{"name": "add", "input_schema": SCHEMA}],
    "gemini": [{"functionDeclarations": [ADD]}],
}


def body_of(api: str, text: str = "hi", *, most: int | None = None, **fields: Any) -> Json:
    """The smallest request, and these fields; `most` is the limit of the reply's tokens."""
    asked: Json = {"model": "m", "messages": [{"role": "user", "content": text}]}
    if api == "responses":
        asked = {"model": "m", "input": text}
    if api == "gemini":
        asked = {"contents": [{"role": "user", "parts": [{"text": text}]}]}
    limit: dict[str, Json] = {
        "chat": {"max_completion_tokens": most},
        "responses": {"max_output_tokens": most},
        "messages": {"max_tokens": most},
        "gemini": {"generationConfig": {"maxOutputTokens": most}},
    }
    return {**asked, **(limit[api] if most else {}), **fields}


async def post(made: Desk, session: Session, api: str, text: str = "hi", *, stream: bool = False, **fields: Any) -> Any:
    path = PATHS[api].replace(":generate", ":streamGenerate") if stream else PATHS[api]
    headers = fields.pop("headers", {})
    body = body_of(api, text, **fields) | ({"stream": True} if stream else {})
    async with made.http(session) as client:
        return await client.post(path, json=body, headers=headers)


def events_of(answer: httpx.Response) -> list[Any]:
    """The data of each event; `[DONE]` as it is."""
    assert (answer.status_code, answer.headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
    rows = [row.rpartition("data: ")[2] for row in answer.text.split("\n\n") if row]
    return [row if row == "[DONE]" else json.loads(row) for row in rows]


def said(api: str, reply: Json) -> tuple[str, str, tuple[int, int]]:
    """(text, why it ended, (tokens in, tokens out)) of a reply in one piece."""
    if api == "chat":
        choice, usage = reply["choices"][0], reply["usage"]
        content = choice["message"]["content"] or ""
        return content, choice["finish_reason"], (usage["prompt_tokens"], usage["completion_tokens"])
    if api == "gemini":
        candidate, usage = reply["candidates"][0], reply["usageMetadata"]
        text = "".join(part.get("text", "") for part in candidate["content"]["parts"])
        return text, candidate["finishReason"], (usage["promptTokenCount"], usage["candidatesTokenCount"])
    counts = (reply["usage"]["input_tokens"], reply["usage"]["output_tokens"])
    if api == "messages":
        return "".join(block.get("text", "") for block in reply["content"]), reply["stop_reason"], counts
    parts = [part for item in reply["output"] for part in item.get("content", ())]
    return "".join(part["text"] for part in parts), reply["status"], counts


# 1
@each_api
async def test_every_api_is_served_below_any_path_prefix_whatever_the_query(desk: MakeDesk, api: str):
    made = desk(lambda _: "ok")
    async with made.http(await made.open()) as client:
        for path in (PATHS[api], f"/x/run-7{PATHS[api]}", f"/a/b/c{PATHS[api]}?beta=true"):
            answer = await client.post(path, json=body_of(api))
            assert (answer.status_code, said(api, answer.json())[0]) == (200, "ok")


# 2
@each_api
async def test_the_run_is_named_by_the_path_or_by_a_key_in_either_header(desk: MakeDesk, api: str):
    made = desk(lambda _: "ok")
    secret = (await made.open()).secret
    async with made.http() as client:
        for path, headers in (
            (f"/r/{secret}{PATHS[api]}", {"authorization": "Bearer anything", "x-api-key": "anything"}),
            (PATHS[api], {"authorization": f"Bearer {secret}"}),
            (PATHS[api], {"x-api-key": secret, "anthropic-version": "2023-06-01"}),
            (PATHS[api], {"authorization": f"Bearer {secret}", "anthropic-version": "2026-10-21"}),
        ):
            assert (await client.post(path, json=body_of(api), headers=headers)).status_code == 200
        assert (await client.post(PATHS[api], json=body_of(api))).status_code == 401
    assert len(made.turns()) == 4


# 3
async def test_counts_of_tokens_in_a_burst_and_lists_of_models_are_answered_and_never_kept(desk: MakeDesk):
    made = desk(["ok"])
    session = await made.open()
    async with made.http(session) as client:
        burst = [client.post("/v1/messages/count_tokens", json=body_of("messages")) for _ in range(25)]
        counts = [answer.json() for answer in await asyncio.gather(*burst)]
        models = (await client.get("/v1/models")).json()
    assert (made.turns(), made.engine.calls, session.spent.turns) == ((), [], 0)
    await post(made, session, "messages")
    assert counts == [{"input_tokens": len(made.turns()[0].prompt_ids)}] * 25
    assert [row["id"] for row in models["data"]] == ["tiny"]


# 4
async def test_head_and_unknown_paths_are_answered_at_once_without_the_model(desk: MakeDesk):
    made = desk()
    await made.engine.pause()  # who waited for the model would wait for ever
    async with made.http() as client, asyncio.timeout(5):
        for method, path in (("HEAD", "/"), ("HEAD", "/api/hello"), ("GET", "/nothing"), ("POST", "/v1/embeddings")):
            assert (await client.request(method, path)).status_code in (200, 404)
    assert made.engine.calls == []


# 5
@pytest.mark.parametrize(
    ("api", "fields"),
    [
        ("chat", {"store": True, "metadata": {"a": 1}, "reasoning_effort": "high", "tools": [{"type": "web_search"}]}),
        ("chat", {"messages": [{"role": "user", "content": "hi", "cache_control": {}, "provider_specific_fields": 1}]}),
        (
            "responses",
            {"include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "tools": [{"type": "web_search"}]},
        ),
        ("responses", {"input": [{"role": "user", "content": "hi", "id": "msg_x", "phase": None, "caller": None}]}),
        ("messages", {"thinking": {"type": "adaptive"}, "context_management": {}, "output_config": {"effort": "high"}}),
        ("messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}], "metadata": {"user_id": "{}"}}),
        ("gemini", {"safetySettings": [], "labels": {}, "tools": [{"googleSearch": {}}]}),
        ("gemini", {"generationConfig": {"thinkingConfig": {"includeThoughts": True}, "topK": 64}}),
    ],
)
async def test_unknown_keys_headers_betas_and_tool_types_are_ignored(desk: MakeDesk, api: str, fields: Json):
    made = desk(["ok"], tools=True)
    headers = {"anthropic-beta": "some-beta-2027-01-01", "x-unknown": "1", "openai-beta": "x"}
    answer = await post(made, await made.open(), api, never_heard_of={"a": 1}, headers=headers, **fields)
    assert (answer.status_code, said(api, answer.json())[0]) == (200, "ok")
    assert "<tools>" not in made.engine.prompts[0]


# 6
CONTENTS: list[Json] = [
    {"content": "yes"},
    {"content": [{"type": "text", "text": "y"}, {"type": "text", "text": "es"}]},
    {"content": None},
    {"content": ""},
    {},
]


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_content_of_any_form_and_system_messages_anywhere_are_accepted(desk: MakeDesk, api: str, content: Json):
    made = desk(["ok"])
    roles = ["developer", "user", "assistant", "system", "user"]
    chat = [{"role": role, **content} for role in roles]
    fields: Json = {"input" if api == "responses" else "messages": chat}
    answer = await post(made, await made.open(), api, **fields)
    assert (answer.status_code, said(api, answer.json())[0]) == (200, "ok")
    text = "yes" if content.get("content") else ""
    shown = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role in ["system", *roles[1:]])
    assert made.engine.prompts == [f"{shown}<|im_start|>assistant\n"]


# 7
@pytest.mark.parametrize(
    ("api", "tools"),
    [
        ("chat", TOOLS["chat"]),
        ("responses", TOOLS["responses"]),
        ("responses", [{"type": "namespace", "name": "mine", "tools": TOOLS["responses"]}]),
        ("messages", TOOLS["messages"]),
        ("messages", [{"type": "custom", **TOOLS["messages"][0]}]),
    ],
)
async def test_tools_of_each_form_are_told_to_the_model_and_a_namespace_comes_back(
    desk: MakeDesk, api: str, tools: Any
):
    made = desk([CALL], tools=True)
    reply = (await post(made, await made.open(), api, tools=tools)).json()
    assert '"name": "add"' in made.engine.prompts[0]
    spaces = [item.get("namespace") for item in reply.get("output", ())]
    assert spaces == ([tools[0]["name"] if tools[0]["type"] == "namespace" else None] if api == "responses" else [])


# 8
async def test_references_to_tools_and_thinking_are_rendered_and_images_refused_clearly(desk: MakeDesk):
    made = desk(["ok"], tools=True)
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "tool_use", "id": "c1", "name": "find", "input": {}},
    ]
    found = [{"type": "tool_reference", "tool_name": "add"}]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": blocks}]
    session = await made.open()
    for content, status in ((found, 200), ([*found, image], 400)):
        result = {"type": "tool_result", "tool_use_id": "c1", "content": content}
        answer = await post(made, session, "messages", messages=[*chat, {"role": "user", "content": [result]}])
        assert answer.status_code == status
    assert "<tool_response>\nadd\n</tool_response>" in made.engine.prompts[0]
    assert "reads no images, but messages[2].content[0].content[1] is one" in answer.json()["error"]["message"]


# 9
@each_api
async def test_any_model_name_works_is_echoed_and_is_sampled_by_the_policy(desk: MakeDesk, api: str):
    made = desk(lambda _: "ok")
    path = PATHS[api].replace("/m:", "/gpt-99-mini:")
    async with made.http(await made.open()) as client:
        reply = (await client.post(path, json={**body_of(api), "model": "gpt-99-mini"})).json()
    assert (reply.get("model") or reply.get("modelVersion"), said(api, reply)[0]) == ("gpt-99-mini", "ok")
    assert len(made.engine.calls) == len(made.turns()) == 1


# 10
@each_api
async def test_a_limit_beyond_the_window_and_none_at_all_are_the_windows(desk: MakeDesk, api: str):
    made = desk(lambda _: "ok", context=200)
    session = await made.open()
    for most in (32_000, 128_000, None):
        assert (await post(made, session, api, most=most)).status_code == 200
    assert {sampling.max_tokens + len(ids) for ids, sampling in made.engine.calls} == {200}


# 11
async def test_stop_strings_forced_calls_and_both_names_of_a_limit_are_honoured(desk: MakeDesk):
    made = desk(
        lambda prompt: 'add", "arguments": {}}\n</tool_call>' if "<tools>" in prompt else "one, two", tools=True
    )
    session = await made.open()
    stops: list[tuple[str, Json]] = [("chat", {"stop": [", t"]}), ("messages", {"stop_sequences": [", t"]})]
    for api, stop in stops:
        assert said(api, (await post(made, session, api, **stop)).json())[0] == "one"
    for api, choice in (("chat", "required"), ("responses", "required"), ("messages", {"type": "any"})):
        reply = (await post(made, session, api, tools=TOOLS[api], tool_choice=choice)).json()
        assert said(api, reply)[1] in ("tool_calls", "tool_use") or reply["output"][0]["type"] == "function_call"
    for api, name in (("chat", "max_tokens"), ("chat", "max_completion_tokens"), ("responses", "max_output_tokens")):
        limit: Json = {name: 2}
        assert said(api, (await post(made, session, api, **limit)).json())[2][1] == 2
    events = events_of(await post(made, session, "chat", stream=True, stream_options={"include_usage": True}))
    assert events[-2]["usage"]["completion_tokens"] == 9  # eight letters and the end


# 12
@each_api
@pytest.mark.parametrize("reply", ["ok", "", CALL])
async def test_a_stream_that_is_asked_for_is_a_stream(desk: MakeDesk, api: str, reply: str):
    made = desk([reply], tools=True)
    assert events_of(await post(made, await made.open(), api, stream=True, tools=TOOLS[api]))


# 13
async def test_messages_streams_what_its_clients_need(desk: MakeDesk):
    made = desk(["ok"])
    answer = await post(made, await made.open(), "messages", stream=True)
    events = events_of(answer)
    assert [row.partition("\n")[0] for row in answer.text.split("\n\n") if row] == [
        f"event: {e['type']}" for e in events
    ]
    block = ["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"]
    assert [event["type"] for event in events] == ["message_start", *block, "message_delta", "message_stop"]
    assert events[0]["message"]["content"] == [] and events[0]["message"]["usage"]["input_tokens"] > 0
    assert (events[1]["content_block"], events[1]["index"]) == ({"type": "text", "text": ""}, 0)
    assert events[-2]["usage"]["output_tokens"] == 3


# 14
async def test_responses_streams_what_its_clients_need(desk: MakeDesk):
    made = desk(["ok"])
    events = events_of(await post(made, await made.open(), "responses", stream=True))
    assert [event["type"].removeprefix("response.") for event in events] == [
        *(
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.delta",
        ),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert [event["sequence_number"] for event in events] == list(range(10))
    whole = events[-1]["response"]
    assert whole["id"] == events[0]["response"]["id"]
    assert {event["output_index"] for event in events[2:-1]} == {0}
    inside = events[3:8]
    assert {(event["item_id"], event["content_index"]) for event in inside} == {(whole["output"][0]["id"], 0)}
    assert events[-2]["item"] == whole["output"][0] and whole["usage"]["output_tokens"] == 3


# 15
@pytest.mark.parametrize("usage", [True, False])
async def test_chat_streams_what_its_clients_need(desk: MakeDesk, usage: bool):
    made = desk([f"So {CALL}{CALL}"], tools=True)
    fields: Json = {"stream_options": {"include_usage": True}} if usage else {}
    *events, done = events_of(await post(made, await made.open(), "chat", stream=True, tools=TOOLS["chat"], **fields))
    assert done == "[DONE]"
    assert [event["choices"] for event in events if "usage" in event] == [[]] * usage
    choices = [event["choices"][0] for event in events if event["choices"]]
    assert choices[0]["delta"]["role"] == "assistant"
    assert [call["index"] for choice in choices for call in choice["delta"].get("tool_calls", ())] == [0, 1]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]


# 16
@each_api
async def test_a_call_ends_for_its_call_and_only_a_real_cut_for_its_length(desk: MakeDesk, api: str):
    called, cut, stopped = {
        "chat": ("tool_calls", "length", "stop"),
        "responses": ("completed", "incomplete", "completed"),
        "messages": ("tool_use", "max_tokens", "end_turn"),
        "gemini": ("STOP", "MAX_TOKENS", "STOP"),
    }[api]
    size = len(tiny_tokenizer(tools=True).encode(CALL, add_special_tokens=False))
    made = desk([CALL, CALL, CALL, "ok"], tools=True)
    session = await made.open()
    for most, why in ((None, called), (size + 1, called), (size - 1, cut), (None, stopped)):
        assert said(api, (await post(made, session, api, tools=TOOLS[api], most=most)).json())[1] == why


# 17
@each_api
@pytest.mark.parametrize("reply", ["ok", "", CALL])
async def test_usage_is_in_every_reply_and_true(desk: MakeDesk, api: str, reply: str):
    made = desk(lambda _: reply, tools=True)
    session = await made.open()
    whole = (await post(made, session, api, tools=TOOLS[api])).json()
    asked: Json = {"stream_options": {"include_usage": True}} if api == "chat" else {}
    events = events_of(await post(made, session, api, stream=True, tools=TOOLS[api], **asked))
    event = events[-2 if api in ("chat", "messages") else -1]
    event = event.get("response", event)
    counts = list((event.get("usage") or event["usageMetadata"]).values())
    turn = made.turns()[0]
    assert said(api, whole)[2] == (len(turn.prompt_ids), len(turn.reply_ids))
    assert {len(turn.prompt_ids), len(turn.reply_ids)} <= {count for count in counts if isinstance(count, int)}


# 18
async def test_ids_of_calls_are_unique_in_the_run_and_short_letters_and_digits_in_every_api(desk: MakeDesk):
    made = desk(lambda _: CALL + CALL, tools=True)
    session = await made.open()
    texts = [(await post(made, session, api, tools=TOOLS[api])).text for api in APIS for _ in range(2)]
    ids = [part["call"]["id"] for turn in made.turns() for part in turn.info["parts"] if part["kind"] == "call"]
    assert len(ids) == len(set(ids)) == 16
    assert all(name.isascii() and name.isalnum() and len(name) <= 40 for name in ids)
    assert all(f'"{name}"' in texts[place // 2] for place, name in enumerate(ids))
