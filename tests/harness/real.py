"""Each real harness does a task that needs a tool, through a real gateway, with a scripted model.

Run by `make test-harness`, which installs the harnesses; not part of `make test`.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cases import CASES, PROMPT, SUM, Case
from whippletree.engine.scripted import ScriptedEngine
from whippletree.gateway.app import create_app
from whippletree.gateway.render import Renderer
from whippletree.gateway.server import serve
from whippletree.gateway.sessions import Sessions
from whippletree.gateway.store import Store
from whippletree.harness import LaunchedHarness, Outcome, load_launcher
from whippletree.models.tiny import tiny_tokenizer
from whippletree.types import Task, Turn

ROOT = Path(__file__).parent.parent.parent
TASK = Task("sum", messages=({"role": "user", "content": PROMPT},))
WINDOW = 400_000  # tokens: here each character is one


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
async def test_a_harness_does_its_task_and_every_turn_is_captured(case: Case, tmp_path: Path, seen: Any) -> None:
    harness = load_launcher(ROOT / "recipes" / "harness" / f"{case.recipe}.toml", api=case.api, tools=ROOT)
    engine = ScriptedEngine(case.script(), tokenizer(), context=WINDOW)
    outcome, turns = await rollout(harness, engine, tmp_path)
    seen(case, harness, outcome, turns)
    assert outcome.ending == "done", (outcome.reason, outcome.info, engine.prompts)
    assert "quokka" in outcome.info["stdout"]
    check(case, engine, turns)


async def rollout(harness: LaunchedHarness, engine: ScriptedEngine, folder: Path) -> tuple[Outcome, tuple[Turn, ...]]:
    """One run of the harness against a gateway on a free port: how it ended, and what was captured."""
    store = Store(folder / "turns.sqlite")
    sessions = Sessions(store)
    app = create_app(engine, Renderer(tokenizer()), store, sessions, model_name="policy")
    try:
        async with serve(app) as url:
            session = await sessions.open("r", group="g", task=TASK, stream="r")
            outcome = await harness.run(TASK, base_url=f"{url}/v1", api_key=session.secret)
            await sessions.close("r")
        return outcome, store.turns("r")
    finally:
        store.close()


def check(case: Case, engine: ScriptedEngine, turns: tuple[Turn, ...]) -> None:
    """What was captured is what was sampled, once, in the right threads, and each prompt continues as documented."""
    assert sorted(turn.prompt_ids for turn in turns) == sorted(ids for ids, _ in engine.calls)
    for turn in turns:
        assert text_of(turn.reply_ids).removesuffix("<|im_end|>") == case.script()(text_of(turn.prompt_ids))
        calls = "<tool_call>" in turn.info.get("forced", "") + text_of(turn.reply_ids)
        assert turn.finish_reason == ("tool_calls" if calls else "stop")
    assert {turn.kind for turn in turns} == {"main", case.side} - {""}
    main = [turn for turn in turns if turn.thread == "main"]
    assert SUM in text_of(main[-1].prompt_ids) and SUM not in text_of(main[0].prompt_ids)
    assert len(main) > 1 and [turn.link for turn in main] == ["root", *[case.follows] * (len(main) - 1)]
    for before, after in pairwise(main):
        sampled = before.prompt_ids + before.reply_ids
        assert (after.prompt_ids[: len(sampled)] == sampled) is (case.follows == "append")
        assert not (case.follows == "append" and after.info.get("drift"))


@cache
def tokenizer() -> Any:
    return tiny_tokenizer(tools=True)


def text_of(ids: tuple[int, ...]) -> str:
    """The text of these tokens, special ones included."""
    return str(tokenizer().decode(list(ids)))
