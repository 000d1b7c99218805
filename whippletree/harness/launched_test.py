from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from whippletree.gateway.server import serve
from whippletree.harness import LaunchedHarness, Outcome, load_launcher, sandbox
from whippletree.harness.launched import prompt_of
from whippletree.types import Task

TASK = Task("t", messages=({"role": "system", "content": "be brief"}, {"role": "user", "content": "2 + {model}?"}))
BOXED = pytest.param(
    "bubblewrap", marks=pytest.mark.skipif(bool(sandbox.lacking()), reason=f"no sandbox here: {sandbox.lacking()}")
)
HEAD = 'name = "fake"\nversion = "1"\ntimeout = 60.0\n'
SHELL = HEAD + 'command = ["sh", "-c", """{}"""]\n[api.chat]\n'


def load(folder: Path, text: str, *, api: str = "chat", **settings: Any) -> LaunchedHarness:
    """The harness that this text describes."""
    path = folder / "fake.toml"
    path.write_text(text)
    return load_launcher(path, api=api, tools=folder, **settings)


async def run(harness: LaunchedHarness, base_url: str = "http://127.0.0.1:9/v1", task: Task = TASK) -> Outcome:
    return await harness.run(task, base_url=base_url, api_key="secret")


# ---- what a run gets --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["none", BOXED])
async def test_a_harness_gets_its_blanks_its_variables_and_its_files(tmp_path: Path, kind: Any):
    text = HEAD + (
        'command = ["sh", "{recipes}/agent.sh", "{prompt}", "{arguments}", "last"]\n'
        '[env]\nWHERE = "{root_url} {base_url}"\nKEY = "{api_key}"\nKIND = "any"\n'
        '[files]\n".config/all.json" = \'{"model": "{model}", "shell": "${HOME}", "template": "{{x}}"}\'\n'
        '[api.chat]\narguments = ["--for", "{model}"]\nenv = { KIND = "chat" }\nfiles = { "own" = "{home} {work}" }\n'
        "[api.messages]\n"
    )
    (tmp_path / "agent.sh").write_text('printf "%s|" "$@"; pwd; cat ~/.config/all.json ~/own; echo; env')
    outcome = await run(load(tmp_path, text, sandbox=kind, model="tiny"))
    assert outcome.ending == "done", outcome
    first, files, *env = outcome.info["stdout"].splitlines()
    arguments, _, work = first.rpartition("|")
    home = work.removesuffix("/work")
    assert arguments == "2 + {model}?|--for|tiny|last"  # what a task says is not filled in
    assert files == '{"model": "tiny", "shell": "${HOME}", "template": "{{x}}"}' + f"{home} {home}/work"
    said = dict(line.split("=", 1) for line in env)
    root = f"http://127.0.0.1:{sandbox.PORT if kind == 'bubblewrap' else 9}"
    assert (said["WHERE"], said["KEY"], said["KIND"]) == (f"{root} {root}/v1", "secret", "chat")
    assert (said["HOME"], said["TZ"], said["LANG"]) == (home, "UTC", "C.UTF-8")
    assert outcome.info["harness"] == "fake 1 chat" and outcome.info["sandbox"] == kind
    assert (home == sandbox.HOME) is (kind == "bubblewrap")


@pytest.mark.parametrize("kind", ["none", BOXED])
async def test_nothing_of_this_process_environment_is_in_a_run(tmp_path: Path, kind: Any):
    os.environ["WHIPPLETREE_TEST_SECRET"] = "of this process"
    try:
        outcome = await run(load(tmp_path, SHELL.format("env"), sandbox=kind))
    finally:
        del os.environ["WHIPPLETREE_TEST_SECRET"]
    names = {line.split("=", 1)[0] for line in outcome.info["stdout"].splitlines()}
    hidden = set() if kind == "bubblewrap" else {"WHIPPLETREE_RUN"}  # the mark by which its processes are found
    assert names - {"PWD", "OLDPWD", "SHLVL", "_"} == {"PATH", "LANG", "TZ", "HOME"} | hidden


