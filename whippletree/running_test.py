from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests import runs
from tests.loop_test import rows_of, weights_of
from whippletree import cli
from whippletree.gateway.store import Store
from whippletree.models.tiny import save_tiny, tiny_tokenizer
from whippletree.report.metrics import read
from whippletree.running import admin_key, evaluate_recipe, rewrite_report, serve_model
from whippletree.types import Rollout, Task

AGENT = """
import json, os, urllib.request

task = json.load(open(os.environ["WHIPPLETREE_TASK"]))
body = {"model": "policy", "messages": [{"role": "user", "content": task["columns"]["word"]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"},
)
reply = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
json.dump({"length": len(reply)}, open("reward.json", "w"))
"""
# the command line in a process of its own, whose files may grow to so many bytes (0: as they like)
COMMAND = """
import resource, sys
most = int(sys.argv.pop(1))
if most:
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
import torch
torch.set_num_threads(1)
from whippletree.cli import app
app(prog_name="whippletree")
"""


def command(*arguments: object, largest: int = 0) -> list[str]:
    return [sys.executable, "-c", COMMAND, str(largest), *map(str, arguments)]


def files(folder: Path) -> dict[str, bytes]:
    """The contents of a run that are not SQLite's own bookkeeping."""
    found = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("turns.sqlite"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


# ---- train ------------------------------------------------------------------------------------------------------


def test_a_command_trains_by_the_rewards_it_leaves(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    harness: dict[str, Any] = {"harness.kind": "command", "harness.agent": f"{sys.executable} agent.py"}
    harness["harness.length_stop"] = "done"  # the agent does not mind
    path = runs.recipe(tmp_path, **harness)
    path.write_text(path.read_text().split("[[rewards]]")[0])
    runs.run(path, tmp_path / "runs", "steps=2", "sampling.rollouts_per_task=2")
    rows = rows_of(tmp_path / "runs" / "tiny")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(0 < row["rewards/length/mean"] <= 4 for row in rows)  # a character a token, four at most
    store = Store(tmp_path / "runs" / "tiny" / "turns.sqlite")
    assert all(r.info["exit_code"] == 0 and len(r.turns) == 1 for r in store.finished(prefix="train/"))
    store.close()


def test_the_summary_has_the_figures_of_the_run(tmp_path: Path) -> None:
    summary = runs.run(runs.evaluated(tmp_path), tmp_path / "runs")
    folder = tmp_path / "runs" / "tiny"
    assert summary == json.loads((folder / "summary.json").read_text())
    for when in ("before", "after"):
        low, high = summary[f"{when}_interval"]
        assert 0 <= low <= summary[when] <= high <= 1
    times = sorted(row["step_time"] for row in rows_of(folder))
    assert (summary["steps"], summary["held_out"], summary["median_step_seconds"]) == (3, 2, times[1])
    assert summary["seconds"] >= sum(times)
    assert {"python", "whippletree", "torch", "transformers"} <= set(summary["versions"])


def test_a_run_that_had_ended_changes_nothing_when_it_is_started_again(tmp_path: Path) -> None:
    path = runs.evaluated(tmp_path)
    first = runs.run(path, tmp_path / "runs")
    before = files(tmp_path / "runs" / "tiny")
    assert runs.run(path, tmp_path / "runs") == first
    assert files(tmp_path / "runs" / "tiny") == before


def test_an_ended_run_goes_on_for_more_steps_and_counts_all_its_time(tmp_path: Path) -> None:
    path = runs.evaluated(tmp_path)
    first = runs.run(path, tmp_path / "runs", "steps=2")
    both = runs.run(path, tmp_path / "runs", "steps=3")
    assert (both["steps"], both["before"]) == (3, first["before"])
    assert both["seconds"] > first["seconds"]
    assert [row["step"] for row in read(tmp_path / "runs" / "tiny" / "metrics.jsonl") if "eval/count" in row] == [
        0,
        2,
        3,
    ]


@pytest.mark.parametrize("cut", ["before any step", "after the last checkpoint"])
def test_an_evaluation_that_a_kill_cut_off_is_made_up_for_and_none_is_made_twice(tmp_path: Path, cut: str) -> None:
    path = runs.evaluated(tmp_path)
    runs.run(path, tmp_path / "runs", "steps=2")
    folder = tmp_path / "runs" / "tiny"
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 4  # evaluation, two steps, evaluation
    if cut == "before any step":
        shutil.rmtree(folder / "checkpoints")
    (folder / "metrics.jsonl").write_text("".join(lines[: 1 if cut == "before any step" else 3]))
    runs.run(path, tmp_path / "runs", "steps=2")
    rows = read(folder / "metrics.jsonl")
    assert [(row["step"], "eval/count" in row) for row in rows] == [(0, True), (1, False), (2, False), (2, True)]
    assert rows[3]["eval/accuracy"] == json.loads(lines[3])["eval/accuracy"]


def test_tensorboard_is_written_by_flag(tmp_path: Path) -> None:
    runs.run(runs.recipe(tmp_path), tmp_path / "runs", "steps=1", 'sinks=["tensorboard"]')
    assert list((tmp_path / "runs" / "tiny").rglob("events.out.tfevents*"))


def test_the_report_is_written_anew(tmp_path: Path) -> None:
    runs.run(runs.recipe(tmp_path), tmp_path / "runs", "steps=1")
    folder = tmp_path / "runs" / "tiny"
    before = files(folder)
    for name in ("report.html", "curve.svg"):
        (folder / name).unlink()
    assert rewrite_report(folder) == folder / "report.html"
    assert files(folder) == before
    with pytest.raises(ValueError, match=r"no metrics\.jsonl"):
        rewrite_report(tmp_path)


# ---- eval -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [(), ("update.lora_rank=4",)])
def test_a_checkpoint_is_evaluated_as_the_run_did(tmp_path: Path, settings: tuple[str, ...]) -> None:
    fast = ("steps=12", "update.learning_rate=0.03", "evaluation.success=0.5", *settings)
    summary = runs.run(runs.evaluated(tmp_path), tmp_path / "runs", *fast)
    folder = tmp_path / "runs" / "tiny"
    (checkpoint,) = (folder / "checkpoints").glob("step-*")
    recipe, others = folder / "config.toml", tmp_path / "others"
    after = evaluate_recipe(recipe, [], checkpoint=checkpoint, runs=others)
    before = evaluate_recipe(recipe, [], checkpoint=None, runs=others)  # at once, in a folder of its own
    last = [row for row in read(folder / "metrics.jsonl") if "eval/count" in row][-1]
    assert (before["eval/accuracy"], after["eval/accuracy"]) == (summary["before"], summary["after"])
    assert after["eval/reward"] == last["eval/reward"] != before["eval/reward"]
    assert before["turns"] != after["turns"]


def test_a_checkpoint_that_is_none_is_refused(tmp_path: Path) -> None:
    path = runs.evaluated(tmp_path)
    with pytest.raises(ValueError, match=r"nowhere is no checkpoint.*model\.safetensors"):
        evaluate_recipe(path, [], checkpoint=tmp_path / "nowhere", runs=tmp_path)
    with pytest.raises(ValueError, match="no held-out tasks"):
        evaluate_recipe(runs.recipe(tmp_path), [], checkpoint=None, runs=tmp_path)


# ---- serve ------------------------------------------------------------------------------------------------------


@contextmanager
def serving(*arguments: object, **environment: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str], str]]:
    """`whippletree serve` in a process of its own, with the variables that it prints, and all that it printed."""
    process = subprocess.Popen(
        command("serve", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
        env={**os.environ, **environment},
    )
    try:
        said = ""
        assert process.stdout is not None
        while not said.rpartition("\n")[0].rpartition("\n")[2].startswith("curl ") and (
            line := process.stdout.readline()
        ):
            said += line
        shown = dict(re.findall(r"([A-Z_]+)=(\S+)", said))
        yield process, shown, said
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_serve_answers_the_openai_sdk_and_keeps_every_call(model: Path, tmp_path: Path, end: signal.Signals) -> None:
    store = tmp_path / "turns.sqlite"
    with serving(model, "--port", 0, "--store", store, "--dtype", "float32") as (process, shown, _):
        assert shown["OPENAI_API_KEY"] == shown["ANTHROPIC_API_KEY"] == shown["GEMINI_API_KEY"]
        asked: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0}
        with openai.OpenAI(base_url=shown["OPENAI_BASE_URL"], api_key=shown["OPENAI_API_KEY"]) as client:
            whole = client.chat.completions.create(**asked).choices[0].message.content
            with client.chat.completions.create(**asked, stream=True) as parts:
                streamed = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        process.send_signal(end)
        _, errors = process.communicate(timeout=30)
        assert (process.returncode, "Traceback" in errors) == (0, False), errors
    assert whole == streamed != ""
    kept = Store(store)
    (rollout,) = kept.finished()
    kept.close()
    assert (rollout.ending, [turn.request["messages"] for turn in rollout.turns]) == ("done", [asked["messages"]] * 2)
    assert rollout.turns[0].reply_ids == rollout.turns[1].reply_ids


