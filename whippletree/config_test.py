from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from whippletree import config

RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.toml"))
SMALL: dict[str, Any] = {
    "method": "a_method",
    "tasks": {"source": "chain_sum"},
    "harness": {"agent": "agents:agent"},
}
HELD_OUT = {"tasks": {"source": "chain_sum"}}
CHANNEL = {"name": "answer", "function": "rewards:answer"}


def recipe(**tables: Any) -> config.Recipe:
    return config.parse({**SMALL, **tables})


def refusal(**tables: Any) -> str:
    """The words in which a recipe is refused, without their heading."""
    with pytest.raises(ValueError, match="the recipe is refused") as caught:
        recipe(**tables)
    return str(caught.value).removeprefix("the recipe is refused:\n").strip()


def write(folder: Path, text: str) -> Path:
    (folder / "recipe.toml").write_text(text, encoding="utf-8")
    return folder / "recipe.toml"


# ---- one setting ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"stepz": 1}, "stepz is not a setting; did you mean steps?"),
        ({"update": {"learning_rte": 1.0}}, "update.learning_rte is not a setting; did you mean update.learning_rate?"),
        ({"evaluation": {"tasks": {"source": "x", "sed": 1}}}, "evaluation.tasks.sed is not a setting; did you mean "),
        (
            {"rewards": [CHANNEL, {**CHANNEL, "name": "b", "wight": 1}]},
            "rewards.1.wight is not a setting; did you mean",
        ),
        ({"fidelity": {"zzz": 1}}, "fidelity.zzz is not a setting; fidelity has mean_limit, max_limit"),
        ({"zzz": 1}, "zzz is not a setting; a recipe has method, name, steps, "),
    ],
)
def test_an_unknown_key_is_named_by_its_path_with_what_it_could_be(tables: dict[str, Any], words: str) -> None:
    assert refusal(**tables).startswith(words)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"steps": 0}, "steps must be greater than or equal to 1, but got 0"),
        ({"steps": True}, "steps must be a valid integer, but got True"),
        ({"steps": "8"}, "steps must be a valid integer, but got '8'"),
        ({"steps": 2.5}, "steps must be a valid integer, but got 2.5"),
        ({"name": 5}, "name must be a valid string, but got 5"),
        ({"method_settings": {"credit": 1}}, "method_settings.credit must be a valid table, but got 1"),
        ({"model": "x"}, "model must be a table, but got 'x'"),
        ({"model": {"dtype": "half"}}, "model.dtype must be 'auto', 'float32' or 'bfloat16', but got 'half'"),
        ({"model": {"gradient_checkpointing": "yes"}}, "model.gradient_checkpointing must be a valid boolean, but got"),
        ({"sinks": ["paper"]}, "sinks.0 must be 'tensorboard', 'wandb', 'trackio' or 'mlflow', but got 'paper'"),
        ({"sinks": "wandb"}, "sinks must be a valid array, but got 'wandb'"),
        ({"update": {"beta2": 1}}, "update.beta2 must be less than 1, but got 1"),
        ({"update": {"learning_rate": float("inf")}}, "update.learning_rate must be a finite number, but got inf"),
        ({"harness": {"agent": ""}}, "harness.agent must have at least 1 character, but got ''"),
        ({"harness": {}}, "harness.agent is required: module:function or file.py:function"),
        ({"rewards": [{"name": "a"}]}, "rewards.0.function is required: module:function"),
        ({"evaluation": {"tasks": {}}}, "evaluation.tasks.source is required: a file, the name of"),
    ],
)
def test_a_value_of_the_wrong_kind_or_size_is_named_with_the_rule(tables: dict[str, Any], words: str) -> None:
    assert refusal(**tables).startswith(words)


@pytest.mark.parametrize("key", ["method", "tasks", "harness"])
def test_what_only_a_person_can_choose_has_no_default(key: str) -> None:
    with pytest.raises(ValueError, match=f"{key} is required: "):
        config.parse({name: value for name, value in SMALL.items() if name != key})


def test_every_refused_setting_is_named_at_once() -> None:
    words = refusal(steps=0, seed="x", update={"epochs": 0})
    assert [line.split()[0] for line in words.splitlines()] == ["steps", "seed", "update.epochs"]


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "-x", "a/b", "../up", "/root", "a b", "a\n", "*"])
def test_a_name_that_leaves_the_folder_of_runs_is_refused(name: str) -> None:
    assert "name must be letters" in refusal(name=name)