@pytest.mark.parametrize("kind", ["none", BOXED])
async def test_a_fresh_home_for_each_run_and_nothing_left_after_it(tmp_path: Path, kind: Any):
    harness = load(tmp_path, SHELL.format("ls -A ~; touch ~/left; echo $WHIPPLETREE_RUN"), sandbox=kind)
    for outcome in (await run(harness), await run(harness)):
        listing, *mark = outcome.info["stdout"].split()
        assert listing == "work"
        assert not any(Path(scratch).exists() for scratch in mark)


async def test_programs_that_were_installed_for_harnesses_come_first(tmp_path: Path):
    for folder in (".harness-npm/node_modules/.bin", ".venv-harness/bin"):
        (tmp_path / folder).mkdir(parents=True)
        program = tmp_path / folder / ("npm-agent" if "npm" in folder else "pip-agent")
        program.write_text(f"#!/bin/sh\necho {folder}")
        program.chmod(0o700)
    outcome = await run(load(tmp_path, SHELL.format("npm-agent; pip-agent")))
    assert outcome.info["stdout"] == ".harness-npm/node_modules/.bin\n.venv-harness/bin\n"


def test_a_prompt_is_the_users_words_else_a_column():
    two = Task("t", messages=({"role": "user", "content": "a"}, {"role": "user", "content": "b"}))
    assert prompt_of(two) == "a\n\nb"
    assert prompt_of(Task("t", columns={"prompt": "c"})) == "c"
    with pytest.raises(ValueError, match="task t has no user message of plain text and no column 'prompt'"):
        prompt_of(Task("t", columns={"prompt": 3}))


# ---- the way to the gateway -------------------------------------------------------------------------------------


async def gateway(scope: Any, receive: Any, send: Any) -> None:
    """An app that says which path was asked for."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


ASK = """
import os, socket, urllib.request
print(urllib.request.urlopen(os.environ["BASE"] + "/models", timeout=30).read().decode())
for place in (("127.0.0.1", int(os.environ["OUTSIDE"])), ("192.0.2.1", 80)):
    try:
        socket.create_connection(place, 5).close()
        print("reached")
    except OSError as error:
        print(error.strerror)
