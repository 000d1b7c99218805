from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import httpx
import openai
import pytest

from whippletree.harness import FunctionHarness, Outcome, load_agent
from whippletree.types import Task

TASK = Task("t", messages=({"role": "user", "content": "2 + 2"},), columns={"answer": "4"})


async def run(agent: object, *, timeout: float = 20.0, base_url: str = "http://127.0.0.1:9/v1") -> Outcome:
    return await FunctionHarness(agent, timeout=timeout).run(TASK, base_url=base_url, api_key="secret")  # type: ignore[arg-type]


@contextmanager
def server(status: int) -> Iterator[str]:
    """A gateway that answers every request with this status."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            body = json.dumps({"error": {"message": "scripted"}}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    scripted = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=scripted.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{scripted.server_port}/v1"
    finally:
        scripted.shutdown()
        scripted.server_close()


async def ask(task: Task, base_url: str, api_key: str) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        await client.chat.completions.create(model="policy", messages=list(task.messages))  # type: ignore[arg-type]


async def test_an_agent_gets_its_task_and_where_the_gateway_is():
    async def agent(task: Task, base_url: str, api_key: str) -> dict[str, object]:
        return {"correct": 1.0, "info": {"saw": [task.id, base_url, api_key]}}

    assert await run(agent, base_url="http://g/v1") == Outcome(
        rewards={"correct": 1.0}, info={"saw": ["t", "http://g/v1", "secret"]}
    )


async def test_an_exception_is_the_harness_s_fault_and_says_where_it_was_raised():
    def deep() -> None:
        raise KeyError("no such tool")

    async def agent(*_: object) -> None:
        json.loads("1")
        deep()

    outcome = await run(agent)
    assert (outcome.ending, outcome.blame, outcome.rewards) == ("failed", "harness", {})
    assert outcome.reason == f"KeyError: 'no such tool' at {__file__}:{deep.__code__.co_firstlineno + 1} in deep"
    assert "json.loads" not in outcome.reason and "deep()" in outcome.info["traceback"]


async def test_the_place_is_in_the_agent_s_file_also_when_a_library_raises():
    async def agent(*_: object) -> None:
        json.loads("{")

    outcome = await run(agent)
    assert outcome.reason.endswith(f" at {__file__}:{agent.__code__.co_firstlineno + 1} in agent")


async def test_an_agent_that_takes_too_long_is_cancelled():
    ended = []

    async def agent(*_: object) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    outcome = await run(agent, timeout=0.05)
    assert (outcome.ending, outcome.blame, outcome.reason) == ("failed", "harness", "timed out after 0.05 s")
    assert ended == [True]


async def test_an_agent_s_own_timeout_is_told_apart_from_the_harness_s():
    async def agent(*_: object) -> None:
        raise TimeoutError("the tool was slow")

    assert "TimeoutError: the tool was slow" in (await run(agent)).reason


async def test_cancelling_a_run_is_not_an_outcome():
    async def agent(*_: object) -> None:
        await asyncio.sleep(60)

    running = asyncio.create_task(run(agent))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_an_agent_that_cancels_itself_or_exits_ends_only_its_own_rollout():
    async def cancels(*_: object) -> None:
        raise asyncio.CancelledError

    async def exits(*_: object) -> None:
        raise SystemExit(2)

    assert (await run(cancels)).reason == "the agent cancelled itself"
    assert (await run(exits)).reason.startswith("SystemExit: 2 at ")


async def test_a_result_that_is_no_reward_is_a_failure():
    async def agent(*_: object) -> str:
        return "1.0"

    outcome = await run(agent)
    assert (outcome.ending, outcome.blame) == ("failed", "harness")
    assert outcome.reason.endswith("for 'reward' it returned a str")


@pytest.mark.parametrize(("status", "blame"), [(500, "engine"), (503, "engine"), (400, "harness"), (401, "harness")])
async def test_a_5xx_of_the_gateway_is_the_engine_s_fault(status: int, blame: str):
    with server(status) as url:
        outcome = await run(ask, base_url=url)
    assert (outcome.ending, outcome.blame) == ("failed", blame)
    assert str(status) in outcome.reason


async def test_a_gateway_that_does_not_answer_is_the_engine_s_fault():
    with server(500) as url:
        pass  # nothing listens there any more
    assert (await run(ask, base_url=url)).blame == "engine"


async def test_a_5xx_of_another_service_is_the_harness_s_fault():
    with server(500) as tool, server(200) as gateway:

        async def agent(*_: object) -> None:
            async with httpx.AsyncClient() as client:
                (await client.post(tool, json={})).raise_for_status()

        assert (await run(agent, base_url=gateway)).blame == "harness"
        assert (await run(agent, base_url=tool)).blame == "engine"


async def test_a_5xx_is_found_under_the_error_the_agent_made_of_it():
    async def agent(task: Task, base_url: str, api_key: str) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(ask(task, base_url, api_key))
        except* openai.APIError as error:
            raise RuntimeError("the agent gave up") from error

    with server(502) as url:
        outcome = await run(agent, base_url=url)
    assert outcome.blame == "engine" and outcome.reason.startswith("RuntimeError: the agent gave up")


def test_a_plain_function_and_a_timeout_of_0_are_refused():
    with pytest.raises(ValueError, match="async def"):
        FunctionHarness(lambda *_: None, timeout=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="above 0 s"):
        FunctionHarness(ask, timeout=0)


async def test_an_agent_is_loaded_from_a_file_or_a_module(tmp_path: Path):
    file = tmp_path / "agent.py"
    file.write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Answer:\n    x: float\n"
        "async def act(task, base_url, api_key):\n    return Answer(0.25).x\n"
    )
    assert (await run(load_agent(f"{file}:act"))).rewards == {"reward": 0.25}
    loaded: object = load_agent("asyncio.tasks:sleep")
    assert loaded is asyncio.sleep


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("agent", "is named 'pkg.module:function'"),
        (":act", "is named 'pkg.module:function'"),
        ("no_such_package_here:act", "ModuleNotFoundError"),
        ("/nowhere/agent.py:act", "no such file"),
        ("asyncio.tasks:slep", r"slep is not there; the async functions of asyncio.tasks are \[.*'sleep'"),
        ("asyncio.tasks:gather", "gather is not an `async def` function"),
    ],
)
def test_an_agent_that_cannot_be_loaded_says_why(spec: str, message: str):
    with pytest.raises(ValueError, match=message):
        load_agent(spec)


def test_an_agent_s_file_that_raises_says_what(tmp_path: Path):
    (tmp_path / "agent.py").write_text("1 / 0")
    with pytest.raises(ValueError, match="ZeroDivisionError: division by zero"):
        load_agent(f"{tmp_path}/agent.py:act")
