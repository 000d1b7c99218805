"""ClawGym II: RL through black-box harnesses, on the main paths of each rollout's prefix tree (arXiv:2608.16798).

keep      dead leaves, side threads and over-branched rollouts do not train
evidence  log pi_trainer(t), the trainer's own log-prob before the update
A_i  = (r_i - mean(r)) / std(r)          over the group of a task and harness, equal on all tokens that are left
A_t  = delta_t + gamma lam A_{t+1},  delta_t = r_t + gamma V_{t+1} - V_t          (PPO, in place of A_i)
       on each path from root to leaf, over sampled tokens alone; r_t = r_i at its end, else 0;
       a token on several paths has the mean of its A_t there, and V_t is to become that + V_t
w_t  = min(pi_trainer(t) / pi_engine(t), 2), no gradient
loss = -w_t min(rho_t A_t, clip(rho_t, 1 - 0.2, 1 + 0.2) A_t),  rho_t = pi(t) / pi_trainer(t)
     = (1/R) sum_i (1 / L_i) sum_t loss_t                  L_i: trained tokens of a rollout, each once, on all paths
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random

import torch
from torch import Tensor

from whippletree import credit, evidence, objective
from whippletree.methods import _scripted
from whippletree.tree.black_box import main_paths, parents, threads
from whippletree.types import Batch, Claim, Kept, Method, Paper, Rollout, Services
from whippletree.update.averages import rollout_mean


async def branches(rollouts: Sequence[Rollout], batch: Batch, services: Services) -> Mapping[str, Tensor]:
    """`back_K`: how many turns before a turn its parent stands, in the tree of its rollout; 0: it has none."""
    above = [(k, parent) for rollout in rollouts for k, parent in enumerate(parents(rollout.turns))]
    return {"back_K": torch.tensor([k - parent if parent >= 0 else 0 for k, parent in above], dtype=torch.int64)}


def gae_on_paths(batch: Batch, *, gamma: float = 1.0, lam: float = 0.95) -> Tensor:
    """[N] `credit.gae` on each path from root to leaf, as if it were a rollout; the mean over the paths of a token.

    It reads the evidence `back_K` and `value_N`. The letters here: E the turns of all paths, P the paths; a turn on
    several paths stands in E several times.

    Raises:
        ValueError: `back_K`, `value_N` or a reward is missing.
    """
    turn_E, path_E = paths(batch.column("back_K"))
    columns = {"value_N": batch.column("value_N"), "place_N": torch.arange(batch.tokens)}
    each = replace(  # each turn as a rollout, so that they can be chosen in any order
        batch,
        group_R=batch.group_R[batch.rollout_K],
        reward_RC=batch.reward_RC[batch.rollout_K],
        rollout_K=torch.arange(batch.turns),
        extra=columns,
    ).select(turn_E)
    last_P = torch.bincount(path_E).cumsum(0) - 1
    joined = replace(each, group_R=each.group_R[last_P], reward_RC=each.reward_RC[last_P], rollout_K=path_E)
    place = joined.column("place_N")
    total_N = torch.zeros(batch.tokens).index_add(0, place, credit.gae(joined, gamma=gamma, lam=lam))
    return total_N / torch.bincount(place, minlength=batch.tokens)


def paths(back_K: Tensor) -> tuple[Tensor, Tensor]:
    """([E] the turns of each path from root to leaf, [E] the path of each), one path after the other."""
    place_K = torch.arange(len(back_K))
    turn = place_K[~torch.isin(place_K, (place_K - back_K)[back_K > 0])]  # the leaves; then a step up in each round
    path, found = torch.arange(len(turn)), [place_K.new_zeros(2, 0)]
    while len(turn):
        found.append(torch.stack([path, turn]))
        path, turn = path[back_K[turn] > 0], (turn - back_K[turn])[back_K[turn] > 0]
    path_E, turn_E = torch.cat(found, dim=1).unique(dim=1)  # sorted by path, and in a path by turn
    return turn_E, path_E


CORRECTED = partial(
    objective.truncated_importance, objective=partial(objective.clipped_ratio, low=0.2, high=0.2), high=2.0
)

METHOD = Method(
    paper=Paper(
        "ClawGym II",
        authors="Renmin University, IQuest",
        year=2026,
        arxiv="2608.16798",
        source="summary",
        also_called=("clawgym", "GRPO on trees"),
    ),
    evidence=(evidence.trainer_logps,),
    credit=partial(credit.group_mean, scale="std"),
    objective=CORRECTED,
    average=rollout_mean,
    keep=main_paths,
    differs="the paper's training code is not out: which leaves are dead, which threads are aside, the limit of 8 "
    "leaves, std with n - 1, the bound of 2, the mean over a rollout's tokens and, in PPO, over the paths of a token "
    "are the page's filling-in; the clip range 0.2, and PPO's gamma 1, lam 0.95 and coefficient 0.5, are ours. A "
    "reward that is not finite is missing and its reason is counted, where the paper makes it 0 with a warning: the "
    "run tries such a rollout again, or leaves its whole group out. Side calls are told by their thread, for which "
    "the gateway reads headers and prompts as well as tools and system prompt. A turn holds its whole prompt, so a "
    "shared token trains once without claims of paths on it. A lone rollout has advantage 0. CLAIM's harnesses are "
    "ours, as the page describes them; all its arms have an entropy bonus of 0.03",
)

ADVANTAGE = partial(gae_on_paths, gamma=1.0, lam=0.95)

PPO = METHOD.but(
    evidence=(evidence.trainer_logps, evidence.values, branches, partial(evidence.returns, credit=ADVANTAGE)),
    credit=ADVANTAGE,
    objective=partial(objective.with_value, objective=CORRECTED, coefficient=0.5),
    needs=("value_head",),
    excused=("equal rewards teach nothing",),
    differs=METHOD.differs + ". Advantages are not whitened. Excused: with equal rewards it still learns from how the "
    "value was wrong",
)


def appends(digit: int, random: Random) -> _scripted.Run:
    """A call, an observation that shows the digit, and a second call, which is to say it, with all of the history."""
    ids: _scripted.Ids = (_scripted.COPY, _scripted.SAY)
    reply = yield _scripted.Ask(ids)
    return _scripted.says((yield _scripted.Ask((*ids, *reply, _scripted.SEE, digit, _scripted.SAY))), digit)


def rewrites(digit: int, random: Random) -> _scripted.Run:
    """The same, but half of the first calls are asked again, a title is asked for, and the history is summed up."""
    for _ in range(1 + (random.random() < 0.5)):
        yield _scripted.Ask((_scripted.COPY, _scripted.SAY))
    yield _scripted.Ask((_scripted.TITLE, digit, _scripted.SAY), "title/1")
    ids = (_scripted.COPY, _scripted.SUMMARY, _scripted.SEE, digit, _scripted.SAY)
    return _scripted.says((yield _scripted.Ask(ids)), digit)


HARNESSES: Mapping[str, _scripted.Harness] = {"appends": appends, "rewrites": rewrites}


def everything(rollout: Rollout) -> Kept:
    """All turns: the filters off."""
    return Kept(rollout.turns)


def learned(arm: Method, seed: int, *, updates: int = 150, over: int = 20) -> float:
    """The reward (0 to 1) on the harness where it is lower, over the last updates, each of 8 tasks x 2 x 4 rollouts."""
    told = _scripted.learn(arm, HARNESSES, seed=seed, updates=updates, bonus=0.03)
    return min(_scripted.last(told, name, updates=over) for name in HARNESSES)


CLAIM = Claim(
    says="one policy learns two harnesses, and better from the main paths than from every call",
    baseline=METHOD.but(keep=everything),
    method=METHOD,
    measure=learned,
    better="higher",
    seeds=12,
    arms={"only side calls left out": METHOD.but(keep=threads)},
)

# the same, but how soon: over all updates
SOONER = replace(CLAIM, says="the same, over all updates", measure=partial(learned, over=150))
