"""What the commands do: run a recipe to its summary and report, evaluate one, serve a model, write a report anew."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
import secrets
import shlex
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
from whippletree.gateway.rollouts import Rollouts
from whippletree.gateway.store import StoreError
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

ADMIN_KEY = "WHIPPLETREE_ADMIN_KEY"
USAGE = """\
export OPENAI_BASE_URL={server}/v1 OPENAI_API_KEY={secret}
export ANTHROPIC_BASE_URL={server} ANTHROPIC_API_KEY={secret}
export GOOGLE_GEMINI_BASE_URL={server} GEMINI_API_KEY={secret}

# for each rollout a session of its own, with a budget, rewards and an end (docs/sessions.md):
{how}
curl {server}/sessions -H "Authorization: Bearer ${name}" -d '{{"task": {{"id": "first"}}}}'"""
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
    model: str,
    store: Path,
    *,
    host: str,
    port: int,
    dtype: str,
    context: int | None,
    idle: float,
    admin: Path | None,
    console: Console,
) -> None:
    """Serve a model, capture every call, and open sessions over HTTP, until SIGINT or SIGTERM.

    A session without a call and an event for `idle` seconds is ended as failed; the one of the printed key is not.
    `admin` is the file of the admin key, if there is one.
    """
    if not 1 <= idle <= 1e9:
        raise ValueError(f"--idle is 1 to 1e9 seconds, but it is {idle:g}")
    key, how = admin_key(admin)
    loaded = load(model, dtype=dtype, context=context)
    policy = Policy(loaded, prove(loaded.model))
    name, stop = f"serve/{time.strftime('%Y%m%d-%H%M%S')}", asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with gateway(policy, store, name=Path(model).name, host=host, port=port) as served:
        served.sessions.admit(key)
        session = await served.sessions.open(
            name, group=name, task=Task(id=name), stream=name, budget=Budget(turns=1 << 30)
        )
        sweeping = asyncio.create_task(_sweep(Rollouts(served.store, served.sessions), idle, name, console))
        try:
            console.print(
                f"serving {model} in {loaded.dtype}; every call goes to {store}; Ctrl-C ends it", highlight=False
            )
            print(USAGE.format(server=served.server, secret=session.secret, how=how, name=ADMIN_KEY), flush=True)
            await stop.wait()
        finally:
            sweeping.cancel()
            await served.sessions.close(name)
            await served.store.end_rollout(name, ending="done")


def admin_key(file: Path | None) -> tuple[str, str]:
    """The key that opens sessions, and the line that gives it to a shell.

    It is what the file holds, else what the environment has, else 256 random bits; these alone are shown.

    Raises:
        ValueError: the key that was given is too short to stay secret, or no header can carry it.
    """
    given = file.read_text(errors="replace").strip() if file else os.environ.get(ADMIN_KEY, "")
    if not given and not file:
        key = secrets.token_urlsafe(32)
        return key, f"export {ADMIN_KEY}={key}"
    if not re.fullmatch("[!-~]{32,}", given):
        raise ValueError(
            f"an admin key is 32 or more visible ASCII characters in a row, but that of {file or ADMIN_KEY} is not "
            f"({len(given)} characters); `openssl rand -hex 32` makes one"
        )
    return (
        given,
        f'export {ADMIN_KEY}="$(cat {shlex.quote(str(file))})"' if file else f"# with {ADMIN_KEY} as you set it",
    )


async def _sweep(rollouts: Rollouts, idle: float, keep: str, console: Console) -> None:
    """End sessions that are left alone, for as long as this runs."""
    while True:
        await asyncio.sleep(min(60.0, idle / 4))
        try:
            for name in await rollouts.sweep(idle, keep=keep):
                console.print(
                    f"session {name} is ended as abandoned: no call and no event for {idle:g} s", soft_wrap=True
                )
        except StoreError as error:
            console.print(str(error))


def _version(name: str) -> str:
    try:
        return version(name)
    except ImportError:
        return "not installed"
