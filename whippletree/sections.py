"""The tables of a recipe, one class each: what may be set, between which limits, and what has no effect."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


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


class ThreadsSection(Section):
    train: tuple[str, ...] = Field(
        ("main",), strict=False, min_length=1, description="kinds of threads that train: main, sub-agent, title, ..."
    )
    apart: tuple[str, ...] = Field(
        (), strict=False, description="those of them that are credited in groups of their own, against their like"
    )
    rewards: dict[str, list[str]] = Field(
        default_factory=dict,
        description="channels that pay a kind that is apart, and not the main thread: {sub-agent = ['found']}; a kind "
        "without any is paid what the rollout is",
    )

    @model_validator(mode="after")
    def _what_is_apart_trains(self) -> ThreadsSection:
        if idle := sorted({*self.apart} - {*self.train}):
            raise ValueError(f"{have(idle)} no effect in apart, as train leaves the kind out: add it to train")
        if "main" in self.apart:
            raise ValueError("main is what the others stand apart from: remove it from apart")
        if idle := sorted({*self.rewards} - {*self.apart}):
            raise ValueError(f"rewards.{', rewards.'.join(idle)} pays nobody, as apart does not have the kind")
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
            raise ValueError(f"{have(idle)} no effect without evaluation.tasks: name held-out tasks or remove it")
        return self


class JudgeSection(Section):
    kind: Literal["server", "policy", "function"] = Field(
        "server", description="a model behind an OpenAI-compatible server, the policy itself, or a Python function"
    )
    url: str = Field("", description="of the server, up to /chat/completions: http://127.0.0.1:8000/v1")
    model: str = Field("", description="its name at the server")
    key_variable: str = Field("", description="the environment variable that holds the server's key")
    function: str = Field("", description="module:function or file.py:function, async, of the question's text")
    at_once: int = Field(8, ge=1, description="questions that run at once")
    timeout: float = Field(120.0, gt=0, description="seconds for one answer")
    reply_tokens: int = Field(1024, ge=1, description="most tokens of one answer")
    calls: int | None = Field(None, ge=1, description="most calls since the start of the command; default: no limit")
    tokens: int | None = Field(None, ge=1, description="most tokens of questions and answers; default: no limit")

    @model_validator(mode="after")
    def _each_kind_has_its_own(self) -> JudgeSection:
        own = {"server": ("url", "model"), "policy": (), "function": ("function",)}[self.kind]
        said = {*self.changed("url", "model", "key_variable", "function")}
        if said - {"key_variable" if self.kind == "server" else ""} != {*own}:
            wants = " and ".join(own) or "none of url, model, key_variable and function"
            raise ValueError(f"a judge of kind {self.kind!r} takes {wants}, but got {sorted(said)}")
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


def have(names: Sequence[str]) -> str:
    """These names and the verb that goes with their number."""
    return f"{', '.join(names)} {'has' if len(names) == 1 else 'have'}"