@pytest.mark.slow
def test_a_session_of_serve_goes_on_after_a_kill_and_is_exported(model: Path, tmp_path: Path) -> None:
    store, admin = tmp_path / "turns.sqlite", "0123456789abcdef" * 4
    arguments = (model, "--port", 0, "--store", store, "--dtype", "float32")
    key = {"authorization": f"Bearer {admin}"}

    def call(url: str, said: str) -> str | None:
        messages: Any = [{"role": "user", "content": said}]
        with openai.OpenAI(base_url=url, api_key="any") as client:
            answer = client.chat.completions.create(model="m", messages=messages, max_tokens=4, temperature=0)
            return answer.choices[0].message.content

    with serving(*arguments, WHIPPLETREE_ADMIN_KEY=admin) as (process, shown, first):
        server = shown["ANTHROPIC_BASE_URL"]
        opened = httpx.post(f"{server}/sessions", headers=key, json={"id": "r", "task": {"id": "t"}}).json()
        replies = [call(opened["base_urls"]["openai"], "hi")]
        process.kill()
    with serving(*arguments, WHIPPLETREE_ADMIN_KEY=admin) as (process, shown, said):
        server, own = shown["ANTHROPIC_BASE_URL"], {"x-api-key": opened["secret"]}
        replies.append(call(f"{server}/r/{opened['secret']}/v1", "more"))
        hello = {"model": "m", "max_tokens": 4, "temperature": 0, "messages": [{"role": "user", "content": "hello"}]}
        replies.append(httpx.post(f"{server}/v1/messages", headers=own, json=hello).json()["content"][0]["text"])
        for event in ({"kind": "reward", "name": "exact", "value": 0.5}, {"kind": "end", "ending": "done"}):
            httpx.post(f"{server}/sessions/r/events", headers=own, json=event).raise_for_status()
        rollout = Rollout.from_json(httpx.get(f"{server}/sessions/r/export", headers=key).json())
        process.terminate()
        out, errors = process.communicate(timeout=30)
    assert (rollout.task.id, rollout.rewards, rollout.ending) == ("t", {"exact": 0.5}, "done")
    tokenizer = tiny_tokenizer()
    assert [tokenizer.decode(turn.reply_ids) for turn in rollout.turns] == replies
    assert [len(turn.reply_ids) for turn in rollout.turns] == [4, 4, 4]
    files = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    for secret in (admin, opened["secret"]):  # its owner has the admin key
        assert (secret in first + said + out + errors, secret.encode() in files) == (False, False)


