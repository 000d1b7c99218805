"""Our gateway beside LiteLLM's proxy and Agent Lightning's server: `make bench-gateways`.

All of them stand before the same dummy upstream, and agents call them with the same short chats: 20 calls with a
growing history each, one agent or 32 at once, streamed and in one piece. The sides take turns, and who goes first
changes, so that what else slows the machine slows all of them; ratios are of medians over the rounds. Ours is measured

    over HTTP        its engine asks the upstream, as the others do: the side to compare
    with httpx       the same with the client library of Agent Lightning
    alone            its engine is the scripted one, in the process: no hop, as with the embedded engine
    no flush         over HTTP, with the store on a memory disk: what waiting for the disk costs

and keeps every call on disk before it answers; the others keep theirs in memory, or nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gateway.load import Gateway, Json, cpu_seconds, faults, run, spread
from benchmarks.gateway.rivals import AgentLightning, LiteLLM, Ours, Side
from benchmarks.step import machine
from benchmarks.worker import Worker
from whippletree.gateway.store import Store

HERE = Path(__file__).parent.parent
MEMORY = Path("/dev/shm")
OURS = "over HTTP"
CELLS = ((1, False), (1, True), (32, False), (32, True))  # sessions, streamed
HEAD = f"{'sessions':>8} {'':6} {'':16} {'calls/s':>8} {'p50 ms':>8} {'p99 ms':>8} {'cpu ms':>7}"


def sides(stack: contextlib.ExitStack, folder: Path, *, rivals: bool = True) -> dict[str, Side]:
    """Every side, started; they end with the stack."""
    upstream = stack.enter_context(Worker([sys.executable, "-m", "benchmarks.gateway.upstream"])).about["url"]
    quick = MEMORY if MEMORY.is_dir() else folder
    memory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=quick)))
    hop = ["--upstream", upstream]
    found: dict[str, Side] = {
        OURS: Ours(stack.enter_context(Gateway(folder / "http.sqlite", *hop))),
        "with httpx": Ours(stack.enter_context(Gateway(folder / "httpx.sqlite", *hop, "--httpx"))),
        "alone": Ours(stack.enter_context(Gateway(folder / "alone.sqlite"))),
        "no flush": Ours(stack.enter_context(Gateway(memory / "turns.sqlite", *hop))),
    }
    for rival in (LiteLLM, AgentLightning) if rivals else ():
        own = folder / rival.__name__
        own.mkdir()
        found[rival.name] = stack.enter_context(rival(own, upstream))
    return found


def measure(side: Side, *, sessions: int, stream: bool, calls: int, name: str) -> Json:
    """One round of one side."""
    side.begin(stream=stream)
    with side.opened([f"{name}-{n}" for n in range(sessions)]) as routes:
        cpu = cpu_seconds(side.pid)
        found, seconds = run(routes, calls=calls, stream=stream)
        cpu = cpu_seconds(side.pid) - cpu
    if isinstance(side, Ours):
        store = Store(side.gateway.store)
        assert not (wrong := faults(store, found)), wrong
        store.close()
    return {
        "sessions": sessions,
        "stream": stream,
        "calls_per_second": len(found) / seconds,
        "ms": spread([call.last for call in found]),
        "cpu_ms": cpu / len(found) * 1e3,
    }


def summary(rows: Sequence[Json]) -> Json:
    """Medians over the rounds of one side in one cell."""
    plain = {name: statistics.median(row[name] for row in rows) for name in ("calls_per_second", "cpu_ms")}
    return plain | {name: statistics.median(row["ms"][name] for row in rows) for name in ("p50", "p99")}


def ratios(cell: Mapping[str, Json]) -> dict[str, Json]:
    """How each other side stands to ours: its calls a second in ours (2: half as many), its median latency by ours."""
    calls, p50 = cell[OURS]["calls_per_second"], cell[OURS]["p50"]
    others = {name: side for name, side in cell.items() if name != OURS}
    return {
        name: {"times_calls": calls / side["calls_per_second"], "times_p50": side["p50"] / p50}
        for name, side in others.items()
    }


def line(sessions: int, stream: bool, name: str, side: Json) -> str:
    """What a person reads of a side in a cell."""
    plain = f"{side['calls_per_second']:8.0f} {side['p50']:8.1f} {side['p99']:8.1f} {side['cpu_ms']:7.2f}"
    return f"{sessions:8} {'stream' if stream else 'whole':6} {name:16} {plain}"


def collect(found: Mapping[str, Side], *, rounds: int, calls: int) -> list[Json]:
    """The rounds of all sides in all cells; round 0 warms up and is left out."""
    rows: list[Json] = []
    for number in range(rounds + 1):
        for sessions, stream in CELLS:
            order = list(found.items())
            for name, side in order if number % 2 else reversed(order):
                if stream and not side.streams:
                    continue
                unique = f"{number}-{sessions}-{stream}"
                row = measure(side, sessions=sessions, stream=stream, calls=calls, name=unique)
                print(line(sessions, stream, name, summary([row])), "" if number else "(warm-up)", flush=True)
                rows += [row | {"side": name, "round": number}] if number else []
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="after one to warm up")
    parser.add_argument("--calls", type=int, default=20, help="of each session")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gateway-rivals.json")
    options = parser.parse_args()
    before = machine()
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        found = sides(stack, Path(folder))
        about = {name: side.versions() for name, side in found.items()}
        rows = collect(found, rounds=options.rounds, calls=options.calls)
    cells: list[Json] = []
    print(f"medians of {options.rounds} rounds", HEAD, sep="\n")
    for sessions, stream in CELLS:
        here = [row for row in rows if (row["sessions"], row["stream"]) == (sessions, stream)]
        cell: dict[str, Any] = {name: summary(r) for name in found if (r := [x for x in here if x["side"] == name])}
        cells.append({"sessions": sessions, "stream": stream, "sides": cell, "ratios": ratios(cell)})
        print(*(line(sessions, stream, name, side) for name, side in cell.items()), sep="\n")
        for name, side in cells[-1]["ratios"].items():
            text = (
                f"ours does {side['times_calls']:.2f} times its calls; it takes {side['times_p50']:.2f} times as long"
            )
            print(f"{'':16}{name}: {text}")
    result = {"machine": before, "versions": about, "calls_each": options.calls, "summary": cells, "rounds": rows}
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
