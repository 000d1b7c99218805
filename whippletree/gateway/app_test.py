"""The HTTP side without a network: replies in one piece, errors, limits, and what the store holds afterwards."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from whippletree.engine.scripted import scripted_logp
from whippletree.gateway.budget import Budget
from whippletree.gateway.choices import Choice
from whippletree.gateway.conftest import Desk, MakeDesk
from whippletree.gateway.sessions import SamplingDefaults
from whippletree.gateway.store import Store
from whippletree.gateway.text import ShownText
from whippletree.models.tiny import tiny_tokenizer
from whippletree.types import Piece

TOKENIZER = tiny_tokenizer()
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


async def test_a_reply_holds_what_was_sampled(desk: MakeDesk):
    made = desk(["hello"])
    answer = await made.ask(await made.open(), "hi", return_token_ids=True, logprobs=True)
    reply = answer.json()
    sampled = [*ids_of("hello"), TOKENIZER.eos_token_id]
    prompt = ids_of("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    (choice,) = reply["choices"]
    assert (answer.status_code, reply["object"], reply["model"]) == (200, "chat.completion", "m")
    assert (choice["message"], choice["finish_reason"]) == ({"role": "assistant", "content": "hello"}, "stop")
    assert (reply["prompt_token_ids"], choice["token_ids"]) == (prompt, sampled)
    logps = [scripted_logp(token, place) for place, token in enumerate(sampled)]
    assert [row["logprob"] for row in choice["logprobs"]["content"]] == logps
    assert [row["token"] for row in choice["logprobs"]["content"]] == [*"hello", "<|im_end|>"]
    usage = {"prompt_tokens": len(prompt), "completion_tokens": 6, "total_tokens": len(prompt) + 6}
    assert reply["usage"] == usage


async def test_token_ids_and_log_probs_stay_out_unless_asked_for(desk: MakeDesk):
    made = desk(["hello"])
    reply = (await made.ask(await made.open(), "hi")).json()
    assert "prompt_token_ids" not in reply
    assert reply["choices"][0] == {
        "index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop", "logprobs": None,
    }  # fmt: skip


async def test_the_store_holds_the_turn_as_it_was(desk: MakeDesk):
    made = desk(["hello"], version=4)
    answer = await made.ask(await made.open(), "hi", temperature=0.5, top_p=0.9, user="u")
    (turn,) = made.turns()
    assert turn.prompt_ids == made.engine.calls[0][0]
    assert turn.reply_ids == (*ids_of("hello"), TOKENIZER.eos_token_id)
    assert turn.reply_logps == tuple(scripted_logp(token, place) for place, token in enumerate(turn.reply_ids))
    assert (turn.version, turn.temperature, turn.top_p, turn.finish_reason) == (4, 0.5, 0.9, "stop")
    assert turn.request == json.loads(answer.request.content)
    assert turn.reply["message"] == answer.json()["choices"][0]["message"]
    assert turn.reply["id"] == answer.json()["id"]


async def test_the_next_turn_extends_the_exact_ids_of_the_one_before(desk: MakeDesk):
    made = desk(["user", "again"])
    session = await made.open()
    first = (await made.ask(session, "hi")).json()["choices"][0]["message"]
    await made.ask(session, "hi", first, "more")
    one, two = made.turns()
    assert two.prompt_ids[: len(one.prompt_ids + one.reply_ids)] == one.prompt_ids + one.reply_ids


async def test_another_rollout_cannot_continue_this_one(desk: MakeDesk):
    made = desk(lambda _: "one, two")
    one, two = await made.open("1"), await made.open("2")
    await made.ask(one, "x", stop=", t")  # sampled "one, t", shown "one"
    said = {"role": "assistant", "content": "one"}
    await made.ask(one, "x", said, "more")
    await made.ask(two, "x", said, "more")
    assert "assistant\none, t<|im_end|>" in made.engine.prompts[1]
    assert "assistant\none<|im_end|>" in made.engine.prompts[2]


async def test_each_of_n_choices_is_a_turn_with_the_same_prompt(desk: MakeDesk):
    made = desk(["a", "b", "c"])
    reply = (await made.ask(await made.open(), "hi", n=3)).json()
    assert sorted(choice["message"]["content"] for choice in reply["choices"]) == ["a", "b", "c"]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert reply["usage"]["completion_tokens"] == 6
    turns = made.turns()
    assert len({turn.prompt_ids for turn in turns}) == 1
    assert len({turn.id for turn in turns}) == 3
    assert [turn.reply["message"] for turn in turns] == [choice["message"] for choice in reply["choices"]]
    assert len({sampling.stream for _, sampling in made.engine.calls}) == 3


async def test_defaults_come_from_the_rollout_and_the_window(desk: MakeDesk):
    made = desk(lambda _: "x", context=100)
    await made.ask(await made.open("plain"), "hi")
    settings = SamplingDefaults(temperature=0.25, max_tokens=5)
    session = await made.open("set", defaults=settings)
    await made.ask(session, "hi")
    await made.ask(session, "hi", max_tokens=3, temperature=0)
    await made.ask(session, "hi", max_completion_tokens=128_000)
    prompt = len(made.engine.calls[0][0])
    samplings = [(sampling.max_tokens, sampling.temperature) for _, sampling in made.engine.calls]
    assert samplings == [(100 - prompt, 1.0), (5, 0.25), (3, 0.0), (100 - prompt, 0.25)]


async def test_a_stop_string_ends_sampling_and_is_not_shown(desk: MakeDesk):
    made = desk(["one, two, three, four"])
    reply = (await made.ask(await made.open(), "hi", stop=[", t"])).json()
    assert reply["choices"][0]["message"]["content"] == "one"
    assert reply["choices"][0]["finish_reason"] == "stop"
    (turn,) = made.turns()
    assert TOKENIZER.decode(list(turn.reply_ids)) == "one, t"  # what was sampled, no more
    assert reply["usage"]["completion_tokens"] == len(turn.reply_ids)
    assert made.engine.closed == 1


async def test_a_cut_reply_says_length(desk: MakeDesk):
    made = desk(["hello"])
    reply = (await made.ask(await made.open(), "hi", max_tokens=2)).json()
    assert reply["choices"][0]["finish_reason"] == "length"
    assert made.turns()[0].finish_reason == "length"


async def test_random_numbers_follow_rollout_prompt_and_occurrence_alone(desk: MakeDesk):
    made = desk(lambda prompt: "x")
    one, two = await made.open("1"), await made.open("2")
    for session, text in ((one, "a"), (two, "a"), (one, "b"), (one, "a")):
        await made.ask(session, text)
    first = [sampling.stream for _, sampling in made.engine.calls]
    again = desk(lambda prompt: "x")
    one, two = await again.open("1"), await again.open("2")
    for session, text in ((one, "b"), (one, "a"), (one, "a"), (two, "a")):  # another order
        await again.ask(session, text)
    second = [sampling.stream for _, sampling in again.engine.calls]
    assert len(set(first)) == 4
    assert second == [first[2], first[0], first[3], first[1]]
    assert first[0].startswith("seed/1/") and first[0].endswith("/0") and first[3].endswith("/1")


async def test_a_seed_names_the_random_numbers_alone(desk: MakeDesk):
    made = desk(lambda prompt: "x")
    await made.ask(await made.open("1"), "a", seed=7)
    await made.ask(await made.open("2"), "b", seed=7, n=2)
    assert [sampling.stream for _, sampling in made.engine.calls] == ["seed 7", "seed 7", "seed 7/1"]


async def test_a_call_is_structured_and_the_conversation_goes_on_from_it(desk: MakeDesk):
    made = desk([f"I add.\n{CALL}", "2"], tools=True)
    session = await made.open()
    (choice,) = (await made.ask(session, "hi", tools=TOOLS)).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert call["id"].isalnum() and len(call["id"]) <= 40
    answer = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
    await made.ask(session, "hi", choice["message"], answer, tools=TOOLS)
    one, two = made.turns()
    assert one.finish_reason == "tool_calls"
    assert two.prompt_ids[: len(one.prompt_ids + one.reply_ids)] == one.prompt_ids + one.reply_ids
    assert "<tool_response>\n2\n</tool_response>" in made.engine.prompts[1]
    assert '"name": "add"' in made.engine.prompts[0]


async def test_a_reply_that_only_calls_has_no_content(desk: MakeDesk):
    made = desk([CALL], tools=True)
    (choice,) = (await made.ask(await made.open(), "hi", tools=TOOLS)).json()["choices"]
    assert choice["message"]["content"] is None


async def test_a_call_cut_short_is_a_real_cut(desk: MakeDesk):
    made = desk([CALL], tools=True)
    (choice,) = (await made.ask(await made.open(), "hi", tools=TOOLS, max_tokens=20)).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"] == {"role": "assistant", "content": CALL[:23]}  # `tool` is one token of the 20


async def test_a_reply_cut_after_a_call_says_length(desk: MakeDesk):
    made = desk([f"{CALL} and more"], tools=True)
    fields = {"tools": TOOLS, "max_tokens": len(ids_of(CALL)) + 4}
    (choice,) = (await made.ask(await made.open(), "hi", **fields)).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["message"]["content"] == " and"


async def test_a_reply_that_saw_two_policies_counts_as_the_older_ones():
    choice = Choice(0, "", ShownText(TOKENIZER, stop=(), tools=None))
    for version in (3, 4):
        choice.take(Piece(ids=(1,), logps=(-1.0,), version=version))
    assert choice.version == 3


async def test_without_tools_a_call_is_text(desk: MakeDesk):
    made = desk([CALL, CALL], tools=True)
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        (choice,) = (await made.ask(await made.open(), "hi", **fields)).json()["choices"]
        assert choice["message"] == {"role": "assistant", "content": CALL}
        assert "<tools>" not in made.engine.prompts[-1]


# ---- refusals ----


async def error_of(made: Desk, *messages: Any, **fields: Any) -> tuple[int, dict[str, Any]]:
    answer = await made.ask(await made.open(), *messages, **fields)
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert made.turns() == ()
    return answer.status_code, error


async def test_bad_requests_are_400_in_openais_shape(desk: MakeDesk):
    made = desk(tools=False)
    for fields, param in (({"top_k": 5}, "top_k"), ({"temperature": -1}, "temperature")):
        status, error = await error_of(made, "hi", **fields)
        assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
    status, error = await error_of(made)  # no messages
    assert (status, error["param"]) == (400, "messages")
    assert made.engine.calls == []


async def test_malformed_json_is_400(desk: MakeDesk):
    made = desk()
    async with made.http(await made.open()) as client:
        answer = await client.post("/v1/chat/completions", content=b'{"messages": [')
    assert answer.status_code == 400
    assert "one JSON object" in answer.json()["error"]["message"]


async def test_an_over_long_prompt_is_400_and_says_so(desk: MakeDesk):
    made = desk(context=50)
    status, error = await error_of(made, "x" * 50)
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 50 tokens" in error["message"]
    session = await made.open()
    await made.ask(session, "x" * 50)
    assert "maximum context length" in session.truncated


async def test_an_empty_prompt_is_400(desk: MakeDesk, tmp_path: Path):
    made = desk()
    renderer_tokenizer = made.engine._tokenizer
    renderer_tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    status, error = await error_of(made, "")
    assert (status, error["param"]) == (400, "messages")
    assert "at least one token" in error["message"]


async def test_an_unknown_key_is_401(desk: MakeDesk):
    made = desk()
    await made.open()
    for path, headers in (
        ("/v1/chat/completions", {}),
        ("/v1/chat/completions", {"authorization": "Bearer wrong"}),
        ("/v1/chat/completions", {"x-api-key": "wrong"}),
        ("/r/wrong/v1/chat/completions", {}),
    ):
        async with made.http() as client:
            answer = await client.post(path, headers=headers, json={"messages": []})
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"


async def test_the_key_may_stand_in_either_header_or_in_the_path(desk: MakeDesk):
    made = desk(lambda _: "x")
    secret = (await made.open()).secret
    body = {"messages": [{"role": "user", "content": "hi"}]}
    async with made.http() as client:
        for path, headers in (
            ("/v1/chat/completions", {"authorization": f"bearer {secret}"}),
            ("/v1/chat/completions?beta=true", {"x-api-key": secret}),
            (f"/r/{secret}/v1/chat/completions", {"authorization": "Bearer some-other-key"}),
        ):
            assert (await client.post(path, headers=headers, json=body)).status_code == 200
    assert len(made.turns()) == 3


async def test_a_request_larger_than_the_limit_is_413_said_or_found(desk: MakeDesk):
    made = desk(app={"max_request_bytes": 100})
    asked = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal asked
        while True:
            asked += 1
            yield b"x" * 60

    async with made.http(await made.open()) as client:
        said = await client.post("/v1/chat/completions", content=b"x" * 101)
        found = await client.post("/v1/chat/completions", content=endless())
    assert [said.status_code, found.status_code] == [413, 413]
    assert said.json()["error"]["code"] == "request_too_large"
    assert asked == 2  # nothing was read past the limit


async def test_unknown_paths_and_methods_are_answered_at_once_in_openais_shape(desk: MakeDesk):
    made = desk()
    async with made.http() as client:
        assert (await client.head("/")).status_code == 200
        for method, path, status in (
            ("GET", "/v1/nothing", 404),
            ("POST", "/", 404),
            ("GET", "/v1/chat/completions", 405),
        ):
            answer = await client.request(method, path)
            assert answer.status_code == status
            assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_models_names_the_policy_to_those_with_a_key(desk: MakeDesk):
    made = desk()
    session = await made.open()
    async with made.http(session) as client:
        assert [row["id"] for row in (await client.get("/v1/models")).json()["data"]] == ["tiny"]
        assert (await client.get(f"/r/{session.secret}/v1/models")).status_code == 200
        assert (await client.get("/r/wrong/v1/models")).status_code == 401
    assert made.turns() == ()


async def test_an_engine_failure_is_500_and_the_rollout_knows_whose_fault_it_was(desk: MakeDesk):
    made = desk(lambda _: "hello", failure=RuntimeError("out of memory"), fail_after=2)
    session = await made.open()
    answer = await made.ask(session, "hi", n=2)
    assert answer.status_code == 500
    assert "the engine failed: RuntimeError: out of memory" in answer.json()["error"]["message"]
    assert session.failure == "the engine failed: RuntimeError: out of memory"
    assert made.turns() == ()


async def test_a_bug_of_the_gateway_is_500_in_openais_shape(desk: MakeDesk):
    made = desk([""], version=2**70)  # more than the store's integers
    transport = httpx.ASGITransport(made.app, raise_app_exceptions=False)
    session = await made.open()
    async with httpx.AsyncClient(transport=transport, base_url=session.base_url("http://gateway")) as client:
        answer = await client.post("/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
    assert answer.status_code == 500
    assert "the gateway failed: OverflowError" in answer.json()["error"]["message"]


async def test_a_retry_of_a_failed_call_samples_what_that_would_have(desk: MakeDesk):
    made = desk(lambda _: "x", failure=RuntimeError("once"))
    session = await made.open()
    await made.ask(session, "hi")
    made.engine.failure = None
    await made.ask(session, "hi")
    failed, retry = (sampling.stream for _, sampling in made.engine.calls)
    assert failed == retry


async def test_a_full_disk_is_503_and_the_next_call_works_once_there_is_space(desk: MakeDesk):
    made = desk(lambda prompt: "x" * 1800 if "long" in prompt else "x", store=lambda path: Store(path, max_pages=20))
    session = await made.open()
    # 5 * 1800 tokens of 12 bytes are more than 20 pages of 4 kB
    answer = await made.ask(session, "long", n=5)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert "database or disk is full" in answer.json()["error"]["message"]
    assert "could not be kept" in session.failure
    assert made.turns() == ()
    assert (await made.ask(session, "short")).status_code == 200
    assert len(made.turns()) == 1


async def test_a_rollout_has_a_limit_of_turns(desk: MakeDesk):
    made = desk(lambda _: "x")
    session = await made.open(budget=Budget(turns=2))
    answers = [(await made.ask(session, "hi")).status_code for _ in range(3)]
    assert answers == [200, 200, 400]


async def test_calls_of_one_rollout_may_come_in_parallel(desk: MakeDesk):
    made = desk(lambda prompt: prompt.split("\n")[1], delay=0.001)
    session = await made.open()
    answers = await asyncio.gather(*(made.ask(session, f"ask {n}") for n in range(8)))
    texts = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
    assert texts == [f"ask {n}<|im_end|>".removesuffix("<|im_end|>") for n in range(8)]
    assert len(made.turns()) == 8
    assert not any(math.isnan(logp) for turn in made.turns() for logp in turn.reply_logps)


async def test_a_new_weight_version_is_that_of_the_turns_sampled_after_it(desk: MakeDesk):
    made = desk(lambda _: "x")
    session = await made.open()
    await made.ask(session, "hi")
    await made.engine.pause()
    made.engine.resume(5)
    await made.ask(session, "hi")
    assert [turn.version for turn in made.turns()] == [0, 5]