async def test_serve_ends_sessions_that_are_left_alone_but_not_its_own(model: Path, tmp_path: Path) -> None:
    store, told = Store(tmp_path / "turns.sqlite"), io.StringIO()  # another process has the same file

    async def left(name: str) -> None:
        """Leave a session alone until it is ended."""
        await store.open_rollout(name, group="g", task=Task("t"), secret_hash=name)
        while (rollout := store.rollout(name)) is None:
            await asyncio.sleep(0.05)
        assert (rollout.ending, rollout.blame) == ("failed", "harness")

    serving = asyncio.create_task(
        serve_model(
            str(model),
            store.path,
            host="127.0.0.1",
            port=0,
            dtype="float32",
            context=None,
            idle=1.0,
            admin=None,
            console=Console(file=told, width=200),
        )
    )
    await left("first")
    await left("second")  # which began later than the session of serve
    (own,) = store.open_rollouts()
    assert own.rollout_id.startswith("serve/")
    assert "session second is ended as abandoned: no call and no event for 1 s" in told.getvalue()
    signal.raise_signal(signal.SIGTERM)
    await serving
    assert store.open_rollouts() == []
    store.close()


@pytest.mark.parametrize("idle", [0.0, -1.0, float("nan"), float("inf")])
def test_an_idle_time_that_is_none_is_refused(tmp_path: Path, idle: float) -> None:
    result = CliRunner().invoke(cli.app, ["serve", str(tmp_path), "--idle", str(idle)])
    assert (result.exit_code, "--idle is 1 to 1e9 seconds" in result.stderr) == (1, True)


