from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest
import torch

from whippletree import config, methods
from whippletree.chosen import chosen_method, fitted, teaches, with_settings
from whippletree.types import Batch, Forward, Rollout, Task, Turn


def recipe(**sections: Any) -> config.Recipe:
    table = {"method": "grpo", "harness": {"agent": "a:b"}, "tasks": {"source": "chain_sum"}, **sections}
    return config.parse(table)


def test_settings_of_a_part_are_applied() -> None:
    changed = chosen_method(recipe(method_settings={"credit": {"scale": "none"}}))
    assert isinstance(changed.credit, partial)
    assert changed.credit.keywords["scale"] == "none"
    assert changed.objective is methods.load("grpo").objective


def test_a_judge_is_named_where_one_is_asked_and_nowhere_else() -> None:
    judge = {"kind": "policy"}
    assert chosen_method(recipe(method="cliff", judge=judge)).needs == ("judge",)
    with pytest.raises(ValueError, match=r"method cliff asks a judge: say whom in \[judge\]"):
        chosen_method(recipe(method="cliff"))
    with pytest.raises(ValueError, match="judge has no effect, as method grpo asks none"):
        chosen_method(recipe(judge=judge))


def test_threads_that_the_method_chooses_itself_cannot_be_set() -> None:
    with pytest.raises(ValueError, match=r"threads\.train has no effect, as clawgym_ii says which"):
        chosen_method(recipe(method="clawgym_ii", threads={"train": ["main", "sub-agent"]}))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"credits": {"scale": "none"}}, "has no such part"),
        ({"evidence": {"a": 1}}, "has no such part"),
        ({"but": {}}, "has no such part"),
        ({"credit": {"scales": "none"}}, r"unknown scales; it has .*scale"),
        ({"credit": {"scale": "nine"}}, r"credit\.scale must be .*'std'.* got 'nine'"),
        ({"objective": {"high": "wide"}}, r"objective\.high must be a valid number"),
    ],
)
def test_a_setting_of_no_part_is_refused(settings: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        chosen_method(recipe(method_settings=settings, update={"epochs": 2}))


def test_every_keyword_of_every_method_takes_the_value_that_it_has() -> None:
    for name in methods.names():
        for slot in ("credit", "objective", "average"):
            part = getattr(methods.load(name), slot)
            found = inspect.signature(part).parameters.items()
            keywords = {key: p.default for key, p in found if p.kind == p.KEYWORD_ONLY}
            with_settings(part, keywords, where=f"{name}.{slot}")


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo"])
def test_a_credit_that_gives_lone_rollouts_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="rollouts_per_task = 1"):
        chosen_method(recipe(method=name, sampling={"rollouts_per_task": 1}))


def test_leave_one_out_says_itself_that_it_needs_others() -> None:
    with pytest.raises(ValueError, match="two or more"):
        chosen_method(recipe(method="rloo", sampling={"rollouts_per_task": 1}))


def test_a_credit_without_a_baseline_learns_from_a_single_rollout() -> None:
    alone = {"rollouts_per_task": 1, "tasks_per_step": 1}
    assert chosen_method(recipe(method="reinforce", sampling=alone)) == methods.load("reinforce")


def test_every_method_is_ready_with_the_default_sizes() -> None:
    for name in methods.names():
        judge = {"judge": {"kind": "policy"}} if "judge" in methods.load(name).needs else {}
        assert chosen_method(recipe(method=name, **judge)).paper == methods.load(name).paper


def test_a_credit_of_nothing_is_refused() -> None:
    nothing = methods.load("grpo").but(credit=lambda batch: torch.zeros(batch.tokens))
    with pytest.raises(ValueError, match="nothing would be learned"):
        teaches(nothing, recipe())


def test_needs_that_a_recipe_cannot_meet_are_refused() -> None:
    needy = methods.load("grpo").but(needs=("a crystal ball", "reference"))
    with pytest.raises(ValueError, match="needs a crystal ball, which a recipe cannot give"):
        fitted(needy, recipe())
    with pytest.raises(ValueError, match="brings its own training"):
        fitted(needy.but(needs=(), train=print), recipe())


def test_the_entropy_bonus_is_taken_off_the_objective() -> None:
    plain, rewarded = (chosen_method(recipe(update={"entropy_bonus": bonus})) for bonus in (0.0, 0.5))
    batch = runs_batch()
    forward = Forward(batch.logp_old_N, {"entropy_N": lambda: torch.tensor([1.0, 2.0])})
    advantage_N = torch.tensor([1.0, -1.0])
    # less 0.5 * entropy
    expected_N = plain.objective(forward, advantage_N, batch) - torch.tensor([0.5, 1.0])
    torch.testing.assert_close(rewarded.objective(forward, advantage_N, batch), expected_N)


def runs_batch() -> Batch:
    turns = [Turn(str(n), (1,), (2,), (-1.0,), 0, "stop") for n in range(2)]
    return Batch.of([Rollout(str(n), Task("t"), "g", (turn,), {"reward": float(n)}) for n, turn in enumerate(turns)])
