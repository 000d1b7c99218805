"""Recipes: what a run is, as typed TOML. Unknown, impossible and ineffective settings are refused at launch."""

from __future__ import annotations

import difflib
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from whippletree import toml
from whippletree.sections import EvalSection as EvalSection
from whippletree.sections import FidelitySection as FidelitySection
from whippletree.sections import HarnessSection as HarnessSection
from whippletree.sections import JudgeSection as JudgeSection
from whippletree.sections import ModelSection as ModelSection
from whippletree.sections import RewardSection as RewardSection
from whippletree.sections import SamplingSection as SamplingSection
from whippletree.sections import Section as Section
from whippletree.sections import TasksSection as TasksSection
from whippletree.sections import ThreadsSection as ThreadsSection
from whippletree.sections import UpdateSection as UpdateSection
from whippletree.sections import have

Harnesses = Annotated[tuple[HarnessSection, ...], BeforeValidator(lambda x: [x] if isinstance(x, Mapping) else x)]


class Recipe(Section):
    """A whole run."""

    method: str = Field(description="a file of whippletree/methods; `whippletree methods` lists them")
    name: str = Field("run", description="of the run directory under runs/: letters, digits and any of . _ -")
    steps: int = Field(100, ge=1, description="updates of the policy")
    seed: int = Field(0, description="of everything random: samples, order of tasks, adapters")
    checkpoint_every: int = Field(20, ge=0, description="steps; the last step always leaves one; 0: only the last")
    keep_checkpoints: int = Field(2, ge=1, description="newest checkpoints that stay on disk")
    sinks: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...] = Field(
        (), strict=False, description="where metrics go besides metrics.jsonl"
    )
    method_settings: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="keywords of the method's parts: {credit = {scale = 'none'}}"
    )
    model: ModelSection = ModelSection()
    tasks: TasksSection
    harness: Harnesses = Field(min_length=1, strict=False, description="how the agent is started; or several agents")
    rewards: tuple[RewardSection, ...] = Field((), strict=False, description="default: what the harness itself gives")
    reward_timeout: float = Field(60.0, gt=0, description="seconds; a reward that takes longer is missing")
    sampling: SamplingSection = SamplingSection()
    threads: ThreadsSection = ThreadsSection()
    update: UpdateSection = UpdateSection()
    evaluation: EvalSection = EvalSection()
    fidelity: FidelitySection = FidelitySection()
    judge: JudgeSection | None = Field(None, description="who is asked where the method needs a judge")

    @model_validator(mode="after")
    def _possible(self) -> Recipe:
        sampling, update, context = self.sampling, self.update, self.model.context
        if not re.fullmatch(r"\w[\w.-]*", self.name):
            raise ValueError(f"name must be letters, digits and any of . _ -, as it is a folder, but got {self.name!r}")
        names = [reward.name for reward in self.rewards]
        if len(set(names)) != len(names):
            raise ValueError(f"each reward channel needs a name of its own, but got {names}")
        if names and not any(reward.weight for reward in self.rewards):
            raise ValueError(
                f"the reward channels {names} all have weight 0, so nothing can be learned: give one a weight"
            )
        labels = [harness.label for harness in self.harness]
        if len(set(labels)) != len(labels) or not all(re.fullmatch(r"\w[\w.-]*", label) for label in labels):
            raise ValueError(
                f"each harness needs a name of its own, of letters, digits and any of . _ -, but got {labels}: set "
                f"`name` in [[harness]]"
            )
        if update.warmup_steps >= self.steps:
            raise ValueError(
                f"update.warmup_steps must be below steps, or the learning rate is never reached, but got "
                f"{update.warmup_steps} of {self.steps}"
            )
        rollouts = sampling.tasks_per_step * sampling.rollouts_per_task * len(labels)
        if update.minibatches > rollouts:
            raise ValueError(f"a step has {rollouts} rollouts, too few for update.minibatches = {update.minibatches}")
        if context is not None and sampling.reply_tokens >= context:
            raise ValueError(
                f"sampling.reply_tokens must be below model.context, which holds prompt and reply, but got "
                f"{sampling.reply_tokens} of {context}"
            )
        return self

    @model_validator(mode="after")
    def _clipping_can_act(self) -> Recipe:
        clip = sorted({"low", "high", "dual"} & set(self.method_settings.get("objective", ())))
        if clip and self.update.epochs == self.update.minibatches == 1:
            raise ValueError(
                f"method_settings.objective: {have(clip)} no effect with one optimizer step for each batch, as the "
                f"ratio it clips is 1 until the policy has moved: set update.epochs or update.minibatches, or remove it"
            )
        return self


