"""A harness described by data: a file says what to start, with which settings, for which API; this starts it."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from whippletree.harness import relay, sandbox
from whippletree.harness.command import execute, exit_failure
from whippletree.harness.outcome import Outcome, failure
from whippletree.types import Task

# {name}, but not ${name} of a shell nor {{name}} of a template
_BLANK = re.compile(r"(?<![{$])\{([a-z_]+)\}(?!\})")
BLANKS = ("prompt", "model", "base_url", "root_url", "api_key", "home", "work", "recipes", "pip", "npm")
_MARK = "WHIPPLETREE_RUN"
ApiName = Annotated[str, Field(pattern=r"^(chat|responses|messages|gemini)(-[a-z-]+)?$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Packages(_Strict):
    """What must be installed, each with its pinned version."""

    pip: list[str] = Field(default_factory=list)
    npm: list[str] = Field(default_factory=list)


class Variant(_Strict):
    """What differs where the harness speaks one API: more arguments, variables and files."""

    arguments: list[str] = Field(default_factory=list)  # put where the command says "{arguments}", else at its end
    env: dict[str, str] = Field(default_factory=dict)
    files: dict[str, str] = Field(default_factory=dict)


class Launcher(_Strict):
    """A harness as its file describes it. In each string `{prompt}`, `{model}`, ... stand for what a rollout fills in.

    The names of `api` begin with chat, responses, messages or gemini; what follows a "-" tells variants apart.
    """

    name: str
    version: str
    command: list[str] = Field(min_length=1)
    timeout: float = Field(gt=0)  # seconds
    memory: int | None = Field(default=None, gt=0)  # bytes of data of each process
    processes: int | None = Field(default=None, gt=0)
    clock: str = Field(default="", pattern=r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)?$")  # at which each run begins; "": now
    packages: Packages = Packages()
    env: dict[str, str] = Field(default_factory=dict)
    files: dict[str, str] = Field(default_factory=dict)  # by path in the home folder
    api: dict[ApiName, Variant] = Field(min_length=1)


@dataclass(frozen=True, kw_only=True)
class LaunchedHarness:
    """Starts a described harness once per rollout, in a fresh home, inside a sandbox where there is one.

    Its rewards are for a reward to give: a model that writes files could write its own. `info` holds the exit code, the
    end of what it printed, its name and version, and whether it ran in a sandbox.

    Raises:
        ValueError: the sandbox that is asked for cannot be had here.
    """

    launcher: Launcher
    api: str
    recipes: Path  # the folder of its file
    tools: Path  # where packages are installed: {pip} is the Python of .venv-harness there, {npm} its .harness-npm
    model: str = "policy"
    sandbox: sandbox.Kind = "auto"
    grace: float = 5.0  # seconds between SIGTERM and SIGKILL

    def __post_init__(self) -> None:
        sandbox.found(self.sandbox)  # raises for one that was asked for and cannot be had

    async def run(self, task: Task, *, base_url: str, api_key: str) -> Outcome:
        """Run the harness once. A non-zero exit and a timeout are failed outcomes."""
        try:
            with tempfile.TemporaryDirectory(prefix="whippletree-", ignore_cleanup_errors=True) as folder:
                boxed = sandbox.found(self.sandbox)
                async with _way_in(Path(folder), base_url, boxed) as root_url:
                    return await self._run_in(Path(folder), boxed, task, root_url, api_key)
        except (OSError, ValueError) as error:
            return failure(f"{self.launcher.name} could not be started: {error}")

    async def _run_in(self, scratch: Path, boxed: bool, task: Task, root_url: str, api_key: str) -> Outcome:
        home = sandbox.HOME if boxed else str(scratch / "home")
        values = {
            "prompt": prompt_of(task),
            "model": self.model,
            "api_key": api_key,
            "root_url": root_url,
            "base_url": f"{root_url}/v1",
            "home": home,
            "work": f"{home}/work",
            "recipes": str(self.recipes),
            "npm": str(self.tools / ".harness-npm"),
            "pip": str(self.tools / ".venv-harness" / "bin" / "python"),
        }
        self._write(scratch / "home", values)
        env = self._env(values, boxed)
        code, info = await execute(
            self._arguments(scratch, boxed, values, env["PATH"]),
            cwd=scratch / "home" / "work",
            env={**env, _MARK: str(scratch)},
            mark=_MARK,
            timeout=self.launcher.timeout,
            grace=self.grace,
        )
        info |= {"harness": f"{self.launcher.name} {self.launcher.version} {self.api}"}
        info |= {"sandbox": "bubblewrap" if boxed else "none"}
        return exit_failure(code, info, self.launcher.timeout) or Outcome(info=info)

    def _write(self, home: Path, values: Mapping[str, str]) -> None:
        (home / "work").mkdir(parents=True)
        for name, text in {**self.launcher.files, **self.launcher.api[self.api].files}.items():
            path = home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_filled(text, values))

    def _env(self, values: Mapping[str, str], boxed: bool) -> dict[str, str]:
        said = {**self.launcher.env, **self.launcher.api[self.api].env}
        installed = (f"{values['npm']}/node_modules/.bin", str(Path(values["pip"]).parent))
        return {
            "PATH": ":".join([*installed, sandbox.PATH if boxed else os.environ.get("PATH", os.defpath)]),
            "LANG": "C.UTF-8",
            "TZ": "UTC",
            "HOME": values["home"],
            **(sandbox.clock(self.launcher.clock) if self.launcher.clock else {}),
            **{name: _filled(text, values) for name, text in said.items()},
        }

    def _arguments(self, scratch: Path, boxed: bool, values: Mapping[str, str], path: str) -> list[str]:
        limits = sandbox.Limits(memory=self.launcher.memory, processes=self.launcher.processes)
        more, command = self.launcher.api[self.api].arguments, []
        for part in self.launcher.command:
            command += more if part == "{arguments}" else [part]
        if "{arguments}" not in self.launcher.command:
            command += more
        command = [_filled(part, values) for part in command]
        if shutil.which(command[0], path=path) is None:
            wanted = " ".join([*self.launcher.packages.pip, *self.launcher.packages.npm])
            raise ValueError(f"{command[0]} is not installed; it is of {wanted or 'no package that its file names'}")
        return sandbox.started(
            command,
            limits,
            scratch=scratch if boxed else None,
            hidden=_MARK,
            readable=self._readable(),
        )

    def _readable(self) -> list[Path]:
        """Folders that the sandbox must show: the recipe's, and what is installed, with the Python it came from."""
        config = self.tools / ".venv-harness" / "pyvenv.cfg"
        bases = re.findall(r"^home = (.+)/bin$", config.read_text(), re.MULTILINE) if config.is_file() else []
        return [self.recipes, self.tools / ".venv-harness", self.tools / ".harness-npm", *map(Path, bases)]


