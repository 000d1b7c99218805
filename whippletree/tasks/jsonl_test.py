from __future__ import annotations

from pathlib import Path

import pytest

from whippletree.tasks import read_jsonl
from whippletree.types import Task


def test_each_line_is_a_task(tmp_path: Path):
    file = tmp_path / "sums.jsonl"
    file.write_text('﻿{"prompt": "2 + 2 ≠", "answer": "4"}\r\n\n{"id": "b", "messages": [{"role": "user"}]}\n')
    assert read_jsonl(file) == [
        Task("sums:1", ({"role": "user", "content": "2 + 2 ≠"},), {"answer": "4"}),
        Task("b", ({"role": "user"},)),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "x"', "it is not JSON: Expecting ',' delimiter at column 15"),
        (b'["x"]', "it must be a JSON object, but it is a list"),
        (b'{"prompt": ""}', "not empty"),
        (b'{"prompt": "x", "score": NaN}', "JSON has no NaN; write null"),
        (b'{"prompt": "\xff"}', "it is not UTF-8: invalid start byte at byte 12"),
        (b"[" * 99_999, "nested too deeply"),
        (b'{"id": "first:1", "prompt": "again"}', "'first:1' is already taken, by .*first.jsonl, line 1"),
    ],
)
def test_a_broken_line_is_named_with_file_number_and_reason(tmp_path: Path, line: bytes, reason: str):
    file = tmp_path / "first.jsonl"
    file.write_bytes(b'{"prompt": "fine"}\n\n' + line + b'\n{"prompt": "fine"}\n')
    with pytest.raises(ValueError, match=rf"first\.jsonl, line 3: .*{reason}"):
        read_jsonl(file)


def test_an_empty_file_and_a_missing_one_are_refused(tmp_path: Path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"empty.jsonl has no tasks"):
        read_jsonl(tmp_path / "empty.jsonl")
    with pytest.raises(FileNotFoundError, match=r"missing.jsonl"):
        read_jsonl(tmp_path / "missing.jsonl")
