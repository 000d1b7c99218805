"""The command line: few commands, each says what it will do and where it writes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from whippletree import __version__, cli_claims
from whippletree.telling import screen, told

app = typer.Typer(
    help="Reinforcement learning of language-model agents inside the harness they already run in. "
    "To see it work: `whippletree quickstart`",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
)
turns = typer.Typer(
    help="The turns that a gateway captured, as files that other trainers read. "
    "For example: `whippletree turns export runs/quickstart/turns.sqlite turns.jsonl`",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
app.add_typer(turns, name="turns")
app.command()(cli_claims.claim)
app.command()(cli_claims.claims)

Settings = Annotated[
    list[str], typer.Option("--set", metavar="A.B=C", help="Change one setting of the recipe; may be given many times.")
]
Runs = Annotated[Path, typer.Option("--runs", help="The folder that holds run directories.")]
Sinks = Annotated[
    list[str],
    typer.Option("--sink", metavar="NAME", help="Also send metrics to tensorboard, wandb, trackio or mlflow."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe as TOML, and run nothing.")]


def _version(asked: bool) -> None:
    if asked:
        print(f"whippletree {__version__}")
        raise typer.Exit


def sent_to(sinks: list[str]) -> list[str]:
    """The setting that names these sinks; none where none is named, so that the recipe's own stay."""
    return [f"sinks={json.dumps(sinks)}"] if sinks else []


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """What all commands share."""


@app.command()
def quickstart(
    steps: Annotated[
        int | None, typer.Option(help="Updates of the policy; the recipe's own number by default.")
    ] = None,
    harness: Annotated[
        str,
        typer.Option(
            metavar="NAME[:API]",
            help="An agent framework in place of our own agent: a file of recipes/harness, such as smolagents, and "
            "which of its APIs. Install them with `make .venv-harness/ready`.",
        ),
    ] = "",
    settings: Settings = [],  # noqa: B006 - typer reads the default and never changes it
    sinks: Sinks = [],  # noqa: B006
    runs: Runs = Path("runs"),
    fresh: Annotated[bool, typer.Option(help="Begin anew where a run of this name has ended or was cut off.")] = True,
    dry_run: DryRun = False,
) -> None:
    """Watch a real 135M-parameter model learn to add inside an ordinary agent: minutes on two CPU cores.

    The agent (recipes/quickstart_agent.py) asks the model for a sum through the OpenAI SDK and, if the answer is wrong,
    says so and lets it try once more. It knows nothing of training. Accuracy on 128 held-out questions is measured
    before and after; runs/quickstart/report.html shows what happened.

    With `--harness` it is a framework that people use, unchanged, as a process in a sandbox for each rollout; that is
    slower, so recipes/quickstart_harness.toml has fewer and shorter steps, enough to see it work and not to learn much.

    For example: `whippletree quickstart`, or with another method `whippletree quickstart --set method=rloo`, or with a
    framework `whippletree quickstart --harness langchain:responses`
    """
    with told():
        from whippletree.running import run_recipe

        recipe = recipe_path("quickstart_harness.toml" if harness else "quickstart.toml")
        chosen = launched(harness) if harness else []
        changes = [*chosen, *settings, *sent_to(sinks), *([] if steps is None else [f"steps={steps}"])]
        run_recipe(recipe, changes, runs=runs, fresh=fresh, dry_run=dry_run, console=screen())


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A TOML recipe; see recipes/ and docs/recipes.md.")],
    settings: Settings = [],  # noqa: B006
    sinks: Sinks = [],  # noqa: B006
    runs: Runs = Path("runs"),
    dry_run: DryRun = False,
) -> None:
    """Train by a recipe. The same command resumes a run that was cut off, where it was.

    For example: `whippletree train recipes/quickstart.toml --set method=rloo --set name=rloo --set steps=40`
    """
    with told():
        from whippletree.running import run_recipe

        run_recipe(recipe, [*settings, *sent_to(sinks)], runs=runs, fresh=False, dry_run=dry_run, console=screen())


