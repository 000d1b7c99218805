from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import runs
from whippletree import config, methods
from whippletree.build import (
    Parts,
    Policy,
    accepts,
    build,
    chosen_harness,
    chosen_policy,
    chosen_tasks,
    endless,
    engine_mask,
    load_tasks,
    value_head,
)
from whippletree.harness.launched import LaunchedHarness
from whippletree.models.tiny import tiny_model, tiny_tokenizer
from whippletree.tree.packed import Layout
from whippletree.types import Method, Rollout, Task
from whippletree.update.trailing import Trailing

SEEN_BQL = torch.tensor([[[True, True, True, False]]])  # one query that may see three of four places
DISTANCE_BQL = torch.tensor([[[2, 1, 0, 9]]])


def recipe(**sections: Any) -> config.Recipe:
    table = {"method": "grpo", "harness": {"agent": "a:b"}, "tasks": {"source": "chain_sum"}, **sections}
    return config.parse(table)


def jsonl(path: Path, *rows: dict[str, Any], **section: Any) -> config.TasksSection:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config.TasksSection(kind="jsonl", source=str(path), **section)


def test_a_launcher_is_a_harness_that_speaks_the_api_of_the_recipe() -> None:
    path = "recipes/harness/openai_agents.toml"
    harness = chosen_harness(*recipe(harness={"kind": "launcher", "agent": path, "api": "responses"}).harness)
    assert isinstance(harness, LaunchedHarness)
    assert (harness.launcher.name, harness.api) == ("openai-agents", "responses")
    with pytest.raises(ValueError, match="but gemini was asked for"):
        chosen_harness(*recipe(harness={"kind": "launcher", "agent": path, "api": "gemini"}).harness)


ROWS = [{"prompt": f"{n}?", "answer": str(n)} for n in range(8, 13)]  # 8, 9, 10, 11, 12


# ---- tasks ------------------------------------------------------------------------------------------------------


def test_where_keeps_the_tasks_whose_column_is_wholly_matched(tmp_path: Path) -> None:
    found = load_tasks(jsonl(tmp_path / "t.jsonl", *ROWS, where={"answer": "[0-9]"}))
    assert [task.columns["answer"] for task in found] == ["8", "9"]
    assert len(load_tasks(jsonl(tmp_path / "t.jsonl", *ROWS, size=3))) == 3


def test_where_finds_enough_of_generated_tasks_or_says_how_many_there_are() -> None:
    one_digit: dict[str, Any] = {"kind": "reasoning_gym", "source": "chain_sum", "where": {"answer": "[0-9]"}}
    settings = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    found = load_tasks(config.TasksSection(**one_digit, settings=settings, size=20))
    assert (len(found), max(len(task.columns["answer"]) for task in found)) == (20, 1)
    with pytest.raises(ValueError, match="only 0 tasks of chain_sum fit"):
        load_tasks(config.TasksSection(**{**one_digit, "where": {"answer": "no"}}, size=20))


def test_too_few_tasks_that_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"only 2 tasks of .*t\.jsonl fit where = .*, but size is 3"):
        load_tasks(jsonl(tmp_path / "t.jsonl", *ROWS, where={"answer": "[0-9]"}, size=3))


def test_a_missing_column_and_a_pattern_that_is_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"names the column 'level', but task .* has none"):
        load_tasks(jsonl(tmp_path / "t.jsonl", *ROWS, where={"level": "1"}))
    with pytest.raises(ValueError, match=r"tasks.where.answer = '\[' is not a regular expression"):
        load_tasks(jsonl(tmp_path / "t.jsonl", *ROWS, where={"answer": "["}))


def test_no_held_out_task_is_trained_on(tmp_path: Path) -> None:
    train, held_out = jsonl(tmp_path / "a", *ROWS), jsonl(tmp_path / "b", *ROWS[1:3], {"prompt": "new?"})
    found, kept = chosen_tasks(recipe(tasks=train.model_dump(), evaluation={"tasks": held_out.model_dump()}))
    assert [task.columns["answer"] for task in found] == ["8", "11", "12"]
    assert len(kept) == 3


def test_every_round_has_each_task_once_in_an_order_of_its_own() -> None:
    train = [Task(str(n)) for n in range(20)]
    task_at = endless(train, seed=1)
    first, second = ([task_at(n + start).id for n in range(20)] for start in (0, 20))
    assert sorted(first, key=int) == sorted(second, key=int) == [str(n) for n in range(20)]
    assert first != second
    again, other = endless(train, seed=1), endless(train, seed=2)
    assert [again(n).id for n in reversed(range(40))][::-1] == first + second  # whatever is asked for first
    assert [other(n).id for n in range(20)] != first


# ---- groups ---------------------------------------------------------------------------------------------------------


def test_a_group_is_accepted_by_its_weighted_total() -> None:
    group = [Rollout(str(n), Task("t"), "g", rewards={"a": float(n), "b": 1.0 - n}) for n in range(2)]
    dapo = methods.load("dapo")
    assert not accepts(dapo, {})(group)  # 0 + 1 and 1 + 0
    assert accepts(dapo, {"b": 0.0})(group)  # 0 and 1
    assert accepts(methods.load("grpo"), {})(group)