def load(path: str | Path, settings: Sequence[str] = ()) -> Recipe:
    """The recipe of a TOML file, with `a.b=c` settings on top; relative files and model folders are found beside it.

    Raises:
        ValueError: the file cannot be read, or a setting is unknown, impossible or without effect; says which and why.
    """
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no recipe at {path}") from None
    except OSError as error:
        raise ValueError(f"the recipe {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None
    for setting in settings:
        toml.change(table, setting)
    return parse(table, beside=path.parent)


def parse(table: Mapping[str, Any], *, beside: Path | None = None) -> Recipe:
    """The recipe of a table; errors name each setting by its dotted path."""
    try:
        recipe = Recipe.model_validate(table)
    except ValidationError as error:
        lone = isinstance(table.get("harness"), Mapping)
        paths = [[str(part) for part in each["loc"]] for each in error.errors()]
        paths = [[*path[:1], *path[2:]] if lone and path[:2] == ["harness", "0"] else path for path in paths]
        lines = (f"  {_words(path, each)}" for path, each in zip(paths, error.errors(), strict=True))
        raise ValueError("the recipe is refused:\n" + "\n".join(lines)) from None
    return _resolve(recipe, beside) if beside else recipe


def dump(recipe: Recipe) -> str:
    """The resolved recipe as TOML that `load` reads back to an equal one."""
    return toml.dump(plain(recipe, exclude_none=True))


def plain(recipe: Recipe, **options: Any) -> dict[str, Any]:
    """The recipe as a table, in which a lone harness is a table as well."""
    table = recipe.model_dump(**options)
    return {**table, "harness": table["harness"][0]} if len(table["harness"]) == 1 else table


def differences(one: Recipe, other: Recipe) -> dict[str, tuple[Any, Any]]:
    """The settings in which two recipes differ, by dotted path; None where one has no such setting."""

    def flat(value: Any, path: str = "") -> dict[str, Any]:
        if not isinstance(value, dict) or not value:
            return {path: value}
        return {k: v for key, item in value.items() for k, v in flat(item, f"{path}.{key}" if path else key).items()}

    a, b = flat(plain(one)), flat(plain(other))
    return {key: (a.get(key), b.get(key)) for key in [*a, *(b.keys() - a.keys())] if a.get(key) != b.get(key)}


def _words(path: list[str], error: Any) -> str:
    """One refused setting in words: its dotted path, the rule, what came."""
    where, kind, message = ".".join(path), error["type"], error["msg"]
    if kind == "extra_forbidden":
        return f"{where} is not a setting; {_known(path)}"
    if kind == "missing":
        return f"{where} is required: {_table(path[:-1]).model_fields[path[-1]].description or 'a table'}"
    if kind == "value_error":
        return ": ".join(filter(None, [where, message.removeprefix("Value error, ")]))
    if kind == "model_type":
        return f"{where} must be a table, but got {error['input']!r}"
    rule = re.sub("^(Input|String) should", "must", message).replace("tuple", "array").replace("dictionary", "table")
    return f"{where} {rule}, but got {error['input']!r}"


def sections(section: type[Section]) -> dict[str, type[Section]]:
    """The tables inside a table, by name; of an array of tables, the table it repeats."""
    kinds = {name: (field.annotation, *get_args(field.annotation)) for name, field in section.model_fields.items()}
    inside = ((name, kind) for name, options in kinds.items() for kind in options)
    return {name: kind for name, kind in inside if isinstance(kind, type) and issubclass(kind, Section)}


def _table(path: Sequence[str]) -> type[Section]:
    """The table at a dotted path."""
    section: type[Section] = Recipe
    for name in path:
        section = sections(section).get(name, section)  # an index into an array stays in its table
    return section


def _known(path: Sequence[str]) -> str:
    """What could have been meant: the nearest name of the same table, or all of them."""
    *above, name = path
    names = list(_table(above).model_fields)
    if near := difflib.get_close_matches(name, names, n=1):
        return f"did you mean {'.'.join([*above, *near])}?"
    return f"{'.'.join(above) or 'a recipe'} has {', '.join(names)}"


def _resolve(recipe: Recipe, folder: Path) -> Recipe:
    """Files and folders beside the recipe made absolute, so that the run directory's copy works from anywhere."""

    def place(text: str) -> str:
        found = folder / text
        return str(found.resolve()) if text and found.exists() and not Path(text).is_absolute() else text

    def function(text: str) -> str:
        file, colon, name = text.rpartition(":")
        return f"{place(file)}{colon}{name}" if file.endswith(".py") else text

    def command(text: str) -> str:
        """The words of a shell command, those that name files beside the recipe in full, the rest as it is."""
        return "".join(
            shlex.quote(place(word)) if (folder / word).is_file() else word for word in re.split(r"(\s+)", text)
        )

    def tasks(section: TasksSection) -> TasksSection:
        return section.model_copy(update={"source": place(section.source)}) if section.kind == "jsonl" else section

    def harness(section: HarnessSection) -> HarnessSection:
        start = {"command": command, "launcher": place, "function": function}[section.kind]
        return section.model_copy(update={"agent": start(section.agent)})

    held_out, judge = recipe.evaluation.tasks, recipe.judge
    return recipe.model_copy(
        update={
            "model": recipe.model.model_copy(update={"path": place(recipe.model.path)}),
            "harness": tuple(map(harness, recipe.harness)),
            "rewards": tuple(r.model_copy(update={"function": function(r.function)}) for r in recipe.rewards),
            "judge": judge and judge.model_copy(update={"function": function(judge.function)}),
            "tasks": tasks(recipe.tasks),
            "evaluation": recipe.evaluation.model_copy(update={"tasks": held_out and tasks(held_out)}),
        }
    )