@app.command("eval")
def evaluate(
    recipe: Annotated[Path, typer.Argument(help="The recipe, or the config.toml of a run directory.")],
    checkpoint: Annotated[Path | None, typer.Option(help="A checkpoint folder; else the recipe's own model.")] = None,
    settings: Settings = [],  # noqa: B006
    runs: Runs = Path("runs"),
) -> None:
    """Measure a model on the recipe's held-out tasks, with its 95 % interval; prints one JSON object.

    For example: `whippletree eval runs/quickstart/config.toml --checkpoint runs/quickstart/checkpoints/step-000024`
    """
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
    idle: Annotated[
        float, typer.Option(help="Seconds without a call after which a session is ended as abandoned.")
    ] = 3600,
    admin: Annotated[
        Path | None,
        typer.Option(
            "--admin-key-file", help="Holds the key that opens sessions; else WHIPPLETREE_ADMIN_KEY, else one is made."
        ),
    ] = None,
) -> None:
    """The gateway alone: serve a model under the OpenAI, Anthropic and Gemini APIs, keep every call at token level.

    Prints base URLs and a key for your agent, and the admin key with a curl line that opens a session: a secret, URLs
    and a budget for one rollout, which then takes rewards and an end and is read as JSON (docs/sessions.md). Ctrl-C
    ends it; what was captured stays in the store. With the same store and admin key, open sessions go on.

    For example: `whippletree serve smollm2-135m-instruct --port 8000`
    """
    with told():
        from whippletree.running import serve_model

        served = serve_model(
            model, store, host=host, port=port, dtype=dtype, context=context, idle=idle, admin=admin, console=screen()
        )
        asyncio.run(served)


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="One method, whole; all as a table by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """The methods: paper, the slots each fills, what it needs, how it differs from its paper.

    For example: `whippletree methods` for the list, `whippletree methods grpo` for one whole
    """
    with told():
        from whippletree import methods as folder
        from whippletree.report.cards import show_card, show_cards

        cards = [folder.card(name)] if name else [folder.card(each) for each in folder.names()]
        if as_json:
            print(json.dumps(cards, indent=2))
        elif name:
            show_card(cards[0], screen())
        else:
            show_cards(cards, screen())


@app.command()
def report(run: Annotated[Path, typer.Argument(help="A run directory.")]) -> None:
    """Write report.html of a run anew, from what is in its directory.

    For example: `whippletree report runs/quickstart`
    """
    with told():
        from whippletree.running import rewrite_report

        print(f"wrote {rewrite_report(run)}")


Store = Annotated[
    str, typer.Argument(metavar="STORE", help="A SQLite file, or postgresql://USER@HOST/DATABASE.", show_default=False)
]


@turns.command("export")
def export_turns(
    store: Store,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="To write: a .jsonl or .parquet that is not there yet.")],
    group: Annotated[str | None, typer.Option(help="Only rollouts of this group; all by default.")] = None,
    prefix: Annotated[str, typer.Option(help="Only rollouts whose id starts with this.")] = "",
    trainer: Annotated[
        str | None,
        typer.Option(
            "--as", metavar="TRAINER", help="As samples for verl, trl, verifiers, prime-rl, slime or agent-lightning."
        ),
    ] = None,
) -> None:
    """Write captured rollouts to a file: one row a turn, with all that is known of it.

    `whippletree turns import` reads such a file without loss. With --as the rows are samples instead, in the names of
    another trainer: turns that go on from each other are one sample, with a mask over the tokens that were sampled.
    docs/turns.md lists all columns. A store that a gateway still writes can be exported: rollouts that ended are.

    For example: `whippletree turns export runs/quickstart/turns.sqlite turns.parquet --prefix train/`
    """
    with told():
        from whippletree.exchanging import export_turns

        export_turns(store, file, group=group, prefix=prefix, trainer=trainer, console=screen())


@turns.command("import")
def import_turns(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `whippletree turns export` wrote without --as.")],
    store: Store,
) -> None:
    """Read rollouts from a file into a store, which is made where there is none.

    Rollouts that the store has already are left as they are, so an import that was cut off goes on when the same
    command is given again. One that the store has with other content is refused.

    For example: `whippletree turns import turns.parquet postgresql://me@db.example/turns`
    """
    with told():
        from whippletree.exchanging import import_turns

        import_turns(file, store, console=screen())


@app.command()
def doctor() -> None:
    """Check this installation: what is there, what is missing and what for, and how fast the processor is.

    For example: `whippletree doctor`; its status is 0 if everything needed is there
    """
    from whippletree.doctor import examine

    findings = examine()
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        mark = "[green]ok[/]" if finding.good else "[bold red]no[/]" if finding.needed else "[yellow]--[/]"
        table.add_row(mark, finding.what, escape(finding.found))
    sound = all(finding.good for finding in findings if finding.needed)
    screen().print(
        table, "everything needed is here" if sound else "[bold red]what is marked no is needed[/]", sep="\n"
    )
    raise typer.Exit(0 if sound else 1)


def launched(harness: str) -> list[str]:
    """The settings that choose NAME[:API] of recipes/harness; without an API the first of its file.

    Raises:
        ValueError: there is none of that name.
    """
    from whippletree.harness.launched import read_launcher

    name, _, api = harness.partition(":")
    folder = recipe_path("harness")
    if not (folder / f"{name}.toml").is_file():
        names = ", ".join(sorted(path.stem for path in folder.glob("*.toml")))
        raise ValueError(f"--harness takes a file of {folder}, but there is no {name!r}; there are {names}")
    launcher = read_launcher(folder / f"{name}.toml")
    return [
        f"harness.agent=harness/{name}.toml",
        f"harness.api={api or next(iter(launcher.api))}",
        f"name=quickstart-{name}",
    ]


def recipe_path(name: str) -> Path:
    """A recipe that comes with the package: beside it in a clone, inside it when installed."""
    package = Path(__file__).parent
    for folder in (package.parent / "recipes", package / "recipes"):
        if (folder / name).exists():
            return folder / name
    raise ValueError(f"the recipe {name} is not there; run from a clone of the repository")
