"""An agent that is a command, started afresh for each rollout."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from whippletree.harness.outcome import Outcome, failure, outcome_of
from whippletree.harness.processes import end_all
from whippletree.types import Json, Task

_KEPT = 8192  # bytes kept of each of stdout and stderr
_LARGEST_RESULT = 1 << 20  # bytes of reward.json


@dataclass(frozen=True, kw_only=True)
class CommandHarness:
    """Runs a command once per rollout, in a fresh scratch folder, and ends everything it started.

    The environment is small, and nothing else of this process's environment is in it:

        PATH, LANG            as here               HOME              the scratch folder, which is also where it starts
        OPENAI_BASE_URL, OPENAI_API_KEY             WHIPPLETREE_TASK  path of a JSON file with the task

    and what `env` adds or replaces. The command may leave its rewards in `reward.json` in the scratch folder: a
    number, or an object of channels (see `outcome_of`). An agent whose model can write files there can write its own
    reward; score such an agent by a reward that reads the turns. Exit code and the last 8 KB of stdout and stderr are
    in `info`. A command that exits with anything but 0 failed.

    Raises:
        ValueError: the command is empty, a limit is not positive, or `env` replaces what the gateway needs.
    """

    command: str | Sequence[str]  # a string is run by sh; a sequence is a program and its arguments
    timeout: float  # seconds
    grace: float = 5.0  # seconds between SIGTERM and SIGKILL
    memory: int | None = None  # bytes of address space of each of its processes; None: no limit
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.command:
            raise ValueError("a command harness needs a command, but got none")
        if not self.timeout > 0 or not self.grace >= 0 or (self.memory is not None and not self.memory > 0):
            raise ValueError(
                f"timeout and memory must be above 0 and grace not below it, but got timeout={self.timeout}, "
                f"memory={self.memory}, grace={self.grace}"
            )
        if taken := {"OPENAI_BASE_URL", "OPENAI_API_KEY", "WHIPPLETREE_TASK"} & set(self.env):
            raise ValueError(f"these variables name the rollout and are set for each one, not in env: {sorted(taken)}")

    async def run(self, task: Task, *, base_url: str, api_key: str) -> Outcome:
        """Run the command once. A non-zero exit, a timeout and an unreadable reward.json are failed outcomes."""
        try:
            with tempfile.TemporaryDirectory(prefix="whippletree-", ignore_cleanup_errors=True) as scratch:
                return await self._run_in(Path(scratch), task, {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key})
        except OSError as error:
            return failure(f"the command could not be started: {error}")

    async def _run_in(self, scratch: Path, task: Task, gateway: dict[str, str]) -> Outcome:
        row = scratch / "task.json"
        row.write_text(json.dumps(task.to_json()))
        here = {"PATH": os.environ.get("PATH", os.defpath), "LANG": os.environ.get("LANG", "C.UTF-8")}
        env = {**here, "HOME": str(scratch), **self.env, **gateway, "WHIPPLETREE_TASK": str(row)}
        code, info = await execute(
            self._arguments(), cwd=scratch, env=env, mark="WHIPPLETREE_TASK", timeout=self.timeout, grace=self.grace
        )
        return exit_failure(code, info, self.timeout) or _with_result(scratch / "reward.json", info)

    def _arguments(self) -> list[str]:
        command = ["/bin/sh", "-c", self.command] if isinstance(self.command, str) else list(self.command)
        if self.memory is None:
            return command
        # sh sets the limit and becomes the command: code between fork and exec is not safe in a threaded process
        return ["/bin/sh", "-c", f'ulimit -v {max(self.memory // 1024, 1)} && exec "$@"', "sh", *command]


async def execute(
    arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], mark: str, timeout: float, grace: float
) -> tuple[int | None, Json]:
    """Exit code (None after the timeout) and what was printed; nothing that the command started outlives this call.

    `mark` names a variable of `env` whose value no other process has.
    """
    # files and not pipes: a pipe stays open as long as any grandchild lives, and waiting for it would hang
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process: asyncio.subprocess.Process | None = None
        code: int | None = None
        try:
            async with asyncio.timeout(timeout):
                process = await asyncio.create_subprocess_exec(
                    *arguments,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    cwd=cwd,
                    env=env,
                    start_new_session=True,
                )
                code = await process.wait()
        except TimeoutError:
            pass
        finally:
            await end_all(process.pid if process else None, mark=f"{mark}={env[mark]}", grace=grace)
        return code, {"exit_code": code, "stdout": _tail(out), "stderr": _tail(err)}


def exit_failure(code: int | None, info: Json, timeout: float) -> Outcome | None:
    """The failed outcome of a command that was timed out or did not exit with 0."""
    if code is None:
        return failure(f"timed out after {timeout:g} s", info=info)
    if code == 0:
        return None
    last = next(iter(info["stderr"].strip().splitlines()[-1:]), "")
    ended = f"was ended by signal {-code}" if code < 0 else f"exited with {code}"
    return failure(f"the command {ended}{': ' if last else ''}{last}", info=info)


def _with_result(path: Path, info: Json) -> Outcome:
    """The outcome of a command that ended well, with what it left in reward.json."""
    if not path.is_file():
        return Outcome(info=info)
    try:
        if path.stat().st_size > _LARGEST_RESULT:
            raise ValueError(f"it has more than {_LARGEST_RESULT} bytes")
        result = outcome_of(json.loads(path.read_text()))
    except (ValueError, RecursionError) as error:
        return failure(f"reward.json cannot be read: {error}", info=info)
    return Outcome(rewards=result.rewards, info={**result.info, **info})


def _tail(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _KEPT))
    return file.read().decode(errors="replace")
