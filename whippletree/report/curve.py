"""Which curves a run has, and the one that stands in a README."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from whippletree.report.chart import Axis, Line, chart, smoothed
from whippletree.report.metrics import read
from whippletree.report.style import CHART, COLOURS

Row = Mapping[str, Any]
SMOOTH = 60  # steps from which a noisy curve is drawn with a running mean of a twentieth of them


@dataclass(frozen=True)
class Curve:
    """One figure: its title, its unit, and the metrics drawn in it, each with its name in the legend."""

    title: str
    unit: str
    metrics: Mapping[str, str]
    axis: Axis = field(default_factory=Axis)


def percent(share: float) -> str:
    return f"{100 * share:g} %"


CURVES = (
    Curve("Reward", "mean over rollouts", {"reward": "reward"}),
    Curve("Held-out accuracy", "share of tasks", {"eval/accuracy": "accuracy"}, Axis(form=percent, ends=(0, 1))),
    Curve("Reply length", "tokens", {"completions/mean_length": "tokens"}, Axis(ends=(0, 0))),
    Curve("KL divergence", "nats a token", {"kl": "kl"}),
    Curve("Step time", "seconds", {"step_time": "seconds"}, Axis(ends=(0, 0))),
    Curve(
        "Log-prob drift",
        "|training − sampling|, nats",
        {"logp_drift/mean": "mean", "logp_drift/max": "greatest"},
        Axis(log=True),
    ),
)


def figures(rows: Sequence[Row]) -> list[str]:
    """An HTML figure for each curve of which the run has numbers."""
    drawn = []
    for curve in CURVES:
        label = f"{curve.title}, {curve.unit}, over steps"
        picture = chart(_lines(curve.metrics, rows), curve.axis, label=label)
        caption = f"<figcaption>{escape(curve.title)} <small>{escape(curve.unit)}</small></figcaption>"
        drawn += [f'<figure class="card">{caption}{picture}</figure>'] if picture else []
    return drawn


def write_curve(run_dir: str | Path) -> Path:
    """`curve.svg` in the run's folder: reward and held-out accuracy over steps, standing by itself.

    Raises:
        ValueError: the run has neither yet, so there is nothing to draw.
    """
    folder = Path(run_dir)
    lines = _lines(
        {"reward": "reward in training", "eval/accuracy": "held-out accuracy"}, read(folder / "metrics.jsonl")
    )
    axis = Axis(form="{:.2g}".format, ends=(0, 1))
    picture = chart(lines, axis, label="reward and held-out accuracy over steps", width=760, height=300)
    if not picture:
        raise ValueError(f"a curve needs steps with a reward or eval/accuracy, but {folder}/metrics.jsonl has none")
    placed = picture.replace("<svg ", '<svg x="20" y="16" ', 1)
    frame = '<rect width="800" height="332" rx="12" style="fill: var(--card); stroke: var(--rule)"/>'
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 332" width="800" height="332" role="img">'
    title = "<title>Reward and held-out accuracy over steps</title>"
    path = folder / "curve.svg"
    path.write_text(f"{head}{title}<style>{COLOURS}{CHART}</style>{frame}{placed}</svg>\n", encoding="utf-8")
    return path


def series(rows: Sequence[Row], name: str) -> tuple[tuple[float, float], ...]:
    """(step, value) of a metric, where it is a number."""
    found = ((row["step"], row.get(name)) for row in rows)
    return tuple((float(x), float(y)) for x, y in found if isinstance(y, int | float))


def _lines(metrics: Mapping[str, str], rows: Sequence[Row]) -> list[Line]:
    """The lines of these metrics; a noisy one is drawn faint, with its running mean, and says so in its name."""
    lines = []
    for colour, (metric, name) in enumerate(metrics.items()):
        points, few = series(rows, metric), metric.startswith("eval/")
        band = _intervals(rows) if metric == "eval/accuracy" else ()
        over = len(points) // 20 if len(points) >= SMOOTH and not few else 1
        if over > 1:
            lines.append(Line(name, points, colour=colour, faint=True))
            name = f"{name}, mean of {over} steps"
        lines.append(Line(name, smoothed(points, over=over), band, colour=colour, dots=few))
    return lines


def _intervals(rows: Sequence[Row]) -> tuple[tuple[float, float, float], ...]:
    """(step, low, high) of the evaluations that have an interval."""
    return tuple((float(row["step"]), *row["eval/interval"]) for row in rows if row.get("eval/interval"))
