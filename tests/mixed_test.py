"""Several harnesses in one run: each task under each of them, in groups of their own."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import runs
from tests.collecting import Runs, ask
from whippletree import toml
from whippletree.collect import DIGESTS, HARNESS, Runner
from whippletree.engine.scripted import ScriptedEngine
from whippletree.gateway.store import Store
from whippletree.harness.outcome import Outcome
from whippletree.models.tiny import tiny_tokenizer
from whippletree.report.metrics import read
from whippletree.stats import harness_metrics
from whippletree.tree.fidelity import FidelityError
from whippletree.types import Rollout, Task

YES = lambda group: True  # noqa: E731


class Named:
    """A harness that makes some calls, and fails on the tasks of these ids."""

    def __init__(self, runs: Runs, calls: int, fails: tuple[str, ...] = ()) -> None:
        self.runs, self.calls, self.fails, self.most, self.now = runs, calls, fails, 0, 0

    async def run(self, task: Task, *, base_url: str, api_key: str) -> Outcome:
        self.now += 1
        self.most = max(self.most, self.now)
        headers = {"authorization": f"Bearer {api_key}"}
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(self.runs.app), base_url=base_url, headers=headers
        ) as client:
            for _ in range(self.calls):
                await ask(client, task.id)
        self.now -= 1
        return Outcome("failed", "harness", "broke") if task.id in self.fails else Outcome()


@pytest.fixture
def mixed(tmp_path: Path):
    store = Store(tmp_path / "turns.sqlite")
    made = Runs(store, ScriptedEngine(lambda prompt: "yes", tiny_tokenizer()))
    made.harnesses = {"short": Runner(Named(made, 1), 2), "long": Runner(Named(made, 3, fails=("1",)), 5)}
    yield made
    store.close()


async def test_each_task_runs_under_each_harness_in_a_group_of_its_own(mixed: Runs) -> None:
    found = await mixed.collector(retries=0).step(0, 0, lambda n: Task(str(n)), YES)
    assert [(group[0].group, group[0].task.id, len(group)) for group in found.groups] == [
        ("train/000000/000/short", "0", 3),
        ("train/000000/000/long", "0", 3),
        ("train/000000/001/short", "1", 3),
    ]
    assert (found.cursor, found.dropped, found.failed_under) == (2, 1, {"long": 3})
    assert {rollout.info[HARNESS] for rollout in found.groups[1]} == {"long"}
    short = mixed.harnesses["short"].harness
    assert isinstance(short, Named)
    assert short.most == 2  # as many at once as its own limit says


async def test_the_metrics_of_each_harness_stand_beside_each_other(mixed: Runs) -> None:
    found = await mixed.collector(retries=0).step(0, 0, lambda n: Task(str(n)), YES)
    # a reply is four tokens, and the reward their number
    assert harness_metrics(found.rollouts, [r.rewards["length"] for r in found.rollouts], found.failed_under) == {
        "harness/short/rollouts": 6,
        "harness/short/failed": 0,
        "harness/short/truncated": 0,
        "harness/short/turns": 1.0,
        "harness/short/reward": 4.0,
        "harness/long/rollouts": 3,
        "harness/long/failed": 3,
        "harness/long/truncated": 0,
        "harness/long/turns": 3.0,
        "harness/long/reward": 12.0,
    }


async def test_an_evaluation_asks_each_task_under_each_harness(mixed: Runs) -> None:
    found = await mixed.collector().evaluate("eval/000000", [Task("0"), Task("1")], temperature=0.0)
    assert [(r.id, r.ending) for r in found] == [
        ("eval/000000/0000/short", "done"),
        ("eval/000000/0000/long", "done"),
        ("eval/000000/0001/short", "done"),
        ("eval/000000/0001/long", "failed"),
    ]


async def test_a_refused_group_of_one_harness_is_made_up_for_by_the_next_task(mixed: Runs) -> None:
    def not_the_first(group: Sequence[Rollout]) -> bool:
        return group[0].id[:22] != "train/000000/000/short"

    found = await mixed.collector(tasks_per_step=1).step(0, 5, lambda n: Task(str(n)), not_the_first)
    assert [group[0].group for group in found.groups] == [
        "train/000000/000/long",
        "train/000000/001/short",
        "train/000000/001/long",
    ]


async def test_a_rollout_keeps_what_made_its_prompts(mixed: Runs) -> None:
    mixed.digests = {"template": "a", "tokenizer": "b"}
    found = await mixed.collector(tasks_per_step=1).step(0, 0, lambda n: Task(str(n)), YES)
    assert json.loads(json.dumps(found.rollouts[0].info[DIGESTS])) == {"template": "a", "tokenizer": "b", "tools": []}


async def test_rollouts_of_another_template_are_not_trained(mixed: Runs) -> None:
    mixed.digests = {"template": "a", "tokenizer": "b"}
    await mixed.collector(tasks_per_step=1).step(0, 0, lambda n: Task(str(n)), YES)
    mixed.digests = {"template": "c", "tokenizer": "b"}
    with pytest.raises(ExceptionGroup) as raised:
        await mixed.collector(tasks_per_step=1).step(0, 0, lambda n: Task(str(n)), YES)
    error: BaseException = raised.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, FidelityError)
    assert "made with another template than" in str(error)


# ---- whole runs -------------------------------------------------------------------------------------------------


def told(folder: Path, *settings: str) -> dict[str, Any]:
    """The metrics of a run of one step under two agents, of which one has a sub-agent."""
    agents = [f'{{name = "{name}", agent = "{runs.__file__}:{name}"}}' for name in ("agent", "agent_with_help")]
    path = runs.recipe(folder)
    table = tomllib.loads(path.read_text())
    del table["harness"]
    path.write_text(toml.dump(table))
    runs.run(path, folder / "runs", "steps=1", f"harness=[{', '.join(agents)}]", *settings)
    (row,) = [row for row in read(folder / "runs" / "tiny" / "metrics.jsonl") if "step_time" in row]
    return row


def test_one_update_learns_from_two_harnesses(tmp_path: Path) -> None:
    row = told(tmp_path)
    assert [row[f"harness/{name}/rollouts"] for name in ("agent", "agent_with_help")] == [8, 8]
    assert (row["harness/agent/turns"], row["harness/agent_with_help/turns"]) == (2, 2)  # of the main thread
    assert row["tree/aux/sub-agent"] == 8
    assert row["grad_norm"] > 0


def test_a_sub_agent_trains_where_the_recipe_says_so_and_in_a_group_of_its_own(tmp_path: Path) -> None:
    row = told(tmp_path, 'threads.train=["main", "sub-agent"]', 'threads.apart=["sub-agent"]')
    assert row["harness/agent_with_help/turns"] == 3
    assert "tree/aux/sub-agent" not in row
    # 2 tasks x 4 rollouts of each harness, and 8 parts for the sub-agents
    assert row["turns/mean"] == (2 * 16 + 8) / 24
    assert row["tree/parts_unpaid"] == 0
