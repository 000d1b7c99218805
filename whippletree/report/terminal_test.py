from __future__ import annotations

import io
import math
import os
import subprocess
import sys

import pytest
from rich.console import Console

from whippletree.report.terminal import View, clock, sparkline, written

METRICS = {"reward": 0.5, "reward_std": 0.25, "frac_reward_zero_std": 0.125, "step_time": 5.0, "other": 9}


def console(*, terminal: bool, width: int = 100) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=width, _environ={"TERM": "xterm"}), out


def test_a_log_gets_one_plain_line_a_step() -> None:
    to, out = console(terminal=False)
    with View("quickstart", 20, header={"model": "tiny"}, console=to) as view:
        view.rollouts(3, 64)
        view.step(1, METRICS)
        view.note("[saved] checkpoint")
        view.step(2, METRICS | {"reward": math.nan, "step_time": 3.0})
    title, header, first, note, second = out.getvalue().splitlines()
    assert (title, header.split(), note) == ("quickstart", ["model", "tiny"], "[saved] checkpoint")
    # 19 steps of 5 s are 95 s; of the two spreads only the one that is there is written
    assert first == "step  1/20  ▄             reward 0.500  spread 0.250  equal groups 12%  s/step 5.0  1:35 left"
    assert second.startswith("step  2/20  ▄             reward –  spread")
    assert second.endswith("s/step 3.0  1:12 left")  # 18 steps of (5 + 3) / 2 s
    assert "\x1b" not in out.getvalue()


def test_colour_that_is_forced_makes_no_terminal_of_a_log() -> None:
    code = "from whippletree.report.terminal import View\nwith View('t', 2) as view: view.step(1, {'kl': 0.5})"
    env = os.environ | {"FORCE_COLOR": "1", "TERM": "xterm"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == ["t", f"step 1/2  {'':12}  kl 0.5"]


def test_a_long_line_is_never_wrapped_in_a_log() -> None:
    to, out = console(terminal=False, width=20)
    with View("t", 2, console=to) as view:
        view.step(1, METRICS)
    assert len(out.getvalue().splitlines()) == 2


def test_an_encoding_without_blocks_gets_none() -> None:
    raw = io.BytesIO()
    to = Console(file=io.TextIOWrapper(raw, encoding="ascii", errors="strict", write_through=True))
    with View("t", 2, console=to) as view:
        view.step(1, METRICS)
    assert raw.getvalue().splitlines()[1].startswith(b"step 1/2  reward 0.500")


@pytest.mark.parametrize("width", [40, 100])
def test_a_terminal_shows_header_bars_metrics_and_curve(width: int) -> None:
    to, out = console(terminal=True, width=width)
    with View("[run] 7", 20, header={"writes": "runs/7"}, console=to) as view:
        view.step(1, METRICS)
        view.step(2, METRICS | {"reward": 0.75})
        view.rollouts(48, 64)
        view.note("a note")
    last = out.getvalue()
    for text in ("[run] 7", "runs/7", "2/20", "48/64", "a note", "0.750", "▁█", "0.50 to 0.75"):
        assert text in last


def test_a_view_of_nothing_yet_renders() -> None:
    to, out = console(terminal=True)
    with View("t", 0, console=to):
        pass
    assert "0/0" in out.getvalue()


def test_the_last_step_has_no_time_left() -> None:
    to, out = console(terminal=False)
    with View("t", 1, console=to) as view:
        view.step(1, METRICS)
    assert "left" not in out.getvalue()


def test_sparkline_by_hand() -> None:
    # eight blocks from 0 to 7: 3.4 rounds to block 3, and a value that is missing leaves a space
    assert sparkline([0, 3.4, None, 7], width=9) == "▁▄ █"
    assert sparkline([9, 0, 7], width=2) == "▁█"
    assert sparkline([2, 2], width=4) == "▄▄"
    assert (sparkline([], width=4), sparkline([None], width=4)) == ("", " ")


def test_clock_by_hand() -> None:
    assert [clock(s) for s in (0, 59.6, 75, 3675)] == ["0:00", "1:00", "1:15", "1:01:15"]


def test_a_metric_that_is_absent_has_no_label_and_one_that_is_missing_a_dash() -> None:
    assert written({"kl": None, "entropy": 1.5}) == [("kl", "–"), ("entropy", "1.500")]
