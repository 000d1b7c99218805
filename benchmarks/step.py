"""The same GRPO step here and in TRL, side by side: `make bench`, or `python -m benchmarks.step --help`.

Both sides are processes of their own that take turns, so that whatever else slows the machine slows both.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import reasoning_gym

from benchmarks.reward import KINDS
from benchmarks.worker import Json, Worker
from whippletree.models.smollm2 import smollm2

HERE = Path(__file__).parent
PROMPTS = 8  # a step, each with 8 rollouts


def write_tasks(path: Path, *, tasks: int, seed: int = 0) -> None:
    """The questions of the quickstart as JSONL, in the columns that TRL reads."""
    source = reasoning_gym.create_dataset(
        "chain_sum", size=tasks, seed=seed, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    rows = ({"prompt": [{"role": "user", "content": task["question"]}], "answer": task["answer"]} for task in source)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def interleave(workers: Mapping[str, Worker], *, steps: int, warmup: int) -> dict[str, list[Json]]:
    """The measured steps of each worker; they take turns and go first in turn. Warm-up steps are left out."""
    rows: dict[str, list[Json]] = {name: [] for name in workers}
    order = list(workers)
    for step in range(warmup + steps):
        for name in order if step % 2 == 0 else reversed(order):
            row = workers[name].step()
            print(
                f"  step {step} {name:12} {row['seconds']:7.2f} s  {row['tokens']} tokens", file=sys.stderr, flush=True
            )
            if step >= warmup:
                rows[name].append(row)
    return rows


def summary(rows: Sequence[Json]) -> Json:
    """Medians over the steps of one side, and the range of its seconds."""
    seconds = [row["seconds"] for row in rows]
    return {
        "seconds": statistics.median(seconds),
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "cpu_seconds": statistics.median(row["cpu_seconds"] for row in rows),
        "tokens_per_second": statistics.median(row["tokens"] / row["seconds"] for row in rows),
        "peak_rss_mb": max(row["peak_rss_mb"] for row in rows),
    }


def table(sides: Mapping[str, Json]) -> str:
    """What a person reads: one line a side."""
    lines = [f"{'':12} {'s/step':>7} {'(range)':>15} {'cpu s':>7} {'tokens/s':>9} {'peak GB':>8}"]
    for name, side in sides.items():
        spread = f"({side['seconds_min']:.2f}-{side['seconds_max']:.2f})"
        time = f"{side['seconds']:7.2f} {spread:>15} {side['cpu_seconds']:7.2f}"
        lines.append(f"{name:12} {time} {side['tokens_per_second']:9.1f} {side['peak_rss_mb'] / 1024:8.2f}")
    return "\n".join(lines)


def machine() -> Json:
    """Where it was measured, and how busy it was at the start (processes waiting or running, over a minute)."""
    return {
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="measured steps of each side")
    parser.add_argument("--warmup", type=int, default=1, help="steps of each side before that")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; default: the model of the quickstart")
    parser.add_argument("--trl-python", type=Path, default=HERE.parent / ".venv-trl" / "bin" / "python")
    parser.add_argument("--reward", choices=KINDS, default="exact", help="see benchmarks/reward.py")
    parser.add_argument("--only", choices=["whippletree", "trl"], help="measure one side")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "step.json")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    before = machine()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        tasks, steps = Path(folder) / "tasks.jsonl", options.steps + options.warmup
        write_tasks(tasks, tasks=PROMPTS * steps)
        given = ["--model", str(options.model or smollm2()), "--tasks", str(tasks), "--steps", str(steps)]
        given += ["--reward", options.reward]
        commands = {
            "whippletree": [sys.executable, "-m", "benchmarks.ours_step", *given],
            "trl": [str(options.trl_python), "-m", "benchmarks.trl.step", *given],
        }
        chosen = {name: command for name, command in commands.items() if options.only in (None, name)}
        workers = {name: stack.enter_context(Worker(command)) for name, command in chosen.items()}
        about: dict[str, Any] = {name: worker.about for name, worker in workers.items()}
        rows = interleave(workers, steps=options.steps, warmup=options.warmup)
    sides = {name: summary(side) for name, side in rows.items()}
    result = {"machine": before, "about": about, "summary": sides, "steps": rows}
    print(table(sides))
    if len(sides) == 2:
        result["ratio"] = sides["trl"]["seconds"] / sides["whippletree"]["seconds"]
        print(f"TRL takes {result['ratio']:.2f} times as long (ratio of medians of {options.steps} steps each)")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"written to {os.path.relpath(options.out)}")


if __name__ == "__main__":
    main()
