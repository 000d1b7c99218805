"""The command line: few commands, each says what it will do and where it writes."""

from __future__ import annotations

import asyncio
import errno
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    help="Reinforcement learning of language-model agents inside the harness they already run in.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
console = Console()

Settings = Annotated[
    list[str], typer.Option("--set", metavar="A.B=C", help="Change one setting of the recipe; may be given many times.")
]
Runs = Annotated[Path, typer.Option("--runs", help="The folder that holds run directories.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe as TOML, and run nothing.")]


@app.command()
def quickstart(
    steps: Annotated[
        int | None, typer.Option(help="Updates of the policy; the recipe's own number by default.")
    ] = None,
    settings: Settings = [],  # noqa: B006 - typer reads the default and never changes it
    runs: Runs = Path("runs"),
    fresh: Annotated[bool, typer.Option(help="Begin anew where a run of this name has ended or was cut off.")] = True,
    dry_run: DryRun = False,
) -> None:
    """Watch a real 135M-parameter model learn to add inside an ordinary agent: minutes on two CPU cores.

    The agent (recipes/quickstart_agent.py) asks the model for a sum through the OpenAI SDK and, if the answer is wrong,
    says so and lets it try once more. It knows nothing of training. Accuracy on 128 held-out questions is measured
    before and after; runs/quickstart/report.html shows what happened.
    """
    with told():
        from whippletree.running import run_recipe

        changes = [*settings, *([f"steps={steps}"] if steps else [])]
        run_recipe(recipe_path("quickstart.toml"), changes, runs=runs, fresh=fresh, dry_run=dry_run, console=console)


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A TOML recipe; see recipes/ and docs/recipes.md.")],
    settings: Settings = [],  # noqa: B006
    runs: Runs = Path("runs"),
    dry_run: DryRun = False,
) -> None:
    """Train by a recipe. The same command resumes a run that was cut off, where it was.

    For example: whippletree train recipes/quickstart.toml --set method=rloo --set name=rloo --set steps=40
    """
    with told():
        from whippletree.running import run_recipe

        run_recipe(recipe, settings, runs=runs, fresh=False, dry_run=dry_run, console=console)


@app.command("eval")
def evaluate(
    recipe: Annotated[Path, typer.Argument(help="The recipe, or the config.toml of a run directory.")],
    checkpoint: Annotated[Path | None, typer.Option(help="A checkpoint folder; else the recipe's own model.")] = None,
    settings: Settings = [],  # noqa: B006
    runs: Runs = Path("runs"),
) -> None:
    """Measure a model on the recipe's held-out tasks, with its 95 % interval; prints one JSON object."""
    with told():
        from whippletree.running import evaluate_recipe

        found = evaluate_recipe(recipe, settings, checkpoint=checkpoint, runs=runs)
        print(json.dumps(found))


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, or smollm2-135m-instruct.")],
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    host: Annotated[
        str, typer.Option(help="Loopback unless told otherwise: whoever has the key can use the model.")
    ] = "127.0.0.1",
    store: Annotated[Path, typer.Option(help="Where every call is kept.")] = Path("turns.sqlite"),
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    context: Annotated[int | None, typer.Option(help="Most tokens of prompt and reply together.")] = None,
) -> None:
    """The gateway alone: serve a model under the OpenAI API and keep every call at token level.

    Prints OPENAI_BASE_URL and OPENAI_API_KEY for your agent. Ctrl-C ends it; what was captured stays in the store.
    """
    with told():
        from whippletree.running import serve_model

        asyncio.run(
            serve_model(model, host=host, port=port, store=store, dtype=dtype, context=context, console=console)
        )


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="One method, whole; all as a table by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """The methods: paper, the slots each fills, what it needs, how it differs from its paper."""
    with told():
        from whippletree import methods as folder

        cards = [folder.card(name)] if name else [folder.card(each) for each in folder.names()]
        if as_json:
            print(json.dumps(cards, indent=2))
        elif name:
            _show_card(cards[0])
        else:
            _show_cards(cards)


@app.command()
def report(run: Annotated[Path, typer.Argument(help="A run directory.")]) -> None:
    """Write report.html of a run anew, from what is in its directory."""
    with told():
        from whippletree.running import rewrite_report

        console.print(f"wrote {rewrite_report(run)}")


@app.command()
def doctor() -> None:
    """Check this installation: what is there, what is missing and what for, and how fast the processor is."""
    from whippletree.doctor import examine

    rows, sound = examine()
    table = Table("", "what", "found", "", box=None, pad_edge=False)
    for good, what, found, advice in rows:
        table.add_row("[green]ok[/]" if good else "[yellow]--[/]", what, found, advice)
    console.print(table)
    console.print("everything needed is here" if sound else "[red]something needed is missing, see above[/]")
    raise typer.Exit(0 if sound else 1)


@contextmanager
def told() -> Iterator[None]:
    """Errors that a person can act on are told in words and end with status 1; others keep their traceback."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _end("the disk is full: make room and give the same command again; every finished turn is kept")
    except (ValueError, ImportError) as error:
        _end(str(error))
    except RuntimeError as error:
        if type(error) is RuntimeError:
            raise
        _end(str(error))
    except KeyboardInterrupt:
        _end("stopped; the same command goes on from the last checkpoint", status=130)


def _end(text: str, *, status: int = 1) -> None:
    print(f"whippletree: {text}", file=sys.stderr)
    raise typer.Exit(status)


def recipe_path(name: str) -> Path:
    """A recipe that comes with the package: beside it in a clone, inside it when installed."""
    package = Path(__file__).parent
    for folder in (package.parent / "recipes", package / "recipes"):
        if (folder / name).exists():
            return folder / name
    raise ValueError(f"the recipe {name} is not there; run from a clone of the repository")


def _show_cards(cards: list[dict[str, Any]]) -> None:
    table = Table("method", "paper", "fills", "needs", "source", box=None, header_style="bold", pad_edge=False)
    for card in cards:
        paper = card["paper"]
        where = f" ({paper['arxiv']})" if paper["arxiv"] else ""
        table.add_row(
            f"[bold]{card['name']}[/]",
            f"{paper['title']}{where}",
            ", ".join(card["slots"]),
            ", ".join(card["needs"]) or "-",
            paper["source"],
        )
    console.print(table)


def _show_card(card: dict[str, Any]) -> None:
    paper = card["paper"]
    about = ", ".join(str(x) for x in (paper["authors"], paper["year"], paper["arxiv"]) if x)
    console.print(f"[bold]{card['name']}[/]  {paper['title']}" + (f" ({about})" if about else ""))
    for label, text in (
        ("also", ", ".join(paper["also_called"])),
        ("source", paper["source"]),
        ("file", card["file"]),
        ("test", card["test"]),
        ("needs", ", ".join(card["needs"])),
        ("claim", card["claim"]),
        ("differs", card["differs"]),
    ):
        if text:
            console.print(f"  {label:<8} {text}", highlight=False, markup=False)
    for slot, parts in card["slots"].items():
        for part in parts:
            settings = ", ".join(f"{key}={value}" for key, value in part["settings"].items())
            console.print(f"  {slot:<10} {part['name']}({settings})  {part['at']}", highlight=False, markup=False)
