"""The driver: turns are taken, medians are right, and a worker that fails says why."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.reward import reward
from benchmarks.step import interleave, summary, table, write_tasks
from benchmarks.worker import Worker

ROW = {"seconds": 2.0, "cpu_seconds": 3.0, "tokens": 100, "peak_rss_mb": 1024.0, "reward": 0.5}

# says it is ready, then answers each line with the number of lines so far as its seconds
COUNTING = f"""
import json, sys
print(json.dumps({{"ready": True, "name": "counting"}}), flush=True)
for n, line in enumerate(sys.stdin, start=1):
    print(json.dumps({{**{ROW!r}, "seconds": n, "said": line.strip()}}), flush=True)
"""
DYING = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
sys.stdin.readline()
sys.exit("out of memory")
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_workers_take_turns_and_warm_up_steps_do_not_count() -> None:
    with Worker(python(COUNTING)) as one, Worker(python(COUNTING)) as two:
        assert one.about == {"ready": True, "name": "counting"}
        rows = interleave({"one": one, "two": two}, steps=3, warmup=2)
    # each did steps 1 to 5, of which the first two were warm-up
    assert {name: [row["seconds"] for row in side] for name, side in rows.items()} == {
        "one": [3, 4, 5],
        "two": [3, 4, 5],
    }
    assert {row["said"] for side in rows.values() for row in side} == {"go"}


def test_a_worker_that_ends_says_why() -> None:
    with Worker(python(DYING)) as worker, pytest.raises(RuntimeError, match="out of memory"):
        worker.step()


@pytest.mark.parametrize("code", ["print('hello')", "print('[1]')", ""])
def test_a_worker_that_breaks_the_protocol_is_refused(code: str) -> None:
    worker = Worker(python(code))
    with pytest.raises(RuntimeError, match="one JSON object"):
        worker.__enter__()
    worker.__exit__(None, None, None)


def test_a_summary_by_hand() -> None:
    rows = [{**ROW, "seconds": 4.0}, {**ROW, "seconds": 2.0, "peak_rss_mb": 2048.0}, {**ROW, "seconds": 10.0}]
    # tokens/s of the three are 25, 50 and 10; the largest peak is 2 GB
    assert summary(rows) == {
        "seconds": 4.0,
        "seconds_min": 2.0,
        "seconds_max": 10.0,
        "cpu_seconds": 3.0,
        "tokens_per_second": 25.0,
        "peak_rss_mb": 2048.0,
    }
    line = table({"one": summary(rows)}).splitlines()[1]
    assert line.split() == ["one", "4.00", "(2.00-10.00)", "3.00", "25.0", "2.00"]


def test_tasks_are_sums_of_two_digits_with_their_answers(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks.jsonl", tasks=5)
    rows = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    sums = [row["prompt"][0]["content"].split(":")[-1].strip(" =") for row in rows]
    assert len(rows) == 5
    assert [str(int(a) + (int(b) if sign == "+" else -int(b))) for a, sign, b in map(str.split, sums)] == [
        row["answer"] for row in rows
    ]


def test_rewards_by_hand() -> None:
    assert reward("3 + 4 = 7", "7", kind="exact") == 1.0
    assert reward("7 is 3 + 4", "7", kind="exact") == 0.0
    assert reward("no number", "7", kind="exact") == 0.0
    # the last number is 9, at distance 2; two characters
    assert reward("=9", "7", kind="dense") == 1 / 3 + 0.002
    assert reward("no", "7", kind="dense") == 0.002
    assert reward("9" * 50, "7", kind="dense") < 0.06