# ---- settings that go together ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"tasks": {"source": "a", "kind": "jsonl", "seed": 1}}, "tasks: seed has no effect on tasks of kind 'jsonl'"),
        ({"tasks": {"source": "a", "settings": {"seed": 1}}}, "tasks: settings must not hold seed: set kind, source"),
        ({"harness": {"agent": "a.toml", "kind": "launcher"}}, "harness: a launcher needs `api`"),
        ({"harness": {"agent": "a:b", "api": "chat"}}, "harness: a launcher needs `api`, and nothing else reads it"),
        ({"harness": {"agent": "a:b", "environment": {"A": "b"}}}, "harness: environment has no effect on a function"),
        (
            {"sampling": {"on_failure": "drop", "retries": 1}},
            "sampling: retries has no effect with on_failure = 'drop'",
        ),
        ({"threads": {"apart": ["title"]}}, "threads: title has no effect in apart, as train leaves the kind out"),
        ({"threads": {"apart": ["main"]}}, "threads: main is what the others stand apart from"),
        ({"threads": {"train": []}}, "threads.train "),
        ({"threads": {"rewards": {"title": ["a"]}}}, "threads: rewards.title pays nobody, as apart does not have"),
        (
            {"harness": [{"agent": "a:b"}, {"agent": "a:c"}]},
            "each harness needs a name of its own, of letters, digits and any of . _ -, but got ['a', 'a']",
        ),
        ({"harness": []}, "harness "),
        (
            {"harness": [{"agent": "a:b", "tmeout": 1}]},
            "harness.0.tmeout is not a setting; did you mean harness.0.time",
        ),
        ({"harness": {"agent": "a:b", "tmeout": 1}}, "harness.tmeout is not a setting; did you mean harness.timeout?"),
        (
            {"judge": {"kind": "server", "model": "m"}},
            "judge: a judge of kind 'server' takes url and model, but",
        ),
        (
            {"judge": {"kind": "policy", "url": "u"}},
            "judge: a judge of kind 'policy' takes none of url, mod",
        ),
        ({"judge": {"kind": "function", "function": "a:b", "key_variable": "K"}}, "judge: a judge of kind 'function' "),
        ({"update": {"lora_alpha": 8.0}}, "update: lora_alpha has no effect while lora_rank is 0"),
        ({"evaluation": {"every": 5}}, "evaluation: every has no effect without evaluation.tasks"),
        ({"evaluation": {"temperature": 1, "success": 0.5}}, "evaluation: temperature, success have no effect without"),
        ({"fidelity": {"mean_limit": 3.0}}, "fidelity: mean_limit must be below max_limit, or it can never act"),
        ({"rewards": [{**CHANNEL, "weight": 0}]}, "the reward channels ['answer'] all have weight 0"),
        ({"method_settings": {"objective": {"low": 0.1}}}, "method_settings.objective: low has no effect with one"),
    ],
)
def test_a_setting_without_effect_is_refused_with_the_reason(tables: dict[str, Any], words: str) -> None:
    assert refusal(**tables).startswith(words)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"rewards": [CHANNEL, CHANNEL]}, "each reward channel needs a name of its own"),
        ({"steps": 5, "update": {"warmup_steps": 5}}, "update.warmup_steps must be below steps"),
        (
            {"sampling": {"tasks_per_step": 1, "rollouts_per_task": 2}, "update": {"minibatches": 3}},
            "a step has 2 rollouts, too few for update.minibatches = 3",
        ),
        ({"model": {"context": 512}}, "sampling.reply_tokens must be below model.context"),
    ],
)
def test_an_impossible_pair_is_refused_with_both_numbers(tables: dict[str, Any], words: str) -> None:
    assert refusal(**tables).startswith(words)


@pytest.mark.parametrize(
    "tables",
    [
        {"tasks": {"source": "a", "seed": 1, "settings": {"distinct": True}}},
        {"harness": {"kind": "command", "agent": "run", "environment": {"A": "b"}}},
        {"sampling": {"on_failure": "resample", "retries": 1}},
        {"update": {"lora_rank": 4, "lora_alpha": 8.0}},
        {"evaluation": {**HELD_OUT, "every": 5, "temperature": 1.0, "success": 0.5}},
        {"rewards": [CHANNEL, {**CHANNEL, "name": "watched", "weight": 0}]},
        {"steps": 5, "update": {"warmup_steps": 4}},
        {"model": {"context": 513}},
        {"method_settings": {"objective": {"low": 0.1, "high": float("inf")}}, "update": {"epochs": 2}},
        {"method_settings": {"objective": {"high": 0.1}}, "update": {"minibatches": 2}},
        {"method_settings": {"credit": {"low": 1}, "objective": {"beta": 0.1}}},
        {"name": "a-1.b_C"},
        {"update": {"learning_rate": 1}},
    ],
)
def test_the_same_settings_where_they_act_are_taken_and_read_back(tables: dict[str, Any], tmp_path: Path) -> None:
    taken = recipe(**tables)
    assert config.load(write(tmp_path, config.dump(taken))) == taken


# ---- files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_reads_back_equal_from_anywhere(path: Path, tmp_path: Path) -> None:
    loaded = config.load(path)
    assert config.load(write(tmp_path, config.dump(loaded))) == loaded