# ---- masks ------------------------------------------------------------------------------------------------------


def test_each_layout_gets_its_mask() -> None:
    near = [n in (1, 2) for n in range(4)]  # nearer than two
    make: Callable[[Layout], Any] = lambda layout: engine_mask(layout, torch.float32)  # noqa: E731
    assert make(Layout("none")) is None
    one = make(Layout("one"))(SEEN_BQL, DISTANCE_BQL)
    assert (one.shape, one.flatten().tolist()) == ((1, 1, 1, 4), SEEN_BQL.flatten().tolist())
    windowed = make(Layout("windowed", window=2))(SEEN_BQL, DISTANCE_BQL)
    assert windowed.flatten().tolist() == near
    by_type = make(Layout("by_type", window=2))(SEEN_BQL, DISTANCE_BQL)
    assert {name: mask.flatten().tolist() for name, mask in by_type.items()} == {
        "full_attention": SEEN_BQL.flatten().tolist(),
        "sliding_attention": near,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_additive_mask_adds_nothing_or_the_least_number(dtype: torch.dtype) -> None:
    mask = engine_mask(Layout("one", additive=True), dtype)
    assert mask is not None
    added = mask(SEEN_BQL, DISTANCE_BQL)
    assert added.dtype == dtype
    assert added.flatten().tolist() == [0.0, 0.0, 0.0, torch.finfo(dtype).min]


# ---- the policy and who scores ----------------------------------------------------------------------------------

TURNS = [((10, 11, 12), (13, 14)), ((10, 11), (15,)), ((10, 11, 12, 13, 14, 20), (21, 22, 23))]


def test_the_value_is_0_everywhere_at_the_start() -> None:
    assert not any(bool(p.any()) for p in value_head(tiny_model()).parameters())


def tiny(folder: Path, **update: Any) -> config.Recipe:
    return config.load(runs.recipe(folder), [f"update.{name}={value}" for name, value in update.items()])


@pytest.mark.parametrize("update", [{}, {"lora_rank": 2}])
async def test_the_reference_does_not_move_with_the_policy(tmp_path: Path, update: dict[str, Any]) -> None:
    needy = methods.load("grpo").but(needs=("reference",))
    _, updater, services = chosen_policy(tiny(tmp_path, **update), needy)
    before = {name: await services.scorer(name).logps(TURNS) for name in ("policy", "reference")}
    torch.testing.assert_close(before["policy"], before["reference"])
    for parameter in updater.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    updater.step(0.01)
    torch.testing.assert_close(await services.scorer("reference").logps(TURNS), before["reference"])
    moved = await services.scorer("policy").logps(TURNS)
    assert all(float((a - b).abs().max()) > 1e-3 for a, b in zip(moved, before["policy"], strict=True))


@pytest.mark.parametrize("update", [{}, {"lora_rank": 2}])
async def test_a_copy_that_trails_the_policy_is_a_scorer_and_moves_half_as_far(
    tmp_path: Path, update: dict[str, Any]
) -> None:
    followed = methods.load("grpo").but(update=partial(Trailing, decay=0.5))
    _, updater, services = chosen_policy(tiny(tmp_path, **update), followed)
    start = {name: p.detach().clone() for name, p in updater.parameters.items()}
    for parameter in updater.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    updater.step(0.01)
    ours = await services.scorer("trailing").logps(TURNS)
    moved = await services.scorer("policy").logps(TURNS)
    with torch.no_grad():
        for name, p in updater.parameters.items():
            p.copy_((start[name] + p) / 2)
    torch.testing.assert_close(ours, await services.scorer("policy").logps(TURNS))
    assert all(float((a - b).abs().max()) > 1e-4 for a, b in zip(ours, moved, strict=True))


def test_what_trains_is_everything_or_adapters_and_the_value_head_where_a_method_needs_one(tmp_path: Path) -> None:
    needy: Method = methods.load("grpo").but(needs=("value_head",))
    whole, updater, services = chosen_policy(tiny(tmp_path), needy)
    assert set(updater.parameters) == {*dict(whole.model.named_parameters()), "value_head.weight", "value_head.bias"}
    assert set(services.scorers) == {"policy", "value"}
    _, adapted, _ = chosen_policy(tiny(tmp_path, lora_rank=2), needy)
    names = {name for name in adapted.parameters if "lora_" not in name}
    assert names == {"value_head.weight", "value_head.bias"}


async def test_a_model_without_a_chat_template_is_refused_before_anything_runs(tmp_path: Path) -> None:
    path = runs.recipe(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    (tmp_path / "model" / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="chat_template"):
        async with build(config.load(path), tmp_path, progress=lambda done, total: None):
            pass
    assert not (tmp_path / "turns.sqlite").exists()


async def test_the_engine_and_the_trainer_hold_the_same_weights(tmp_path: Path) -> None:
    async with build(tiny(tmp_path), tmp_path, progress=lambda done, total: None) as parts:
        assert isinstance(parts, Parts)
        assert isinstance(parts.policy, Policy)
        assert parts.engine.model is parts.policy.model
        assert {id(p) for p in parts.updater.parameters.values()} == {id(p) for p in parts.policy.model.parameters()}
