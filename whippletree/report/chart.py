"""One small way to draw: lines over steps, with ticks, units and bands, as inline SVG without scripts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 36  # margins around the plot, for labels
HOVER = 120  # points up to which each can be pointed at

Scale = Callable[[float], float]


@dataclass(frozen=True)
class Line:
    """One curve: (step, value) in order of steps, and a band (step, low, high) around it where one is known."""

    name: str
    points: tuple[tuple[float, float], ...]
    band: tuple[tuple[float, float, float], ...] = ()
    colour: int = 0  # c0..c5 of the style
    faint: bool = False  # drawn behind and thin: the raw numbers under a smoothed line
    dots: bool = False  # few measurements, each of them marked


@dataclass(frozen=True, kw_only=True)
class Axis:
    """What the numbers are: how one is written, their natural ends, and whether steps of ten are evenly spaced."""

    form: Callable[[float], str] = "{:g}".format
    ends: tuple[float, float] | None = None
    log: bool = False


def chart(lines: Sequence[Line], axis: Axis, *, label: str, width: int = 420, height: int = 220) -> str:
    """An `<svg>` of these lines over steps; its colours and fonts are the page's (`style.CHART`)."""
    lines = [_positive(line) for line in lines] if axis.log else lines
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    named = [line for line in lines if not line.faint] if len(lines) > 1 else []
    top = TOP + (20 if named else 0)
    steps = [x for line in lines for x, _ in line.points]
    levels = _levels(lines, axis)
    at_x = _scale(*_spread(min(steps), max(steps)), LEFT, width - RIGHT)
    at_y = _scale(_place(levels[0], axis), _place(levels[-1], axis), height - BOTTOM, top)

    def at(value: float) -> float:
        return at_y(_place(value, axis))

    drawn = [_grid(levels, at, axis, width), _steps(steps, at_x, width, height)]
    drawn += [_line(line, at_x, at, axis) for line in lines]
    drawn += [_legend(named)]
    head = f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
    return f'{head}aria-label="{escape(label)}" xmlns="http://www.w3.org/2000/svg">{"".join(drawn)}</svg>'


def ticks(low: float, high: float, *, count: int = 4) -> list[float]:
    """About `count` round numbers (1, 2 or 5 times a power of ten apart) that enclose low..high."""
    low, high = _spread(low, high)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    apart = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / apart + 1e-9), math.ceil(high / apart - 1e-9)
    return [float(f"{n * apart:.12g}") for n in range(first, last + 1)]


def whisker(rows: Sequence[tuple[float, float, float]], axis: Axis, *, label: str) -> str:
    """A strip with one dot and its interval for each (value, low, high), on a common scale with its ends named."""
    width, height = 210, 16 * len(rows) + 26
    levels = _levels([Line(label, tuple((0, x) for row in rows for x in row))], axis)
    at = _scale(levels[0], levels[-1], 12, width - 12)
    drawn = [f'<line class="grid" x1="12" x2="{width - 12}" y1="{height - 18}" y2="{height - 18}"/>']
    for x, anchor, end in ((6, "start", levels[0]), (width - 6, "end", levels[-1])):
        drawn.append(f'<text x="{x}" y="{height - 4}" text-anchor="{anchor}">{escape(axis.form(end))}</text>')
    for i, (value, low, high) in enumerate(rows):
        y, colour = 8 + 16 * i, (1, 0)[i % 2]  # before, after
        drawn.append(f'<line class="line s{colour}" x1="{at(low):.1f}" x2="{at(high):.1f}" y1="{y}" y2="{y}"/>')
        drawn.append(f'<circle class="dot f{colour}" cx="{at(value):.1f}" cy="{y}" r="5"/>')
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg {size} role="img" aria-label="{escape(label)}">{"".join(drawn)}</svg>'


def smoothed(points: Sequence[tuple[float, float]], *, over: int) -> tuple[tuple[float, float], ...]:
    """Each value's mean with the `over - 1` before it (fewer at the start), so nothing later is read into a step."""
    values = [y for _, y in points]
    windows = (values[max(0, i + 1 - over) : i + 1] for i in range(len(values)))
    return tuple((x, sum(window) / len(window)) for (x, _), window in zip(points, windows, strict=True))


