"""Whether the last reply's answer is mathematically equal to the expected one, through the library math-verify."""

from __future__ import annotations

import asyncio
import atexit
import importlib.util
import json
import select
import subprocess
import sys
from pathlib import Path
from threading import Lock
from typing import Any

from whippletree.reward.text import final_text
from whippletree.types import Json, Rollout


async def math_equal(rollout: Rollout, *, column: str = "answer") -> dict[str, float]:
    """1 where the answer found in the last reply equals the task's, else 0 (also where none is found).

    The expected answer is LaTeX, with or without its dollar signs, or a plain number or expression.

    Raises:
        ImportError: the library is not installed.
        ValueError: the task has no answer in that column, or one that is not mathematics.
        TimeoutError: comparing them took too long, so whether they are equal is not known.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("this reward needs the library math-verify: pip install math-verify")
    expected = rollout.task.columns.get(column)
    if expected is None:
        raise ValueError(f"task {rollout.task.id} has no answer in its column {column!r}")
    question = {"expected": str(expected), "reply": final_text(rollout)}
    return {"math_equal": float(await asyncio.to_thread(_JUDGE.equal, question))}


class Judge:
    """A process that compares answers, one at a time; started when first asked, ended when it hangs or we end.

    math-verify stops its own long computations by a signal, which works only in a process's main thread; and not all
    of them, so the process is the second limit.
    """

    def __init__(self, *, limit: float) -> None:
        self.limit = limit  # seconds for one question
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def equal(self, question: Json) -> bool:
        with self._lock:
            answer = self._ask(question)
        if "error" in answer:
            raise {"TimeoutError": TimeoutError, "ValueError": ValueError}[answer["error"]](answer["reason"])
        return bool(answer["equal"])

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _ask(self, question: Json) -> Any:
        if self._process is None or self._process.poll() is not None:
            # -P: this folder holds a math.py, and must not come before the standard library
            command = [sys.executable, "-P", str(Path(__file__).with_name("math_judge.py"))]
            pipe, null = subprocess.PIPE, subprocess.DEVNULL
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, bufsize=0)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        ready, _, _ = select.select([self._process.stdout], [], [], self.limit)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            self.close()
            raise TimeoutError(f"comparing the answers took more than {self.limit:g} s, or ended the process")
        return json.loads(line)


_JUDGE = Judge(limit=30.0)
atexit.register(_JUDGE.close)
