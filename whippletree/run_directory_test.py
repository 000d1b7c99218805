from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from whippletree import config
from whippletree.run_directory import RunDirectory, State, write_aside

TABLE: dict[str, Any] = {
    "method": "a_method",
    "tasks": {"source": "chain_sum"},
    "harness": {"agent": "agents:agent"},
    "update": {"learning_rate": 1e-5},
}
RECIPE = config.parse(TABLE)
WEIGHTS = {"layer.weight": torch.tensor([[1.0, -0.1], [3e-39, 1e30]]), "layer.bias": torch.tensor([0.5]).bfloat16()}
MOMENTS = {"layer.weight/step": torch.tensor(3.0), "layer.weight/exp_avg": torch.arange(4.0).reshape(2, 2).T}

HOLD = """
import sys, time
from whippletree import config
from whippletree.run_directory import RunDirectory, State
directory = RunDirectory(sys.argv[1], config.load(sys.argv[2]))
def hang(folder):
    print("in the middle", flush=True)
    time.sleep(600)
directory.save(State(step=2), {}, {}, hang)
"""


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RunDirectory]:
    opened = RunDirectory(tmp_path / "run", RECIPE)
    yield opened
    opened.close()


def save(directory: RunDirectory, step: int) -> Path:
    return directory.save(State(step=step), WEIGHTS, MOMENTS)


def names(directory: RunDirectory) -> list[str]:
    """Everything in the folder of checkpoints, hidden or not."""
    return sorted(path.name for path in (directory.path / "checkpoints").iterdir())


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    same = {name: one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one}
    return one.keys() == other.keys() and all(same.values())


