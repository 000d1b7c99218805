"""Recipes: what a run is, as typed TOML. Unknown, impossible and ineffective settings are refused at launch."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class Section(BaseModel):
    """A table of a recipe: frozen, and closed to keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSection(Section):
    path: str = Field("smollm2-135m-instruct", description="a Hugging Face folder, or the quickstart's model by name")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: measured at start")
    context: int | None = Field(None, ge=2, description="most tokens of prompt and reply; default: the model's own")
    gradient_checkpointing: bool = Field(
        False, description="recompute layers in the backward pass: less memory, more time"
    )


class TasksSection(Section):
    kind: Literal["jsonl", "reasoning_gym", "hub"] = "reasoning_gym"
    source: str = Field(description="a file, the name of a reasoning-gym dataset, or of a Hugging Face dataset")
    size: int | None = Field(None, ge=1, description="how many tasks; default: all there are")
    seed: int = Field(0, description="of the generated tasks")
    settings: dict[str, Any] = Field(default_factory=dict, description="passed to the source as they are")


class HarnessSection(Section):
    kind: Literal["function", "command"] = "function"
    agent: str = Field(description="module:function or file.py:function, or the command line to start")
    timeout: float = Field(120.0, gt=0, description="seconds a rollout may take")
    concurrency: int = Field(64, ge=1, description="rollouts that run at once")
    environment: dict[str, str] = Field(default_factory=dict, description="further variables of a command")

    @model_validator(mode="after")
    def _environment_needs_a_command(self) -> HarnessSection:
        if self.kind == "function" and self.environment:
            raise ValueError("harness.environment has no effect on a function, which runs in this process: remove it")
        return self


class RewardSection(Section):
    name: str = Field(description="the channel's name")
    function: str = Field(description="module:function or file.py:function, an async function of a Rollout")
    weight: float = Field(1.0, description="what the channel counts in the total")


class SamplingSection(Section):
    tasks_per_step: int = Field(8, ge=1)
    rollouts_per_task: int = Field(8, ge=1, description="G, the size of a group")
    reply_tokens: int = Field(512, ge=1, description="most tokens of one reply, not of a rollout")
    turns: int = Field(64, ge=1, description="most calls of one rollout")
    temperature: float = Field(1.0, gt=0, description="of training rollouts; evaluation is greedy")
    on_failure: Literal["resample", "drop", "keep"] = Field(
        "resample", description="a failed rollout is run again, its group is dropped, or its group goes on without it"
    )
    retries: int = Field(2, ge=0, description="how often a failed rollout is run again before its group is dropped")


class UpdateSection(Section):
    learning_rate: float = Field(1e-6, gt=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    epsilon: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    clip_norm: float = Field(1.0, ge=0, description="largest norm of the gradient; 0: no clipping")
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    epochs: int = Field(1, ge=1, description="passes over the rollouts of one step")
    minibatches: int = Field(1, ge=1, description="optimizer steps in one pass")
    token_budget: int = Field(4096, ge=1, description="places of one packed forward, padding included")
    lora_rank: int = Field(0, ge=0, description="0: all parameters are trained")
    lora_alpha: float | None = Field(None, description="default: twice the rank")

    @model_validator(mode="after")
    def _alpha_needs_a_rank(self) -> UpdateSection:
        if self.lora_alpha is not None and not self.lora_rank:
            raise ValueError("update.lora_alpha has no effect while update.lora_rank is 0: set a rank or remove it")
        return self


class EvalSection(Section):
    tasks: TasksSection | None = Field(None, description="held-out tasks; without them there is no evaluation")
    every: int = Field(
        0, ge=0, description="steps between evaluations; 0: only before the first and after the last step"
    )
    success: float = Field(1.0, description="a rollout counts as solved from this total reward on")


class FidelitySection(Section):
    mean_limit: float = Field(
        0.1, gt=0, description="mean |log-prob at training - at sampling| beyond which training stops"
    )
    max_limit: float = Field(2.0, gt=0, description="the same for the worst token")


class Recipe(Section):
    """A whole run."""

    method: str = Field("grpo", description="a file of whippletree/methods")
    name: str = Field("run", description="of the run directory, under runs/")
    steps: int = Field(100, ge=1)
    seed: int = 0
    checkpoint_every: int = Field(20, ge=0, description="steps; the last step always leaves one; 0: only the last")
    keep_checkpoints: int = Field(2, ge=1)
    sinks: tuple[str, ...] = Field((), description="besides metrics.jsonl: tensorboard, wandb, trackio, mlflow")
    method_settings: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="keywords of the method's parts: {credit = {scale = 'none'}}"
    )
    model: ModelSection = ModelSection()
    tasks: TasksSection
    harness: HarnessSection
    rewards: tuple[RewardSection, ...] = Field((), description="default: what the harness itself gives")
    reward_timeout: float = Field(60.0, gt=0, description="seconds; a reward that takes longer is missing")
    sampling: SamplingSection = SamplingSection()
    update: UpdateSection = UpdateSection()
    evaluation: EvalSection = EvalSection()
    fidelity: FidelitySection = FidelitySection()

    @model_validator(mode="after")
    def _possible(self) -> Recipe:
        names = [reward.name for reward in self.rewards]
        if len(set(names)) != len(names):
            raise ValueError(f"each reward channel needs a name of its own, but got {names}")
        if self.update.warmup_steps >= self.steps:
            raise ValueError(
                f"update.warmup_steps must be below steps, or the learning rate is never reached, but got "
                f"{self.update.warmup_steps} of {self.steps}"
            )
        rollouts = self.sampling.tasks_per_step * self.sampling.rollouts_per_task
        if self.update.minibatches > rollouts:
            raise ValueError(
                f"a step has {rollouts} rollouts, too few for update.minibatches = {self.update.minibatches}"
            )
        if self.evaluation.every and self.evaluation.tasks is None:
            raise ValueError(
                "evaluation.every has no effect without evaluation.tasks: name held-out tasks or remove it"
            )
        if self.sampling.on_failure != "resample" and "retries" in self.sampling.model_fields_set:
            raise ValueError(
                f"sampling.retries has no effect with on_failure = {self.sampling.on_failure!r}: remove it"
            )
        return self


