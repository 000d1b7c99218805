"""A gateway with a scripted engine as a process of its own, which a test may kill, and clients for each of its APIs."""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import random
import re
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from whippletree.engine.scripted import ScriptedEngine
from whippletree.gateway.app import create_app
from whippletree.gateway.render import Renderer
from whippletree.gateway.server import serve
from whippletree.gateway.sessions import Sessions
from whippletree.gateway.store import Store
from whippletree.models.tiny import tiny_tokenizer
from whippletree.types import Json

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.gateway.serving"])  # so that a start takes no imports
READY = 60.0  # seconds in which a gateway answers after its start
Said = Sequence[tuple[str, str]]  # (role, text), as it was said


class Gateway:
    """A gateway on the store `folder/turns.sqlite`, always on the same port.

    No two of its replies are the same text, whatever is asked: each begins with the number of the start and a count.
    """

    def __init__(self, folder: Path) -> None:
        self.store, self.log = folder / "turns.sqlite", folder / "log"
        self.starts = 0
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: Any = None

    async def start(self) -> None:
        """Start it; returns when it answers."""
        self.starts += 1
        self._process = FORKS.Process(target=_run, args=(self.store, self.log, self.port, self.starts))
        self._process.start()
        async with asyncio.timeout(READY), httpx.AsyncClient() as client:
            while True:
                assert self._process.is_alive(), self.log.read_text()
                try:
                    await client.get(f"{self.url}/healthz")
                    return
                except httpx.TransportError:
                    await asyncio.sleep(0.01)

    def kill(self) -> None:
        """End it with SIGKILL, if it runs."""
        if self._process is not None and self._process.is_alive():
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.join()

    def end(self) -> None:
        """End it in good order."""
        os.kill(self._process.pid, signal.SIGTERM)
        self._process.join()
        assert self._process.exitcode == 0, self.log.read_text()


def _run(store: Path, log: Path, port: int, start: int) -> None:
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    asyncio.run(_serve(store, port, start))


async def _serve(path: Path, port: int, start: int) -> None:
    stop, count, chance = asyncio.Event(), itertools.count(), random.Random(start)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    tokenizer, store = tiny_tokenizer(), Store(path)

    def reply(prompt: str) -> str:
        return f"{start}.{next(count)}." + " la" * chance.randrange(40)

    engine = ScriptedEngine(reply, tokenizer, delay=0.005, piece=16)
    app = create_app(engine, Renderer(tokenizer), store, Sessions(store), model_name="tiny")
    async with serve(app, port=port):
        await stop.wait()
    store.close()


# ---- the APIs, from a client's side ----


def request(api: str, said: Said, *, stream: bool) -> tuple[str, Json]:
    """(path after the server's URL, body) of a call with this conversation."""
    chat = [{"role": role, "content": text} for role, text in said]
    if api == "chat":
        return "/v1/chat/completions", {"model": "m", "messages": chat, "stream": stream}
    if api == "responses":
        return "/v1/responses", {"model": "m", "input": chat, "stream": stream}
    if api == "messages":
        return "/v1/messages", {"model": "m", "messages": chat, "stream": stream, "max_tokens": 500}
    named = {"user": "user", "assistant": "model"}
    contents = [{"role": named[role], "parts": [{"text": text}]} for role, text in said]
    return f"/v1beta/models/m:{'streamGenerateContent' if stream else 'generateContent'}", {"contents": contents}


def reply_of(api: str, body: str, *, stream: bool) -> tuple[str, str] | None:
    """(id of the call, text) of a reply; `None` where a stream has no end."""
    found = _streamed(api, body) if stream else _whole(api, json.loads(body))
    return found and (re.split("[-_]", found[0])[-1], found[1])


def _whole(api: str, body: Json) -> tuple[str, str]:
    if api == "chat":
        return body["id"], body["choices"][0]["message"]["content"]
    if api == "responses":
        return body["id"], body["output"][0]["content"][0]["text"]
    if api == "messages":
        return body["id"], body["content"][0]["text"]
    return body["responseId"], body["candidates"][0]["content"]["parts"][0]["text"]


def _streamed(api: str, body: str) -> tuple[str, str] | None:
    ended = {
        "chat": "[DONE]",
        "responses": '"response.completed"',
        "messages": '"message_stop"',
        "gemini": '"finishReason":"STOP"',
    }
    whole, _, rest = body.rpartition("\n\n")  # the last event may be cut
    datas = re.findall(r"^data: (.*)$", whole, re.MULTILINE)
    if rest or not datas or ended[api] not in datas[-1]:
        return None
    events = [json.loads(data) for data in datas if data != "[DONE]"]
    if api == "chat":
        return events[0]["id"], "".join(e["choices"][0]["delta"].get("content", "") for e in events)
    if api == "responses":
        return _whole(api, events[-1]["response"])
    if api == "messages":
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        return events[0]["message"]["id"], "".join(delta["text"] for delta in deltas)
    parts = [part for event in events for part in event["candidates"][0]["content"]["parts"]]
    return events[0]["responseId"], "".join(part["text"] for part in parts)