def _levels(lines: Sequence[Line], axis: Axis) -> list[float]:
    values = [y for line in lines for _, y in line.points] + [y for line in lines for _, *ys in line.band for y in ys]
    low, high = min([*values, *(axis.ends or ())]), max([*values, *(axis.ends or ())])
    if not axis.log:
        return ticks(low, high)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    apart = max(1, math.ceil((last - first) / 5))
    return [10.0**n for n in range(first, max(last, first + 1) + apart, apart)]


def _place(value: float, axis: Axis) -> float:
    return math.log10(value) if axis.log else value


def _positive(line: Line) -> Line:
    """A logarithmic axis has no place for 0: such points are left out, not drawn at the bottom."""
    return Line(line.name, tuple(p for p in line.points if p[1] > 0), (), line.colour, line.faint, line.dots)


def _spread(low: float, high: float) -> tuple[float, float]:
    """The same range, or one around a single number, which has no width of its own."""
    room = (abs(low) or 1) / 2
    return (low, high) if high > low else (low - room, high + room)


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    return lambda x: start + (x - low) / (high - low) * (end - start)


def _grid(levels: Sequence[float], at: Scale, axis: Axis, width: int) -> str:
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{at(y):.1f}" y2="{at(y):.1f}"/>'
        f'<text x="{LEFT - 8}" y="{at(y) + 4:.1f}" text-anchor="end">{escape(axis.form(y).replace("-", "−"))}</text>'
        for y in levels
    )


def _steps(steps: Sequence[float], at: Scale, width: int, height: int) -> str:
    """The horizontal axis: whole steps only, inside the data."""
    low, high, base = min(steps), max(steps), height - BOTTOM
    marks = [x for x in ticks(low, high, count=6) if low <= x <= high and x == int(x)] or [low]
    axis = f'<line class="axis" x1="{LEFT}" x2="{width - RIGHT}" y1="{base}" y2="{base}"/>'
    labels = "".join(f'<text x="{at(x):.1f}" y="{base + 16}" text-anchor="middle">{x:,.0f}</text>' for x in marks)
    return f'{axis}{labels}<text x="{(LEFT + width - RIGHT) / 2}" y="{height - 4}" text-anchor="middle">step</text>'


def _line(line: Line, at_x: Scale, at: Scale, axis: Axis) -> str:
    drawn = []
    if line.band:
        above = [f"{at_x(x):.1f},{at(high):.1f}" for x, _, high in line.band]
        below = [f"{at_x(x):.1f},{at(low):.1f}" for x, low, _ in reversed(line.band)]
        drawn.append(f'<polygon class="band f{line.colour}" points="{" ".join(above + below)}"/>')
    places = [(at_x(x), at(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    drawn.append(f'<polyline class="line s{line.colour}{" faint" if line.faint else ""}" points="{path}"/>')
    if line.dots or len(places) == 1:
        drawn += [f'<circle class="dot f{line.colour}" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>' for x, y in places]
    if len(places) <= HOVER and not line.faint:
        told = (f"step {x:g}: {line.name} {axis.form(y)}" for x, y in line.points)
        drawn += [
            f'<circle class="hit" cx="{x:.1f}" cy="{y:.1f}" r="8"><title>{escape(text)}</title></circle>'
            for (x, y), text in zip(places, told, strict=True)
        ]
    return "".join(drawn)


def _legend(lines: Sequence[Line]) -> str:
    drawn, x = [], float(LEFT)
    for line in lines:
        drawn.append(f'<line class="line s{line.colour}" x1="{x}" x2="{x + 16}" y1="12" y2="12"/>')
        drawn.append(f'<text class="name" x="{x + 22}" y="16">{escape(line.name)}</text>')
        x += 42 + 7 * len(line.name)  # of a letter, about
    return "".join(drawn)
