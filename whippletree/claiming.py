"""What `whippletree claim` and `whippletree claims` do."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from whippletree import methods
from whippletree.analysis.measuring import Experiment, claim_in, measure_all, sources
from whippletree.report.claims import BEGIN, END, page, picture
from whippletree.run_directory import write_aside
from whippletree.types import Claim, Json

FIRST = 1000  # of the seeds of the stored table


def names() -> list[str]:
    """The methods of the folder that have a `CLAIM`."""
    modules = {name: importlib.import_module(f"{methods.__name__}.{name}") for name in methods.names()}
    return [name for name, module in modules.items() if isinstance(getattr(module, "CLAIM", None), Claim)]


def prepared(name: str, *, first: int, seeds: int | None = None, file: Path | None = None) -> Experiment:
    """The claim of a method of the folder, else of the module of this name; with what `file` has of it.

    Raises:
        ValueError: there is no such method or module, or it has no claim.
    """
    module = f"{methods.__name__}.{name}" if name in methods.names() else name
    if not sources(module):
        raise ValueError(f"there is no method or module {name!r}; claims are in {', '.join(names())}")
    chosen = range(first, first + (seeds or claim_in(module).seeds))
    return Experiment(
        name, module, chosen, json.loads(file.read_text(encoding="utf-8")) if file and file.exists() else {}
    )


def measure(experiments: Sequence[Experiment], *, jobs: int, folder: Path | None = None) -> list[Json]:
    """Measure what is missing under a progress bar, keeping each number in `folder` at once; the records."""
    with Progress(console=Console(stderr=True)) as progress:
        todo = {e.name: progress.add_task(e.name, total=len(e.missing())) for e in experiments}

        def told(experiment: Experiment, arm: str, seed: int) -> None:
            progress.update(todo[experiment.name], advance=1)
            keep(experiment, folder)

        asyncio.run(measure_all(experiments, jobs=jobs, told=told))
    return [keep(experiment, folder) for experiment in experiments]


def keep(experiment: Experiment, folder: Path | None) -> Json:
    """The record of a claim, also as a file and a picture where there is a folder."""
    record = experiment.record()
    if folder:
        written = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
        write_aside(folder / f"{experiment.name}.json", f"{written}\n".encode())
        write_aside(folder / f"{experiment.name}.svg", picture(record).encode())
    return record


def stored(chosen: Sequence[str], *, docs: Path, jobs: int) -> list[Json]:
    """Measure claims on the stored table's seeds, keep them in `docs`/claims, and write the table of `docs`/claims.md.

    What is there already, of the same code with the same seeds, is not measured again.
    """
    folder, table = docs / "claims", docs / "claims.md"
    experiments = [prepared(name, first=FIRST, file=folder / f"{name}.json") for name in chosen or names()]
    folder.mkdir(parents=True, exist_ok=True)
    records = measure(experiments, jobs=jobs, folder=folder)
    known = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]
    text = table.read_text(encoding="utf-8") if table.exists() else f"{BEGIN}\n{END}\n"
    write_aside(table, page(text, known).encode())
    return records
