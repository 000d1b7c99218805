"""What a gateway must do to serve real harnesses, item by item: 30 to 38, which are about whole runs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cases import CASES, PROMPT
from whippletree.gateway.budget import Budget
from whippletree.gateway.checklist_stream_test import HI, MORE, continues
from whippletree.gateway.checklist_test import CALL, TOOLS, each_api, events_of, post, said
from whippletree.gateway.conftest import Desk, MakeDesk
from whippletree.gateway.server import serve
from whippletree.gateway.sessions import Session
from whippletree.harness import load_launcher, sandbox
from whippletree.harness.launched import read_launcher
from whippletree.types import Json, Task

LAUNCHERS = Path(__file__).parent.parent.parent / "recipes" / "harness"
needs_bubblewrap = pytest.mark.skipif(bool(sandbox.lacking()), reason=f"no sandbox here: {sandbox.lacking()}")


def system(text: str) -> Json:
    return {"role": "system", "content": text}


async def chat(made: Desk, session: Session, *messages: Json, tools: Any = (), **fields: Any) -> Json:
    """The message that answers these."""
    more: Json = {"tools": list(tools)} if tools else {}
    answer = await post(made, session, "chat", messages=list(messages), **more, **fields)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["choices"][0]["message"])


# 30
@pytest.mark.parametrize("what", ["tools", "system"])
async def test_another_tool_list_or_system_prompt_starts_a_segment(desk: MakeDesk, what: str):
    made = desk(lambda _: "ok", tools=True)
    session, tools = await made.open(), TOOLS["chat"]
    first = [system("brief"), HI]
    reply = await chat(made, session, *first, tools=tools)
    grown = [*tools, {"type": "function", "function": {"name": "sub", "parameters": {"type": "object"}}}]
    later = [system("brief" if what == "tools" else "long"), HI, reply, MORE]
    await chat(made, session, *later, tools=grown if what == "tools" else tools)
    one, two = made.turns()
    assert (one.link, two.link) == ("root", "fork")
    assert not continues(two, one)


# 31
HEADERS: dict[str, tuple[Json, Json]] = {  # those of the main loop, those of its sub-agent
    "claude code": (
        {"x-claude-code-session-id": "s"},
        {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a", "x-claude-code-parent-agent-id": "p"},
    ),
    "codex": ({"thread-id": "1"}, {"thread-id": "2", "x-codex-parent-thread-id": "1", "x-openai-subagent": "worker"}),
    "opencode": ({"x-session-id": "1"}, {"x-session-id": "2", "x-parent-session-id": "1"}),
    "qwen code, which says nothing": ({}, {}),
}


@pytest.mark.parametrize("harness", HEADERS)
async def test_threads_of_a_run_are_told_apart_though_their_calls_come_in_parallel(desk: MakeDesk, harness: str):
    made = desk(lambda _: "ok", tools=True, delay=0.001)
    session, tools = await made.open(), TOOLS["chat"]
    own, sub = HEADERS[harness]
    look = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    other, prompt = (tools, "you are an agent") if sub else (look, "you are a sub-agent")  # then its headers alone tell

    async def main() -> None:
        messages = [system("you are an agent"), HI]
        for _ in range(4):
            messages += [await chat(made, session, *messages, tools=tools, headers=own), MORE]

    async def beside(number: int) -> None:
        messages = [system(prompt), {"role": "user", "content": f"errand {number}"}]
        for _ in range(3):
            headers = {name: value + str(number) if value in "a2" else value for name, value in sub.items()}
            messages += [await chat(made, session, *messages, tools=other, headers=headers), MORE]

    running = asyncio.create_task(main())
    while not made.turns():
        await asyncio.sleep(0.001)
    await asyncio.gather(running, beside(1), beside(2))
    turns = made.turns()
    threads = {turn.thread for turn in turns}
    assert threads == {"main", "sub-agent/1", "sub-agent/2"}
    for thread in threads:
        rows = [turn for turn in turns if turn.thread == thread]
        assert all(continues(after, before) for before, after in pairwise(rows))
    assert len(turns) == 4 + 3 + 3


# 32
async def test_side_calls_are_kept_and_marked(desk: MakeDesk):
    made = desk(["Adding", "so it is 3", "they added", "3", "helped"], tools=True)
    session, tools = await made.open(), TOOLS["chat"]
    task = {"role": "user", "content": "add one and two"}
    main = [system("you are an agent"), task]
    await chat(made, session, system("You are a title generator. You output only a thread title."), task)
    main += [await chat(made, session, *main, tools=tools), MORE]
    await chat(made, session, *main, {"role": "user", "content": "Write a summary of this conversation."}, tools=tools)
    await chat(made, session, system("now answer"), *main[1:])  # at the step limit, without tools
    await chat(made, session, system("you are a helper"), MORE, tools=tools)
    kinds = [turn.kind for turn in made.turns()]
    assert kinds == ["title", "main", "summary", "answer", "sub-agent"]


# 33
@pytest.mark.parametrize(
    ("budget", "code", "served"),
    [
        (Budget(turns=2), "turn_limit_exceeded", 2),
        (Budget(tokens=6), "token_limit_exceeded", 2),  # three tokens a reply
        (Budget(calls_per_second=0.2), "rate_limit_exceeded", 2),  # over ten seconds
    ],
)
async def test_a_harness_in_a_loop_ends_with_a_400(desk: MakeDesk, budget: Budget, code: str, served: int):
    made = desk(lambda _: "ok")
    session = await made.open(budget=budget)
    answers = [await post(made, session, "chat", f"ask {n}") for n in range(4)]
    assert [answer.status_code for answer in answers] == [200] * served + [400] * (4 - served)
    assert answers[-1].json()["error"]["code"] == code
    assert session.truncated and len(made.turns()) == served


# 34
@each_api
async def test_what_is_no_valid_call_is_passed_on_as_the_model_made_it_and_marked(desk: MakeDesk, api: str):
    broken = '<tool_call>\n{"name": "add", "arguments": {"a": \n</tool_call>'
    made = desk([broken, CALL.replace("add", "nothing")], tools=True)
    session = await made.open()
    first = (await post(made, session, api, tools=TOOLS[api])).json()
    second = (await post(made, session, api, tools=TOOLS[api])).text
    assert said(api, first)[0] == broken
    assert '"nothing"' in second
    one, two = (turn.info for turn in made.turns())
    assert (one["malformed"], one.get("unknown_tools")) == (1, None)
    assert (two.get("malformed"), two["unknown_tools"]) == (None, ["nothing"])


# 35
@each_api
async def test_extra_fields_stay_out_unless_asked_for(desk: MakeDesk, api: str):
    made = desk(lambda _: "ok")
    session = await made.open()
    plain = (await post(made, session, api)).text + str(events_of(await post(made, session, api, stream=True)))
    for name in ("token_ids", "prompt_token_ids", "rollout", f'"{session.rollout_id}"', "turn_id"):
        assert name not in plain
    asked = (await post(made, session, api, return_token_ids=True)).json()
    if api == "chat":
        assert asked["choices"][0]["token_ids"] == list(made.turns()[-1].reply_ids)
    else:
        assert "token_ids" not in str(asked)


# 36
async def test_after_a_restart_a_run_goes_on_from_its_messages_alone(desk: MakeDesk):
    made = desk(lambda _: CALL, tools=True)
    session, tools = await made.open(), TOOLS["chat"]
    first = [system("main"), HI]
    reply = await chat(made, session, *first, tools=tools)
    beside = [system("sub-agent"), MORE]
    aside = await chat(made, session, *beside, tools=tools)
    made.store.close()
    again = desk(lambda _: "ok", tools=True, store=lambda path: type(made.store)(made.store.path))
    for before, answer in ((first, reply), (beside, aside)):
        result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "2"}
        await chat(again, session, *before, answer, result, tools=tools)
    one, two, three, four = again.turns()
    assert continues(three, one) and continues(four, two)
    assert [turn.thread for turn in (one, two, three, four)] == ["main", "sub-agent/1"] * 2


# 37
async def printed(folder: Path, script: str, kind: sandbox.Kind, more: str = "") -> list[str]:
    """What two runs of a harness that is this script print."""
    text = f'name = "fake"\nversion = "1"\ntimeout = 60.0\n{more}command = ["sh", "-c", """{script}"""]\n[api.chat]\n'
    (folder / "fake.toml").write_text(text)
    harness = load_launcher(folder / "fake.toml", api="chat", tools=folder, sandbox=kind)
    task, urls = Task("t", columns={"prompt": "x"}), [f"http://127.0.0.1:{port}/v1" for port in (9, 10)]
    outcomes = [await harness.run(task, base_url=url, api_key="k") for url in urls]
    return [str(outcome.info["stdout"]) for outcome in outcomes]


@needs_bubblewrap
async def test_two_runs_see_the_same_machine_so_that_their_prompts_are_the_same(tmp_path: Path):
    script = "env | sort; pwd; hostname; id; ls -A ~ /tmp; cat /etc/hosts; readlink /proc/self/cwd; echo {base_url}"
    one, two = await printed(tmp_path, script, "bubblewrap")
    assert one == two
    for fixed in (
        "HOME=/agent",
        "TZ=UTC",
        "LANG=C.UTF-8",
        "/agent/work",
        "uid=1000(agent)",
        "http://127.0.0.1:8080/v1",
    ):
        assert fixed in one


@needs_bubblewrap
@pytest.mark.skipif(not list(Path("/usr/lib").glob("**/faketime/libfaketimeMT.so.1")), reason="no faketime here")
async def test_two_runs_see_the_same_day_where_their_launcher_fixes_it(tmp_path: Path):
    script = "date +%F; python3 -c 'import datetime; print(datetime.date.today())'"
    one, two = await printed(tmp_path, script, "bubblewrap", 'clock = "2026-01-31 09:00:00"\n')
    assert one == two == "2026-01-31\n" * 2


# 38
SEEN = {  # the versions of the notes on real harnesses
    "openai-sdk": "3.57.0", "anthropic-sdk": "2.14.0", "openai-agents": "0.24.0", "smolagents": "1.26.0",
    "mini-swe-agent": "2.4.6", "langchain": "1.5.2", "pydantic-ai": "2.68.0", "claude-code": "2.1.332",
    "codex": "0.171.0", "opencode": "1.18.33", "qwen-code": "0.24.4", "openclaw": "2026.9.6", "gemini-cli": "0.61.0",
}  # fmt: skip


def test_each_harness_has_a_launcher_at_its_version_and_a_case_for_each_api_that_it_speaks():
    launchers = {path.stem: read_launcher(path) for path in LAUNCHERS.glob("*.toml")}
    assert {launcher.name: launcher.version for launcher in launchers.values()} == SEEN
    spoken = {(stem, api) for stem, launcher in launchers.items() for api in launcher.api}
    assert spoken == {(case.recipe, case.api) for case in CASES}
    streams = {
        "openai_sdk": {"chat", "responses"},
        "anthropic_sdk": {"messages"},
        "openai_agents": {"chat", "responses"},
    }
    assert all((stem, f"{api}-stream") in spoken for stem, apis in streams.items() for api in apis)


@pytest.mark.parametrize("api", ["chat", "responses-stream"])
async def test_the_harness_that_is_installed_here_does_its_task_through_the_gateway(
    desk: MakeDesk, tmp_path: Path, api: str
):
    (tmp_path / ".venv-harness").symlink_to(sys.prefix)  # `make test-harness` installs all thirteen; this one is here
    (case,) = (case for case in CASES if case.recipe == "openai_sdk" and case.api == api)
    script: Callable[[str], str] = case.script()
    made = desk(script, tools=True)
    harness = load_launcher(LAUNCHERS / "openai_sdk.toml", api=api, tools=tmp_path, sandbox="none")
    session = await made.open()
    task = Task("t", messages=({"role": "user", "content": PROMPT},))
    async with serve(made.app) as url:
        outcome = await harness.run(task, base_url=f"{url}/v1", api_key=session.secret)
    assert outcome.ending == "done" and "quokka" in outcome.info["stdout"]
    one, two = made.turns()
    assert continues(two, one) and (two.link, two.info.get("drift", 0)) == ("append", 0)