def load(path: str | Path, settings: Sequence[str] = ()) -> Recipe:
    """The recipe of a TOML file, with `a.b=c` settings on top; relative agent and task files are found beside it.

    Raises:
        ValueError: the file cannot be read, or a setting is unknown, impossible or without effect; says which and why.
    """
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"there is no recipe at {path}") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None
    for setting in settings:
        _set(table, setting)
    return parse(table, beside=path.parent)


def parse(table: Mapping[str, Any], *, beside: Path | None = None) -> Recipe:
    """The recipe of a table; errors name each setting by its dotted path."""
    try:
        recipe = Recipe.model_validate(table)
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, e['loc'])) or 'recipe'}: {_words(e)}" for e in error.errors()]
        raise ValueError("the recipe is refused:\n" + "\n".join(lines)) from None
    return _resolve(recipe, beside) if beside else recipe


def dump(recipe: Recipe) -> str:
    """The resolved recipe as TOML that `load` reads back to an equal one."""
    return "\n".join(_toml((), recipe.model_dump(exclude_none=True, mode="json"))).strip() + "\n"


def _words(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        return "is not a setting; the known ones are in `whippletree train --help` and docs/recipes.md"
    return (
        f"{error['msg'].removeprefix('Value error, ')} (got {error['input']!r})"
        if error["loc"]
        else error["msg"].removeprefix("Value error, ")
    )


def _set(table: dict[str, Any], setting: str) -> None:
    """Apply `a.b=c`; c is read as TOML, and as plain text where it is none."""
    path, equals, text = setting.partition("=")
    if not equals or not path:
        raise ValueError(f"a setting must look like update.learning_rate=1e-5, but got {setting!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *tables, key = path.split(".")
    for name in tables:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ValueError(f"{setting!r}: {name} is not a table of the recipe")
    table[key] = value


def _resolve(recipe: Recipe, folder: Path) -> Recipe:
    """File names made absolute, so that the run directory's copy of the recipe works from anywhere."""

    def place(text: str) -> str:
        file, colon, name = text.rpartition(":")
        if colon and file.endswith(".py") and not Path(file).is_absolute() and (folder / file).exists():
            return f"{(folder / file).resolve()}:{name}"
        return text

    def tasks(section: TasksSection) -> TasksSection:
        file = folder / section.source
        found = section.kind == "jsonl" and not Path(section.source).is_absolute() and file.exists()
        return section.model_copy(update={"source": str(file.resolve())}) if found else section

    held_out = recipe.evaluation.tasks
    return recipe.model_copy(
        update={
            "harness": recipe.harness.model_copy(update={"agent": place(recipe.harness.agent)}),
            "rewards": tuple(r.model_copy(update={"function": place(r.function)}) for r in recipe.rewards),
            "tasks": tasks(recipe.tasks),
            "evaluation": recipe.evaluation.model_copy(update={"tasks": held_out and tasks(held_out)}),
        }
    )


def _toml(path: tuple[str, ...], table: Mapping[str, Any]) -> list[str]:
    """Lines of a TOML table: its values, then its tables, then its arrays of tables."""
    tables = {key: value for key, value in table.items() if isinstance(value, dict)}
    arrays = {
        key: value for key, value in table.items() if isinstance(value, list) and value and isinstance(value[0], dict)
    }
    lines = [f"{key} = {_value(value)}" for key, value in table.items() if key not in tables and key not in arrays]
    for key, value in tables.items():
        lines += ["", f"[{'.'.join([*path, key])}]", *_toml((*path, key), value)]
    for key, values in arrays.items():
        for value in values:
            lines += ["", f"[[{'.'.join([*path, key])}]]", *_toml((*path, key), value)]
    return lines


def _value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    # JSON's strings, booleans and numbers are TOML's
    return json.dumps(value, ensure_ascii=False)
