"""What `whippletree turns` does: a store into a file and back, with a bar that shows how far it is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from whippletree.gateway.exchange import KINDS, import_rollouts, read_rollouts, rows_of, write_rows
from whippletree.gateway.samples import layout, samples
from whippletree.gateway.store import open_store
from whippletree.types import Json


def export_turns(
    address: str, path: Path, *, group: str | None, prefix: str, trainer: str | None, console: Console
) -> None:
    """Write the ended rollouts of a store to a file, as they are or as samples for a trainer.

    Raises:
        ImportError: a library is missing that the file or the store needs.
        StoreError: the store cannot be opened or read.
        ValueError: there is no such store, rollout or trainer, or the file is there already or of no known kind.
    """
    kinds = KINDS if trainer is None else layout(trainer)
    if "://" not in address and not Path(address).exists():
        raise ValueError(
            f"there is no store at {address}; a run keeps its turns in runs/NAME/turns.sqlite, and `whippletree serve` "
            f"in turns.sqlite"
        )
    with closing(open_store(address)) as store, _bar(console) as bar:
        names = store.ids(group=group, prefix=prefix)
        if not names:
            raise ValueError(
                f"only rollouts that ended are exported, but {store.name} has none"
                + ("" if group is None else f" of group {group!r}")
                + (f" whose id starts with {prefix!r}" if prefix else "")
                + f", and {len(store.open_rollouts())} in all are open"
            )

        def rows() -> Iterator[Json]:
            for rollout in bar.track(store.each(group=group, prefix=prefix), total=len(names), description="export"):
                yield from rows_of(rollout) if trainer is None else samples(rollout, trainer)

        count = write_rows(rows(), path, kinds)
    what = "rows, one a turn," if trainer is None else f"samples for {trainer}"
    console.print(f"wrote {path}: {count} {what} of {len(names)} rollouts", markup=False, soft_wrap=True)


def import_turns(path: Path, address: str, *, console: Console) -> None:
    """Keep the rollouts of a file in a store; those that are there already are left as they are.

    Raises:
        ImportError: a library is missing that the file or the store needs.
        OSError: the file cannot be read.
        StoreError: the store cannot be opened or written, or has one of the turns in another rollout.
        ValueError: the file is not what was exported, or the store has another rollout of the same id.
    """
    next(read_rollouts(path), None)  # no store is made for a file that cannot be read
    with closing(open_store(address)) as store, _bar(console) as bar:
        task = bar.add_task("import", total=1.0)
        added = asyncio.run(import_rollouts(path, store, seen=lambda part: bar.update(task, completed=part)))
    there = f"; {len(added) - sum(added)} were there already" if not all(added) else ""
    console.print(f"kept {sum(added)} rollouts in {store.name}{there}", markup=False, soft_wrap=True)


def _bar(console: Console) -> Progress:
    return Progress(console=console, transient=True, disable=not console.is_terminal)
