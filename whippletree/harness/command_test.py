from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from whippletree.harness import CommandHarness, Outcome
from whippletree.harness.processes import alive
from whippletree.types import Task

TASK = Task("t", messages=({"role": "user", "content": "2 + 2 ≠"},), columns={"answer": "4"})


async def run(command: Any, *, timeout: float = 30.0, **settings: Any) -> Outcome:
    harness = CommandHarness(command=command, timeout=timeout, **settings)
    return await harness.run(TASK, base_url="http://g/v1", api_key="secret")


def gone(pid: int) -> bool:
    """The process is not there, or it is dead and only waits for a parent to notice."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"


async def pids(file: Path, *, count: int) -> list[int]:
    """The process ids a command writes to a file, once they are all there."""
    async with asyncio.timeout(30):
        while not file.exists() or len(file.read_text().split("\n")) <= count:
            await asyncio.sleep(0.01)
    return [int(pid) for pid in file.read_text().split()]


async def test_a_command_gets_its_task_the_gateway_and_little_else():
    os.environ["WHIPPLETREE_TEST_SECRET"] = "of this process"
    try:
        outcome = await run("cat $WHIPPLETREE_TASK; echo; pwd; env", env={"MODE": "fast", "LANG": "de"})
    finally:
        del os.environ["WHIPPLETREE_TEST_SECRET"]
    row, where, *lines = outcome.info["stdout"].splitlines()
    env = dict(line.split("=", 1) for line in lines)
    assert (outcome.ending, outcome.info["exit_code"]) == ("done", 0)
    assert Task.from_json(json.loads(row)) == TASK
    assert env.pop("WHIPPLETREE_TASK") == f"{where}/task.json" and env.pop("HOME") == where
    for shells_own in ("PWD", "OLDPWD", "SHLVL", "_"):
        env.pop(shells_own, None)
    assert env == {
        "PATH": os.environ["PATH"],
        "LANG": "de",
        "MODE": "fast",
        "OPENAI_BASE_URL": "http://g/v1",
        "OPENAI_API_KEY": "secret",
    }
    assert not Path(where).exists()


async def test_a_sequence_is_a_program_and_its_arguments():
    outcome = await run([sys.executable, "-c", "import sys; print(sys.argv[1])", "$HOME; x"])
    assert outcome.info["stdout"] == "$HOME; x\n"


@pytest.mark.parametrize(
    ("written", "rewards", "info"),
    [("0.5", {"reward": 0.5}, {}), ('{"correct": 1, "info": {"tries": 2}}', {"correct": 1.0}, {"tries": 2})],
)
async def test_reward_json_holds_the_rewards(written: str, rewards: dict[str, float], info: dict[str, int]):
    outcome = await run(f"echo '{written}' > reward.json")
    assert (outcome.ending, outcome.rewards) == ("done", rewards)
    assert outcome.info == {**info, "exit_code": 0, "stdout": "", "stderr": ""}


@pytest.mark.parametrize("content", ["'{'", "'[1]'", "'[' * 99_999", "'1' * (2 ** 20 + 1)", "'\\ud800'", "'1e'"])
async def test_an_unreadable_reward_json_is_a_failure_and_not_a_0(content: str):
    source = f"open('reward.json', 'wb').write(({content}).encode(errors='surrogatepass'))"
    outcome = await run([sys.executable, "-c", source])
    assert (outcome.ending, outcome.blame, outcome.rewards) == ("failed", "harness", {})
    assert outcome.reason.startswith("reward.json cannot be read: ")


async def test_a_non_zero_exit_is_a_failure_with_the_last_words():
    outcome = await run("echo 1.0 > reward.json; echo working; echo oh >&2; echo no >&2; exit 3")
    assert (outcome.ending, outcome.blame, outcome.reason) == ("failed", "harness", "the command exited with 3: no")
    assert outcome.rewards == {}
    assert outcome.info == {"exit_code": 3, "stdout": "working\n", "stderr": "oh\nno\n"}
    assert (await run("kill -9 $$")).reason == "the command was ended by signal 9"


async def test_only_the_last_8_kilobytes_of_the_output_are_kept():
    outcome = await run([sys.executable, "-c", "print('a' * 50_000 + 'b' * 8191)"])
    assert outcome.info["stdout"] == "b" * 8191 + "\n"  # 8192 with the newline


async def test_a_command_that_is_not_there_is_a_failure():
    outcome = await run(["no-such-command-here"])
    assert outcome.ending == "failed" and "could not be started" in outcome.reason


async def test_a_timeout_is_a_failure_and_ends_the_command(tmp_path: Path):
    outcome = await run(f"echo begun; echo $$ > {tmp_path}/pids; exec sleep 99", timeout=1)
    assert (outcome.ending, outcome.blame, outcome.reason) == ("failed", "harness", "timed out after 1 s")
    assert outcome.info == {"exit_code": None, "stdout": "begun\n", "stderr": ""}
    assert gone((await pids(tmp_path / "pids", count=1))[0])


async def test_cancelling_ends_the_command_and_its_grandchildren_also_where_they_ignore_it(tmp_path: Path):
    stubborn = f"trap '' TERM; echo $$ >> {tmp_path}/pids; while :; do sleep 0.05; done"
    (tmp_path / "stubborn.sh").write_text(stubborn)
    running = asyncio.create_task(run(f"(sh {tmp_path}/stubborn.sh & sleep 99) & {stubborn}", grace=0.1))
    command, grandchild = await pids(tmp_path / "pids", count=2)
    assert not gone(command) and not gone(grandchild)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert gone(command) and gone(grandchild)


async def test_a_command_may_clean_up_before_it_is_killed(tmp_path: Path):
    script = f"trap 'echo saved > {tmp_path}/saved; exit' TERM; echo $$ > {tmp_path}/pids; while :; do sleep 0.05; done"
    running = asyncio.create_task(run(script, grace=30))
    await pids(tmp_path / "pids", count=1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (tmp_path / "saved").read_text() == "saved\n"


@pytest.mark.parametrize("start", ["", "env -i "])  # also one that forgets its environment is in the group
async def test_a_child_left_behind_by_a_command_that_ended_well_is_ended(tmp_path: Path, start: str):
    outcome = await run(f"{start}sleep 99 & echo $! > {tmp_path}/pids; echo 1 > reward.json")
    assert (outcome.ending, outcome.rewards) == ("done", {"reward": 1.0})
    assert gone((await pids(tmp_path / "pids", count=1))[0])


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="only /proc shows who left its session")
async def test_a_process_in_a_session_of_its_own_is_found_and_ended(tmp_path: Path):
    leave = f"import os, time; os.setsid(); print(os.getpid(), file=open('{tmp_path}/pids', 'w')); time.sleep(99)"
    outcome = await run(f'{sys.executable} -c "{leave}" & while [ ! -s {tmp_path}/pids ]; do sleep 0.02; done')
    assert outcome.ending == "done"
    assert gone((await pids(tmp_path / "pids", count=1))[0])


def test_a_mark_that_would_fit_every_process_is_our_own_bug():
    with pytest.raises(AssertionError, match="NAME=value"):
        alive(None, mark="")


async def test_memory_is_limited():
    allocate = [sys.executable, "-c", "print(len(bytearray(2 ** 30)))"]
    assert (await run(allocate)).info["stdout"] == f"{2**30}\n"
    limited = await run(allocate, memory=2**29)
    assert limited.ending == "failed" and "MemoryError" in limited.reason


@pytest.mark.parametrize(
    "settings",
    [
        {"command": "", "timeout": 1},
        {"command": "true", "timeout": 0},
        {"command": "true", "timeout": 1, "memory": 0},
        {"command": "true", "timeout": 1, "grace": -1},
        {"command": "true", "timeout": 1, "env": {"OPENAI_API_KEY": "mine"}},
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any]):
    with pytest.raises(ValueError, match=r"needs a command|must be above 0|are set for each one"):
        CommandHarness(**settings)
