"""One side of a comparison: a process that does a step when told to, so that only one side works at a time."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

ROOT = Path(__file__).parent.parent
Json = dict[str, Any]


class Worker:
    """Speaks the protocol of `benchmarks/README.md`: waits for `ready`, writes `go`, reads one JSON line.

    Raises:
        RuntimeError: the process ended or wrote something else; the end of its standard error is in the message.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self.errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in __exit__
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, cwd=ROOT
        )

    def __enter__(self) -> Worker:
        self.about = self._read()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.errors.close()

    def step(self) -> Json:
        """One step: `seconds`, `cpu_seconds`, `tokens`, `peak_rss_mb`, `reward`."""
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # the read below says why
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        return self._read()

    def _read(self) -> Json:
        assert self.process.stdout
        line = self.process.stdout.readline()
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if not isinstance(row, dict):
            self.errors.seek(0)
            tail = "".join(self.errors.readlines()[-20:])
            raise RuntimeError(
                f"a worker answers each `go` with one JSON object, but {' '.join(self.command)} wrote {line!r} "
                f"(exit code {self.process.poll()}); its standard error ends with:\n{tail}"
            )
        return row
