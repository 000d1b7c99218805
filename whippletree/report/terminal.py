"""The run as it is watched: a live view in a terminal, one plain line a step everywhere else."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

# metric, its short label, how its number is written
SHOWN = (
    ("reward", "reward", "{:.3f}"),
    ("reward_std", "spread", "{:.3f}"),
    ("frac_reward_zero_std", "equal groups", "{:.0%}"),
    ("eval/accuracy", "held-out", "{:.1%}"),
    ("completions/mean_length", "reply tokens", "{:.1f}"),
    ("kl", "kl", "{:.2g}"),
    ("entropy", "entropy", "{:.3f}"),
    ("logp_drift/mean", "drift", "{:.1e}"),
    ("logp_drift/max", "drift max", "{:.1e}"),
    ("tokens_per_second", "tokens/s", "{:,.0f}"),
    ("step_time", "s/step", "{:.1f}"),
)
BLOCKS = "▁▂▃▄▅▆▇█"
CELL = 25  # columns of the terminal for one metric with its label
SPARK = 12  # steps in the small curve of a plain line
RECENT = 10  # steps whose mean time foretells the rest


class View:
    """`with View(title, total_steps) as view`: tell it of rollouts and steps, and it shows them.

    `header` says what runs and where it is written, as short words to short words. Without a terminal, or with an
    encoding that has no blocks, there is one line a step and no drawing.
    """

    def __init__(
        self,
        title: str,
        total_steps: int,
        *,
        header: Mapping[str, str] | None = None,
        console: Console | None = None,
    ) -> None:
        self.title, self.total_steps, self.header = title, total_steps, dict(header or {})
        # asked of the stream itself: FORCE_COLOR in a CI job makes no terminal of its log
        self.console = console or Console(force_terminal=sys.stdout.isatty())
        self.done = 0
        self.running = (0, 0)  # rollouts of the running step: finished, all
        self.metrics: Mapping[str, Any] = {}
        self.latest: Mapping[str, Any] = {}  # the last value of each metric, also of those that not every step has
        self.rewards: list[float | None] = []
        self.seconds: list[float] = []
        interactive = self.console.is_terminal and not self.console.is_dumb_terminal
        self.live = (
            Live(console=self.console, get_renderable=self.render, refresh_per_second=4) if interactive else None
        )

    def __enter__(self) -> View:
        if self.live:
            self.live.start()
        else:
            self._print(self.title)
            for name, value in self.header.items():
                self._print(f"  {name:<8} {value}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.live.stop()

    def rollouts(self, done: int, total: int) -> None:
        """So many rollouts of the running step have finished."""
        self.running = (done, total)

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """A step is done; `metrics` is what was logged of it."""
        self.done, self.metrics = step, metrics
        self.running = (0, self.running[1]) if step < self.total_steps else self.running
        self.latest = {**self.latest, **metrics}
        if "reward" in metrics:
            self.rewards.append(_number(metrics, "reward"))
        if (seconds := _number(metrics, "step_time")) is not None:
            self.seconds.append(seconds)
        if not self.live:
            self._print(self.line())

    def note(self, text: str) -> None:
        """Something worth a line of its own, above the view."""
        self._print(text)

    @property
    def left(self) -> str:
        """Time to go, from the mean of the recent steps; empty before the first."""
        recent = self.seconds[-RECENT:]
        return clock((self.total_steps - self.done) * sum(recent) / len(recent)) if recent else ""

    def line(self) -> str:
        """The last step as one line of plain text."""
        width = len(str(self.total_steps))
        cells = [f"{label} {text}" for label, text in written(self.metrics)]
        spark = [f"{sparkline(self.rewards, width=SPARK):<{SPARK}}"] if self._blocks else []
        left = [f"{self.left} left"] if self.left and self.done < self.total_steps else []
        return "  ".join([f"step {self.done:>{width}}/{self.total_steps}", *spark, *cells, *left])

    def render(self) -> RenderableType:
        """The whole live view."""
        parts: list[RenderableType] = [self._header(), self._bars()] if self.header else [self._bars()]
        if self.latest:
            parts += [self._table()]
        if len(self.rewards) > 1:
            seen = [r for r in self.rewards if r is not None]
            text = sparkline(self.rewards, width=max(10, min(60, self.console.width - 40))) if self._blocks else ""
            span = f"  {min(seen):.2f} to {max(seen):.2f}" if seen else ""
            parts += [Text.assemble(("reward  ", "dim"), (text, "green"), (span, "dim"))]
        spaced = [item for part in parts for item in (part, Text())][:-1]
        return Panel(Group(*spaced), title=f"[bold]{escape(self.title)}[/]", box=box.ROUNDED, padding=(1, 2))

    @property
    def _blocks(self) -> bool:
        return self.console.encoding.lower().startswith("utf")

    def _header(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        for name, value in self.header.items():
            grid.add_row(Text(name, style="dim"), Text(value))
        return grid

    def _bars(self) -> Table:
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column()
        grid.add_column(ratio=1)
        grid.add_column(justify="right")
        grid.add_column(min_width=12)
        done, total = self.running
        left = f"{self.left} left" if self.left and self.done < self.total_steps else ""
        for name, part, whole, after in (("steps", self.done, self.total_steps, left), ("rollouts", done, total, "")):
            bar = ProgressBar(total=max(whole, 1), completed=part, complete_style="cyan", finished_style="green")
            grid.add_row(Text(name, style="dim"), bar, f"{part}/{whole}", Text(after, style="dim"))
        return grid

    def _table(self) -> Table:
        grid = Table.grid(padding=(0, 2), expand=True)
        columns = max(1, self.console.width // CELL)
        for _ in range(columns):
            grid.add_column(style="dim", no_wrap=True)
            grid.add_column(justify="right", style="bold", no_wrap=True)
        cells = written(self.latest)
        for start in range(0, len(cells), columns):
            grid.add_row(*(Text(word) for cell in cells[start : start + columns] for word in cell))
        return grid

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def written(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(label, text) of each metric the view shows; one that does not apply at this step is a dash."""
    present = [(name, label, form) for name, label, form in SHOWN if name in metrics]
    return [(label, "–" if (x := _number(metrics, name)) is None else form.format(x)) for name, label, form in present]


def sparkline(values: Sequence[float | None], *, width: int) -> str:
    """The last `width` values as blocks between their least and their greatest; a missing value is a space."""
    last = values[-width:]
    seen = [x for x in last if x is not None]
    low, span = (min(seen), max(seen) - min(seen)) if seen else (0.0, 0.0)
    top = len(BLOCKS) - 1
    return "".join(" " if x is None else BLOCKS[round((x - low) / span * top) if span else top // 2] for x in last)


def clock(seconds: float) -> str:
    """75 -> "1:15", 3675 -> "1:01:15"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _number(metrics: Mapping[str, Any], name: str) -> float | None:
    value = metrics.get(name)
    return None if value is None or not math.isfinite(float(value)) else float(value)
