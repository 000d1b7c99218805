"""Claims as people read them: a table on a page, a picture of each, and lines in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from rich.markup import escape as plain
from rich.table import Table

from whippletree.report.chart import ticks
from whippletree.report.style import CHART, COLOURS

Record = Mapping[str, Any]  # what `analysis/measuring.py` keeps of a claim
BEGIN, END = "<!-- claims: written by `whippletree claims` -->", "<!-- claims: end -->"
COLOUR = {"held": "green", "not held": "red", "inconclusive": "yellow"}
LABEL, PANEL, GAP, ROW = 250, 220, 36, 24  # of a picture: names, each of two panels, what is between them, an arm


# ---- the page ---------------------------------------------------------------------------------------------------


def page(text: str, records: Sequence[Record]) -> str:
    """The page with its part between the marks written anew.

    Raises:
        ValueError: it has not both marks.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the table stands between two marks, but the page has not both: write {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{markdown(records)}\n{END}{after}"


def markdown(records: Sequence[Record]) -> str:
    """A line for each claim, then each with all its arms and its picture."""
    lines = [
        "| claim | verdict | method − baseline, 95 % | baseline | method | pairs | minutes |",
        "|---|---|---|---|---|---|---|",
    ]
    for record in records:
        told, arms = record["differences"]["method"], record["arms"]
        means = " | ".join(number(arms[arm]["mean"]) for arm in ("baseline", "method"))
        link = f"[{record['name']}](#{record['name'].replace('.', '')})"
        lines.append(
            f"| {link} | **{record['verdict']}** | {spread(told)} | {means} | {told['pairs']} "
            f"| {record['seconds'] / 60:.1f} |"
        )
    return "\n".join([*lines, *(line for record in records for line in _section(record))]) + "\n"


def _section(record: Record) -> Iterator[str]:
    first, last = record["seeds"]
    yield from ("", f"### {record['name']}", "", f"*{record['says']}*", "")
    yield f"**{record['verdict']}**: {record['better']} is better; seeds {first} to {last}, at {origin(record)}."
    yield from (
        "",
        f"![{record['name']}: each arm, and its difference to the baseline](claims/{record['name']}.svg)",
        "",
    )
    yield from ("| arm | mean ± standard error | seeds | arm − baseline, 95 % | which is |", "|---|---|---|---|---|")
    for arm, found in record["arms"].items():
        told = record["differences"].get(arm)
        compared = f"{spread(told)} | {told['side']}" if told else " | "
        mean = f"{number(found['mean'])} ± {number(found['standard_error'])}"
        yield f"| {cell(arm)} | {mean} | {found['seeds']} | {compared} |"
    yield from (f"\n{line}" for line in missing(record))


def cell(text: str) -> str:
    """A text that stands in a table without breaking it."""
    return " ".join(text.split()).replace("|", "\\|")


def origin(record: Record) -> str:
    """Of which code and with what it was measured."""
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    return f"commit {record['commit'][:7] + record['commit'][40:] or 'unknown'} with {versions}"


def missing(record: Record) -> Iterator[str]:
    """A line for each arm that has seeds without a number: how many, and the first reason."""
    for arm, found in record["arms"].items():
        if lost := found["missing"]:
            seed, why = next(iter(lost.items()))
            yield f"{arm}: {len(lost)} missing, at seeds {', '.join(lost)}; at {seed}: {' '.join(why.split())[:160]}"


def number(x: float | None) -> str:
    """Three places that count; a dash where there is no number."""
    return "–" if x is None else f"{x:#.3g}".rstrip(".").replace("-", "−")


def spread(told: Mapping[str, Any]) -> str:
    """A difference and its interval."""
    if told["value"] is None:
        return "–"
    sign = "+" * (told["value"] > 0)
    return f"{sign}{number(told['value'])} [{number(told['low'])}, {number(told['high'])}]"


# ---- the picture ------------------------------------------------------------------------------------------------


def picture(record: Record) -> str:
    """An `<svg>` that stands by itself: at the left the mean of each arm, at the right its difference to the baseline.

    A dot is a mean over seeds, the line through it its bootstrap 95 % interval.
    """
    arms, told = record["arms"], record["differences"]
    width, height = LABEL + 2 * PANEL + GAP + 20, ROW * len(arms) + 62
    means = {arm: (row["mean"], row["low"], row["high"]) for arm, row in arms.items() if row["mean"] is not None}
    changes = {arm: (row["value"], row["low"], row["high"]) for arm, row in told.items() if row["value"] is not None}
    names = "".join(
        f'<text class="name" x="14" y="{_level(n) + 4}">{escape(arm if len(arm) < 37 else arm[:35] + "…")}</text>'
        for n, arm in enumerate(arms)
    )
    left = _panel("mean", means, list(arms), LABEL, ())
    right = _panel("difference to the baseline", changes, list(arms), LABEL + PANEL + GAP, (0.0,))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    frame = f'<rect width="{width}" height="{height}" rx="12" style="fill: var(--card); stroke: var(--rule)"/>'
    title = f"<title>{escape(record['name'])}: {escape(record['says'])}</title>"
    return f'{head} role="img">{title}<style>{COLOURS}{CHART}</style>{frame}{names}{left}{right}</svg>\n'


def _level(row: int) -> int:
    return 46 + ROW * row


def _panel(
    title: str,
    rows: Mapping[str, tuple[float, float, float]],
    arms: Sequence[str],
    left: int,
    marks: tuple[float, ...],
) -> str:
    """One dot and its interval for each arm that has numbers, on a scale of its own; `marks` are drawn as lines."""
    values = [*marks, *(x for row in rows.values() for x in row)]
    if not values:
        return ""
    levels, base = ticks(min(values), max(values), count=3), _level(len(arms)) - ROW // 2 + 4

    def at(x: float) -> float:
        return left + (x - levels[0]) / (levels[-1] - levels[0]) * PANEL

    drawn = [f'<text x="{left}" y="20">{escape(title)}</text>']
    for x in levels:
        line = "axis" if x in marks else "grid"
        drawn.append(f'<line class="{line}" x1="{at(x):.1f}" x2="{at(x):.1f}" y1="30" y2="{base}"/>')
        drawn.append(f'<text x="{at(x):.1f}" y="{base + 16}" text-anchor="middle">{f"{x:g}".replace("-", "−")}</text>')
    for arm, (value, low, high) in rows.items():
        n = arms.index(arm)
        y, colour = _level(n), n % 6
        drawn.append(f'<line class="line s{colour}" x1="{at(low):.1f}" x2="{at(high):.1f}" y1="{y}" y2="{y}"/>')
        drawn.append(f'<circle class="dot f{colour}" cx="{at(value):.1f}" cy="{y}" r="5"/>')
    return "".join(drawn)


# ---- the terminal -----------------------------------------------------------------------------------------------


def shown(record: Record) -> Iterator[Any]:
    """One claim for a console: what it says, its arms, what is missing, and the verdict."""
    first, last = record["seeds"]
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("arm", "seeds", "mean", "s.e.", "arm - baseline, 95 %", "which is"):
        table.add_column(name, justify="left" if name in ("arm", "which is") else "right")
    for arm, found in record["arms"].items():
        told = record["differences"].get(arm)
        about = (str(found["seeds"]), number(found["mean"]), number(found["standard_error"]))
        table.add_row(plain(arm), *about, *((spread(told), told["side"]) if told else ("", "")))
    yield from (plain(record["says"]), f"{record['better']} is better; seeds {first} to {last}, the same for all arms")
    yield table
    yield from map(plain, missing(record))
    colour = COLOUR[record["verdict"]]
    yield f"[bold {colour}]{record['verdict']}[/], from {record['seconds']:.0f} seconds of measuring"


def listed(records: Sequence[Record]) -> Table:
    """All claims for a console, a line each."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("claim", "verdict", "difference, 95 %", "pairs", "seconds"):
        table.add_column(name)
    for record in records:
        told, verdict = record["differences"]["method"], f"[{COLOUR[record['verdict']]}]{record['verdict']}[/]"
        table.add_row(record["name"], verdict, spread(told), str(told["pairs"]), f"{record['seconds']:.0f}")
    return table
