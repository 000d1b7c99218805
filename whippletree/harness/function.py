"""An agent that is an async Python function: `agent(task, base_url, api_key)`."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast
from urllib.parse import urlsplit

from whippletree.harness.outcome import Outcome, failure, outcome_of
from whippletree.types import Blame, Task

Agent = Callable[[Task, str, str], Awaitable[object]]
_KEPT = 8192  # characters of a traceback kept in `info`


@dataclass(frozen=True)
class FunctionHarness:
    """Runs `agent(task, base_url, api_key)` in this process; see `outcome_of` for what it may return.

    The timeout cancels the agent where it awaits, so an agent that computes for long should do so in a thread.

    Raises:
        ValueError: the agent is not an async function, or the timeout is not positive.
    """

    agent: Agent
    timeout: float  # seconds

    def __post_init__(self) -> None:
        if not _is_async(self.agent):
            raise ValueError(f"an agent must be an `async def` function, but {self.agent!r} is not")
        if not self.timeout > 0:
            raise ValueError(f"a harness needs a timeout above 0 s, but got {self.timeout}")

    async def run(self, task: Task, *, base_url: str, api_key: str) -> Outcome:
        """Run the agent once. An exception, a timeout and an unreadable result are failed outcomes."""
        clock = asyncio.timeout(self.timeout)
        try:
            async with clock:
                returned = await self.agent(task, base_url, api_key)
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if me is None or me.cancelling():
                raise
            return failure("the agent cancelled itself")
        except (Exception, SystemExit) as error:
            return failure(f"timed out after {self.timeout:g} s") if clock.expired() else _failed(error, base_url)
        try:
            return outcome_of(returned)
        except ValueError as error:
            return failure(str(error))


def _failed(error: BaseException, base_url: str) -> Outcome:
    """The outcome of an agent that raised."""
    words = "".join(traceback.format_exception(error))[-_KEPT:]
    blame: Blame = "engine" if any(_is_gateways(e, base_url) for e in _chain(error)) else "harness"
    return failure(f"{type(error).__name__}: {error}{_place(error)}", blame=blame, info={"traceback": words})


def load_agent(spec: str) -> Agent:
    """The agent that `pkg.module:function` or `path/file.py:function` names.

    Raises:
        ValueError: the name has no colon, nothing is there, importing it raised, or it is not an async function.
    """
    place, colon, name = spec.rpartition(":")
    if not (colon and place and name):
        raise ValueError(f"an agent is named 'pkg.module:function' or 'path/file.py:function', but got {spec!r}")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:
        raise ValueError(
            f"agent {spec!r}: {place} cannot be imported: {type(error).__name__}: {error}. Give the path of its "
            f"file, or put its folder on PYTHONPATH"
        ) from error
    agent: Any = getattr(module, name, None)
    if not _is_async(agent):
        offered = sorted(key for key, value in vars(module).items() if inspect.iscoroutinefunction(value))
        found = "is not an `async def` function" if hasattr(module, name) else "is not there"
        raise ValueError(f"agent {spec!r}: {name} {found}; the async functions of {place} are {offered}")
    return cast(Agent, agent)


def _load_file(path: Path) -> ModuleType:
    """Import a file under a name made from its path, so that two files of one name do not meet."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError("there is no such file")
    name = f"agent_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look a class's module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_async(agent: object) -> bool:
    return inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(getattr(agent, "__call__", None))  # noqa: B004


def _place(error: BaseException) -> str:
    """Where in the agent's own file it was raised; the agent's file is that of the first frame below this one."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" at {own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, what caused it, and the members of exception groups."""
    seen: dict[int, BaseException] = {}
    waiting = [error]
    while waiting:
        error = waiting.pop()
        if id(error) not in seen:
            seen[id(error)] = error
            members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
            waiting += [e for e in (error.__cause__, error.__context__, *members) if e is not None]
    return iter(seen.values())


def _is_gateways(error: BaseException, base_url: str) -> bool:
    """An HTTP client's error about a request to the gateway that got a 5xx, or no answer at all.

    Read by its shape, which httpx and the SDKs of OpenAI and Anthropic share, so that none of them is needed here.
    """
    try:
        origin = urlsplit(str(cast(Any, error).request.url))[:2]
    except (AttributeError, RuntimeError):  # httpx raises the latter where an error has no request
        return False
    response = getattr(error, "response", None)
    return origin == urlsplit(base_url)[:2] and (response is None or response.status_code >= 500)
