from __future__ import annotations

import errno
import json
import os
import platform
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from whippletree import __version__, cli, config, methods
from whippletree.telling import told

COMMANDS = ("quickstart", "train", "eval", "serve", "methods", "claim", "claims", "report", "doctor", "turns")
RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.toml"


def call(*arguments: str, columns: int = 80) -> Result:
    environment = {"COLUMNS": str(columns), "TERM": "dumb"}
    return CliRunner().invoke(cli.app, arguments, env=environment, prog_name="whippletree")


def refused(*arguments: str) -> str:
    """What standard error says of a refused command, which ends with status 1 and no traceback."""
    result = call(*arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("whippletree: ")
    return result.stderr


# ---- it teaches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_each_command_has_an_example_and_fits(command: str, columns: int) -> None:
    result = call(command, "--help", columns=columns)
    assert result.exit_code == 0
    assert f"For example: whippletree {command}" in " ".join(result.stdout.split())
    assert max(map(len, result.stdout.splitlines())) <= columns


def test_without_a_command_the_commands_are_listed() -> None:
    listed = call()
    assert all(f"│ {command} " in listed.output for command in COMMANDS)
    assert "whippletree quickstart" in listed.output
    assert listed.output.strip() == call("--help").output.strip()


def test_every_command_is_one_of_these() -> None:
    assert set(typer.main.get_command(cli.app).commands) == set(COMMANDS)  # type: ignore[attr-defined]  # it is a group


def test_the_version_is_told() -> None:
    assert call("--version").stdout == f"whippletree {__version__}\n"


# ---- methods ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, 120])
def test_methods_stand_on_one_line_each(columns: int) -> None:
    lines = call("methods", columns=columns).stdout.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == methods.names()
    assert max(map(len, lines)) <= columns
    assert ("source" in lines[0].split()) == (columns == 120)
    assert lines[-1].startswith("all fill credit, objective, average; ")


def test_one_method_is_shown_whole() -> None:
    shown = " ".join(call("methods", "ppo").stdout.split())
    card = methods.card("ppo")
    parts = [part for parts in card["slots"].values() for part in parts]
    assert all(part["at"] in shown for part in parts)
    assert len(parts) >= 4
    for word in (card["paper"]["title"], "arXiv:1707.06347", "value_head", card["differs"], card["file"], card["test"]):
        assert " ".join(word.split()) in shown


def test_methods_as_json_are_their_cards() -> None:
    assert json.loads(call("methods", "--json").stdout) == json.loads(json.dumps([*map(methods.card, methods.names())]))
    assert [card["name"] for card in json.loads(call("methods", "gspo", "--json").stdout)] == ["gspo"]


# ---- refusals ---------------------------------------------------------------------------------------------------


def test_an_unknown_method_recipe_and_run_are_refused_in_one_line(tmp_path: Path) -> None:
    assert refused("methods", "nope") == f"whippletree: there is no method 'nope'; this folder has {names()}\n"
    assert refused("train", "nope.toml") == "whippletree: there is no recipe at nope.toml\n"
    assert refused("report", str(tmp_path)).startswith(f"whippletree: {tmp_path} is not a run directory")
    assert refused("eval", "nope.toml") == "whippletree: there is no recipe at nope.toml\n"


def names() -> str:
    return ", ".join(methods.names())


def test_every_refused_setting_has_its_line() -> None:
    told = refused("train", str(RECIPE), "--dry-run", "--set", "stepz=3", "--set", "update.learning_rate=-1")
    assert told == (
        "whippletree: the recipe is refused:\n"
        "  update.learning_rate must be greater than 0, but got -1\n"
        "  stepz is not a setting; did you mean steps?\n"
    )
    assert "must look like" in refused("train", str(RECIPE), "--set", "steps")
    assert "steps must be greater than or equal to 1, but got 0" in refused("quickstart", "--steps", "0")


def test_an_unknown_command_is_refused_by_name() -> None:
    result = call("trian")
    assert result.exit_code == 2
    assert "No such command 'trian'" in result.stderr


def end(error: BaseException) -> int:
    """The status with which an error inside a command ends it."""
    with pytest.raises(typer.Exit) as ended, told():
        raise error
    return ended.value.exit_code


def test_a_full_disk_and_a_missing_right_are_told_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert end(OSError(errno.ENOSPC, "No space left on device")) == 1
    assert "the disk is full" in capsys.readouterr().err
    assert end(PermissionError(errno.EACCES, "Permission denied", "runs")) == 1
    assert capsys.readouterr().err == "whippletree: runs: Permission denied\n"
    assert end(KeyboardInterrupt()) == 130
    assert "the same command goes on" in capsys.readouterr().err


@pytest.mark.parametrize("bug", [KeyError("x"), AssertionError("x"), OSError("no file is named")])
def test_a_bug_keeps_its_traceback(bug: Exception) -> None:
    with pytest.raises(type(bug)), told():
        raise bug


def test_an_error_of_a_library_keeps_its_traceback_though_ours_of_that_kind_are_told() -> None:
    with pytest.raises(json.JSONDecodeError), told():  # a ValueError, raised outside this package
        json.loads("{")
    assert end(ValueError("ours")) == 1
    assert end(FloatingPointError("ours")) == 1


def test_of_errors_that_came_together_the_first_that_can_be_told_is(capsys: pytest.CaptureFixture[str]) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    assert end(ExceptionGroup("tasks", [KeyError("x"), ExceptionGroup("inner", [full]), full])) == 1
    assert "the disk is full" in capsys.readouterr().err
    with pytest.raises(ExceptionGroup), told():
        raise ExceptionGroup("tasks", [KeyError("x")])


# ---- dry runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [("quickstart",), ("train", str(RECIPE))])
def test_a_dry_run_prints_the_resolved_recipe_and_writes_nothing(command: tuple[str, ...], tmp_path: Path) -> None:
    settings = ("--set", "seed=7", "--set", "update.schedule=cosine")
    shown = call(*command, *settings, "--runs", str(tmp_path / "runs"), "--dry-run").stdout
    (tmp_path / "recipe.toml").write_text(shown)
    assert config.load(tmp_path / "recipe.toml") == config.load(RECIPE, ["seed=7", "update.schedule=cosine"])
    assert os.listdir(tmp_path) == ["recipe.toml"]


def test_the_quickstart_can_run_under_a_framework_in_any_of_its_apis() -> None:
    found: Any = tomllib.loads(call("quickstart", "--harness", "langchain:messages", "--dry-run").stdout)
    assert found["harness"]["agent"].endswith("recipes/harness/langchain.toml")
    assert (found["harness"]["kind"], found["harness"]["api"], found["name"]) == (
        "launcher",
        "messages",
        "quickstart-langchain",
    )
    first: Any = tomllib.loads(call("quickstart", "--harness", "smolagents", "--dry-run").stdout)
    assert first["harness"]["api"] == "chat-tool"
    assert "there are anthropic_sdk, claude_code, codex," in refused("quickstart", "--harness", "smol")


def test_the_number_of_steps_of_the_quickstart_can_be_chosen() -> None:
    steps: Any = tomllib.loads(call("quickstart", "--steps", "3", "--dry-run").stdout)["steps"]
    assert steps == 3


# ---- doctor -----------------------------------------------------------------------------------------------------


def test_doctor_ends_well_where_everything_needed_is_here() -> None:
    result = call("doctor")
    assert result.exit_code == 0, result.stdout
    assert result.stdout.splitlines()[0].split() == ["ok", "Python", platform.python_version()]
    assert result.stdout.splitlines()[-1] == "everything needed is here"
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_sinks_are_named_by_a_flag_and_the_recipes_own_stay_without_it(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('sinks = ["wandb"]\n' + RECIPE.read_text())
    plain = call("train", str(recipe), "--dry-run")
    flagged = call("train", str(recipe), "--dry-run", "--sink", "tensorboard", "--sink", "mlflow")
    assert tomllib.loads(plain.stdout)["sinks"] == ["wandb"]
    assert tomllib.loads(flagged.stdout)["sinks"] == ["tensorboard", "mlflow"]
