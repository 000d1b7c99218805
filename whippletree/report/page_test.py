from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from whippletree.report.curve import SMOOTH, write_curve
from whippletree.report.metrics import Metrics
from whippletree.report.page import verdict, write_report

EVIL = "<script>alert(1)</script>\"'&"
SUMMARY: dict[str, Any] = {
    "title": "quickstart",
    "before": 0.125,
    "before_interval": [0.0787, 0.1932],
    "after": 0.75,
    "after_interval": [0.6685, 0.8172],
    "steps": 3,
    "seconds": 75.0,
    "versions": {"torch": "2.13"},
    "command": "make quickstart",
}
VOID = {"meta", "line", "circle", "polyline", "polygon", "br"}


class Page(HTMLParser):
    """What a browser would see: tags, attributes and text; fails where tags do not nest."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += " " * (self.open[-1:] != ["style"]) + data

    @property
    def words(self) -> str:
        return " ".join(self.text.split())


def run(folder: Path, more: Mapping[str, Any] | None = None, *, steps: int = 3) -> Path:
    metrics = Metrics(folder)
    for step in range(1, steps + 1):
        metrics.log(
            step, {"reward": step / 10, "step_time": 4.0, "time/sample": 1.0, "time/backward": 2.0, **(more or {})}
        )
    return folder


def test_a_report_has_verdict_table_curves_times_and_how_to_repeat_it(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('method = "grpo"')
    page = Page(write_report(run(tmp_path), summary=SUMMARY, samples=[]))
    for text in (
        "Held-out accuracy rose from 12.5 % to 75.0 %.",
        "The 95 % intervals do not overlap.",
        "7.9 to 19.3 %",
        "+62.5 points",
        'method = "grpo"',
        "torch 2.13",
        "make quickstart",
        "time 1:15",
        # of 4 s a step, 1 s and 2 s are told, so 1 s is other
        "sample 1.00 s 25 % backward 2.00 s 50 % other 1.00 s 25 %",
    ):
        assert text in page.words
    assert "Rollouts" not in page.words and page.words.count("KL divergence") == 0


def test_a_report_holds_no_script_and_fetches_nothing(tmp_path: Path) -> None:
    path = write_report(run(tmp_path), summary=SUMMARY, samples=[])
    page = Page(path)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.seen)
    assert not [name for name, _ in page.attributes if name in ("src", "href") or name.startswith("on")]
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes
    assert "url(" not in path.read_text() and "@import" not in path.read_text()


def test_everything_a_run_can_name_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(EVIL)
    names = ("title", "measure", "model", "method", "task", "device", "dtype", "command")
    summary = SUMMARY | dict.fromkeys(names, EVIL) | {"versions": {EVIL: EVIL}, "unit": EVIL}
    part = {"kind": "sampled", "text": EVIL, "tokens": [{"text": EVIL, "logp": -1.0, "advantage": 1.0}]}
    sample = {"title": EVIL, "reward": 1.0, "segments": [{"kind": "prompt", "text": EVIL, "tokens": []}, part]}
    run(tmp_path, {f"time/{EVIL}": 0.5})
    path = write_report(tmp_path, summary=summary, samples=[sample])
    assert "script" not in Page(path).seen
    assert "<script" not in path.read_text()
    assert EVIL in Page(path).text


def test_an_empty_run_renders_and_says_so(tmp_path: Path) -> None:
    page = Page(write_report(tmp_path, summary={}, samples=[]))
    assert "No step has finished yet." in page.words and "No metrics were written yet." in page.words


def test_a_run_without_an_evaluation_tells_its_reward(tmp_path: Path) -> None:
    page = Page(write_report(run(tmp_path), summary={"before": 0.1}, samples=[]))
    assert "Reward went from 0.1 at step 1 to 0.3 at step 3." in page.words
    assert "–" in page.words  # after, in the table


def test_a_missing_number_leaves_a_gap_and_no_error(tmp_path: Path) -> None:
    run(tmp_path, {"kl": float("nan"), "time/sample": None})
    assert "KL divergence" not in Page(write_report(tmp_path, summary={}, samples=[])).words


@pytest.mark.parametrize(
    ("changes", "says", "sure"),
    [
        ({"after": 0.125}, "stayed at 12.5 %", "do not overlap"),
        ({"measure": "share solved", "after": 0.0}, "Share solved fell from 12.5 % to 0.0 %", "do not overlap"),
        ({"after_interval": [0.1, 0.9]}, "rose", "overlap, so chance is not ruled out"),
        ({"after_interval": None}, "rose", "No interval was computed"),
        ({"difference_interval": [0.5, 0.7]}, "rose", "interval of the change: +50.0 to +70.0 points."),
        ({"difference_interval": [-0.1, 0.7]}, "rose", "−10.0 to +70.0 points, which includes zero"),
        ({"measure": "Length", "unit": "tokens", "before": 9, "after": 5}, "Length fell from 9 tokens to 5 tokens", ""),
    ],
)
def test_the_verdict_says_no_more_than_the_intervals(changes: dict[str, Any], says: str, sure: str) -> None:
    told = verdict(SUMMARY | changes, [])
    assert says in told[0] and sure in told[1]


def test_further_measures_have_their_own_rows_and_units(tmp_path: Path) -> None:
    more = {"measure": "Reply length", "unit": "tokens", "before": 9.0, "after": 5.5, "difference_interval": [-4, -3]}
    page = Page(write_report(tmp_path, summary=SUMMARY | {"measures": [more]}, samples=[]))
    assert "Reply length 9 tokens 5.5 tokens −3.5 tokens −4 to −3 tokens" in page.words


def test_a_report_is_replaced_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    write_report(tmp_path, summary={"title": "one"}, samples=[])
    path = write_report(tmp_path, summary={"title": "two"}, samples=[])
    assert "two" in Page(path).words and [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_the_curve_stands_by_itself_with_its_colours(tmp_path: Path) -> None:
    run(tmp_path, {"eval/accuracy": 0.5, "eval/interval": [0.4, 0.6]})
    text = write_curve(tmp_path).read_text()
    tags = [element.tag.rsplit("}")[-1] for element in ElementTree.fromstring(text).iter()]
    assert (tags.count("polyline"), tags.count("polygon"), tags.count("style")) == (2, 1, 1)
    assert "prefers-color-scheme: dark" in text and "held-out accuracy" in text


def test_a_long_curve_shows_its_running_mean_and_says_over_how_many_steps(tmp_path: Path) -> None:
    # a twentieth of 60 steps is 3
    text = write_curve(run(tmp_path, steps=SMOOTH)).read_text()
    assert "reward in training, mean of 3 steps" in text and text.count("<polyline") == 2


def test_a_run_without_steps_has_no_curve(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has none"):
        write_curve(tmp_path)