@pytest.mark.parametrize("on_failure", ["drop", "keep", "resample"])
def test_a_dumped_recipe_states_every_default_and_is_not_refused_for_it(on_failure: str, tmp_path: Path) -> None:
    written = write(tmp_path, config.dump(recipe(sampling={"on_failure": on_failure})))
    assert config.load(written).sampling.on_failure == on_failure
    assert "retries = 2" in written.read_text()


def test_awkward_words_read_back_equal(tmp_path: Path) -> None:
    odd = {"two words": {"ключ.x": ['say "no"\n', 1e-6]}, "empty": [], "rows": [{"a": 1}, {"b": {}}]}
    taken = recipe(tasks={"source": "it's\tΔ\\", "settings": odd})
    again = config.load(write(tmp_path, config.dump(taken)))
    assert again == taken
    assert again.tasks.settings == odd


def test_settings_lie_on_top_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, config.dump(recipe(steps=7)))
    changed = config.load(path, ["steps=9", "update.schedule=linear", 'sinks=["wandb"]', "tasks.settings={n = 1}"])
    assert (changed.steps, changed.update.schedule, changed.sinks) == (9, "linear", ("wandb",))
    assert changed.tasks.settings == {"n": 1}
    with pytest.raises(ValueError, match="must look like"):
        config.load(path, ["steps"])


def test_files_and_folders_beside_the_recipe_are_named_in_full(tmp_path: Path) -> None:
    folder = tmp_path / "my recipes"
    (folder / "model").mkdir(parents=True)
    for name in ("agent.py", "rewards.py", "train.jsonl", "held.jsonl"):
        (folder / name).touch()
    path = write(
        folder,
        "method = 'a_method'\n[model]\npath = 'model'\n[harness]\nagent = 'agent.py:agent'\n"
        "[tasks]\nkind = 'jsonl'\nsource = 'train.jsonl'\n[evaluation.tasks]\nkind = 'jsonl'\nsource = 'held.jsonl'\n"
        "[[rewards]]\nname = 'a'\nfunction = 'rewards.py:a'\n[[rewards]]\nname = 'b'\nfunction = 'package.rewards:b'\n",
    )
    with contextlib.chdir(tmp_path):  # found beside the recipe, wherever the command is given
        found = config.load("my recipes/recipe.toml")
    assert found.model.path == str(folder / "model")
    assert found.harness[0].agent == f"{folder / 'agent.py'}:agent"
    assert [reward.function for reward in found.rewards] == [f"{folder / 'rewards.py'}:a", "package.rewards:b"]
    assert found.tasks.source == str(folder / "train.jsonl")
    assert found.evaluation.tasks is not None
    assert found.evaluation.tasks.source == str(folder / "held.jsonl")
    assert config.load(path) == found


def test_a_command_runs_elsewhere_so_its_files_are_named_in_full(tmp_path: Path) -> None:
    (tmp_path / "my agent.py").touch()
    (tmp_path / "agent.py").touch()
    command = recipe(harness={"kind": "command", "agent": 'python  agent.py --say "two words" missing.py'})
    found = config.load(write(tmp_path, config.dump(command)))
    assert found.harness[0].agent == f'python  {tmp_path / "agent.py"} --say "two words" missing.py'


def test_what_is_not_beside_the_recipe_stays_as_it_is_written(tmp_path: Path) -> None:
    absolute = str(tmp_path / "elsewhere.jsonl")
    taken = recipe(tasks={"kind": "jsonl", "source": absolute}, harness={"agent": "missing.py:agent"})
    assert config.load(write(tmp_path, config.dump(taken))) == taken


def test_a_file_that_cannot_be_read_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no recipe at .*nothing\.toml"):
        config.load(tmp_path / "nothing.toml")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        config.load(tmp_path)
    with pytest.raises(ValueError, match=r"not valid TOML: .*line 1"):
        config.load(write(tmp_path, "steps 3"))
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(ValueError, match=r"latin\.toml is not valid TOML: .*utf-8"):
        config.load(tmp_path / "latin.toml")


def test_differences_are_named_by_path_with_both_values() -> None:
    one = recipe(tasks={"source": "a", "settings": {"n": 1, "m": {}}})
    other = recipe(tasks={"source": "a", "settings": {"n": 2}}, steps=9)
    assert config.differences(one, one) == {}
    assert config.differences(one, other) == {
        "steps": (100, 9),
        "tasks.settings.n": (1, 2),
        "tasks.settings.m": ({}, None),
    }


def test_no_setting_is_without_words() -> None:
    def told(section: type[config.Section]) -> list[str]:
        tables = config.sections(section)
        silent = [f for f, field in section.model_fields.items() if not field.description and f not in tables]
        return silent + [f for table in tables.values() for f in told(table)]

    assert told(config.Recipe) == []
