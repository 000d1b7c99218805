"""The commands about claims; `cli.py` has the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from whippletree.telling import screen, told

Jobs = Annotated[int, typer.Option(min=1, help="Processes at a time, each with one thread.")]


def claim(
    name: Annotated[str, typer.Argument(help="A method, or any module that has a CLAIM.")],
    seeds: Annotated[int | None, typer.Option(min=1, help="How many; the claim's own number by default.")] = None,
    first: Annotated[int, typer.Option("--first-seed", min=0, help="Tune on 0 to 99, then look here.")] = 100,
    jobs: Jobs = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with the number of each arm and seed.")] = False,
) -> None:
    """Run a method's claim: every arm with the same seeds, its difference to the baseline, and the verdict.

    Writes nothing. docs/claims.md says how to read it.

    For example: `whippletree claim agent_lightning --seeds 3`
    """
    with told():
        from whippletree.claiming import measure, prepared
        from whippletree.report.claims import shown

        [record] = measure([prepared(name, first=first, seeds=seeds)], jobs=jobs)
        print(json.dumps(record, indent=1)) if as_json else screen().print(*shown(record), sep="\n")


def claims(
    names: Annotated[list[str] | None, typer.Argument(help="Methods; all that have a claim by default.")] = None,
    file: Annotated[Path | None, typer.Option("--json", help="Also write all the numbers into this file.")] = None,
    jobs: Jobs = 2,
    docs: Annotated[Path, typer.Option(help="The folder of claims.md and claims/.")] = Path("docs"),
) -> None:
    """Run claims on the seeds of the stored table, from 1000 on; the same command goes on where it was cut off.

    Writes docs/claims/NAME.json after each number, pictures beside it, and the table in docs/claims.md. What was
    measured of the same code is not measured again.

    For example: `whippletree claims --json claims.json --jobs 2`
    """
    with told():
        from whippletree.claiming import stored
        from whippletree.report.claims import listed

        records = stored(names or [], docs=docs, jobs=jobs)
        if file:
            file.write_text(json.dumps(records, indent=1) + "\n")
        screen().print(listed(records), f"wrote {docs / 'claims.md'} and {docs / 'claims'}", sep="\n")
