"""Where the time of a call goes: `python -m benchmarks.gateway.stages [--sampler PATH TO py-spy]`.

py-spy looks at the gateway's process from outside, 500 times a second, while 32 agents call, and sees which threads
compute. A look belongs to the first stage of `STAGES` that has a function on the stack; its share times the processor
time of a call gives microseconds. Threads in `WAITS` wait for orders, for writes or for the disk, and are not counted.
Beside the stages stand floors, measured in the same minutes: the same server with an application that answers at once,
and the commit of one row with a flush to disk.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gateway.client import Connection
from benchmarks.gateway.load import Gateway, Json, cpu_seconds, run
from benchmarks.step import machine
from benchmarks.worker import Worker
from whippletree.gateway.server import serve
from whippletree.gateway.sqlite import File

HERE = Path(__file__).parent.parent
SESSIONS, CALLS, RATE = 32, 20, 500

# the first that fits a stack is its stage: (what, a function of the stack, with its file where the name is common)
STAGES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("store: rows out of turns (differences, zlib, JSON)", ("Recent.row",)),
    ("store: SQL, on its own thread", ("Store._write_all",)),
    ("engine (scripted: the words to ids, its pauses)", ("ScriptedEngine.sample", "Upstream.sample", "Paced.sample")),
    ("prompt: the chat template", ("Renderer._raw",)),
    ("prompt: text to ids", ("Renderer._tokenized", "Renderer._ids")),
    ("prompt: messages cleaned, hashed and looked up", ("Renderer.prompt",)),
    ("events: JSON of each", ("CallResponse._hear", "Chunks.ends")),
    ("ids to text", ("Choice.show",)),
    ("answer: sockets, HTTP (uvicorn, h11)", ("RequestResponseCycle.send",)),
    ("step, thread and turn; handed to the store", ("Call._keep", "Call._note", "Steps.begun", "step_of", "Call._run")),
    ("sampling loop, tasks", ("Call._sample", "Call.run")),
    ("answer: through the app's layers", ("CallResponse.__call__",)),
    ("request: JSON and fields", ("create_app.<locals>.called",)),
    ("request: sockets, HTTP (uvicorn, h11)", ("H11Protocol.data_received", "HttpToolsProtocol.data_received")),
    ("routing and layers of the app (FastAPI, Starlette)", ("RequestResponseCycle.run_asgi",)),
    ("event loop", ("BaseEventLoop._run_once",)),
)

WAITS = {"_WorkItem.run", "_worker", "Store._write_all", "Store._commit"}  # innermost: in C, below them


def shares(stacks: Iterable[str]) -> dict[str, float]:
    """Share of each stage in py-spy's raw lines, `outermost;...;innermost count`; what fits no stage is "other"."""
    found: collections.Counter[str] = collections.Counter()
    for row in stacks:
        stack, _, count = row.rstrip().rpartition(" ")
        names = [frame.partition(" (")[0] for frame in stack.split(";")]
        if names[-1] not in WAITS:
            found[next((stage for stage, marks in STAGES if set(names) & set(marks)), "other")] += int(count)
    return {stage: count / found.total() for stage, count in found.most_common()}


def load(gateway: Gateway, *, name: str, seconds: float, stream: bool) -> tuple[int, float]:
    """Batches of sessions for so long: (calls, processor seconds of the gateway)."""
    done, number, cpu = 0, 0, 0.0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with gateway.opened([f"{name} {number}, {n}" for n in range(SESSIONS)]) as routes:
            before = cpu_seconds(gateway.process.pid)
            done += len(run(routes, calls=CALLS, stream=stream)[0])
            cpu += cpu_seconds(gateway.process.pid) - before
        number += 1
    return done, cpu


def measure(gateway: Gateway, sampler: str, folder: Path, *, stream: bool, seconds: float) -> Json:
    """Microseconds a call of each stage."""
    name = "stream" if stream else "whole"
    gateway.order(pace=0.0, streams=stream)
    load(gateway, name=f"{name}, warm", seconds=seconds / 4, stream=stream)
    done, cpu = load(gateway, name=f"{name}, unwatched", seconds=seconds, stream=stream)
    raw = folder / f"{name}.txt"
    command = [sampler, "record", "--rate", str(RATE), "--format", "raw", "--output", str(raw)]
    command += ["--duration", "3600", "--pid", str(gateway.process.pid)]
    watching = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    load(gateway, name=f"{name}, watched", seconds=seconds, stream=stream)
    watching.send_signal(signal.SIGINT)
    watching.wait(30)
    whole = cpu / done * 1e6
    with raw.open() as stacks:
        stages = {stage: share * whole for stage, share in shares(stacks).items()}
    return {"cpu_us_per_call": whole, "calls": done, "stages_us": stages}


def floors(folder: Path, bodies: int = 2000) -> Json:
    """Microseconds: an application that answers at once, streamed in thirteen events and not; a row and its flush."""
    found = {}
    for name, events in (("answer at once", 1), ("thirteen events at once", 13)):
        with Worker([sys.executable, "-m", "benchmarks.gateway.stages", "--floor", str(events)]) as worker:
            found[name] = _calls(worker, bodies)
    db = File.at(folder / "floor.sqlite")
    db.execute("CREATE TABLE t(a BLOB)")
    times = []
    for _ in range(200):
        began = time.perf_counter()
        db.begin()
        db.execute("INSERT INTO t VALUES (?)", (b"x" * 1500,))
        db.commit()
        times.append(time.perf_counter() - began)
    db.close()
    return found | {"commit with its flush": statistics.median(times) * 1e6}


def _calls(worker: Worker, bodies: int) -> float:
    async def everybody() -> None:
        connections = await asyncio.gather(*(Connection(worker.about["url"]).opened() for _ in range(SESSIONS)))
        await asyncio.gather(*(_many(connection, bodies // SESSIONS) for connection in connections))

    async def _many(connection: Connection, count: int) -> None:
        for _ in range(count):
            await connection.post(b'{"messages": "%s"}' % (b"x" * 1500))

    asyncio.run(everybody())
    before = cpu_seconds(worker.process.pid)
    asyncio.run(everybody())
    return (cpu_seconds(worker.process.pid) - before) / (bodies // SESSIONS * SESSIONS) * 1e6


async def floor(events: int) -> None:
    """Serve an application that reads a request and answers with so many pieces."""
    head = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send(head)
        for number in range(events):
            await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": b"x" * 200, "more_body": number < events - 1})

    async with serve(app) as url:
        print(json.dumps({"ready": True, "url": url}), flush=True)
        await asyncio.to_thread(sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sampler", default="py-spy", help="the program py-spy (pip install py-spy)")
    parser.add_argument("--seconds", type=float, default=20, help="of load, for each of two measurements")
    parser.add_argument("--floor", type=int, help="be the server of a floor, with so many pieces an answer")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gateway-stages.json")
    options = parser.parse_args()
    if options.floor:
        asyncio.run(floor(options.floor))
        return
    result: Json = {"machine": machine()}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        result["floors_us"] = floors(folder)
        with Gateway(folder / "turns.sqlite") as gateway:
            result["versions"] = gateway.about["versions"]
            for name, stream in (("whole", False), ("stream", True)):
                result[name] = measure(gateway, options.sampler, folder, stream=stream, seconds=options.seconds)
                print(f"{name}: {result[name]['cpu_us_per_call']:.0f} us of processor a call")
                for stage, us in result[name]["stages_us"].items():
                    print(f"  {us:6.0f}  {stage}", flush=True)
    print("floors, us:", {name: round(us) for name, us in result["floors_us"].items()})
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
