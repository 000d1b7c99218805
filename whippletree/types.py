"""The nouns. Nothing here imports the rest of the package, and everything else may import this.

Shape letters end every tensor name:

    R rollouts   K turns   N sampled tokens   C reward channels   J rubric criteria   V vocabulary   D hidden width
    M tokens read beside each sampled one (the most likely, or given ids)

A `Batch` is flat: one entry per *sampled* token, in turn order. Prompts and tool output are not in it. It stands in
`batch.py` for its length, and is imported from here like every other noun.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from whippletree.batch import Batch as Batch
from whippletree.batch import shape_letters as shape_letters

Json = dict[str, Any]
Ending = Literal["done", "truncated", "failed"]
Blame = Literal["harness", "engine", "judge", "sandbox", "reward"]
Link = Literal["root", "append", "realign", "fork"]


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

    `thread` says which conversation of the rollout it belongs to: "main", or a kind and a number ("sub-agent/1",
    "title/1", "summary/1"). `link` says how its prompt follows from an earlier turn: it is a "root", it begins with the
    whole of one ("append"), with one but for a short span of its reply ("realign"), or with a part of one ("fork").
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
    thread: str = "main"
    link: Link = "root"
    versions: tuple[int, ...] = ()  # of each sampled token, where weights changed within the reply; else empty
    info: Json = field(default_factory=dict)  # what the gateway noted: API, malformed calls, drift, the turn retried

    def __post_init__(self) -> None:
        if self.versions and len(self.versions) != len(self.reply_ids):
            raise ValueError(
                f"turn {self.id}: versions are one for each of {len(self.reply_ids)} sampled tokens, or none where "
                f"all are of `version`, but there are {len(self.versions)}"
            )
        if len(self.reply_ids) != len(self.reply_logps):
            raise ValueError(
                f"turn {self.id}: each sampled token needs one log-probability, but there are {len(self.reply_ids)} "
                f"ids and {len(self.reply_logps)} log-probabilities; use NaN where one is unknown"
            )

    @property
    def trainable(self) -> bool:
        """The distribution that was sampled is one the trainer can express: tempered, not cut off, and finished."""
        return self.temperature > 0 and self.top_p >= 1 and self.finish_reason != "abandoned"

    @property
    def kind(self) -> str:
        """What its thread is for: "main", "sub-agent", "title", "summary", ..."""
        return self.thread.partition("/")[0]

    def to_json(self) -> Json:
        """A JSON object that `from_json` turns back into an equal turn; NaN is written as null."""
        row = {f.name: getattr(self, f.name) for f in fields(self)}
        row |= {name: list(row[name]) for name in ("prompt_ids", "reply_ids", "versions")}
        row["reply_logps"] = [None if math.isnan(x) else x for x in self.reply_logps]
        return row

    @classmethod
    def from_json(cls, row: Json) -> Turn:
        ids = {name: tuple(row.get(name, ())) for name in ("prompt_ids", "reply_ids", "versions")}
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

    @property
    def paused(self) -> bool:
        """Whether new replies are held back."""
        ...

    def sample(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Piece, None]: ...

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


# the sampled token alone; the whole vocabulary; the M most likely tokens; the ids [n, M] given for each turn
Kind = Literal["sampled", "full"] | int | Sequence[Tensor]


@dataclass(frozen=True)
class Scored:
    """What a model says at the places of N sampled tokens, at the temperature of sampling; float32, no gradient.

        sum of exp(logp_NM) over M + exp(tail_N) = 1

    M is 0 where only the sampled token was asked for, and V, with a tail of -inf, for the full distribution.
    """

    logp_N: Tensor
    id_NM: Tensor
    logp_NM: Tensor
    tail_N: Tensor  # log of the mass of all tokens that are not in id_NM

    def split(self, lengths: Sequence[int]) -> list[Scored]:
        """One for each turn."""
        columns = (self.logp_N, self.id_NM, self.logp_NM, self.tail_N)
        return [Scored(*parts) for parts in zip(*(x.split(list(lengths)) for x in columns), strict=True)]


@runtime_checkable
class Reader(Scorer, Protocol):
    """A scorer that also gives distributions, each turn at its own temperature."""

    async def score(
        self, turns: Sequence[tuple[Sequence[int], Sequence[int], float]], kind: Kind = "sampled"
    ) -> Sequence[Scored | None]:
        """For each (prompt_ids, reply_ids, temperature) what is asked for; None where the model failed on it.

        Raises:
            ValueError: it cannot give this kind, or not at this temperature.
        """
        ...


@runtime_checkable
class Asker(Protocol):
    """A model that answers in words: a judge, a critic."""

    async def ask(self, messages: Sequence[Json], **options: Any) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Again:
    """A further rollout on the task of one that ended, by the same harness: a new start, or a continuation.

    The first `turn` turns are played back as they were, token for token; from there on the policy samples. A `note` is
    told to the policy alone, at the end of the last message before turn `turn`, where it stays for all later turns.

    In the new rollout, `info` of a turn that was played back has "played": the id of the turn it repeats; that of a
    turn under a note has "plain_prompt_ids": its prompt as it would be without one.
    """

    rollout: Rollout
    turn: int = 0
    note: str = ""


Play = Callable[[Sequence[Again]], Awaitable[list[Rollout | None]]]  # scored; None: it failed, or asked otherwise


@dataclass(frozen=True)
class Services:
    """What evidence may call: the policy, frozen copies, teachers and judges, each by name; and further rollouts."""

    scorers: Mapping[str, Scorer] = field(default_factory=dict)  # "policy", "reference", "teacher", "critic", ...
    askers: Mapping[str, Asker] = field(default_factory=dict)  # "judge", ...
    tokenizer: Any = None  # of the policy, for evidence that writes prompts of its own
    play: Play | None = None

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


@dataclass(frozen=True)
class Kept:
    """The turns of a rollout that may train, and how many were left out for each reason (`tree/dead_leaves`, ...)."""

    turns: tuple[Turn, ...]
    removed: Mapping[str, int] = field(default_factory=dict)


Keep = Callable[[Rollout], Kept]
Reward = Callable[[Rollout], Awaitable[Mapping[str, float | None]]]
More = Callable[[Sequence[Rollout], Services], Awaitable[Sequence[Rollout]]]
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
    more: More | None = None  # what is trained beside the rollouts of the step: further ones, as `Services.play` gives
    keep: Keep | None = None  # which turns of a rollout may train; None: those of the recipe's threads
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