@asynccontextmanager
async def _way_in(scratch: Path, base_url: str, boxed: bool) -> AsyncIterator[str]:
    """The gateway's URL as the harness is told it, without /v1."""
    root = base_url.removesuffix("/v1")
    if not boxed:
        yield root
        return
    url = urlsplit(root)
    if url.scheme != "http" or url.hostname is None:
        raise ValueError(f"a sandbox leads to a gateway at http://HOST:PORT, but the gateway is at {root}")
    async with relay.serve_socket(scratch / "gateway.sock", host=url.hostname, port=url.port or 80):
        yield f"http://127.0.0.1:{sandbox.PORT}{url.path}"


def load_launcher(path: str | Path, *, api: str, tools: str | Path = ".", **settings: Any) -> LaunchedHarness:
    """The harness that a file describes, speaking `api`; `settings` are further ones of `LaunchedHarness`.

    Raises:
        ValueError: the file has unknown keys or lacks some, names a blank that nothing fills, or has no such API.
    """
    path = Path(path)
    launcher = read_launcher(path)
    if api not in launcher.api:
        raise ValueError(f"{path.name}: {launcher.name} speaks {', '.join(launcher.api)}, but {api} was asked for")
    return LaunchedHarness(
        launcher=launcher, api=api, recipes=path.resolve().parent, tools=Path(tools).resolve(), **settings
    )


def read_launcher(path: Path) -> Launcher:
    """A harness's file, checked.

    Raises:
        ValueError: as `load_launcher`.
    """
    try:
        launcher = Launcher.model_validate(tomllib.loads(path.read_text()))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from None
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ValueError(f"{path}: {wrong}. The keys are {', '.join(Launcher.model_fields)}") from None
    for text in _texts(launcher):
        for blank in _BLANK.findall(text):
            if blank not in (*BLANKS, "arguments"):
                raise ValueError(f"{path}: nothing fills {{{blank}}}; there are {', '.join(BLANKS)}")
    return launcher


def prompt_of(task: Task) -> str:
    """What a command-line agent is asked: the text of the task's user messages, else its column `prompt`.

    Raises:
        ValueError: it has neither.
    """
    said = [m["content"] for m in task.messages if m.get("role") == "user" and isinstance(m.get("content"), str)]
    text = "\n\n".join(said) or task.columns.get("prompt")
    if not isinstance(text, str):
        raise ValueError(f"task {task.id} has no user message of plain text and no column 'prompt'")
    return text


def _filled(text: str, values: Mapping[str, str]) -> str:
    return _BLANK.sub(lambda match: values[match[1]], text)


def _texts(launcher: Launcher) -> list[str]:
    tables = [launcher.env, launcher.files, *(t for part in launcher.api.values() for t in (part.env, part.files))]
    said = [text for table in tables for text in table.values()]
    return [*launcher.command, *(text for part in launcher.api.values() for text in part.arguments), *said]