"""


@pytest.mark.parametrize("kind", [BOXED])
async def test_from_a_sandbox_the_gateway_is_reached_and_nothing_else(tmp_path: Path, kind: Any):
    (tmp_path / "ask.py").write_text(ASK)
    async with serve(gateway) as url:
        text = HEAD + (
            f'command = ["{sandbox.own_python()}", "{{recipes}}/ask.py"]\n'
            f'[env]\nBASE = "{{base_url}}"\nOUTSIDE = "{url.rpartition(":")[2]}"\n[api.chat]\n'
        )
        outcome = await run(load(tmp_path, text, sandbox=kind), f"{url}/r/key/v1")
    assert outcome.info["stdout"].splitlines() == ["/r/key/v1/models", "Connection refused", "Network is unreachable"]


@pytest.mark.parametrize("kind", [BOXED])
async def test_a_sandbox_cannot_lead_to_a_gateway_behind_tls(tmp_path: Path, kind: Any):
    outcome = await run(load(tmp_path, SHELL.format("true"), sandbox=kind), "https://127.0.0.1:9/v1")
    assert outcome.ending == "failed" and "leads to a gateway at http://HOST:PORT" in outcome.reason


# ---- how a run ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["none", BOXED])
async def test_a_failure_says_the_last_words(tmp_path: Path, kind: Any):
    outcome = await run(load(tmp_path, SHELL.format("echo working; echo no >&2; exit 3"), sandbox=kind))
    assert (outcome.ending, outcome.blame, outcome.reason) == ("failed", "harness", "the command exited with 3: no")
    assert (outcome.info["stdout"], outcome.info["exit_code"]) == ("working\n", 3)


@pytest.mark.parametrize("kind", ["none", BOXED])
async def test_a_timeout_ends_every_process_of_a_run(tmp_path: Path, kind: Any):
    # one in a session of its own, one that ignores SIGTERM
    script = "setsid sleep 987 & (trap '' TERM; sleep 988) & echo begun; sleep 989"
    text = SHELL.format(script).replace("60.0", "1.5")
    outcome = await run(load(tmp_path, text, sandbox=kind, grace=0.2))
    assert (outcome.ending, outcome.reason) == ("failed", "timed out after 1.5 s")
    assert outcome.info["stdout"] == "begun\n"
    assert running("sleep\x0098") == []


@pytest.mark.parametrize("kind", ["none", BOXED])
async def test_cancelling_ends_every_process_of_a_run(tmp_path: Path, kind: Any):
    script = "setsid sleep 977 & sleep 978"
    task = asyncio.create_task(run(load(tmp_path, SHELL.format(script), sandbox=kind, grace=0.2)))
    async with asyncio.timeout(30):
        while len(running("sleep\x0097")) < 2:
            await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert running("sleep\x0097") == []


@pytest.mark.parametrize("kind", ["none", BOXED])
async def test_memory_of_a_run_is_limited(tmp_path: Path, kind: Any):
    allocate = f'command = ["{sandbox.own_python()}", "-c", "print(len(bytearray(2 ** 30)))"]\n[api.chat]\n'
    assert (await run(load(tmp_path, HEAD + allocate, sandbox=kind))).info["stdout"] == f"{2**30}\n"
    limited = await run(load(tmp_path, HEAD + f"memory = {2**29}\n" + allocate, sandbox=kind))
    assert limited.ending == "failed" and "MemoryError" in limited.reason


async def test_a_program_that_is_not_installed_is_named_with_its_package(tmp_path: Path):
    text = HEAD + 'command = ["no-such-agent"]\n[packages]\nnpm = ["no-such-agent@1.2.3"]\n[api.chat]\n'
    outcome = await run(load(tmp_path, text))
    assert outcome.ending == "failed" and outcome.reason == (
        "fake could not be started: no-such-agent is not installed; it is of no-such-agent@1.2.3"
    )


def running(words: str) -> list[str]:
    """Command lines of this machine's processes that begin with these words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if line.startswith(words):
            found.append(line)
    return found


# ---- what a file may say ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (SHELL.format("true") + "\n[env]\nX = 3\n", "env.X: Input should be a valid string"),
        (HEAD + 'comand = ["x"]\n[api.chat]\n', "comand: Extra inputs are not permitted. The keys are name, version"),
        (HEAD + "[api.chat]\n", "command: Field required"),
        (HEAD + 'command = ["x"]\n[api.chat]\nargs = []\n', "api.chat.args: Extra inputs are not permitted"),
        (HEAD + 'command = ["x"]\n[api.telepathy]\n', "api.telepathy.[key]: String should match"),
        (HEAD + 'command = ["x", "{promt}"]\n[api.chat]\n', "nothing fills {promt}; there are prompt, model"),
        (HEAD + 'command = ["x"]\n[api.chat]\n[files]\na = "{nobody}"\n', "nothing fills {nobody}"),
        (HEAD + "command = [\n", "not valid TOML"),
        (HEAD.replace("60.0", "0.0") + 'command = ["x"]\n[api.chat]\n', "timeout: Input should be greater than 0"),
    ],
)
def test_a_file_that_says_what_nothing_reads_is_refused(tmp_path: Path, text: str, says: str):
    with pytest.raises(ValueError, match=r"fake\.toml") as refused:
        load(tmp_path, text)
    assert says in str(refused.value)


def test_an_api_that_a_harness_does_not_speak_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"fake.toml: fake speaks chat, but messages was asked for"):
        load(tmp_path, SHELL.format("true"), api="messages")


def test_a_clock_that_cannot_be_had_says_what_is_missing(tmp_path: Path):
    with pytest.raises(ValueError, match="package faketime"):
        sandbox.clock("2026-01-31 09:00:00", folders=(str(tmp_path),))


def test_a_clock_is_a_day_and_a_time(tmp_path: Path):
    with pytest.raises(ValueError, match="clock"):
        load(tmp_path, 'clock = "tomorrow"\n' + SHELL.format("date"))
