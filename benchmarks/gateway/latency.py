"""What the gateway adds to a call, with 1, 32 and 256 sessions at once: `python -m benchmarks.gateway.latency --help`.

Each session is an agent of 20 streamed calls with a growing history. The engine gives a token every so many
milliseconds by its own clock (0: at once, so that the gateway alone is the limit). Added latency is the time of a call
until its last byte, less that of its tokens. Agents begin one after another within the time of a reply. After each
round the store is read: every call is one turn, which continues the one before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gateway.load import Gateway, Json, cpu_seconds, faults, memory_mb, run, spread
from benchmarks.step import machine
from whippletree.gateway.store import Store

HERE = Path(__file__).parent.parent
CELLS = ((1, 0), (1, 20), (32, 0), (32, 20), (32, 100), (256, 0), (256, 20), (256, 100))  # sessions, ms a token
HEAD = f"{'sessions':>8} {'ms/token':>8} {'calls/s':>8} {'cpu ms':>7}  added ms: {'p50':>8} {'p90':>8} {'p99':>8}"


def measure(gateway: Gateway, *, sessions: int, pace_ms: float, calls: int, name: str) -> Json:
    """One round: what was added to each call, and what the store has wrong (which must be nothing)."""
    engine = pace_ms / 1000 * gateway.order(pace=pace_ms / 1000, streams=True)["tokens"]
    with gateway.opened([f"{name}, {n}" for n in range(sessions)]) as routes:
        cpu, own = cpu_seconds(gateway.process.pid), time.process_time()
        found, seconds = run(routes, calls=calls, stream=True, apart=engine)
        cpu, own = cpu_seconds(gateway.process.pid) - cpu, time.process_time() - own
    store = Store(gateway.store)
    wrong = faults(store, found)
    store.close()
    return {
        "sessions": sessions,
        "pace_ms": pace_ms,
        "calls": len(found),
        "calls_per_second": len(found) / seconds,
        "added_ms": spread([call.last - engine for call in found]),
        "added_first_token_ms": spread([call.first - pace_ms / 1000 for call in found]),
        "gateway_cpu_ms": cpu / len(found) * 1e3,
        "client_cpu_ms": own / len(found) * 1e3,
        "rss_mb": memory_mb(gateway.process.pid),
        "wrong": wrong,
    }


def summary(rows: Sequence[Json]) -> Json:
    """Medians over the rounds of one cell."""
    middle = {name: statistics.median(row["added_ms"][name] for row in rows) for name in ("p50", "p90", "p99")}
    first = {name: statistics.median(row["added_first_token_ms"][name] for row in rows) for name in ("p50", "p99")}
    plain = ("calls_per_second", "gateway_cpu_ms", "client_cpu_ms")
    same = {name: rows[0][name] for name in ("sessions", "pace_ms")}
    found = {"calls": sum(row["calls"] for row in rows), "wrong": sum(len(row["wrong"]) for row in rows)}
    medians = {name: statistics.median(row[name] for row in rows) for name in plain}
    return same | found | medians | {"added_ms": middle, "added_first_token_ms": first}


def line(cell: Json) -> str:
    """What a person reads of a cell."""
    p50, p90, p99 = (cell["added_ms"][name] for name in ("p50", "p90", "p99"))
    plain = f"{cell['sessions']:8} {cell['pace_ms']:8} {cell['calls_per_second']:8.0f} {cell['gateway_cpu_ms']:7.2f}"
    return f"{plain}            {p50:8.1f} {p90:8.1f} {p99:8.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=20, help="of each session")
    parser.add_argument("--cells", nargs="+", help="SESSIONS:MS of the cells to measure; default: all")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gateway-latency.json")
    options = parser.parse_args()
    cells = [(int(s), float(m)) for s, m in (cell.split(":") for cell in options.cells or ())] or CELLS
    before = machine()
    rows: list[Json] = []
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as folder, Gateway(Path(folder) / "turns.sqlite") as gateway:
        measure(gateway, sessions=8, pace_ms=0, calls=options.calls, name="to warm up")
        for number in range(options.rounds):
            for sessions, pace in cells:
                name = f"round {number}, {sessions} at {pace}"
                rows.append(measure(gateway, sessions=sessions, pace_ms=pace, calls=options.calls, name=name))
                print(line(rows[-1]), *rows[-1]["wrong"][:3], flush=True)
        about = gateway.about["versions"]
    medians = [summary([row for row in rows if (row["sessions"], row["pace_ms"]) == cell]) for cell in cells]
    print(f"medians of {options.rounds} rounds", HEAD, *map(line, medians), sep="\n")
    result = {"machine": before, "versions": about, "calls_each": options.calls, "summary": medians, "rounds": rows}
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
