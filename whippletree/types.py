"""The nouns. Nothing here imports the rest of the package, and everything else may import this.

Shape letters end every tensor name:

    R rollouts   K turns   N sampled tokens   C reward channels   J rubric criteria   V vocabulary   D hidden width

A `Batch` is flat: one entry per *sampled* token, in turn order. Prompts and tool output are not in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

Json = dict[str, Any]
Ending = Literal["done", "truncated", "failed"]
Blame = Literal["harness", "engine", "judge", "sandbox", "reward"]


# ---- what happened ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """What is asked once: chat messages, and free columns such as `answer`, tests or a rubric."""

    id: str
    messages: tuple[Json, ...] = ()
    columns: Json = field(default_factory=dict)

    def to_json(self) -> Json:
        """A JSON object that `from_json` turns back into an equal task."""
        return {"id": self.id, "messages": list(self.messages), "columns": self.columns}

    @classmethod
    def from_json(cls, row: Json) -> Task:
        return cls(id=row["id"], messages=tuple(row["messages"]), columns=row["columns"])


@dataclass(frozen=True)
class Turn:
    """One call to the policy: the exact ids it saw, the exact ids it sampled, and their log-probabilities.

    `reply_logps` are natural logs under the policy of `version` at `temperature`; NaN means unknown, and a token with
    an unknown log-probability is never trained. Two turns with equal NaN places compare equal through `to_json`.
    """

    id: str
    prompt_ids: tuple[int, ...]
    reply_ids: tuple[int, ...]
    reply_logps: tuple[float, ...]
    version: int
    finish_reason: str  # "stop", "length", "tool_calls", or "abandoned" when the client went away
    temperature: float = 1.0
    top_p: float = 1.0
    request: Json = field(default_factory=dict)  # as the harness sent it
    reply: Json = field(default_factory=dict)  # as the harness got it

    def __post_init__(self) -> None:
        if len(self.reply_ids) != len(self.reply_logps):
            raise ValueError(
                f"turn {self.id}: each sampled token needs one log-probability, but there are {len(self.reply_ids)} "
                f"ids and {len(self.reply_logps)} log-probabilities; use NaN where one is unknown"
            )

    @property
    def trainable(self) -> bool:
        """The distribution that was sampled is one the trainer can express: tempered, not cut off, and finished."""
        return self.temperature > 0 and self.top_p >= 1 and self.finish_reason != "abandoned"

    def to_json(self) -> Json:
        """A JSON object that `from_json` turns back into an equal turn; NaN is written as null."""
        row = {f.name: getattr(self, f.name) for f in fields(self)}
        row["prompt_ids"], row["reply_ids"] = list(self.prompt_ids), list(self.reply_ids)
        row["reply_logps"] = [None if math.isnan(x) else x for x in self.reply_logps]
        return row

    @classmethod
    def from_json(cls, row: Json) -> Turn:
        ids = {"prompt_ids": tuple(row["prompt_ids"]), "reply_ids": tuple(row["reply_ids"])}
        return cls(**{**row, **ids, "reply_logps": tuple(math.nan if x is None else x for x in row["reply_logps"])})


@dataclass(frozen=True)
class Rollout:
    """One run of a harness on a task: its turns in order, its named rewards, and how it ended.

    A reward of `None` does not apply; it is never read as 0. `blame` and `reason` say whose fault a failure was.
    """

    id: str
    task: Task
    group: str  # rollouts of one task under one harness; credit compares within it
    turns: tuple[Turn, ...] = ()
    rewards: dict[str, float | None] = field(default_factory=dict)
    ending: Ending = "done"
    blame: Blame | None = None
    reason: str = ""
    info: Json = field(default_factory=dict)  # what harness and rewards found: exit code, stderr, judge's words

    def to_json(self) -> Json:
        row = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**row, "task": self.task.to_json(), "turns": [turn.to_json() for turn in self.turns]}

    @classmethod
    def from_json(cls, row: Json) -> Rollout:
        nested = {"task": Task.from_json(row["task"]), "turns": tuple(Turn.from_json(t) for t in row["turns"])}
        return cls(**{**row, **nested})


@dataclass(frozen=True)
class Tree:
    """Turns merged by exact token prefix: T nodes, parents before children, one node per distinct prefix.

    Sampled token n (turn order, as in `Batch`) is node `node_N[n]`, predicted at that node's parent. Several turns may
    sample the same token after the same prefix: they share the node, so it is computed once, and each trains it.
    """

    id_T: Tensor  # int64, token ids in depth-first order
    parent_T: Tensor  # int64, index of the parent node, -1 at a root
    depth_T: Tensor  # int64, position of the token in its sequence
    node_N: Tensor  # int64, node of each sampled token


# ---- the flat table ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The flat table that credit, objective and average read: rollouts, turns, sampled tokens.

    Rows are grouped: tokens of a turn are contiguous, turns of a rollout are contiguous, so `rollout_K` and `turn_N`
    never decrease. `reward_RC` is NaN where a channel does not apply. Untrainable tokens have NaN in `logp_old_N`.
    """

    group_R: Tensor  # int64, which group (task and harness) a rollout belongs to
    rollout_K: Tensor  # int64, turn -> rollout
    turn_N: Tensor  # int64, sampled token -> turn
    id_N: Tensor  # int64, the sampled token ids
    logp_old_N: Tensor  # float32, log-prob under the policy that sampled, at the turn's temperature
    version_N: Tensor  # int64, version of that policy
    reward_RC: Tensor  # float32, one column a channel
    channels: tuple[str, ...] = ("reward",)
    weight_C: Tensor = field(default_factory=lambda: torch.ones(1))  # what each channel counts in `reward_R`
    extra: dict[str, Tensor] = field(default_factory=dict)  # evidence; keys end in shape letters

    def __post_init__(self) -> None:
        sizes = {"R": self.rollouts, "K": self.turns, "N": self.tokens, "C": len(self.channels)}
        columns = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        for name, tensor in {**columns, **self.extra}.items():
            for axis, letter in enumerate(shape_letters(name)):
                if letter in sizes and tensor.shape[axis] != sizes[letter]:
                    raise ValueError(
                        f"column {name} must have {sizes[letter]} entries on axis {axis} ({letter}), but its shape is "
                        f"{tuple(tensor.shape)}"
                    )
        for name in ("rollout_K", "turn_N"):
            if (columns[name].diff() < 0).any():
                raise ValueError(f"{name} must not decrease: turns of a rollout and tokens of a turn stand together")

    @property
    def rollouts(self) -> int:
        return self.group_R.shape[0]

    @property
    def turns(self) -> int:
        return self.rollout_K.shape[0]

    @property
    def tokens(self) -> int:
        return self.turn_N.shape[0]

    @cached_property
    def rollout_N(self) -> Tensor:
        """[N] which rollout each sampled token belongs to."""
        return self.rollout_K[self.turn_N]

    @cached_property
    def lengths_K(self) -> Tensor:
        """[K] sampled tokens of each turn."""
        return torch.bincount(self.turn_N, minlength=self.turns)

    @cached_property
    def lengths_R(self) -> Tensor:
        """[R] sampled tokens of each rollout, over all its turns."""
        return torch.bincount(self.rollout_N, minlength=self.rollouts)

    @cached_property
    def trainable_N(self) -> Tensor:
        """[N] bool: the log-probability at sampling is known."""
        return ~self.logp_old_N.isnan()

    @cached_property
    def reward_R(self) -> Tensor:
        """[R] weighted sum of the channels that apply; NaN where none does."""
        total_R = (self.reward_RC * self.weight_C).nansum(dim=1)
        return torch.where(self.reward_RC.isnan().all(dim=1), torch.nan, total_R)

    def column(self, name: str) -> Tensor:
        """The evidence column of this name.

        Raises:
            ValueError: no evidence of the method found such a column.
        """
        if name not in self.extra:
            raise ValueError(
                f"a part of this method reads the column {name!r}, but its evidence found {sorted(self.extra)}: add the "
                f"evidence that finds it"
            )
        return self.extra[name]

    def with_extra(self, **columns: Tensor) -> Batch:
        """The same batch with further evidence columns, checked against their shape letters."""
        return replace(self, extra={**self.extra, **columns})

    def select(self, rollouts: Tensor) -> Batch:
        """The sub-batch of these rollouts (indices [R'] in the wanted order, or a bool mask [R]), renumbered."""
        rollout_R = rollouts.nonzero()[:, 0] if rollouts.dtype == torch.bool else rollouts
        turn_K = _members(self.rollout_K, rollout_R, self.rollouts)
        token_N = _members(self.turn_N, turn_K, self.turns)
        index = {"R": rollout_R, "K": turn_K, "N": token_N}

        def pick(name: str, tensor: Tensor) -> Tensor:
            letters = shape_letters(name)
            return tensor[index[letters[0]]] if letters and letters[0] in index else tensor

        columns = {
            f.name: pick(f.name, getattr(self, f.name)) for f in fields(self) if f.name.endswith(("_R", "_N", "_RC"))
        }
        rank_R = torch.empty(self.rollouts, dtype=torch.int64).index_copy_(0, rollout_R, torch.arange(len(rollout_R)))
        rank_K = torch.empty(self.turns, dtype=torch.int64).index_copy_(0, turn_K, torch.arange(len(turn_K)))
        return replace(
            self,
            **{**columns, "turn_N": rank_K[self.turn_N[token_N]], "rollout_K": rank_R[self.rollout_K[turn_K]]},
            extra={name: pick(name, tensor) for name, tensor in self.extra.items()},
        )

    @classmethod
    def of(
        cls,
        rollouts: Sequence[Rollout],
        *,
        channels: Sequence[str] | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> Batch:
        """The table of these rollouts; `channels` defaults to every channel named by any of them, sorted.

        Raises:
            ValueError: there are no rollouts or no channels, or a rollout failed (it is missing, not a reward of 0).
        """
        failed = [r.id for r in rollouts if r.ending == "failed"]
        if not rollouts or failed:
            raise ValueError(f"a batch needs rollouts that did not fail, but got {len(rollouts)}, failed: {failed[:5]}")
        names = tuple(channels) if channels else tuple(sorted({name for r in rollouts for name in r.rewards}))
        if not names:
            raise ValueError("a batch needs at least one reward channel, but no rollout names any: score them first")
        turns = [turn for r in rollouts for turn in r.turns]
        lengths = torch.tensor([len(turn.reply_ids) for turn in turns], dtype=torch.int64)
        numbers = {group: n for n, group in enumerate(dict.fromkeys(r.group for r in rollouts))}
        rewards = [[math.nan if (x := r.rewards.get(name)) is None else x for name in names] for r in rollouts]
        unknown = math.nan
        return cls(
            group_R=torch.tensor([numbers[r.group] for r in rollouts]),
            rollout_K=torch.repeat_interleave(
                torch.arange(len(rollouts)), torch.tensor([len(r.turns) for r in rollouts], dtype=torch.int64)
            ),
            turn_N=torch.repeat_interleave(torch.arange(len(turns)), lengths),
            id_N=torch.tensor([i for turn in turns for i in turn.reply_ids], dtype=torch.int64),
            logp_old_N=torch.tensor(
                [x if turn.trainable else unknown for turn in turns for x in turn.reply_logps], dtype=torch.float32
            ),
            version_N=torch.repeat_interleave(torch.tensor([t.version for t in turns], dtype=torch.int64), lengths),
            reward_RC=torch.tensor(rewards, dtype=torch.float32),
            channels=names,
            weight_C=torch.tensor([(weights or {}).get(name, 1.0) for name in names]),
        )

    def save(self, path: str | Path) -> None:
        """Write every column to one safetensors file."""
        columns = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        extra = {f"extra.{name}": tensor for name, tensor in self.extra.items()}
        tensors = {name: tensor.clone().contiguous() for name, tensor in {**columns, **extra}.items()}
        save_file(tensors, str(path), metadata={"channels": json.dumps(self.channels)})

    @classmethod
    def load(cls, path: str | Path) -> Batch:
        """Read back what `save` wrote, exactly."""
        with safe_open(str(path), "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            channels = tuple(json.loads(file.metadata()["channels"]))
        extra = {name.removeprefix("extra."): x for name, x in tensors.items() if name.startswith("extra.")}
        columns = {name: x for name, x in tensors.items() if not name.startswith("extra.")}
        return cls(**columns, channels=channels, extra=extra)


def shape_letters(name: str) -> str:
    """The capital letters after the last underscore of a tensor's name: `reward_RC` -> "RC"."""
    letters = name.rsplit("_", 1)[-1]
    return letters if letters.isupper() and letters.isalpha() else ""


def _members(owner: Tensor, chosen: Tensor, owners: int) -> Tensor:
    """Indices of the members of the chosen owners, in the order of the chosen; `owner` must not decrease."""
    size = torch.bincount(owner, minlength=owners)
    start = size.cumsum(0) - size
    size, start = size[chosen], start[chosen]
    within = torch.arange(int(size.sum())) - torch.repeat_interleave(size.cumsum(0) - size, size)
    return torch.repeat_interleave(start, size) + within


# ---- one pass of the policy -------------------------------------------------------------------------------------


@dataclass
class Forward:
    """One differentiable pass over the sampled tokens of a batch: `logp_N` always, the rest when asked for.

    `ask` holds what this pass can also compute, each at most once and only when an objective reads it:
    `entropy_N`, `logits_NV`, `hidden_ND` (at the predicting position), `value_N`.
    """

    logp_N: Tensor  # log-prob of each sampled token at the temperature it was sampled with
    ask: Mapping[str, Callable[[], Tensor]] = field(default_factory=dict)
    second_pass: Callable[[Sequence[Sequence[int]]], Forward] | None = None
    asked: dict[str, Tensor] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_") or name not in self.ask:
            raise AttributeError(f"this forward pass gives logp_N and {sorted(self.ask)}, but it was asked for {name}")
        if name not in self.asked:
            self.asked[name] = self.ask[name]()
        return self.asked[name]

    def under(self, prompt_ids_K: Sequence[Sequence[int]]) -> Forward:
        """A second differentiable pass of the same sampled tokens, turn k under the prompt `prompt_ids_K[k]`."""
        if self.second_pass is None:
            raise AttributeError("this forward pass cannot be repeated under another prompt")
        return self.second_pass(prompt_ids_K)


# ---- who samples ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one reply is sampled."""

    max_tokens: int  # of the reply
    temperature: float = 1.0  # 0: the most likely token, always
    top_p: float = 1.0
    stream: str = ""  # names the stream of random numbers: same name, weights and prompt, same reply


@dataclass(frozen=True)
class Piece:
    """Tokens of a reply as they are sampled; the last piece of a reply carries the finish reason."""

    ids: tuple[int, ...]
    logps: tuple[float, ...]
    version: int
    finish_reason: Literal["stop", "length"] | None = None


class Engine(Protocol):
    """Who samples: token ids in, token ids and log-probabilities out.

    Closing the iterator of `sample` early ends that reply and frees its place.
    """

    context: int  # most tokens of prompt and reply together
    version: int  # of the weights now in use

    def sample(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncIterator[Piece]: ...

    async def pause(self) -> None:
        """Let running replies end, hold new ones back; returns when nothing runs. Weights may then change."""
        ...

    def resume(self, version: int) -> None:
        """Serve again, as policy `version`; what was computed under older weights is forgotten."""
        ...


# ---- methods ----------------------------------------------------------------------------------------------------


@runtime_checkable
class Scorer(Protocol):
    """A model that gives the log-probs of given tokens: the policy, a frozen copy, a teacher."""

    async def logps(self, turns: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Tensor]:
        """For each (prompt_ids, reply_ids): float32 log-probs [len(reply_ids)], no gradient."""
        ...


@runtime_checkable
class Asker(Protocol):
    """A model that answers in words: a judge, a critic."""

    async def ask(self, messages: Sequence[Json], **options: Any) -> str: ...


@dataclass(frozen=True)
class Services:
    """What evidence may call: the policy, frozen copies, teachers and judges, each by name."""

    scorers: Mapping[str, Scorer] = field(default_factory=dict)  # "policy", "reference", "teacher", "critic", ...
    askers: Mapping[str, Asker] = field(default_factory=dict)  # "judge", ...

    def scorer(self, name: str) -> Scorer:
        if name not in self.scorers:
            raise ValueError(f"this method needs the scorer {name!r}, but the run has {sorted(self.scorers)}")
        return self.scorers[name]

    def asker(self, name: str) -> Asker:
        if name not in self.askers:
            raise ValueError(f"this method needs the asker {name!r}, but the run has {sorted(self.askers)}")
        return self.askers[name]


@dataclass(frozen=True)
class Paper:
    """Where a method comes from, and how far the page we worked from is the paper itself."""

    title: str
    authors: str = ""  # authors or lab
    year: int | None = None
    arxiv: str | None = None
    source: Literal["paper", "summary", "reconstructed"] = "paper"
    also_called: tuple[str, ...] = ()


Reward = Callable[[Rollout], Awaitable[Mapping[str, float | None]]]
Evidence = Callable[[Sequence[Rollout], Batch, Services], Awaitable[Mapping[str, Tensor]]]
Credit = Callable[[Batch], Tensor]
Objective = Callable[[Forward, Tensor, Batch], Tensor]
Average = Callable[[Batch], Tensor]


@dataclass(frozen=True, kw_only=True)
class Method:
    """A choice of one part on each slot, plus the paper it comes from. `None` leaves the slot to the recipe."""

    paper: Paper
    credit: Credit
    objective: Objective
    average: Average
    reward: Reward | None = None
    evidence: tuple[Evidence, ...] = ()  # run in order; later ones see the columns of earlier ones
    update: Callable[..., Any] | None = None  # how parameters move; None: AdamW as the recipe configures it
    memory: Callable[..., Any] | None = None
    curriculum: Callable[..., Any] | None = None
    accept: Callable[[Tensor], bool] | None = None  # reward_R of one group -> does it enter; else more is sampled
    train: Callable[..., Any] | None = None  # a method that cannot be said in slots brings its own
    needs: tuple[str, ...] = ()  # beyond a policy: "reference", "value_head", "judge", "teacher", ...
    excused: tuple[str, ...] = ()  # laws of the contract that this method does not obey, each argued in `differs`
    differs: str = ""  # every departure from the paper, with its reason

    def but(self, **changes: Any) -> Method:
        """The same method with some parts exchanged."""
        return replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A paper's central claim against its own baseline, as an experiment: `measure(arm, seed)` gives one number."""

    says: str
    baseline: Any
    method: Any
    measure: Callable[[Any, int], float]
    better: Literal["higher", "lower"]
    seeds: int = 6
    arms: Mapping[str, Any] = field(default_factory=dict)  # further arms and controls, by name
