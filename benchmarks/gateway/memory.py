"""Whether the gateway's memory stays flat: `python -m benchmarks.gateway.memory [--calls 50000]`.

32 sessions at a time of 20 calls each, streamed and not in turn, opened and ended as in a run; the resident memory of
the gateway's process after each 5,000 calls, and its slope from the second reading on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.gateway.load import Gateway, Json, faults, memory_mb, run
from benchmarks.step import machine
from whippletree.gateway.store import Store

HERE = Path(__file__).parent.parent
SESSIONS, CALLS = 32, 20


def measure(gateway: Gateway, *, calls: int, every: int) -> list[Json]:
    """A reading after each `every` calls: calls so far, resident megabytes, megabytes on disk, seconds."""
    rows: list[Json] = []
    done, number, began = 0, 0, time.monotonic()
    while done < calls:
        with gateway.opened([f"batch {number}, {n}" for n in range(SESSIONS)]) as routes:
            found, _ = run(routes, calls=CALLS, stream=number % 2 == 0)
        done, number = done + len(found), number + 1
        if done // every > len(rows):
            disk = gateway.store.stat().st_size / 2**20
            seconds = time.monotonic() - began
            rows.append({"calls": done, "rss_mb": memory_mb(gateway.process.pid), "store_mb": disk, "seconds": seconds})
            print("  {calls:6} calls {rss_mb:7.1f} MB  store {store_mb:7.1f} MB  {seconds:6.0f} s".format(**rows[-1]))
            store = Store(gateway.store)
            assert not (wrong := faults(store, found)), wrong
            store.close()
    return rows


def slope(rows: list[Json]) -> float:
    """Kilobytes a call by which memory grows, by least squares."""
    fit = statistics.linear_regression([row["calls"] for row in rows], [row["rss_mb"] for row in rows])
    return fit.slope * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=50_000)
    parser.add_argument("--every", type=int, default=5_000, help="calls between two readings")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gateway-memory.json")
    options = parser.parse_args()
    before = machine()
    with tempfile.TemporaryDirectory() as folder, Gateway(Path(folder) / "turns.sqlite") as gateway:
        started = memory_mb(gateway.process.pid)
        rows = measure(gateway, calls=options.calls, every=options.every)
        about = gateway.about["versions"]
    result = {"machine": before, "versions": about, "started_mb": started, "readings": rows}
    if len(rows) > 2:
        result["kb_per_call"] = slope(rows[1:])
        print(f"{result['kb_per_call']:.3f} KB a call from {rows[1]['calls']} calls on")
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
