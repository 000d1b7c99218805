"""Whole runs on a tiny model: the recipe, an agent and a reward, as a user would write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import httpx
from rich.console import Console

from whippletree.models.tiny import save_tiny
from whippletree.reward import assistant_texts
from whippletree.running import run_recipe
from whippletree.types import Rollout, Task

QUIET = Console(quiet=True)


async def agent(task: Task, base_url: str, api_key: str) -> None:
    """Asks, says "go on", asks again."""
    messages: list[Any] = [{"role": "user", "content": task.columns["word"]}]
    async with httpx.AsyncClient(base_url=base_url, headers={"x-api-key": api_key}, verify=False, timeout=60) as client:
        for _ in range(task.columns.get("turns", 2)):
            response = await client.post("/chat/completions", json={"model": "policy", "messages": messages})
            reply = response.raise_for_status().json()["choices"][0]["message"]
            messages += [reply, {"role": "user", "content": "go on"}]


async def agent_with_help(task: Task, base_url: str, api_key: str) -> None:
    """Asks, and a sub-agent of its asks too."""
    await agent(task, base_url, api_key)
    says = {"x-api-key": api_key, "x-openai-subagent": "worker", "thread-id": "w"}
    async with httpx.AsyncClient(base_url=base_url, headers=says, verify=False, timeout=60) as client:
        asked = {"model": "policy", "messages": [{"role": "user", "content": "help with " + task.columns["word"]}]}
        (await client.post("/chat/completions", json=asked)).raise_for_status()


async def failing_agent(task: Task, base_url: str, api_key: str) -> None:
    """Fails after its first call wherever the task says so."""
    await agent(task, base_url, api_key)
    if task.columns["word"] == "bad":
        raise RuntimeError("the tool broke")


async def reward(rollout: Rollout) -> dict[str, float | None]:
    """The share of the letter a in what was said: a random model can begin to learn it at once."""
    text = "".join(assistant_texts(rollout))
    return {"a": text.count("a") / len(text) if text else 0.0}


async def judge(text: str) -> Any:
    """Some value that the schema of a question allows, the same for the same question; "yes" where there is none."""
    form = text.rpartition("Answer with one JSON object of this schema:\n")[2]
    return some(json.loads(form), json.loads(form).get("$defs", {}), Random(text)) if form[:1] == "{" else "yes"


def some(schema: Any, defs: Any, random: Random) -> Any:
    """A value of a JSON schema."""
    if "$ref" in schema:
        return some(defs[schema["$ref"].rpartition("/")[2]], defs, random)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return random.choice(schema["enum"])
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return some(random.choice(options), defs, random)
    kind = schema.get("type")
    if kind == "object":
        return {name: some(inner, defs, random) for name, inner in schema.get("properties", {}).items()}
    if kind == "array":
        return [some(schema.get("items", {}), defs, random) for _ in range(max(1, schema.get("minItems", 0)))]
    if kind in ("integer", "number"):
        return random.randint(int(schema.get("minimum", 1)), int(schema.get("maximum", 2)))
    return {"string": "x", "boolean": random.random() < 0.5, "null": None}[kind]


async def coin(rollout: Rollout) -> dict[str, float | None]:
    """1 or 0, as the letters fall: groups of both kinds, for methods that ask who passed."""
    return {"a": float(sum(map(ord, "".join(assistant_texts(rollout)))) % 2)}


async def broken_reward(rollout: Rollout) -> dict[str, float | None]:
    """Cannot judge one of the words."""
    if rollout.task.columns["word"] == "bad":
        raise ValueError("no judgement of this word")
    return await reward(rollout)


def recipe(folder: Path, *, words: tuple[str, ...] = ("ab", "cd", "ef"), family: str = "llama", **changes: Any) -> Path:
    """Write a tiny model, its tasks and a recipe into a folder; gives the recipe's path. `changes` are dotted."""
    save_tiny(folder / "model", family)
    rows = [{"prompt": word, "word": word, "turns": 2, "answer": "x"} for word in words]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table: dict[str, Any] = {
        "method": "grpo",
        "steps": 3,
        "name": "tiny",
        "model.path": str(folder / "model"),
        "model.dtype": "float32",
        "model.context": 200,
        "tasks.kind": "jsonl",
        "tasks.source": "tasks.jsonl",
        "harness.agent": f"{__file__}:agent",
        "harness.timeout": 60,
        "sampling.tasks_per_step": 2,
        "sampling.rollouts_per_task": 4,
        "sampling.reply_tokens": 4,
        "update.learning_rate": 3e-3,
        **changes,
    }
    path = folder / "recipe.toml"
    # dotted keys are TOML as they stand
    lines = [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    channel = f'[[rewards]]\nname = "a"\nfunction = "{__file__}:{changes.get("reward", "reward")}"\n'
    path.write_text("\n".join(line for line in lines if not line.startswith("reward =")) + "\n" + channel)
    return path


def evaluated(folder: Path, **changes: Any) -> Path:
    """A recipe as `recipe` writes it, with two held-out tasks."""
    rows = [{"prompt": word, "word": word, "turns": 1} for word in ("xy", "zz")]
    (folder / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held: dict[str, Any] = {
        "evaluation.tasks.kind": "jsonl",
        "evaluation.tasks.source": "held.jsonl",
        "evaluation.success": 0.01,
    }
    return recipe(folder, **held, **changes)


def run(path: Path, runs: Path, *settings: str) -> Mapping[str, Any]:
    """Train by a recipe as the command does, quietly."""
    return run_recipe(path, settings, runs=runs, fresh=False, dry_run=False, console=QUIET)
