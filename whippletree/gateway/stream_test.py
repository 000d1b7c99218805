"""The OpenAI SDK against a real server on loopback: streaming, tools, errors, and clients that go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from whippletree.gateway.conftest import Desk, MakeDesk
from whippletree.gateway.server import serve
from whippletree.gateway.sessions import Session
from whippletree.gateway.store import Store
from whippletree.types import Turn

HI: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@asynccontextmanager
async def sdk(made: Desk, session: Session) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serve(made.app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=session.secret, max_retries=0) as client,
    ):
        yield client


async def events_of(made: Desk, session: Session, **fields: Any) -> list[Any]:
    """The parsed events of one streamed reply, the end mark as it is."""
    async with serve(made.app) as url, httpx.AsyncClient() as client:
        body = {"messages": HI, "stream": True, **fields}
        answer = await client.post(f"{session.base_url(url)}/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def until_kept(made: Desk, count: int) -> tuple[Turn, ...]:
    async with asyncio.timeout(10):
        while len(made.turns()) < count:
            await asyncio.sleep(0.005)
    return made.turns()


async def test_a_streamed_reply_in_the_order_clients_rely_on(desk: MakeDesk):
    made = desk(["hey"])
    events = await events_of(made, await made.open(), stream_options={"include_usage": True})
    first, *middle, finish, usage, done = events
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [event["choices"][0]["delta"]["content"] for event in middle] == ["h", "e", "y"]
    assert (finish["choices"][0]["delta"], finish["choices"][0]["finish_reason"]) == ({}, "stop")
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 4)
    assert done == "[DONE]"
    assert sum(e["choices"][0]["finish_reason"] is not None for e in [first, *middle, finish]) == 1
    assert {event["object"] for event in events[:-1]} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events[:-1]}) == 1


async def test_usage_comes_only_when_asked_for(desk: MakeDesk):
    made = desk(["hey"])
    events = await events_of(made, await made.open())
    assert not any("usage" in event for event in events[:-1])


async def test_streamed_ids_and_log_probs_are_those_of_the_turn(desk: MakeDesk):
    made = desk(["a STOP b"], piece=3)
    session = await made.open()
    events = await events_of(made, session, return_token_ids=True, logprobs=True, stop="STOP")
    (turn,) = made.turns()
    choices = [event["choices"][0] for event in events[1:-1]]
    assert events[0]["prompt_token_ids"] == list(turn.prompt_ids)
    assert tuple(token for choice in choices for token in choice["token_ids"]) == turn.reply_ids
    rows = [row for choice in choices for row in choice["logprobs"]["content"]]
    assert tuple(row["logprob"] for row in rows) == turn.reply_logps
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "a "


async def test_a_stream_without_text_is_still_a_stream(desk: MakeDesk):
    made = desk([""])
    events = await events_of(made, await made.open())
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None, "stop"]
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"


async def test_the_sdk_reads_streams_and_whole_replies_alike(desk: MakeDesk):
    made = desk(["hello there"] * 2)
    async with sdk(made, await made.open()) as client:
        whole = await client.chat.completions.create(model="m", messages=HI)
        async with client.chat.completions.stream(model="m", messages=HI) as stream:
            streamed = await stream.get_final_completion()
    assert whole.choices[0].message.content == streamed.choices[0].message.content == "hello there"
    assert whole.choices[0].finish_reason == streamed.choices[0].finish_reason == "stop"
    assert whole.usage is not None and whole.usage.completion_tokens == 12
    assert [turn.reply["message"] for turn in made.turns()] == [{"role": "assistant", "content": "hello there"}] * 2


@pytest.mark.parametrize("stream", [True, False])
async def test_the_sdk_runs_a_tool_loop(desk: MakeDesk, stream: bool):
    made = desk([f"So:\n{CALL}\n{CALL}", "done"], tools=True)
    async with sdk(made, await made.open()) as client:
        message: Any
        if stream:
            async with client.chat.completions.stream(model="m", messages=HI, tools=TOOLS) as events:
                message = (await events.get_final_completion()).choices[0].message
        else:
            message = (await client.chat.completions.create(model="m", messages=HI, tools=TOOLS)).choices[0].message
        assert message.tool_calls is not None
        one, two = message.tool_calls
        assert (one.function.name, one.function.arguments) == ("add", '{"a": 1}')
        assert one.id != two.id
        answers = [{"role": "tool", "tool_call_id": call.id, "content": "2"} for call in (two, one)]  # any order
        chat: Any = [*HI, message.model_dump(exclude_none=True), *answers]
        last = await client.chat.completions.create(model="m", messages=chat, tools=TOOLS)
    assert last.choices[0].message.content == "done"
    first, second = made.turns()
    assert second.prompt_ids[: len(first.prompt_ids + first.reply_ids)] == first.prompt_ids + first.reply_ids


async def test_each_streamed_call_has_its_own_index(desk: MakeDesk):
    made = desk([f"So:{CALL}{CALL}"], tools=True)
    events = await events_of(made, await made.open(), tools=TOOLS)
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0, 1]
    assert "".join(delta.get("content") or "" for delta in deltas) == "So:"
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"


async def test_several_choices_stream_side_by_side(desk: MakeDesk):
    made = desk(["aaa", "bb"])
    events = await events_of(made, await made.open(), n=2)
    texts, finishes = {0: "", 1: ""}, []
    for event in events[:-1]:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        finishes += [choice["index"]] if choice["finish_reason"] else []
    assert sorted(texts.values()) == ["aaa", "bb"]
    assert sorted(finishes) == [0, 1]


class HeldStore(Store):
    """Keeps nothing until it is let go."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def add_turns(self, rollout_id: str, attempt: int, turns: Sequence[Turn]) -> None:
        self.asked.set()
        await self.go.wait()
        await super().add_turns(rollout_id, attempt, turns)


