"""Our gateway as a process of its own, told by JSON lines what to do: `python -m benchmarks.gateway.serve --help`.

Each line on standard input is an order, answered by one line:

    {"open": [ids]}          sessions of these rollouts -> {"keys": [secrets]}
    {"end": [ids]}           close them and write their end, as a run does -> {"ended": how many}
    {"pace": s, "streams": bool}   how the engine answers from now on -> {"tokens": of each reply}

The engine is the scripted one (a token a piece, each `pace` seconds after the one before, by its own clock), or one
that asks an upstream over HTTP for the same words, `streams` or not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
from transformers import AutoTokenizer

from benchmarks.gateway.client import Connection
from benchmarks.gateway.upstream import TEXT
from whippletree.engine.scripted import ScriptedEngine
from whippletree.gateway.app import create_app
from whippletree.gateway.render import Renderer
from whippletree.gateway.server import serve
from whippletree.gateway.sessions import Sessions
from whippletree.gateway.store import Store
from whippletree.models.smollm2 import smollm2
from whippletree.models.tiny import tiny_tokenizer
from whippletree.types import Piece, Sampling, Task

CONTEXT = 8192
LIBRARIES = ("uvicorn", "h11", "httptools", "starlette", "fastapi", "httpx", "transformers", "tokenizers")


class Always(Sequence[str]):
    """A script that says the same for ever."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, place: Any) -> Any:
        return self._text


class Paced:
    """The scripted engine at the pace of a model: token k comes k * `pace` seconds after the call, whoever reads it."""

    def __init__(self, scripted: ScriptedEngine) -> None:
        self.scripted, self.pace = scripted, 0.0
        self.context, self.version, self.paused = scripted.context, scripted.version, False

    async def sample(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Piece, None]:
        """The reply's tokens, each at its time."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        async with aclosing(self.scripted.sample(prompt_ids, sampling)) as pieces:
            async for piece in pieces:
                due += self.pace
                if due > loop.time():
                    await asyncio.sleep(due - loop.time())
                yield piece

    async def pause(self) -> None:
        """Never asked for here."""

    def resume(self, version: int) -> None:
        """Never asked for here."""


class Upstream:
    """An engine that sends the prompt's ids to a server and takes ids and log-probabilities from its reply.

    It keeps as many connections open as ever were in use at once; with `httpx` that library does.
    """

    def __init__(self, url: str, tokenizer: Any, *, use_httpx: bool) -> None:
        self.context, self.version, self.paused = CONTEXT, 0, False
        self.streams = False
        self._url, self._httpx = f"{url}/v1/chat/completions", use_httpx
        self._client = httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None))
        self._free: list[Connection] = []
        self._ids = (*tokenizer.encode(TEXT, add_special_tokens=False), tokenizer.eos_token_id)

    async def sample(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Piece, None]:
        """The reply: whole, or a token at a time as its events arrive."""
        body = {"model": "dummy", "prompt": list(prompt_ids), "max_tokens": sampling.max_tokens, "stream": self.streams}
        place = 0
        for line in (await self._answer(json.dumps(body).encode())).split(b"\n\n"):
            row = line.removeprefix(b"data: ")
            if not row.startswith(b"{"):
                continue
            choice = json.loads(row)["choices"][0]
            last = choice["finish_reason"]
            if self.streams and not last and not choice["delta"].get("content"):
                continue
            ids = self._ids[place : None if last else place + 1]
            yield Piece(ids, (-0.5,) * len(ids), self.version, last)
            place += 1

    async def _answer(self, body: bytes) -> bytes:
        if self._httpx:
            head = {"content-type": "application/json"}
            return (await self._client.post(self._url, content=body, headers=head)).content
        connection = self._free.pop() if self._free else await Connection(self._url).opened()
        answer = await connection.post(body)
        self._free.append(connection)
        return answer.body

    async def close(self) -> None:
        """Hang up."""
        for connection in self._free:
            connection.close()
        await self._client.aclose()

    async def pause(self) -> None:
        """Never asked for here."""

    def resume(self, version: int) -> None:
        """Never asked for here."""


class Orders:
    """What standard input may ask for."""

    def __init__(self, engine: Paced | Upstream, store: Store, sessions: Sessions, *, tokens: int) -> None:
        self.engine, self.store, self.sessions, self.tokens = engine, store, sessions, tokens

    async def do(self, order: dict[str, Any]) -> dict[str, Any]:
        """The answer to an order."""
        if "open" in order:
            opened = [self.sessions.open(name, group=name, task=Task(id=name), stream=name) for name in order["open"]]
            return {"keys": [session.secret for session in await asyncio.gather(*opened)]}
        if "end" in order:
            await asyncio.gather(*map(self._end, order["end"]))
            if isinstance(self.engine, Paced):
                self.engine.scripted.calls.clear()  # what it was asked, for tests
            return {"ended": len(order["end"])}
        if isinstance(self.engine, Paced):
            self.engine.pace = order["pace"]
        else:
            self.engine.streams = order["streams"]
        return {"tokens": self.tokens}

    async def _end(self, name: str) -> None:
        await self.sessions.close(name)
        await self.store.end_rollout(name, ending="done")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True, help="the SQLite file to write")
    parser.add_argument(
        "--upstream", default="", help="URL of a server to sample from; without it the engine is scripted"
    )
    parser.add_argument("--httpx", action="store_true", help="ask the upstream with httpx")
    parser.add_argument("--tiny", action="store_true", help="a tokenizer of characters in place of the quickstart's")
    return parser.parse_args()


async def main() -> None:
    options = arguments()
    tokenizer: Any = tiny_tokenizer() if options.tiny else AutoTokenizer.from_pretrained(smollm2())
    store = Store(options.store)
    scripted = ScriptedEngine(Always(TEXT), tokenizer, context=CONTEXT)
    engine: Paced | Upstream = Paced(scripted)
    if options.upstream:
        engine = Upstream(options.upstream, tokenizer, use_httpx=options.httpx)
    sessions = Sessions(store)
    orders = Orders(engine, store, sessions, tokens=len(tokenizer.encode(TEXT, add_special_tokens=False)) + 1)
    app = create_app(engine, Renderer(tokenizer), store, sessions, model_name="dummy")
    async with serve(app) as url:
        print(json.dumps({"ready": True, "url": url, "versions": versions()}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await orders.do(json.loads(line))), flush=True)
    store.close()


def versions() -> dict[str, str]:
    """Of what stands between a request and the disk."""
    found = {"python": sys.version.split()[0]}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except ImportError:
            found[name] = "not installed"
    return found


if __name__ == "__main__":
    asyncio.run(main())
