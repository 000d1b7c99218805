"""Recipes: what a run is, as typed TOML. Unknown, impossible and ineffective settings are refused at launch."""

from __future__ import annotations

import difflib
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from whippletree import toml


class Section(BaseModel):
    """A table of a recipe: frozen, closed to keys it does not know, and numbers are finite and not written as text."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def changed(self, *names: str) -> list[str]:
        """Those of these settings that are not at their default, so that they are meant to do something."""
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]


class ModelSection(Section):
    path: str = Field("smollm2-135m-instruct", description="a Hugging Face folder, or the quickstart's model by name")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: measured at start")
    context: int | None = Field(None, ge=2, description="most tokens of prompt and reply; default: the model's own")
    gradient_checkpointing: bool = Field(
        False, description="recompute layers in the backward pass: less memory, more time"
    )


class TasksSection(Section):
    kind: Literal["jsonl", "reasoning_gym", "hub"] = Field("reasoning_gym", description="where tasks come from")
    source: str = Field(description="a file, the name of a reasoning-gym dataset, or of a Hugging Face dataset")
    size: int | None = Field(None, ge=1, description="how many; default: all there are, 1000 of reasoning-gym")
    seed: int = Field(0, description="of generated tasks")
    settings: dict[str, Any] = Field(default_factory=dict, description="passed to the source as they are")
    where: dict[str, str] = Field(
        default_factory=dict,
        description="keep the tasks whose column is wholly matched by a pattern: {answer = '[0-9]+'}",
    )

    @model_validator(mode="after")
    def _each_setting_has_one_place(self) -> TasksSection:
        if taken := sorted({"kind", "path", "dataset", "size", "seed"} & set(self.settings)):
            raise ValueError(
                f"settings must not hold {', '.join(taken)}: set kind, source, size and seed beside settings"
            )
        if self.kind != "reasoning_gym" and self.changed("seed"):
            raise ValueError(f"seed has no effect on tasks of kind {self.kind!r}, which are not generated: remove it")
        return self


class HarnessSection(Section):
    name: str = Field("", description="of its groups and metrics; default: that of its file or function's module")
    kind: Literal["function", "command", "launcher"] = Field("function", description="how the agent is started")
    agent: str = Field(
        description="module:function or file.py:function, the command line to start, or a launcher's TOML file",
        min_length=1,
    )
    api: str = Field("", description="which API of its launcher the agent speaks: chat, responses, messages, ...")
    timeout: float = Field(120.0, gt=0, description="seconds a rollout may take; a launcher says its own")
    concurrency: int = Field(64, ge=1, description="rollouts that run at once")
    environment: dict[str, str] = Field(default_factory=dict, description="further variables of a command")
    length_stop: Literal["auto", "truncated", "done"] = Field(
        "auto",
        description="what a run is whose last reply was cut for length, though the agent says that it is done; auto: "
        "done of a function, truncated of others, which seldom look",
    )

    @property
    def label(self) -> str:
        """Its name in groups and metrics."""
        place = self.agent.rpartition(":")[0] or self.agent
        return self.name or ("command" if self.kind == "command" else re.sub(r"\.(py|toml)$", "", Path(place).name))

    @property
    def takes_cut_replies(self) -> bool:
        """Whether a run that ends on a reply that was cut for length is done."""
        return self.length_stop == "done" or (self.length_stop == "auto" and self.kind == "function")

    @model_validator(mode="after")
    def _environment_needs_a_command(self) -> HarnessSection:
        if self.kind == "function" and self.environment:
            raise ValueError("environment has no effect on a function, which runs in this process: remove it")
        if self.kind == "launcher" and self.environment:
            raise ValueError("environment has no effect on a launcher, whose file says it in [env]: remove it")
        if (self.kind == "launcher") != bool(self.api):
            raise ValueError(
                f"a launcher needs `api`, and nothing else reads it, but kind is {self.kind!r} and api is {self.api!r}"
            )
        return self


class RewardSection(Section):
    name: str = Field(description="the channel's name", min_length=1)
    function: str = Field(description="module:function or file.py:function, an async function of a Rollout")
    weight: float = Field(1.0, description="what the channel counts in the total; 0: it is only watched")


class SamplingSection(Section):
    tasks_per_step: int = Field(8, ge=1, description="groups of one update")
    rollouts_per_task: int = Field(8, ge=1, description="G, the size of a group")
    reply_tokens: int = Field(512, ge=1, description="most tokens of one reply, whatever the agent asks for")
    turns: int = Field(64, ge=1, description="most calls of one rollout")
    tokens: int | None = Field(None, ge=1, description="most tokens that one rollout samples in all; default: no limit")
    seconds: float | None = Field(
        None,
        gt=0,
        description="after which a rollout's calls are refused, so that it ends as truncated; default: never",
    )
    calls_per_second: float | None = Field(
        None, gt=0, description="most calls of one rollout, over ten seconds: some agents ask again for ever"
    )
    unfinished_reward: float = Field(
        0.0, description="the most that any channel gives a rollout that was truncated; one below it stays as it is"
    )
    temperature: float = Field(1.0, gt=0, description="of training rollouts")
    on_failure: Literal["resample", "drop", "keep"] = Field(
        "resample", description="a failed rollout is run again, its group is dropped, or its group goes on without it"
    )
    retries: int = Field(2, ge=0, description="how often a failed rollout is run again before its group is dropped")

    @model_validator(mode="after")
    def _retries_need_resampling(self) -> SamplingSection:
        if self.on_failure != "resample" and self.changed("retries"):
            raise ValueError(f"retries has no effect with on_failure = {self.on_failure!r}: remove it")
        return self


class UpdateSection(Section):
    learning_rate: float = Field(1e-6, gt=0, description="after the warm-up")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the mean gradient, a step")
    beta2: float = Field(0.999, ge=0, lt=1, description="decay of the mean squared gradient, a step")
    epsilon: float = Field(1e-8, gt=0, description="added to the root of the mean squared gradient")
    weight_decay: float = Field(0.0, ge=0, description="share of a weight lost in a step, in units of the rate")
    clip_norm: float = Field(1.0, ge=0, description="largest norm of the gradient; 0: no clipping")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="of the learning rate after the warm-up; the others end at 0 after the last step"
    )
    warmup_steps: int = Field(0, ge=0, description="steps over which the learning rate rises")
    epochs: int = Field(1, ge=1, description="passes over the rollouts of one step")
    minibatches: int = Field(1, ge=1, description="optimizer steps in one pass")
    entropy_bonus: float = Field(0.0, ge=0, description="weight of the policy's entropy in the loss")
    token_budget: int = Field(4096, ge=1, description="places of one packed forward, padding included")
    lora_rank: int = Field(0, ge=0, description="0: all parameters are trained")
    lora_alpha: float | None = Field(None, gt=0, description="default: twice the rank")

    @model_validator(mode="after")
    def _alpha_needs_a_rank(self) -> UpdateSection:
        if self.lora_alpha is not None and not self.lora_rank:
            raise ValueError("lora_alpha has no effect while lora_rank is 0: set a rank or remove it")
        return self


class EvalSection(Section):
    tasks: TasksSection | None = Field(None, description="held-out tasks; without them there is no evaluation")
    every: int = Field(
        0, ge=0, description="steps between evaluations; 0: only before the first and after the last step"
    )
    temperature: float = Field(0.0, ge=0, description="0: the most likely reply")
    success: float = Field(1.0, description="a rollout counts as solved from this total reward on")

    @model_validator(mode="after")
    def _settings_need_tasks(self) -> EvalSection:
        if self.tasks is None and (idle := self.changed("every", "temperature", "success")):
            raise ValueError(f"{_have(idle)} no effect without evaluation.tasks: name held-out tasks or remove it")
        return self


class FidelitySection(Section):
    mean_limit: float = Field(
        0.1, gt=0, description="mean |log-prob at training - at sampling| beyond which training stops"
    )
    max_limit: float = Field(2.0, gt=0, description="the same for the worst token")

    @model_validator(mode="after")
    def _the_mean_can_pass_its_limit_first(self) -> FidelitySection:
        if self.mean_limit >= self.max_limit:
            raise ValueError(
                f"mean_limit must be below max_limit, or it can never act, as no mean exceeds the maximum, but got "
                f"{self.mean_limit} and {self.max_limit}"
            )
        return self


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
    update: UpdateSection = UpdateSection()
    evaluation: EvalSection = EvalSection()
    fidelity: FidelitySection = FidelitySection()

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
                f"method_settings.objective: {_have(clip)} no effect with one optimizer step for each batch, as the "
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


def _have(names: Sequence[str]) -> str:
    return f"{', '.join(names)} {'has' if len(names) == 1 else 'have'}"


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

    held_out = recipe.evaluation.tasks
    return recipe.model_copy(
        update={
            "model": recipe.model.model_copy(update={"path": place(recipe.model.path)}),
            "harness": tuple(map(harness, recipe.harness)),
            "rewards": tuple(r.model_copy(update={"function": function(r.function)}) for r in recipe.rewards),
            "tasks": tasks(recipe.tasks),
            "evaluation": recipe.evaluation.model_copy(update={"tasks": held_out and tasks(held_out)}),
        }
    )