async def test_the_last_byte_leaves_only_when_the_turn_is_on_disk(desk: MakeDesk):
    made = desk(["hey"], store=HeldStore)
    assert isinstance(made.store, HeldStore)
    session = await made.open()
    seen = ""
    async with serve(made.app) as url, httpx.AsyncClient() as client:
        body = {"messages": HI, "stream": True}
        async with client.stream("POST", f"{session.base_url(url)}/chat/completions", json=body) as answer:
            async for text in answer.aiter_text():
                seen += text
                if '"y"' in seen and not made.store.go.is_set():  # all of the text is here
                    await made.store.asked.wait()
                    assert '"stop"' not in seen and "[DONE]" not in seen
                    made.store.go.set()
                if "[DONE]" in text:
                    assert len(made.turns()) == 1
    assert "[DONE]" in seen


async def test_a_whole_reply_waits_for_the_disk_too(desk: MakeDesk):
    made = desk(["hey"], store=HeldStore)
    assert isinstance(made.store, HeldStore)
    asking = asyncio.create_task(made.ask(await made.open(), "hi"))
    await made.store.asked.wait()
    for _ in range(50):
        await asyncio.sleep(0)
    assert not asking.done()
    made.store.go.set()
    assert (await asking).status_code == 200
    assert len(made.turns()) == 1


async def test_a_client_that_goes_away_while_its_reply_is_being_kept_finds_that_reply_again(desk: MakeDesk):
    made = desk(["hey", "another"], store=HeldStore)
    assert isinstance(made.store, HeldStore)
    session = await made.open()
    async with serve(made.app) as url:
        async with httpx.AsyncClient() as client:
            asking = asyncio.create_task(
                client.post(f"{session.base_url(url)}/chat/completions", json={"messages": HI})
            )
            await made.store.asked.wait()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await asyncio.sleep(0.05)  # the server sees that nobody waits
        made.store.go.set()
        await until_kept(made, 1)
        await asyncio.sleep(0.05)  # and that its reply arrived nowhere
        again = await made.ask(session, "hi")
    assert again.json()["choices"][0]["message"]["content"] == "hey"
    assert (len(made.turns()), len(made.engine.calls)) == (1, 1)


async def test_events_are_sent_as_they_are_made(desk: MakeDesk):
    made = desk(["abc"], delay=0.01)
    session = await made.open()
    async with sdk(made, session) as client:
        stream = await client.chat.completions.create(model="m", messages=HI, stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content == "a":
                assert session.running  # the reply is still being sampled
                break
        await stream.close()


async def test_a_waiting_client_is_told_that_the_call_lives(desk: MakeDesk):
    made = desk(["ab"], delay=0.05, app={"keepalive": 0.01})
    events = await events_of(made, await made.open())
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert {} in deltas[:-1]
    assert "".join(delta.get("content") or "" for delta in deltas) == "ab"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_ends_sampling_and_leaves_an_abandoned_turn(desk: MakeDesk, stream: bool):
    made = desk(lambda _: "a long reply " * 100, delay=0.002)
    session = await made.open()
    async with serve(made.app) as url:
        async with httpx.AsyncClient() as client:
            body = {"messages": HI, "stream": stream}
            asking = asyncio.create_task(client.post(f"{session.base_url(url)}/chat/completions", json=body))
            while not made.engine._running:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.02)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        (turn,) = await until_kept(made, 1)
        assert made.engine.closed == 1
        assert turn.finish_reason == "abandoned"
        assert not turn.trainable
        assert 0 < len(turn.reply_ids) < 1301
        assert ("a long reply " * 100).startswith(turn.reply["message"]["content"])
        await made.ask(session, "hi", max_tokens=1)
    gone, retry = (sampling.stream for _, sampling in made.engine.calls)
    assert gone == retry  # the retry of that step, not a second step


async def test_an_engine_failure_in_mid_stream_is_an_error_event(desk: MakeDesk):
    made = desk(["hello"], failure=RuntimeError("broke"), fail_after=2)
    session = await made.open()
    async with sdk(made, session) as client:
        stream = await client.chat.completions.create(model="m", messages=HI, stream=True)
        with pytest.raises(openai.APIError, match="the engine failed: RuntimeError: broke"):
            async for _ in stream:
                pass
    assert session.failure
    assert made.turns() == ()


async def test_the_sdk_raises_the_error_of_each_status(desk: MakeDesk):
    made = desk(["x"], failure=RuntimeError("broke"), context=60)
    async with sdk(made, await made.open()) as client:
        create = client.chat.completions.create
        with pytest.raises(openai.BadRequestError, match="top_k"):
            await create(model="m", messages=HI, extra_body={"top_k": 3})
        with pytest.raises(openai.BadRequestError) as caught:
            await create(model="m", messages=[{"role": "user", "content": "x" * 60}])
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.InternalServerError, match="broke"):
            await create(model="m", messages=HI, stream=True)  # before the first event, so as a status
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").chat.completions.create(model="m", messages=HI)
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="m", input="hi")
