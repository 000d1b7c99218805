"""What the commands do: run a recipe to its summary and report, evaluate one, serve a model, write a report anew."""

from __future__ import annotations

import asyncio
import json
import platform
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file

from whippletree import config
from whippletree.build import Parts, Policy, build, gateway
from whippletree.gateway.budget import Budget
from whippletree.loop import Loop, evaluation
from whippletree.models.pretrained import load
from whippletree.report.curve import write_curve
from whippletree.report.metrics import Metrics, read
from whippletree.report.page import write_report
from whippletree.report.rollouts import rollout_view
from whippletree.report.sinks import make_sinks
from whippletree.report.terminal import View
from whippletree.run_directory import RunDirectory
from whippletree.tree.families import prove
from whippletree.types import Task

LIBRARIES = ("whippletree", "torch", "transformers", "tokenizers", "reasoning-gym", "openai")


def run_recipe(
    recipe: Path, settings: Sequence[str], *, runs: Path, fresh: bool, dry_run: bool, console: Console
) -> dict[str, Any]:
    """Train by a recipe, then write summary.json and report.html; returns the summary.

    Raises:
        ValueError: the recipe is refused, with the reason.
    """
    resolved = config.load(recipe, settings)
    if dry_run:
        print(config.dump(resolved), end="")
        return {}
    directory = RunDirectory(runs / resolved.name, resolved, fresh=fresh)
    try:
        return asyncio.run(_run(resolved, directory, console))
    finally:
        directory.close()


async def _run(recipe: config.Recipe, directory: RunDirectory, console: Console) -> dict[str, Any]:
    began = time.time()
    metrics = Metrics(directory.path, sinks=make_sinks(recipe.sinks, directory.path, recipe.model_dump(mode="json")))
    console.print(f"loading {recipe.model.path}", highlight=False)
    shown: list[View] = []
    progress = lambda done, total: shown[-1].rollouts(done, total) if shown else None  # noqa: E731
    async with build(recipe, directory.path, progress=progress) as parts:
        pretrained = parts.policy.pretrained
        number_type = str(pretrained.dtype).removeprefix("torch.")
        header = {
            "model": f"{recipe.model.path}, {number_type} ({pretrained.why})",
            "method": recipe.method,
            "task": f"{recipe.tasks.source} under {', '.join(x.agent.rsplit('/', 1)[-1] for x in recipe.harness)}",
            "writes": str(directory.path),
        }
        with View(f"whippletree {recipe.name}", recipe.steps, header=header, console=console) as view:
            shown.append(view)
            loop = Loop(parts, directory, metrics, view)
            await loop.train()
    metrics.close()
    summary = summarise(directory.path, recipe, began=began, dtype=number_type)
    directory.write_json("summary.json", summary)
    if loop.taught:  # a run that had ended before keeps what it showed
        directory.write_json("samples.json", samples(loop, parts))
    rewrite_report(directory.path)
    if summary["before"] is not None and summary["after"] is not None:
        (low, high), (low_, high_) = summary["before_interval"], summary["after_interval"]
        console.print(
            f"solved before {summary['before']:.3f} [{low:.3f}, {high:.3f}], after {summary['after']:.3f} "
            f"[{low_:.3f}, {high_:.3f}], in {summary['steps']} steps and {summary['seconds']:.0f} s "
            f"({summary['median_step_seconds']:.2f} s a step)",
            highlight=False,
        )
    console.print(f"{directory.path / 'summary.json'}\n{directory.path / 'report.html'}", highlight=False)
    return summary


def summarise(folder: Path, recipe: config.Recipe, *, began: float, dtype: str) -> dict[str, Any]:
    """The figures of a run, out of its metrics; of one that had ended before `began`, those that it left.

    Its seconds are those since `began`, a time of this clock, and of the steps and evaluations that were done before.
    """
    rows, left = read(folder / "metrics.jsonl"), folder / "summary.json"
    earlier = [row for row in rows if row["time"] < began]
    if len(earlier) == len(rows) and left.exists():
        found: dict[str, Any] = json.loads(left.read_text())
        return found
    seconds = time.time() - began + sum(row.get("step_time", 0) + row.get("eval/seconds", 0) for row in earlier)
    evaluations = [row for row in rows if row.get("eval/accuracy") is not None]
    first = next((row for row in evaluations if row["step"] == 0), {})
    last = evaluations[-1] if evaluations and evaluations[-1]["step"] > 0 else {}
    steps = [row["step_time"] for row in rows if "step_time" in row]
    return {
        "title": recipe.name,
        "measure": "share of held-out tasks solved"
        if recipe.evaluation.success != 1
        else "share solved at the first try",
        "before": first.get("eval/accuracy"),
        "before_interval": first.get("eval/interval"),
        "after": last.get("eval/accuracy"),
        "after_interval": last.get("eval/interval"),
        "held_out": last.get("eval/count") or first.get("eval/count"),
        "steps": len(steps),
        "seconds": seconds,
        "median_step_seconds": statistics.median(steps) if steps else None,
        "model": recipe.model.path,
        "method": recipe.method,
        "task": recipe.tasks.source,
        "dtype": dtype,
        "device": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "seed": recipe.seed,
        "command": f"whippletree train {folder / 'config.toml'}",
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in LIBRARIES}},
    }


