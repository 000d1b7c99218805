from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from whippletree.tasks import load
from whippletree.types import Task


def test_a_recipe_s_table_is_loaded_by_its_kind(tmp_path: Path):
    (tmp_path / "t.jsonl").write_text('{"prompt": "x"}')
    assert load({"kind": "jsonl", "path": str(tmp_path / "t.jsonl")}) == [
        Task("t:1", ({"role": "user", "content": "x"},))
    ]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, r"one of \['hub', 'jsonl', 'reasoning_gym'\], but got None"),
        ({"kind": "csv"}, "but got 'csv'"),
        ({"kind": "jsonl"}, "missing a required argument: 'path'"),
        ({"kind": "jsonl", "path": "x", "shuffle": True}, "unexpected keyword argument 'shuffle'"),
        ({"kind": "reasoning_gym", "dataset": "chain_sum", "seed": 1}, "missing a required argument: 'size'"),
    ],
)
def test_a_table_that_fits_no_kind_is_refused(spec: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        load(spec)
