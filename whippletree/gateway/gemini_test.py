"""Google's generateContent: what is read, what is written, and a tool loop on exact ids."""

from __future__ import annotations

import json
from typing import Any

import pytest

from whippletree.gateway.conftest import Desk, MakeDesk
from whippletree.gateway.errors import ApiError
from whippletree.gateway.gemini import ask_of
from whippletree.gateway.sessions import Session

HI: Any = [{"role": "user", "parts": [{"text": "hi"}]}]
TOOLS: Any = [{"functionDeclarations": [{"name": "add", "parametersJsonSchema": {"type": "object"}}]}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


async def post(made: Desk, session: Session, method: str = "generateContent", **fields: Any) -> Any:
    async with made.http() as client:
        headers = {"x-goog-api-key": session.secret}
        return await client.post(f"/v1beta/models/any:{method}", headers=headers, json={"contents": HI, **fields})


def test_contents_are_read_as_chat():
    model = [{"text": "hm", "thought": True}, {"functionCall": {"name": "add", "args": {"a": 1}}}]
    results = [{"functionResponse": {"name": "add", "response": {"output": "2"}}}]
    said = ask_of(
        {
            "systemInstruction": {"parts": [{"text": "brief"}]},
            "contents": [*HI, {"role": "model", "parts": model}, {"role": "user", "parts": results}],
        },
        "tiny",
    ).messages
    assert [message["role"] for message in said] == ["system", "user", "assistant", "tool"]
    (call,) = said[2]["tool_calls"]
    assert (call["function"], said[3]["tool_call_id"]) == ({"name": "add", "arguments": '{"a": 1}'}, call["id"])
    assert said[3]["content"] == "2"


@pytest.mark.parametrize("parts", [7, "x", {"a": 1}, [7], []])
def test_an_answer_whose_files_are_none_is_its_text(parts: Any):
    result = {"functionResponse": {"name": "add", "response": {"output": "2"}, "parts": parts}}
    (said,) = ask_of({"contents": [{"role": "user", "parts": [result]}]}, "tiny").messages
    assert said["content"] == "2"


def test_what_is_not_honoured_is_refused_by_name():
    for name, given in (("candidateCount", 2), ("responseMimeType", "application/json"), ("topP", 0)):
        with pytest.raises(ApiError, match=name):
            ask_of({"contents": HI, "generationConfig": {name: given}}, "tiny")


@pytest.mark.parametrize("method", ["generateContent", "streamGenerateContent"])
async def test_a_tool_loop_continues_the_exact_ids(desk: MakeDesk, method: str):
    made = desk([f"So: {CALL}", "2"], tools=True)
    session = await made.open()
    chat = list(HI)
    for _ in range(2):
        answer = await post(made, session, method, contents=chat, tools=TOOLS)
        assert answer.status_code == 200
        lines = answer.text.split("\n\n") if method.startswith("stream") else [f"data: {answer.text}"]
        bodies = [json.loads(line.removeprefix("data: ")) for line in lines if line]
        parts = [part for body in bodies for part in body["candidates"][0]["content"]["parts"]]
        chat.append({"role": "model", "parts": parts})
        calls = [part["functionCall"] for part in parts if "functionCall" in part]
        results = [{"functionResponse": {**call, "response": {"output": "2"}}} for call in calls]
        chat.append({"role": "user", "parts": results})
    one, two = made.turns()
    assert bodies[-1]["candidates"][0]["finishReason"] == "STOP"
    assert bodies[-1]["usageMetadata"]["promptTokenCount"] == len(two.prompt_ids)
    assert "".join(part.get("text", "") for part in parts) == "2"
    assert two.prompt_ids[: len(one.prompt_ids + one.reply_ids)] == one.prompt_ids + one.reply_ids
    assert (two.link, two.info["api"]) == ("append", "gemini")


async def test_tokens_are_counted_and_errors_are_googles(desk: MakeDesk):
    made = desk(["x"])
    session = await made.open()
    counted = (await post(made, session, "countTokens")).json()
    wrong = await post(made, session, contents=[])
    assert (wrong.status_code, wrong.json()["error"]["status"]) == (400, "INVALID_ARGUMENT")
    assert made.turns() == ()
    await post(made, session)
    assert counted == {"totalTokens": len(made.turns()[0].prompt_ids)}