def last_step(directory: RunDirectory) -> int:
    found = directory.latest()
    assert found is not None
    return found[0].step


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """What a full disk does: no file grows beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ---- checkpoints ------------------------------------------------------------------------------------------------


def test_a_checkpoint_reads_back_exactly(directory: RunDirectory) -> None:
    assert directory.latest() is None
    state = State(step=3, version=4, cursor=24, tokens=12345678901, seconds=0.1 + 0.2)
    folder = directory.save(state, WEIGHTS, MOMENTS, lambda aside: (aside / "extra.txt").touch())
    found = directory.latest()
    assert found is not None
    assert found[0] == state
    assert equal(found[1], WEIGHTS)
    assert equal(found[2], MOMENTS)
    assert sorted(path.name for path in folder.iterdir()) == [
        "extra.txt",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]


def test_only_the_newest_checkpoints_stay(directory: RunDirectory) -> None:
    for step in (1, 2, 3):
        save(directory, step)
    assert names(directory) == ["step-000002", "step-000003"]


def test_the_newest_is_the_one_with_the_highest_number_however_long(directory: RunDirectory) -> None:
    for step in (999_999, 1_000_000):
        save(directory, step)
    assert last_step(directory) == 1_000_000


def test_saving_a_step_again_replaces_it(directory: RunDirectory) -> None:
    save(directory, 1)
    directory.save(State(step=1, tokens=9), {"w": torch.ones(1)}, {})
    found = directory.latest()
    assert found is not None
    assert (found[0].tokens, list(found[1]), names(directory)) == (9, ["w"], ["step-000001"])


@pytest.mark.parametrize("kept", [[], ["model.safetensors"], ["model.safetensors", "optimizer.safetensors"]])
def test_what_a_kill_left_half_written_is_no_checkpoint_and_is_cleared(
    directory: RunDirectory, kept: list[str]
) -> None:
    whole = save(directory, 1)
    half, hidden = whole.with_name("step-000002"), whole.with_name(".step-000003")
    for folder in (half, hidden):
        folder.mkdir()
        for name in kept:
            shutil.copy(whole / name, folder / name)
    (hidden / "state.json").write_text("{")
    assert last_step(directory) == 1
    save(directory, 2)
    assert (last_step(directory), names(directory)) == (2, ["step-000001", "step-000002"])


def test_a_kill_while_an_old_checkpoint_is_removed_leaves_no_part_under_its_name(directory: RunDirectory) -> None:
    for step in (1, 2):
        save(directory, step)
    old = directory.path / "checkpoints" / "step-000001"
    old.rename(old.with_name(".step-000001-old"))  # the first thing that removal does
    assert [path.name for path in directory.checkpoints] == ["step-000002"]
    save(directory, 3)
    assert names(directory) == ["step-000002", "step-000003"]


def test_an_error_in_the_middle_leaves_nothing_of_the_new_and_all_of_the_old(directory: RunDirectory) -> None:
    save(directory, 1)

    def break_off(folder: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        directory.save(State(step=2), WEIGHTS, MOMENTS, break_off)
    assert names(directory) == ["step-000001"]


@pytest.mark.parametrize("large", ["weights", "moments", "extras"])
def test_a_full_disk_leaves_the_older_checkpoint_and_says_so(directory: RunDirectory, large: str) -> None:
    save(directory, 1)
    tensors = {name: {"x": torch.zeros(10_000)} if name == large else {} for name in ("weights", "moments")}

    def extras(folder: Path) -> None:
        (folder / "extra.bin").write_bytes(bytes(40_000 if large == "extras" else 1))

    with largest_file(20_000), pytest.raises(OSError, match="File too large") as caught:
        directory.save(State(step=2), **tensors, extras=extras)
    assert caught.value.errno == errno.EFBIG
    assert (last_step(directory), names(directory)) == (1, ["step-000001"])


def test_a_file_is_replaced_whole_or_not_at_all(directory: RunDirectory) -> None:
    path = directory.write_json("summary.json", {"a": 1})
    with largest_file(1000), pytest.raises(OSError, match="File too large"):
        directory.write_json("summary.json", {"a": "x" * 2000})
    assert path.read_text() == '{\n  "a": 1\n}'


# ---- one run, one process, one recipe ---------------------------------------------------------------------------


def test_a_run_is_held_by_one_process_until_it_ends_however_it_ends(tmp_path: Path) -> None:
    path, file = tmp_path / "run", write_aside(tmp_path / "recipe.toml", config.dump(RECIPE).encode())
    directory = RunDirectory(path, RECIPE)
    save(directory, 1)
    directory.close()
    command = [sys.executable, "-c", HOLD, str(path), str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "in the middle\n"
            with pytest.raises(ValueError, match=r"run is in use by another process"):
                RunDirectory(path, RECIPE)
            with pytest.raises(ValueError, match=r"run is in use by another process"):
                RunDirectory(path, RECIPE, fresh=True)
        finally:
            os.kill(other.pid, signal.SIGKILL)
    directory = RunDirectory(path, RECIPE)
    assert last_step(directory) == 1
    save(directory, 2)
    assert names(directory) == ["step-000001", "step-000002"]
    directory.close()


def test_another_recipe_is_refused_by_the_names_of_what_differs(directory: RunDirectory) -> None:
    save(directory, 1)
    directory.close()
    other = config.parse({**TABLE, "seed": 1, "update": {"learning_rate": 2e-5}, "steps": 7})
    with pytest.raises(ValueError, match=r"another recipe: seed was 0 and is 1; update\.learning_rate was 1e-05") as e:
        RunDirectory(directory.path, other)
    assert "steps" not in str(e.value)
    RunDirectory(directory.path, RECIPE).close()  # the refused one let go of the lock and changed nothing


def test_a_run_that_failed_before_it_began_takes_the_corrected_recipe(directory: RunDirectory) -> None:
    directory.close()
    (directory.path / "metrics.jsonl").touch()  # opened, and nothing was logged
    corrected = config.parse({**TABLE, "seed": 1})
    RunDirectory(directory.path, corrected).close()
    assert config.load(directory.path / "config.toml") == corrected


@pytest.mark.parametrize("trace", ["metrics.jsonl", "turns.sqlite", "checkpoints/step-000001/state.json"])
def test_a_run_that_began_keeps_its_recipe(directory: RunDirectory, trace: str) -> None:
    directory.close()
    (directory.path / trace).parent.mkdir(parents=True, exist_ok=True)
    (directory.path / trace).write_text("{}")
    with pytest.raises(ValueError, match="another recipe: seed was 0 and is 1"):
        RunDirectory(directory.path, config.parse({**TABLE, "seed": 1}))


def test_how_long_a_run_takes_may_change_and_is_kept(directory: RunDirectory) -> None:
    directory.close()
    longer = config.parse({**TABLE, "steps": 500, "checkpoint_every": 1, "keep_checkpoints": 9, "sinks": ["wandb"]})
    RunDirectory(directory.path, longer).close()
    assert config.load(directory.path / "config.toml") == longer


def test_a_fresh_run_begins_empty_under_any_recipe(directory: RunDirectory) -> None:
    save(directory, 1)
    (directory.path / "metrics.jsonl").touch()
    directory.close()
    other = config.parse({**TABLE, "seed": 1})
    again = RunDirectory(directory.path, other, fresh=True)
    assert sorted(path.name for path in again.path.iterdir()) == ["config.toml", "lock"]
    assert config.load(again.path / "config.toml") == other
    again.close()


def test_a_folder_that_is_no_run_is_never_emptied(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="it is no run directory"):
        RunDirectory(tmp_path, RECIPE, fresh=True)
    assert (tmp_path / "thesis.tex").exists()
    RunDirectory(tmp_path / "new", RECIPE, fresh=True).close()  # an empty one may be taken
