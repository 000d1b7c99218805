"""A gateway that starts again: rollouts go on where they were, and a reply that was kept is not sampled twice."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from whippletree.engine.scripted import ScriptedEngine
from whippletree.gateway.app import create_app
from whippletree.gateway.budget import Budget
from whippletree.gateway.render import Renderer
from whippletree.gateway.sessions import Sessions
from whippletree.gateway.store import Store
from whippletree.models.tiny import tiny_tokenizer
from whippletree.types import Task

TOKENIZER = tiny_tokenizer()
HI = [{"role": "user", "content": "hi"}]


class Process:
    """All that one process of a gateway holds; another one of the same path shares the file alone."""

    def __init__(self, path: Path, *replies: str) -> None:
        self.store = Store(path)
        self.sessions = Sessions(self.store)
        self.engine = ScriptedEngine(replies, TOKENIZER)
        self.app: FastAPI = create_app(
            self.engine, Renderer(TOKENIZER), self.store, self.sessions, model_name="tiny", hold=0.1
        )

    async def open(self, **settings: Any) -> str:
        session = await self.sessions.open("r", group="g", task=Task(id="t"), stream="s", **settings)
        return session.secret

    async def ask(
        self, secret: str, messages: list[Any] = HI, *, key: str = "", stream: bool = False
    ) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://gateway") as client:
            sent = {"authorization": f"Bearer {secret}"} | ({"idempotency-key": key} if key else {})
            body = {"messages": messages, "stream": stream}
            return await client.post("/v1/chat/completions", headers=sent, json=body)


def said(answer: httpx.Response) -> Any:
    return answer.json()["choices"][0]["message"]


async def test_a_rollout_goes_on_with_the_same_secret_and_the_same_tree(tmp_path: Path):
    first = Process(tmp_path / "t.sqlite", "user")
    secret = await first.open()
    reply = said(await first.ask(secret))
    first.store.close()
    second = Process(tmp_path / "t.sqlite", "again")
    assert (await second.ask(secret, [*HI, reply, {"role": "user", "content": "more"}])).status_code == 200
    one, two = second.store.turns("r")
    assert two.prompt_ids[: len(one.prompt_ids + one.reply_ids)] == one.prompt_ids + one.reply_ids
    assert (two.link, two.info["parent"], two.thread) == ("append", one.id, "main")


async def test_the_retry_of_a_reply_that_never_arrived_gets_that_reply(tmp_path: Path):
    first = Process(tmp_path / "t.sqlite", "kept")
    secret = await first.open()
    await first.ask(secret)
    first.store.close()
    # as if the process had been killed between the commit and the last byte
    with closing(sqlite3.connect(tmp_path / "t.sqlite", isolation_level=None)) as file:
        file.execute("UPDATE turns SET delivered = 0")
    second = Process(tmp_path / "t.sqlite", "sampled anew")
    answer = await second.ask(secret)
    assert said(answer)["content"] == "kept"
    assert (len(second.store.turns("r")), len(second.engine.calls)) == (1, 0)
    # once it has arrived, the same request is another sample of the step
    again = await second.ask(secret)
    assert said(again)["content"] == "sampled anew"
    kept, sibling = second.store.turns("r")
    assert sibling.info["sibling"] == [kept.id]


async def test_lost_samples_of_one_step_are_each_given_once(tmp_path: Path):
    first = Process(tmp_path / "t.sqlite", "one", "two", "three")
    secret = await first.open()
    await asyncio.gather(*(first.ask(secret) for _ in range(3)))
    first.store.close()
    with closing(sqlite3.connect(tmp_path / "t.sqlite", isolation_level=None)) as file:
        file.execute("UPDATE turns SET delivered = number = 2")
    second = Process(tmp_path / "t.sqlite", "sampled anew")
    again = await asyncio.gather(second.ask(secret), second.ask(secret))
    kept = [turn.reply["message"]["content"] for turn in second.store.turns("r")]
    assert sorted(said(answer)["content"] for answer in again) == sorted(kept[:2])
    assert (len(kept), len(second.engine.calls)) == (3, 0)


async def test_a_client_key_for_its_request_gets_one_reply(tmp_path: Path):
    gateway = Process(tmp_path / "t.sqlite", "one", "two")
    secret = await gateway.open()
    first, second = await gateway.ask(secret, key="a"), await gateway.ask(secret, key="a")
    assert said(first) == said(second)
    assert first.json()["id"] == second.json()["id"]
    other = await gateway.ask(secret, key="b")
    assert said(other)["content"] == "two"
    assert len(gateway.store.turns("r")) == 2


async def test_a_reply_that_is_given_again_has_its_id_in_a_stream_too(tmp_path: Path):
    gateway = Process(tmp_path / "t.sqlite", "one")
    secret = await gateway.open()
    whole = await gateway.ask(secret, key="a")
    streamed = await gateway.ask(secret, key="a", stream=True)
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.text.split("\n\n")[:-2]]
    assert {event["id"] for event in events} == {whole.json()["id"]}


async def test_what_was_spent_before_counts_after_a_restart(tmp_path: Path):
    first = Process(tmp_path / "t.sqlite", "one")
    secret = await first.open(budget=Budget(turns=2))
    await first.ask(secret)
    first.store.close()
    second = Process(tmp_path / "t.sqlite", "two", "three")
    answers = [await second.ask(secret), await second.ask(secret)]
    assert [answer.status_code for answer in answers] == [200, 400]
    assert answers[1].json()["error"]["code"] == "turn_limit_exceeded"


async def test_a_rollout_that_ended_is_unknown_after_a_restart(tmp_path: Path):
    first = Process(tmp_path / "t.sqlite", "one")
    secret = await first.open()
    await first.sessions.close("r")
    await first.store.end_rollout("r", ending="done")
    first.store.close()
    assert (await Process(tmp_path / "t.sqlite").ask(secret)).status_code == 401


async def test_while_weights_change_a_call_waits_and_is_then_told_to_come_again(tmp_path: Path):
    gateway = Process(tmp_path / "t.sqlite", "one")
    secret = await gateway.open()
    await gateway.engine.pause()
    refused = await gateway.ask(secret)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert gateway.store.turns("r") == ()
    gateway.engine.resume(1)
    assert (await gateway.ask(secret)).status_code == 200


async def test_the_last_token_of_a_budget_ends_the_reply_with_length(tmp_path: Path):
    gateway = Process(tmp_path / "t.sqlite", "a long reply", "more")
    secret = await gateway.open(budget=Budget(tokens=4))
    answer = await gateway.ask(secret)
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert (await gateway.ask(secret)).json()["error"]["code"] == "token_limit_exceeded"
