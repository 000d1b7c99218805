"""Measuring claims in processes of their own, each with one thread: what goes in is a module's name, an arm, a seed."""

from __future__ import annotations

import ast
import asyncio
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec, resolve_name
from pathlib import Path
from platform import python_version

from whippletree.analysis import claims
from whippletree.types import Claim, Json

PACKAGE = claims.__name__.partition(".")[0]
LIBRARIES = (PACKAGE, "torch", "numpy")
ALIKE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


def claim_in(module: str) -> Claim:
    """The `CLAIM` of a module.

    Raises:
        ValueError: it has none.
    """
    claim = getattr(importlib.import_module(module), "CLAIM", None)
    if not isinstance(claim, Claim):
        raise ValueError(f"a claim is CLAIM = Claim(...) in a method's file, but {module} has CLAIM = {claim!r}")
    return claim


# ---- what a number depends on -----------------------------------------------------------------------------------


def sources(module: str) -> dict[str, Path]:
    """The files, by module, of `module` and of all that it imports from its own package and from ours, sorted.

    There are none if there is no such module.
    """
    inside, todo, found = {module.partition(".")[0], PACKAGE}, [module], dict[str, Path]()
    while todo:
        name = todo.pop()
        if name in found or name.partition(".")[0] not in inside or (path := _file(name)) is None:
            continue
        found[name] = path
        todo += [*_imports(name, path), name.rpartition(".")[0]]
    return dict(sorted(found.items()))


def digest(files: dict[str, Path]) -> str:
    """A hash of the code in these files: comments, docstrings and the form of the code do not change it."""
    total = hashlib.sha256()
    for name, path in files.items():
        tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                node.body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
        total.update(f"{name}\n{ast.unparse(tree)}\n".encode())
    return total.hexdigest()[:16]


def _file(name: str) -> Path | None:
    """Where a module stands; None if it is no module, but a name in one."""
    try:
        spec = find_spec(name) if name else None
    except ModuleNotFoundError:
        return None
    return Path(spec.origin) if spec and spec.has_location and spec.origin else None


def _imports(name: str, path: Path) -> Iterator[str]:
    """What a module imports, with each name that it takes, as that may be a module too."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def commit(files: dict[str, Path]) -> str:
    """The commit of the checkout in which the files stand, "+" after it where they differ from it; else ""."""
    folder = next(iter(files.values())).parent
    if not shutil.which("git"):
        return ""
    told = [
        subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, check=False)
        for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--", *files.values()])
    ]
    return told[0].stdout.strip() + "+" * bool(told[1].stdout) if told[0].returncode == 0 else ""


# ---- a claim being measured -------------------------------------------------------------------------------------


@dataclass
class Experiment:
    """A claim with its seeds, the same for all arms, and what is known of it; `stored` is an earlier record of it."""

    name: str
    module: str
    seeds: range
    stored: Json = field(default_factory=dict)
    claim: Claim = field(init=False)
    files: dict[str, Path] = field(init=False)
    digest: str = field(init=False)
    runs: dict[str, dict[str, Json]] = field(init=False)
    new: int = 0  # numbers that were measured by this one

    def __post_init__(self) -> None:
        self.claim, self.files = claim_in(self.module), sources(self.module)
        self.digest = digest(self.files)
        known = self.stored.get("runs", {}) if self.stored.get("sources") == self.digest else {}
        known = {arm: {s: run for s, run in found.items() if "died" not in run} for arm, found in known.items()}
        self.runs = {
            arm: {str(seed): known[arm][str(seed)] for seed in self.seeds if str(seed) in known.get(arm, {})}
            for arm in claims.arms(self.claim)
        }

    def missing(self) -> list[tuple[str, int]]:
        """(arm, seed) of what is not measured yet: all arms of a seed before the next seed."""
        return [(arm, seed) for seed in self.seeds for arm, found in self.runs.items() if str(seed) not in found]

    def take(self, arm: str, seed: int, answer: Json) -> None:
        """Keep what a process told.

        Raises:
            ValueError: it measured other code than this experiment is about.
        """
        if answer.pop("sources", self.digest) != self.digest:
            raise ValueError(
                f"the code of {self.name} is to stay as it is while it is measured, but it was changed: give the same "
                f"command again"
            )
        self.runs[arm][str(seed)] = answer
        self.new += 1

    def record(self) -> Json:
        """All that is kept of a claim; where nothing was measured anew, of the commit at which it was."""
        versions = {"python": python_version(), **{name: version(name) for name in LIBRARIES}}
        origin: Json = {"commit": commit(self.files), "versions": versions}
        if not self.new and self.stored:
            origin = {key: self.stored[key] for key in origin}
        runs = {arm: {str(s): found[str(s)] for s in self.seeds if str(s) in found} for arm, found in self.runs.items()}
        return {
            "name": self.name,
            "says": self.claim.says,
            "better": self.claim.better,
            "seeds": [self.seeds.start, self.seeds.stop - 1],
            **origin,
            "sources": self.digest,
            **claims.summarised(runs, better=self.claim.better),
            "runs": runs,
        }


# ---- processes --------------------------------------------------------------------------------------------------


async def measure_all(
    experiments: Sequence[Experiment], *, jobs: int, told: Callable[[Experiment, str, int], None]
) -> None:
    """Measure what is missing, `jobs` at a time; `told` after each, when the experiment has it.

    A process that dies leaves its seed missing, and the same command tries that again.

    Raises:
        ValueError: code was changed in the meantime; what was measured before stays.
    """
    todo = iter([(each, arm, seed) for each in experiments for arm, seed in each.missing()])
    async with asyncio.TaskGroup() as group:
        for _ in range(jobs):
            group.create_task(_take_turns(todo, told))


async def _take_turns(
    todo: Iterator[tuple[Experiment, str, int]], told: Callable[[Experiment, str, int], None]
) -> None:
    """One process after another, a new one for each claim, so that none finds what another left."""
    process: Process | None = None
    module = ""
    try:
        for experiment, arm, seed in todo:
            if process is None or module != experiment.module:
                await _end(process)
                module, process = experiment.module, await _start(experiment.module)
            assert process.stdin and process.stdout
            process.stdin.write(f"{json.dumps([arm, seed])}\n".encode())
            if line := await process.stdout.readline():
                experiment.take(arm, seed, json.loads(line))
            else:
                status, process = await process.wait(), None
                ended = f"its process ended with status {status}"
                experiment.take(arm, seed, {"missing": ended, "died": status, "seconds": 0.0})
            told(experiment, arm, seed)
    finally:
        await _end(process)


async def _start(module: str) -> Process:
    # it finds the same modules; and is of its own session: Ctrl-C is for the command, which then ends its processes
    settings = {**os.environ, **ALIKE, "PYTHONPATH": os.pathsep.join(sys.path)}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, module, stdin=PIPE, stdout=PIPE, env=settings, start_new_session=True
    )


async def _end(process: Process | None) -> None:
    if process and process.returncode is None:
        process.kill()
        await process.wait()


def main(module: str) -> None:
    """Answer each line [arm, seed] with a line that says what was measured, and of which code."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a measure prints is no answer
    code = digest(sources(module))
    claim = claim_in(module)
    for line in sys.stdin:
        arm, seed = json.loads(line)
        print(json.dumps({**claims.measured(claim, arm, seed), "sources": code}), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
