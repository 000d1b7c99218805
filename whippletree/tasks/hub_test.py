from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from whippletree.tasks import hub_tasks
from whippletree.types import Task

ROWS = [{"question": "2 + 2", "answer": "4"}, {"question": "3 + 3", "answer": "6"}, {"question": "", "answer": "0"}]


@pytest.fixture
def local(tmp_path: Path) -> dict[str, Any]:
    """A data set on disk, and a cache that ends with the test."""
    pytest.importorskip("datasets")
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, ROWS)))
    return {"dataset": "json", "data_files": str(tmp_path / "rows.json"), "cache_dir": str(tmp_path / "cache")}


def test_rows_of_a_local_data_set_are_tasks(local: dict[str, Any]):
    assert hub_tasks(**local, prompt="question", size=2) == [
        Task("json:train:0", ({"role": "user", "content": "2 + 2"},), ROWS[0]),
        Task("json:train:1", ({"role": "user", "content": "3 + 3"},), ROWS[1]),
    ]


def test_a_row_that_is_no_task_is_named(local: dict[str, Any]):
    with pytest.raises(ValueError, match=r"json:train:2: a prompt must be text"):
        hub_tasks(**local, prompt="question")
    with pytest.raises(ValueError, match=r"json:train:0: there is no column 'asked' to ask, only \['answer', 'ques"):
        hub_tasks(**local, prompt="asked")


def test_without_its_library_a_source_says_how_to_install_it():
    script = """
import sys
sys.modules["datasets"] = sys.modules["reasoning_gym"] = None  # as if they were not installed
from whippletree.tasks import hub_tasks, reasoning_gym_tasks
for source in (lambda: hub_tasks("x"), lambda: reasoning_gym_tasks("x", size=1, seed=1)):
    try:
        source()
    except ImportError as error:
        print(error)
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "pip install datasets" in said and "pip install reasoning-gym" in said
