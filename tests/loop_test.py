"""What crosses the folders: a whole run on a tiny model, through a real gateway and a real client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import runs
from whippletree.gateway.store import Store
from whippletree.loop import EmptyStepError
from whippletree.report.metrics import read
from whippletree.tree.fidelity import FidelityError


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read(folder / "metrics.jsonl") if "step_time" in row]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(sorted((folder / "checkpoints").glob("step-*"))[-1] / "model.safetensors")


def test_a_run_leaves_what_the_design_says(tmp_path: Path) -> None:
    runs.run(runs.recipe(tmp_path), tmp_path / "runs")
    folder = tmp_path / "runs" / "tiny"
    assert {"config.toml", "metrics.jsonl", "turns.sqlite", "checkpoints", "report.html", "summary.json"} <= {
        path.name for path in folder.iterdir()
    }
    assert [row["step"] for row in rows_of(folder)] == [1, 2, 3]
    # 3 steps x 2 tasks x 4 rollouts, each of 2 turns of at most 4 tokens
    store = Store(folder / "turns.sqlite")
    rollouts = store.finished(prefix="train/")
    store.close()
    assert len(rollouts) == 24
    assert all(len(rollout.turns) == 2 and rollout.ending == "done" for rollout in rollouts)
    assert rows_of(folder)[-1]["num_tokens"] == sum(len(t.reply_ids) for r in rollouts for t in r.turns)
    # the second prompt begins with the first prompt and reply, token for token
    for rollout in rollouts:
        first, second = rollout.turns
        assert second.prompt_ids[: len(first.prompt_ids) + len(first.reply_ids)] == first.prompt_ids + first.reply_ids


def test_training_sees_what_was_sampled(tmp_path: Path) -> None:
    """In float32 the log-probs at training are those at sampling, before every update of a run."""
    runs.run(runs.recipe(tmp_path, family="qwen3"), tmp_path / "runs")
    assert max(row["logp_drift/max"] for row in rows_of(tmp_path / "runs" / "tiny")) < 1e-4


def test_a_random_model_learns_and_unlearns(tmp_path: Path) -> None:
    """The share of the letter a rises from about 1 in 100 to more than a half; with a negated reward it cannot."""
    learns = ("steps=30", "sampling.rollouts_per_task=8", "update.learning_rate=0.005")
    path = runs.recipe(tmp_path)
    runs.run(path, tmp_path / "runs", *learns)
    rewards = [row["reward"] for row in rows_of(tmp_path / "runs" / "tiny")]
    assert sum(rewards[:3]) / 3 < 0.1 < 0.5 < sum(rewards[-3:]) / 3, rewards
    # from the model that has learned, with the reward counted against it
    learned = sorted((tmp_path / "runs" / "tiny" / "checkpoints").glob("step-*"))[-1]
    back = recipe_with_weight(path, -1.0)
    runs.run(back, tmp_path / "runs", *learns, "name=back", f'model.path="{learned}"')
    rewards = [row["rewards/a/mean"] for row in rows_of(tmp_path / "runs" / "back")]
    assert rewards[0] > 0.4 and rewards[-1] < 0.2, rewards


def recipe_with_weight(path: Path, weight: float) -> Path:
    other = path.with_name("back.toml")
    other.write_text(path.read_text() + f"weight = {weight}\n")
    return other


def test_the_same_seed_gives_the_same_run_and_another_does_not(tmp_path: Path) -> None:
    path = runs.recipe(tmp_path)
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        runs.run(path, tmp_path / "runs", f"name={name}", f"seed={seed}")
    one, two, three = (weights_of(tmp_path / "runs" / name) for name in ("one", "two", "three"))
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=1e-5)
    assert any(not torch.allclose(one[name], three[name], atol=1e-4) for name in one)


def test_a_group_with_a_failed_rollout_is_missing_and_never_a_zero(tmp_path: Path) -> None:
    path = runs.recipe(tmp_path, words=("ab", "bad"), **{"harness.agent": f"{runs.__file__}:failing_agent"})
    runs.run(path, tmp_path / "runs", "steps=1", "sampling.retries=1")
    (row,) = rows_of(tmp_path / "runs" / "tiny")
    # one of two groups: 4 rollouts, each tried twice
    assert (row["groups/dropped"], row["rollouts/failed"], row["rollouts/failed/harness"]) == (1, 8, 8)
    runs.run(path, tmp_path / "runs", "steps=1", "name=drop", 'sampling.on_failure="drop"')
    (row,) = rows_of(tmp_path / "runs" / "drop")
    assert (row["groups/dropped"], row["rollouts/failed"]) == (1, 4)


def test_a_reward_that_raises_is_missing_counted_and_named(tmp_path: Path) -> None:
    path = runs.recipe(tmp_path, words=("ab", "bad"), reward="broken_reward")
    runs.run(path, tmp_path / "runs", "steps=1", "sampling.retries=0")
    (row,) = rows_of(tmp_path / "runs" / "tiny")
    assert (row["groups/dropped"], row["rollouts/failed/reward"]) == (1, 4)


def test_a_step_without_any_group_says_why(tmp_path: Path) -> None:
    path = runs.recipe(tmp_path, words=("bad",), **{"harness.agent": f"{runs.__file__}:failing_agent"})
    with pytest.raises(EmptyStepError, match="the tool broke"):
        runs.run(path, tmp_path / "runs", 'sampling.on_failure="drop"')


def test_training_stops_where_the_log_probs_part(tmp_path: Path) -> None:
    """A limit below what float32 can hold stands for an engine that holds other weights than the trainer."""
    with pytest.raises(FidelityError, match=r"at sampling, .* at training - .*>>>.+<<<"):
        runs.run(runs.recipe(tmp_path), tmp_path / "runs", "fidelity.mean_limit=1e-12", "fidelity.max_limit=1e-11")
    assert not list((tmp_path / "runs" / "tiny").glob("checkpoints/step-*"))


@pytest.mark.parametrize("family", ["gemma3", "lfm2"])
def test_every_family_runs_the_same_loop(tmp_path: Path, family: str) -> None:
    runs.run(runs.recipe(tmp_path, family=family), tmp_path / "runs", "steps=2")
    assert max(row["logp_drift/max"] for row in rows_of(tmp_path / "runs" / "tiny")) < 1e-4


@pytest.mark.parametrize("settings", [("update.lora_rank=4",), ("model.gradient_checkpointing=true",)])
def test_lora_and_checkpointing_run_the_same_loop(tmp_path: Path, settings: tuple[str, ...]) -> None:
    runs.run(runs.recipe(tmp_path), tmp_path / "runs", "steps=2", *settings)
    assert max(row["logp_drift/max"] for row in rows_of(tmp_path / "runs" / "tiny")) < 1e-4


def test_every_method_trains_two_steps_through_the_gateway(tmp_path: Path) -> None:
    from whippletree import methods

    path = runs.recipe(tmp_path, reward="coin")
    before = load_file(tmp_path / "model" / "model.safetensors")
    judge = f'judge={{kind = "function", function = "{runs.__file__}:judge"}}'
    for name in methods.names():
        needs = [judge] if "judge" in methods.load(name).needs else []
        runs.run(path, tmp_path / "runs", f"name={name}", f"method={name}", "steps=2", *needs)
        after = weights_of(tmp_path / "runs" / name)
        assert any(not torch.equal(before[key], after[key]) for key in before), name
        assert all(row["loss"] is not None for row in rows_of(tmp_path / "runs" / name)), name


def test_the_report_and_summary_are_written_of_a_run(tmp_path: Path) -> None:
    runs.run(runs.recipe(tmp_path), tmp_path / "runs")
    folder = tmp_path / "runs" / "tiny"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 3 and summary["median_step_seconds"] > 0 and summary["versions"]["torch"]
    assert "<html" in (folder / "report.html").read_text()
