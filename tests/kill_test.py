"""A run that is killed at any moment goes on by the same command, and ends as if nothing had been."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from tests import runs
from tests.loop_test import rows_of, weights_of
from whippletree.gateway.store import Store
from whippletree.report.metrics import read

STEPS = 6
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.runs", "transformers.models.llama.modeling_llama"])


def train(path: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    # with the usual epsilon of 1e-8, Adam makes steps of 1e-5 out of the rounding of gradients that are 0
    runs.run(path, folder, f"steps={STEPS}", "checkpoint_every=3", "update.epsilon=1e-5")


def killed(path: Path, folder: Path, after: float) -> bool:
    """Start the run and kill it with SIGKILL after so many seconds; False if it ended before."""
    process = FORKS.Process(target=train, args=(path, folder))
    process.start()
    process.join(after)
    if process.exitcode is not None:
        assert process.exitcode == 0, process.exitcode
        return False
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    return True


@pytest.mark.slow
def test_ten_kills_at_random_points_change_nothing(tmp_path: Path) -> None:
    path = runs.evaluated(tmp_path, words=("ab", "cd", "ef", "gh", "ij"))
    assert not killed(path, tmp_path / "first", after=600)  # the server of forks imports everything once
    began = time.perf_counter()
    assert not killed(path, tmp_path / "calm", after=600)
    whole = time.perf_counter() - began
    seed = time.time_ns()
    chance, kills, ended = random.Random(seed), 0, 0
    print(f"kill points are seeded by {seed}, a run takes {whole:.1f} s")
    while kills < 10:  # where a run ends before its kill, the next kills meet another run
        folder = tmp_path / f"killed-{ended}"
        if killed(path, folder, after=chance.uniform(0.2, 0.9) * whole):
            kills += 1
            check_nothing_is_lost(folder / "tiny")
        else:
            ended += 1
    for folder in tmp_path.glob("killed*"):
        assert not killed(path, folder, after=600)
        check_the_same(tmp_path / "calm" / "tiny", folder / "tiny")


def check_the_same(calm: Path, disturbed: Path) -> None:
    """Each step and each evaluation once, the same tokens, the same weights."""
    assert [row["step"] for row in rows_of(disturbed)] == list(range(1, STEPS + 1))  # no step twice
    for name, weight in weights_of(calm).items():
        torch.testing.assert_close(weights_of(disturbed)[name], weight, rtol=0, atol=1e-5)
    assert sampled(calm) == sampled(disturbed)
    assert evaluations(calm) == evaluations(disturbed)
    assert [step for step, _ in evaluations(calm)] == [0, STEPS]


def check_nothing_is_lost(folder: Path) -> None:
    """Every step that was counted had whole groups of finished rollouts, each of them in the store."""
    if not (folder / "turns.sqlite").exists():
        return
    store = Store(folder / "turns.sqlite")
    for row in rows_of(folder):
        done = store.finished(prefix=f"train/{row['step'] - 1:06d}/")
        assert len(done) == 8 and all(rollout.rewards for rollout in done), row["step"]
    store.close()


def evaluations(folder: Path) -> list[tuple[int, float]]:
    """Step and mean reward of each evaluation that was logged."""
    return [(row["step"], row["eval/reward"]) for row in read(folder / "metrics.jsonl") if "eval/count" in row]


def sampled(folder: Path) -> dict[str, list[tuple[int, ...]]]:
    """What every rollout of a run sampled, turn by turn."""
    store = Store(folder / "turns.sqlite")
    found = {r.id: [turn.reply_ids for turn in r.turns] for r in store.finished(prefix="train/")}
    store.close()
    return found
