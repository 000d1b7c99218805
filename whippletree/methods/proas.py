"""ProAS: an advantage masked and moved by whether each turn went towards the goal (LINs lab 2026).

evidence   a graph for each task, of the states that successes went through; d(s) = fewest steps from s to success
    phi(s)     = 1 - d(s) / D,  D the largest d of a first state;  delta = phi(s') - phi(s)
    label_K    P valid, delta > 0;  N valid, delta = 0;  B valid, delta < 0;  I invalid: an error, and still in s;
               U s or s' is not in the graph, or the turn only looked
A_i        of GRPO, or any other credit
A_i > 0    w = 1 for P and U, 0 for I, B and N                                                masked, not renormalised
A_i < 0    w = alpha for P, 1 for U, and for I, B and N       what P is spared, they have in addition
               1 + sum over P of n_t (1 - alpha) / sum over I, B, N of n_t, at most 5;   alpha 0.2, n_t tokens of a turn
A_t      = w A_i  on all tokens of the turn
loss     = the clipped ratio loss

Cost beyond GRPO: none of tokens or models; states and steps are read off what the harness sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from whippletree import credit
from whippletree.methods import _corridor, grpo
from whippletree.methods._observed import ERRORS, done, steps
from whippletree.types import Batch, Claim, Credit, Method, Paper, Rollout, Services

UNKNOWN, PROGRESS, STALL, REGRESS, INVALID = range(5)
GOAL = "success"  # what follows the last turn of a success, whatever it shows
LOOKS = r"(?i)^\W*(look|inventory|examine|help|ls|cat|read|list)\b"


@dataclass
class Graph:
    """The steps that successes took on one task."""

    before: dict[str, set[str]] = field(default_factory=dict)  # state -> those from which a step led there
    starts: set[str] = field(default_factory=set)

    def add(self, states: Sequence[str]) -> None:
        """A success, as the states before each of its turns."""
        self.starts.update(states[:1])
        for a, b in zip(states, [*states, GOAL][1:], strict=True):
            self.before.setdefault(b, set()).add(a)

    def distances(self) -> dict[str, int]:
        """Fewest steps to success from each state of which that is known."""
        found, edge = {GOAL: 0}, [GOAL]
        for state in edge:
            new = [s for s in self.before.get(state, ()) if s not in found]
            found |= dict.fromkeys(new, found[state] + 1)
            edge += new
        return found

    def potentials(self) -> dict[str, float]:
        """phi of each such state: 1 at success, 0 at the farthest first state."""
        found = self.distances()
        return {state: 1 - d / max(found[start] for start in self.starts) for state, d in found.items()}


def normalised(text: str) -> str:
    """A text in small letters without numbers and ids: what looks alike is the same state."""
    return " ".join(re.sub(r"\b[0-9a-f]*\d[0-9a-f-]*\b", "#", text.lower()).split())


async def annotated(
    rollouts: Sequence[Rollout],
    batch: Batch,
    services: Services,
    *,
    graphs: dict[str, Graph] | None = None,
    state: Callable[[str], str] = normalised,
    success: float = 1.0,
    errors: str = ERRORS,
    looks: str = LOOKS,
) -> Mapping[str, Tensor]:
    """`label_K`, by the successes (a reward of `success` or more) in this batch on the same task.

    They are added to `graphs`, if given, which may hold those of earlier batches, and demonstrations. A turn in which
    what is done matches `looks` only looked; `state` and `errors` are as for `steps`.
    """
    graphs, labels = {} if graphs is None else graphs, list[int]()
    walks = [steps(rollout, state=state, errors=errors) for rollout in rollouts]
    ends = [GOAL if won else None for won in (batch.reward_R >= success).tolist()]
    for rollout, walk, end in zip(rollouts, walks, ends, strict=True):
        if end:
            main = [step.at for step, turn in zip(walk, rollout.turns, strict=True) if turn.thread == "main"]
            graphs.setdefault(rollout.task.id, Graph()).add(main)
    for rollout, walk, end in zip(rollouts, walks, ends, strict=True):
        left = graphs.get(rollout.task.id, Graph()).distances()
        for step, turn in zip(walk, rollout.turns, strict=True):
            then = end if step.then is None and turn.thread == "main" else step.then
            known = not re.search(looks, done(turn)) and step.at in left and then in left
            gained = left[step.at] - left[then] if known and then else 0
            moved = PROGRESS if gained > 0 else REGRESS if gained < 0 else STALL
            labels.append(INVALID if step.refused else moved if known else UNKNOWN)
    return {"label_K": torch.tensor(labels, dtype=torch.int64)}


def shaped(
    batch: Batch, *, base: Credit = credit.group_mean, alpha: float = 0.2, most: float = 5.0, stall: float = 0.0
) -> Tensor:
    """[N] the advantage of `base`, masked where it is above 0, and moved from progress to blame where it is below.

    `stall` is the weight of N in a success; `most` bounds the weight of blamed turns. It reads the evidence `label_K`.
    """
    label_K = batch.column("label_K")
    size_K = torch.bincount(batch.turn_N[batch.trainable_N], minlength=batch.turns)

    def tokens(of_K: Tensor) -> Tensor:
        return torch.zeros(batch.rollouts).index_add_(0, batch.rollout_K, of_K * size_K.float())

    blamed_K = (label_K != UNKNOWN) & (label_K != PROGRESS)
    more_R = (1 - alpha) * tokens(label_K == PROGRESS) / tokens(blamed_K).clamp(min=1)
    masked_K = torch.tensor([1.0, 1.0, stall, 0.0, 0.0])[label_K]
    moved_K = torch.where(blamed_K, (1 + more_R).clamp(max=most)[batch.rollout_K], masked_K)
    moved_K = torch.where(label_K == PROGRESS, alpha, moved_K)
    advantage_N = base(batch)
    return advantage_N * torch.where(advantage_N > 0, masked_K[batch.turn_N], moved_K[batch.turn_N])


METHOD = Method(
    paper=Paper(
        "ProAS: A Progress-Aware Advantage Shaping Framework for Multi-Turn Agentic Reinforcement Learning",
        *("LINs lab", 2026),
        source="reconstructed",
        also_called=("progress-aware advantage shaping",),
    ),
    evidence=(annotated,),
    credit=shaped,
    objective=grpo.METHOD.objective,
    average=grpo.METHOD.average,
    differs="only names and numbers of the paper are known: labels, weights and their defaults are the page's "
    "filling-in. The graph is of the successes of the batch, so that a run that goes on from a checkpoint is the same; "
    "`graphs` keeps those of earlier batches. States are what is seen, in small letters and without numbers, as the "
    "environment's own are not known; inventories are not sorted; of the last turn of a failure nothing is known. The "
    "clip range is PPO's; how often `most` binds is not logged",
)


def learned(arm: Callable[[], Method], seed: int) -> float:
    """Updates until the corridor is walked, at most 150, where a cell is a state."""
    return _corridor.updates(arm().but(average=_corridor.SUMMED), seed)


def made(*, demonstrated: bool = False, dealt: bool = False, **settings: Any) -> Method:
    """The method with a graph that holds a straight walk from the beginning, or with labels dealt anew."""
    straight = Graph()
    straight.add([f"cell {cell}" for cell in range(_corridor.CELLS - 1)])
    found = partial(annotated, state=str, graphs={"0": straight} if demonstrated else None)
    evidence = (found, _dealt) if dealt else (found,)
    return METHOD.but(evidence=evidence, credit=partial(shaped, **settings))


async def _dealt(rollouts: Sequence[Rollout], batch: Batch, services: Services) -> Mapping[str, Tensor]:
    order = (batch.rollout_K + torch.rand(batch.turns)).argsort()
    return {"label_K": batch.column("label_K")[order]}


CLAIM = Claim(
    says="masked and moved by progress, an advantage needs fewer updates than GRPO's",
    baseline=partial(grpo.METHOD.but),
    method=made,
    measure=learned,
    better="lower",
    seeds=12,
    arms={
        "a demonstration": partial(made, demonstrated=True),
        "a demonstration, nothing moved": partial(made, demonstrated=True, most=1.0),
        "a demonstration, masked alone": partial(made, demonstrated=True, alpha=1.0),
        "stalls keep half of a reward": partial(made, stall=0.5),
        "labels dealt anew": partial(made, dealt=True),
    },
)
