"""Reward functions written for other libraries: TRL's and verifiers' conventions.

A function that raises makes its channel missing here (see `channels.score`); verifiers would have made it 0.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whippletree.reward.channels import name_of
from whippletree.reward.text import conversation, final_text, reply_message, text_of
from whippletree.types import Json, Reward, Rollout

_TRAINERS = {"trainer_state", "log_extra", "log_metric", "environments"}  # what only TRL's trainer can give
_GROUPS = {"prompts", "completions", "answers", "states", "tasks", "infos"}  # verifiers' sign of a group function


def from_trl(
    function: Callable[..., Any], *, name: str | None = None, conversational: bool = True, thread: bool = True
) -> Reward:
    """The reward of a function in TRL's convention, called for one rollout at a time, under the function's name.

        function(prompts=[...], completions=[...], completion_ids=[...], **columns) -> [number or None]

    Conversational, a prompt is the messages the harness began with and a completion those that followed; otherwise
    both are text, and the completion is the last reply. `completion_ids` are the sampled tokens of all turns. Every
    column of the task comes as a list of one. The function may leave out what it does not need, and may be async.

    One that is not async runs in a thread, so that others go on and a timeout can be told; `thread=False` is for
    functions that need the main thread (they use signals), during which nothing else runs.

    Raises:
        ValueError: the function requires what only TRL's trainer has.
    """
    if missing := _required(function) & _TRAINERS:
        raise ValueError(f"{name_of(function)} requires {sorted(missing)}, which exist only inside TRL's trainer")
    return TrlReward(function, name or name_of(function), conversational, thread)


def from_verifiers(
    function: Callable[..., Any], *, name: str | None = None, parser: Any = None, thread: bool = True
) -> Reward:
    """The reward of one function of a verifiers rubric: it names what it wants, and gets that.

    `prompt` and `completion` (messages), `answer`, `info` and `task` (columns of the task), `state` (a dict of these,
    and the trajectory), `parser` (the object given here), and any other column of the task. For `thread` see
    `from_trl`.

    Raises:
        ValueError: the function scores whole groups, or requires a parser and there is none.
    """
    required = _required(function)
    if groups := required & _GROUPS:
        raise ValueError(f"{name_of(function)} asks for {sorted(groups)}: it scores groups, and a reward one rollout")
    if "parser" in required and parser is None:
        raise ValueError(f"{name_of(function)} requires a parser; give the one of its rubric")
    return VerifiersReward(function, name or name_of(function), parser, thread)


def from_rubric(
    functions: Sequence[Callable[..., Any]], weights: Sequence[float] | None = None, *, parser: Any = None
) -> tuple[dict[str, Reward], dict[str, float]]:
    """The rewards of a verifiers rubric (its `funcs`, `weights`, `parser`), and the weight of each channel.

    The weights are for `Batch.of`. A weight of 0 makes a channel that is only watched.

    Raises:
        ValueError: there is not one weight a function, or two functions have one name.
    """
    weights = [1.0] * len(functions) if weights is None else weights
    names = [name_of(function) for function in functions]
    if len(weights) != len(functions) or len(set(names)) != len(names):
        raise ValueError(f"a rubric has one weight and one name a function, but got {names} and {list(weights)}")
    rewards = {name: from_verifiers(function, parser=parser) for name, function in zip(names, functions, strict=True)}
    return rewards, dict(zip(names, weights, strict=True))


@dataclass(frozen=True)
class TrlReward:
    """What `from_trl` makes."""

    function: Callable[..., Any]
    name: str
    conversational: bool
    thread: bool

    async def __call__(self, rollout: Rollout) -> Mapping[str, float | None]:
        prompt, completion = conversation(rollout)
        ids = [token for turn in rollout.turns for token in turn.reply_ids]
        offered: Json = {
            key: [value] for key, value in rollout.task.columns.items() if key not in ("prompt", "completion")
        }
        offered["prompts"] = [prompt if self.conversational else "\n\n".join(map(text_of, prompt))]
        offered["completions"] = [completion if self.conversational else final_text(rollout)]
        offered["completion_ids"] = [ids]
        given = list(await _call(self.function, offered, thread=self.thread))
        if len(given) != 1:
            raise ValueError(f"{self.name} returns one value a completion, but for one it returned {len(given)}")
        return {self.name: given[0]}


@dataclass(frozen=True)
class VerifiersReward:
    """What `from_verifiers` makes."""

    function: Callable[..., Any]
    name: str
    parser: Any
    thread: bool

    async def __call__(self, rollout: Rollout) -> Mapping[str, float | None]:
        columns = rollout.task.columns
        prompt, completion = conversation(rollout)
        row = {"prompt": prompt, "completion": completion, "answer": columns.get("answer", "")}
        row |= {"info": columns.get("info", {}), "task": columns.get("task", "")}
        trajectory = [
            {"prompt": turn.request.get("messages", []), "completion": [reply_message(turn)]} for turn in rollout.turns
        ]
        state = {**row, "trajectory": trajectory, "is_truncated": rollout.ending == "truncated"}
        offered = {**columns, **row, "state": state, **({} if self.parser is None else {"parser": self.parser})}
        return {self.name: await _call(self.function, offered, thread=self.thread)}


async def _call(function: Callable[..., Any], offered: Mapping[str, Any], *, thread: bool) -> Any:
    """Call a function with those of the offered arguments that it takes."""
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    given = dict(offered) if takes_all else {p.name: offered[p.name] for p in parameters if p.name in offered}
    if thread and not _is_async(function):
        return await asyncio.to_thread(function, **given)
    result = function(**given)
    return await result if inspect.isawaitable(result) else result


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _required(function: Callable[..., Any]) -> set[str]:
    """Parameters that a call must give."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind in named and p.default is p.empty}