def test_the_admin_key_is_of_a_file_of_the_environment_or_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WHIPPLETREE_ADMIN_KEY", raising=False)
    (one, how), (other, _) = admin_key(None), admin_key(None)
    assert (how, one != other, len(one)) == (f"export WHIPPLETREE_ADMIN_KEY={one}", True, 43)  # 256 bits in base64
    monkeypatch.setenv("WHIPPLETREE_ADMIN_KEY", "e" * 32)
    key, how = admin_key(None)
    assert (key, key in how) == ("e" * 32, False)
    file = tmp_path / "a key"
    file.write_text("f" * 32 + "\n")
    assert admin_key(file) == ("f" * 32, f"export WHIPPLETREE_ADMIN_KEY=\"$(cat '{file}')\"")
    for bad in ("", "f" * 31, "f" * 16 + " " + "f" * 16, "\u00e9" * 32):
        file.write_text(bad)
        with pytest.raises(ValueError, match="32 or more visible ASCII") as caught:
            admin_key(file)
        assert not bad or bad not in str(caught.value)


def test_a_port_in_use_is_told_in_one_line(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        arguments = ("serve", str(tmp_path / "model"), "--port", port, "--store", str(tmp_path / "turns.sqlite"))
        result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 1
    (line,) = [line for line in result.stderr.splitlines() if "whippletree:" in line]
    assert f"port {port} on 127.0.0.1 is in use" in line
    assert "Traceback" not in result.output


def turns_of(folder: Path) -> dict[str, tuple[str, ...]]:
    """The turns of every finished rollout of a run."""
    store = Store(folder / "turns.sqlite")
    found = {rollout.id: tuple(turn.id for turn in rollout.turns) for rollout in store.finished()}
    store.close()
    return found


# ---- a full disk ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("largest", "told"), [(100_000, r"turns\.sqlite could not be written"), (500_000, "the disk is full")]
)
def test_a_disk_that_fills_is_told_and_the_same_command_goes_on(tmp_path: Path, largest: int, told: str) -> None:
    """100 kB end while rollouts are kept; 500 kB hold those of one step, but not the 650 kB of the optimizer."""
    # with the usual 1e-8, Adam makes steps of 1e-5 out of the rounding of gradients that are 0
    steady: dict[str, Any] = {"update.epsilon": 1e-5}
    path = runs.recipe(tmp_path, **steady)
    calm = tmp_path / "calm"
    runs.run(path, calm, "steps=1")
    train = command("train", path, "--runs", tmp_path / "runs", "--set", "steps=1", largest=largest)
    full = subprocess.run(train, capture_output=True, text=True)
    assert full.returncode == 1, full.stderr
    (line,) = [line for line in full.stderr.splitlines() if line.startswith("whippletree: ")]
    assert re.search(told, line), full.stderr
    assert "Traceback" not in full.stderr
    kept = turns_of(tmp_path / "runs" / "tiny")
    runs.run(path, tmp_path / "runs", "steps=1")
    assert kept.items() <= turns_of(tmp_path / "runs" / "tiny").items()  # not one of them was run again
    assert bool(kept) or largest == 100_000
    for name, weight in weights_of(calm / "tiny").items():
        assert float((weights_of(tmp_path / "runs" / "tiny")[name] - weight).abs().max()) < 1e-5, name
    assert [row["rollouts/failed"] for row in rows_of(tmp_path / "runs" / "tiny")] == [0]
