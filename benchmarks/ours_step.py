"""One step of this library a line: the worker that `benchmarks.step` starts. The protocol is in `benchmarks/README.md`.

The step is the whole of it: an agent with the OpenAI SDK for each rollout, over HTTP, every call on disk, the update.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from rich.console import Console

from benchmarks.reward import KINDS, reward
from whippletree import config
from whippletree.build import build
from whippletree.loop import Loop
from whippletree.report.metrics import Metrics
from whippletree.report.terminal import View
from whippletree.reward import assistant_texts
from whippletree.run_directory import RunDirectory
from whippletree.types import Rollout, Task

CLIENT = AsyncOpenAI(api_key="set for each rollout")  # one pool of connections for all rollouts


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--tasks", type=Path, required=True, help='JSONL of {"prompt": [messages], "answer": text}')
    parser.add_argument("--steps", type=int, required=True, help="most steps that will be asked for")
    parser.add_argument("--prompts", type=int, default=8, help="prompts a step, each with 8 rollouts")
    parser.add_argument("--reply-tokens", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--reward", choices=KINDS, default="exact")
    return parser.parse_args()


async def agent(task: Task, base_url: str, api_key: str) -> None:
    """Asks once."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    await client.chat.completions.create(model="policy", messages=list(task.messages))  # type: ignore[arg-type]  # rows


async def exact(rollout: Rollout) -> dict[str, float | None]:
    return {"answer": reward(assistant_texts(rollout)[-1], rollout.task.columns["answer"], kind="exact")}


async def dense(rollout: Rollout) -> dict[str, float | None]:
    return {"answer": reward(assistant_texts(rollout)[-1], rollout.task.columns["answer"], kind="dense")}


def recipe(options: argparse.Namespace) -> config.Recipe:
    """GRPO with the settings that the other side has too."""
    return config.parse(
        {
            "method": "grpo",
            "steps": options.steps,
            "checkpoint_every": 0,
            "model": {"path": str(options.model), "dtype": options.dtype, "context": 256},
            "tasks": {"kind": "jsonl", "source": str(options.tasks)},
            "harness": {"agent": "benchmarks.ours_step:agent"},
            "rewards": [{"name": "answer", "function": f"benchmarks.ours_step:{options.reward}"}],
            "sampling": {
                "tasks_per_step": options.prompts,
                "rollouts_per_task": 8,
                "reply_tokens": options.reply_tokens,
            },
            "update": {"learning_rate": options.learning_rate},
        }
    )


async def work(options: argparse.Namespace, say: Any) -> None:
    wanted = recipe(options)
    with tempfile.TemporaryDirectory() as name, open(os.devnull, "w") as nowhere:  # noqa: ASYNC230 - before any step
        folder = Path(name)
        directory, metrics = RunDirectory(folder, wanted), Metrics(folder)
        async with build(wanted, folder, progress=lambda done, total: None) as parts:
            loop = Loop(parts, directory, metrics, View("", options.steps, console=Console(file=nowhere)))
            state = await loop.resume()
            versions = {name: version(name) for name in ("whippletree", "torch", "transformers")}
            settings = {key: str(value) for key, value in vars(options).items() if key not in ("model", "tasks")}
            say({"ready": True, "name": "whippletree", "versions": versions, "settings": settings})
            while (await asyncio.to_thread(sys.stdin.readline)).strip() == "go":
                start, cpu, before = time.perf_counter(), time.process_time(), state.tokens
                state = await loop.step(state)
                seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
                say({"seconds": seconds, "cpu_seconds": cpu, "tokens": state.tokens - before, **measured(loop)})
        metrics.close()
        directory.close()


def measured(loop: Loop) -> dict[str, float]:
    """The largest resident memory of this process so far, in MB, and the mean reward of the last step."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    assert loop.last is not None, "a step was just done"
    return {"peak_rss_mb": peak, "reward": loop.last[1].reward_R.nanmean().item()}


def main() -> None:
    options = arguments()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to standard error
    asyncio.run(work(options, lambda row: print(json.dumps(row), file=out, flush=True)))


if __name__ == "__main__":
    main()