def samples(loop: Loop, parts: Parts) -> list[dict[str, Any]]:
    """Rollouts as the report shows them: the best and the worst of the group that differs most, in two steps."""
    decode, views = parts.policy.pretrained.tokenizer.decode, []
    for rollouts, batch, learned in loop.taught:
        by_turn = learned.advantage_N.split(batch.lengths_K.tolist())
        of_turn = [[by_turn[k].tolist() for k in (batch.rollout_K == r).nonzero()[:, 0]] for r in range(len(rollouts))]
        worth = torch.zeros(batch.rollouts).index_add(
            0, batch.rollout_N, learned.advantage_N
        ) / batch.lengths_R.clamp_min(1)
        best = int(worth.argmax())
        group = (batch.group_R == batch.group_R[best]).nonzero()[:, 0]
        worst = int(group[worth[group].argmin()])
        views += [rollout_view(rollouts[r], of_turn[r], decode) for r in (best, worst)]
    return views


def rewrite_report(folder: Path) -> Path:
    """report.html and curve.svg of a run directory, from its files."""
    if not (folder / "metrics.jsonl").exists():
        raise ValueError(f"{folder} is not a run directory: it has no metrics.jsonl")
    known = {name: folder / f"{name}.json" for name in ("summary", "samples")}
    found = {name: json.loads(file.read_text()) if file.exists() else None for name, file in known.items()}
    write_curve(folder)
    return write_report(folder, summary=found["summary"] or {}, samples=found["samples"] or [])


def evaluate_recipe(recipe: Path, settings: Sequence[str], *, checkpoint: Path | None, runs: Path) -> dict[str, Any]:
    """The figures of the recipe's held-out tasks under its model, or under a checkpoint of a run."""
    resolved = config.load(recipe, settings)
    if resolved.evaluation.tasks is None:
        raise ValueError(f"{recipe} names no held-out tasks: add a table [evaluation.tasks]")
    weights_file = checkpoint and checkpoint / "model.safetensors"
    if weights_file and not weights_file.is_file():
        raise ValueError(f"{checkpoint} is no checkpoint of a run: it has no model.safetensors")
    runs.mkdir(parents=True, exist_ok=True)
    # a folder that no other evaluation has, as rollouts that are found are not run again
    folder = Path(tempfile.mkdtemp(prefix=f"{resolved.name}-eval-{time.strftime('%Y%m%d-%H%M%S')}-", dir=runs))

    async def run() -> dict[str, Any]:
        async with build(resolved, folder, progress=lambda done, total: None) as parts:
            if weights_file:
                parts.updater.restore(load_file(weights_file), {})
            rollouts = await parts.collector.evaluate(
                "eval", parts.held_out, temperature=resolved.evaluation.temperature
            )
        weights = {reward.name: reward.weight for reward in resolved.rewards}
        return evaluation(rollouts, weights, resolved.evaluation.success)

    return {
        "model": str(checkpoint or resolved.model.path),
        **asyncio.run(run()),
        "turns": str(folder / "turns.sqlite"),
    }


async def serve_model(
    model: str, *, host: str, port: int, store: Path, dtype: str, context: int | None, console: Console
) -> None:
    """Serve a model and capture every call, until SIGINT or SIGTERM."""
    loaded = load(model, dtype=dtype, context=context)
    policy = Policy(loaded, prove(loaded.model))
    name, stop = f"serve/{time.strftime('%Y%m%d-%H%M%S')}", asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with gateway(policy, store, name=Path(model).name, host=host, port=port) as served:
        session = await served.sessions.open(
            name, group=name, task=Task(id=name), stream=name, budget=Budget(turns=1 << 30)
        )
        try:
            console.print(
                f"serving {model} in {loaded.dtype}; every call goes to {store}; Ctrl-C ends it", highlight=False
            )
            print(f"export OPENAI_BASE_URL={served.server}/v1\nexport OPENAI_API_KEY={session.secret}", flush=True)
            await stop.wait()
        finally:
            await served.sessions.close(name)
            await served.store.end_rollout(name, ending="done")


def _version(name: str) -> str:
    try:
        return version(name)
    except ImportError:
        return "not installed"
