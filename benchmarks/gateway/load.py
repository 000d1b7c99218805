"""The load: sessions that call with a growing history, what each call took, and what the store has of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gateway.client import Connection
from benchmarks.gateway.upstream import TEXT
from benchmarks.worker import Worker
from whippletree.gateway.store import Store

Json = dict[str, Any]
SYSTEM = "You are a careful agent. Think, use what you were told, and answer in one short sentence."


@dataclass(frozen=True)
class Called:
    """One call of a session: seconds to the first and to the last byte, and the id that the reply had."""

    session: str
    number: int
    reply_id: str
    first: float
    last: float


@dataclass(frozen=True)
class Route:
    """Where a session calls, and by which key."""

    session: str
    url: str
    key: str = ""


class Gateway(Worker):
    """Our gateway as a process, see `benchmarks.gateway.serve`."""

    def __init__(self, store: Path, *options: str) -> None:
        super().__init__([sys.executable, "-m", "benchmarks.gateway.serve", "--store", str(store), *options])
        self.store = store

    def __enter__(self) -> Gateway:
        super().__enter__()
        return self

    def order(self, **order: Any) -> Json:
        """The answer to one order."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self._read()

    @contextlib.contextmanager
    def opened(self, names: Sequence[str]) -> Iterator[list[Route]]:
        """Routes of new sessions, ended as a run ends them."""
        url = f"{self.about['url']}/v1/chat/completions"
        yield [Route(n, url, key) for n, key in zip(names, self.order(open=list(names))["keys"], strict=True)]
        self.order(end=list(names))


def run(routes: Sequence[Route], *, calls: int, stream: bool, apart: float = 0.0) -> tuple[list[Called], float]:
    """All sessions at once, each call after the one before: (the calls, seconds of all together).

    The sessions begin one after another within `apart` seconds, as agents do that do not march in step.
    """
    return asyncio.run(everybody(routes, calls=calls, stream=stream, apart=apart))


async def everybody(
    routes: Sequence[Route], *, calls: int, stream: bool, apart: float = 0.0
) -> tuple[list[Called], float]:
    """What `run` gives, in a running loop."""
    connections = await asyncio.gather(*(Connection(route.url, key=route.key).opened() for route in routes))
    began = time.perf_counter()
    begins = [apart * number / len(routes) for number in range(len(routes))]
    places = zip(routes, connections, begins, strict=True)
    found = await asyncio.gather(*(_session(r, c, s, calls=calls, stream=stream) for r, c, s in places))
    seconds = time.perf_counter() - began
    for connection in connections:
        connection.close()
    return [call for session in found for call in session], seconds


async def _session(route: Route, connection: Connection, after: float, *, calls: int, stream: bool) -> list[Called]:
    """The calls of one agent, the first `after` so many seconds.

    Raises:
        ValueError: a reply is an error, is cut, or says something else than the engine said.
    """
    await asyncio.sleep(after)
    out: list[Called] = []
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"This is {route.session}. Begin."}]
    for number in range(calls):
        body = {"model": "dummy", "messages": messages, "stream": stream}
        answer = await connection.post(json.dumps(body).encode())
        reply = answer.reply()
        if (reply["text"], reply["finish_reason"], reply["done"]) != (TEXT, "stop", True):
            raise ValueError(f"each reply is {TEXT!r}, whole, but call {number} of {route.session} got {reply}")
        out.append(Called(route.session, number, reply["id"], answer.first, answer.last))
        messages.append({"role": "assistant", "content": reply["text"]})
        messages.append({"role": "user", "content": f"The tool said {number * 37 % 100}. What comes next?"})
    return out


def faults(store: Store, calls: Sequence[Called]) -> list[str]:
    """What the store has wrong of these calls: each is one turn, that of its reply, continuing the one before."""
    found: list[str] = []
    sessions: dict[str, list[Called]] = {}
    for call in calls:
        sessions.setdefault(call.session, []).append(call)
    for name, rows in sessions.items():
        turns = store.turns(name)
        asked, kept = [row.reply_id for row in rows], [f"chatcmpl-{turn.id.rpartition('.')[0]}" for turn in turns]
        if asked != kept:
            lost, more = len(set(asked) - set(kept)), len(kept) - len(set(kept) & set(asked))
            found.append(f"{name}: {len(asked)} calls, {len(kept)} turns, {lost} lost, {more} doubled or unknown")
        for before, turn in itertools.pairwise(turns):
            ids = before.prompt_ids + before.reply_ids
            if turn.link != "append" or turn.prompt_ids[: len(ids)] != ids:
                found.append(f"{name}: turn {turn.id} does not continue {before.id} token for token")
    return found


def spread(seconds: Sequence[float]) -> Json:
    """Percentiles in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50": cuts[49] * 1e3, "p90": cuts[89] * 1e3, "p99": cuts[98] * 1e3, "max": max(seconds) * 1e3}


def memory_mb(pid: int) -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has taken, all threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
