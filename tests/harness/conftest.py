"""A table of what each harness did, at the end of `make test-harness` and in runs/harnesses.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cases import Case
from whippletree.harness import LaunchedHarness, Outcome
from whippletree.types import Turn

ROWS = pytest.StashKey[dict[str, list[str]]]()
HEAD = ("harness", "version", "API", "calls", "second prompt", "threads", "result")
TABLE = Path(__file__).parent.parent.parent / "runs" / "harnesses.md"


@pytest.fixture
def seen(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Notes what a harness did, for the table."""
    rows = request.config.stash.setdefault(ROWS, {})

    def note(case: Case, harness: LaunchedHarness, outcome: Outcome, turns: tuple[Turn, ...]) -> None:
        main = [turn for turn in turns if turn.thread == "main"]
        links = ", ".join(turn.link for turn in main[1:]) or "none"
        row = [harness.launcher.name, harness.launcher.version, case.api, str(len(turns)), links]
        rows[request.node.nodeid] = [*row, ", ".join(dict.fromkeys(turn.kind for turn in turns)), outcome.ending]

    return note


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash.get(ROWS, {})
    if not rows:
        return
    failed = {report.nodeid for report in terminalreporter.stats.get("failed", [])}
    table = [HEAD, tuple("---" for _ in HEAD)]
    table += [(*row[:-1], "failed" if name in failed else "passed") for name, row in rows.items()]
    lines = ["| " + " | ".join(row) + " |" for row in table]
    terminalreporter.section("harnesses")
    terminalreporter.write("\n".join(lines) + "\n")
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("\n".join(lines) + "\n")
