"""Methods in the terminal: a line each, or one whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Card = Mapping[str, Any]  # what `methods.card` gives
WIDE = 110  # columns from which a table shows everything


def show_cards(cards: Sequence[Card], console: Console) -> None:
    """One line a method; slots that every method fills are not repeated, and titles give way first."""
    common = set.intersection(*(set(card["slots"]) for card in cards))
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0), expand=True)
    for name in ("method", "arXiv", "also fills", "needs", *(["source"] if console.width >= WIDE else [])):
        table.add_column(name, no_wrap=True)
    table.add_column("paper", no_wrap=True, overflow="ellipsis", ratio=1)
    for card in cards:
        paper = card["paper"]
        source = [paper["source"]] if console.width >= WIDE else []
        also = ", ".join(slot for slot in card["slots"] if slot not in common)
        row = (paper["arxiv"] or "", also, ", ".join(card["needs"]), *source, paper["title"])
        table.add_row(f"[bold]{card['name']}[/]", *map(escape, row))
    console.print(table)
    filled = ", ".join(slot for slot in cards[0]["slots"] if slot in common)
    console.print(f"all fill {filled}; `whippletree methods NAME` shows one whole", style="dim")


def show_card(card: Card, console: Console) -> None:
    """All that is told of a method."""
    paper = card["paper"]
    about = ", ".join(
        str(x) for x in (paper["authors"], paper["year"], paper["arxiv"] and f"arXiv:{paper['arxiv']}") if x
    )
    table = Table.grid(padding=(0, 2))
    table.add_row(f"[bold]{card['name']}[/]", f"[bold]{escape(paper['title'])}[/]")
    for label, text in (
        ("", about),
        ("also called", ", ".join(paper["also_called"])),
        ("read from", paper["source"]),
        ("needs", ", ".join(card["needs"])),
        ("claim", card["claim"]),
        ("differs", card["differs"]),
        *((slot, part_line(part)) for slot, parts in card["slots"].items() for part in parts),
        ("file", card["file"]),
        ("test", card["test"]),
    ):
        if text:
            table.add_row(label, escape(text))
    console.print(table)


def part_line(part: Mapping[str, Any]) -> str:
    """A part as it is called, and where it stands."""
    settings = ", ".join(f"{key}={value}" for key, value in part["settings"].items())
    return f"{part['name']}({settings})  {part['at']}"
