"""`report.html`: one self-contained page about a run. No scripts, nothing fetched, and everything in it escaped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from whippletree.report.chart import Axis, whisker
from whippletree.report.curve import figures, percent, series
from whippletree.report.metrics import read
from whippletree.report.rollouts import rollouts_html
from whippletree.report.style import CHART, COLOURS, PAGE
from whippletree.report.terminal import clock

Row = Mapping[str, Any]
PHASES = (
    "sample",
    "score",
    "evidence",
    "forward",
    "backward",
    "update",
)  # metrics `time/<phase>`, in seconds of a step
FACTS = ("model", "method", "task", "device", "dtype", "steps", "seconds", "median_step_seconds")
# the browser itself refuses a script or a fetch, should an escape ever be forgotten
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def write_report(run_dir: str | Path, *, summary: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> Path:
    """Write `report.html` from the run's `metrics.jsonl` and `config.toml`, a summary, and views of rollouts.

    Every key of `summary` may be absent: `title`, `measure` (what before and after count), `before`, `after`,
    `before_interval`, `after_interval`, `difference_interval` ([low, high] at 95 %), `measures` (further rows, each
    with the same keys), `versions` (name to version), `command` (how to run it again), `config` (if there is no
    config.toml), and what `FACTS` names. `samples` are made by `rollout_view`. Readable at any moment of a run.
    """
    folder = Path(run_dir)
    rows = read(folder / "metrics.jsonl")
    title = str(summary.get("title") or folder.resolve().name)
    parts = [
        _head(title, summary, rows),
        _section("Before and after", _table(summary)),
        _section("Curves", _curves(rows)),
        _section("Where the time goes", _time(rows)),
        _section("Rollouts", rollouts_html(samples) if samples else ""),
        _section("Configuration and versions", _configuration(folder, summary)),
        _section("Run it again", _again(folder, summary)),
    ]
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)} · whippletree</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<style>{COLOURS}{CHART}{PAGE}</style></head><body><main>{''.join(parts)}"
        "<footer>Written by whippletree. This page is one file and fetches nothing.</footer></main></body></html>\n"
    )
    path, aside = folder / "report.html", folder / "report.html.new"
    aside.write_text(page, encoding="utf-8")
    os.replace(aside, path)
    return path


def verdict(summary: Mapping[str, Any], rows: Sequence[Row]) -> tuple[str, str]:
    """One line that says what came of the run, and one that says how sure that is."""
    before, after = summary.get("before"), summary.get("after")
    if before is None or after is None:
        rewards = series(rows, "reward")
        if not rewards:
            return "No step has finished yet.", ""
        (first, start), (last, end) = rewards[0], rewards[-1]
        return f"Reward went from {start:.3g} at step {first:g} to {end:.3g} at step {last:g}.", "Not yet measured."
    went = "rose" if after > before else "fell" if after < before else "stayed"
    old, new = _written(before, m=summary), _written(after, m=summary)
    between = f"at {new}" if after == before else f"from {old} to {new}"
    return f"{_measure(summary)} {went} {between}.", _sureness(summary)


def _sureness(summary: Mapping[str, Any]) -> str:
    if change := summary.get("difference_interval"):
        apart = change[0] > 0 or change[1] < 0
        means = "" if apart else ", which includes zero: this run shows no change"
        return f"95 % interval of the change: {_written(*change, m=summary, change=True)}{means}."
    old, new = summary.get("before_interval"), summary.get("after_interval")
    if not old or not new:
        return "No interval was computed, so chance is not ruled out."
    apart = old[1] < new[0] or new[1] < old[0]
    return "The 95 % intervals " + ("do not overlap." if apart else "overlap, so chance is not ruled out.")


def _head(title: str, summary: Mapping[str, Any], rows: Sequence[Row]) -> str:
    says, sure = verdict(summary, rows)
    written: dict[str, Callable[[Any], str]] = {"seconds": clock, "median_step_seconds": "{:.2f} s".format}
    names = {"seconds": "time", "median_step_seconds": "median step"}
    facts = "".join(
        f"<div><dt>{names.get(name, name)}</dt><dd>{escape(written.get(name, str)(summary[name]))}</dd></div>"
        for name in FACTS
        if summary.get(name) is not None
    )
    small = f"<small>{escape(sure)}</small>" if sure else ""
    return (
        f'<header><p class="eyebrow">whippletree run report</p><h1>{escape(title)}</h1>'
        f'<p class="verdict">{escape(says)}{small}</p>{f"<dl class=facts>{facts}</dl>" if facts else ""}</header>'
    )


def _section(title: str, inside: str) -> str:
    return f"<section><h2>{title}</h2>{inside}</section>" if inside else ""


def _table(summary: Mapping[str, Any]) -> str:
    measured = [m for m in (summary, *summary.get("measures", ())) if m.get("before") is not None]
    if not measured:
        return ""
    names = ("measure", "before", "after", "change", "both with their intervals")
    head = "".join(f"<th scope=col>{name}</th>" for name in names)
    body = "".join(map(_table_row, measured))
    table = f"<table class=compare><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    note = "<p class=lead>Intervals are 95 %. In the picture orange is before, blue is after.</p>"
    return f"{note}<div class='card scroll'>{table}</div>"


def _table_row(m: Mapping[str, Any]) -> str:
    before, after = m["before"], m.get("after")
    change = None if after is None else after - before
    columns = [("before", before, "before_interval"), ("after", after, "after_interval")]
    columns += [("change", change, "difference_interval")]
    cells = [_number(name, value, m.get(interval), m) for name, value, interval in columns]
    sides = [(m[side], m.get(f"{side}_interval")) for side in ("before", "after") if m.get(side) is not None]
    strip = [(value, *(interval or (value, value))) for value, interval in sides]
    axis = Axis(form=percent, ends=(0, 1)) if _is_share(m) else Axis()
    cells += [f"<td>{whisker(strip, axis, label=f'{_measure(m)} before and after')}</td>"]
    return f"<tr><th scope=row>{escape(_measure(m))}</th>{''.join(cells)}</tr>"


def _number(column: str, value: float | None, interval: Sequence[float] | None, m: Mapping[str, Any]) -> str:
    if value is None:
        return f"<td data-column={column}>–</td>"
    change = column == "change"
    small = f"<small>{escape(_written(*interval, m=m, change=change))}</small>" if interval else ""
    return f"<td data-column={column}><b>{escape(_written(value, m=m, change=change))}</b>{small}</td>"


def _measure(m: Mapping[str, Any]) -> str:
    name = str(m.get("measure") or "held-out accuracy")
    return name[:1].upper() + name[1:]


def _is_share(m: Mapping[str, Any]) -> bool:
    return str(m.get("unit", "share")) == "share"


def _written(*values: float, m: Mapping[str, Any], change: bool = False) -> str:
    """One number or the ends of an interval, with the unit once: "5.5 to 15.7 %", "+65.6 to +80.5 points"."""
    share, sign = _is_share(m), "+" if change else ""
    unit = ("points" if change else "%") if share else m["unit"]
    texts = [f"{100 * x:{sign}.1f}" if share else f"{x:{sign}.3g}" for x in values]
    return f"{' to '.join(texts)} {unit}".strip().replace("-", "−")


def _curves(rows: Sequence[Row]) -> str:
    drawn = figures(rows)
    return f"<div class=figures>{''.join(drawn)}</div>" if drawn else "<p class=lead>No metrics were written yet.</p>"


def _time(rows: Sequence[Row]) -> str:
    """Mean seconds of a step in each phase; `other` is what of `step_time` no phase accounts for."""
    timed = [row for row in rows if isinstance(row.get("step_time"), int | float)]
    if not any(key.startswith("time/") for row in timed for key in row):
        return ""
    named = list(PHASES) + sorted({k[5:] for row in timed for k in row if k.startswith("time/")} - set(PHASES))
    seconds = {name: sum(row.get(f"time/{name}") or 0.0 for row in timed) / len(timed) for name in named}
    step = sum(row["step_time"] for row in timed) / len(timed)
    shown = {name: s for name, s in seconds.items() if s > 0} | {"other": max(0.0, step - sum(seconds.values()))}
    whole = sum(shown.values()) or 1.0
    kinds = {name: f"b{n}" if name != "other" and n < 6 else "rest" for n, name in enumerate(shown)}
    bar = "".join(
        f'<span class="{kinds[n]}" style="flex: {s / whole:.4f}" title="{escape(n)}"></span>' for n, s in shown.items()
    )
    body = "".join(
        f'<tr><th scope=row><i class="key {kinds[name]}"></i>{escape(name)}</th><td class=n>{s:.2f} s</td>'
        f"<td class=n>{100 * s / whole:.0f} %</td></tr>"
        for name, s in shown.items()
    )
    head = "<tr><th scope=col>phase</th><th scope=col class=n>seconds a step</th><th scope=col class=n>share</th></tr>"
    lead = f"<p class=lead>A step takes {step:.2f} s, the mean of {len(timed)}.</p>"
    table = f"<table class=phases><thead>{head}</thead><tbody>{body}</tbody></table>"
    return f"{lead}<div class=card><div class=bar aria-hidden=true>{bar}</div>{table}</div>"


def _configuration(folder: Path, summary: Mapping[str, Any]) -> str:
    file = folder / "config.toml"
    config = json.dumps(summary["config"], indent=2, default=str) if summary.get("config") else ""
    config = file.read_text(encoding="utf-8") if file.exists() else config
    versions = "\n".join(f"{name} {version}" for name, version in summary.get("versions", {}).items())
    cards = [("Configuration", config), ("Versions", versions)]
    drawn = [f"<div class=card><h3>{h}</h3><pre tabindex=0>{escape(t.strip())}</pre></div>" for h, t in cards if t]
    return f"<div class=two>{''.join(drawn)}</div>" if drawn else ""


def _again(folder: Path, summary: Mapping[str, Any]) -> str:
    recipe = "whippletree train config.toml" if (folder / "config.toml").exists() else ""
    command = summary.get("command") or recipe
    return f"<div class=card><pre tabindex=0>{escape(str(command))}</pre></div>" if command else ""
