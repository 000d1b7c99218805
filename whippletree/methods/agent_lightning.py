"""Agent Lightning v1.0: RL through an unmodified harness, with every statistic over rollouts (arXiv:2608.17528).

keep      calls that got a reply; of those with the same prompt the last one
evidence  log pi_trainer(t), the trainer's own log-prob before the update
A_i  = (r_i - mean(r)) / std(r)          over the *rollouts* of a group, equal on all their tokens
w_t  = min(pi_trainer(t) / pi_engine(t), 2), no gradient
loss = w_t times the clipped ratio loss against pi_trainer, with a dual clip of 3
     = (1/R) sum_i (1 / L_i) sum_t loss_t                  L_i: trained tokens of all calls of a rollout

A harness that rewrites its history breaks a rollout into several rows of a trainer, as often as templates, tokenizers
and summaries have it, and not the task. Over rows, a rollout in three pieces counts three times in the baseline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random

import torch
from torch import Tensor

from whippletree import credit, objective
from whippletree.evidence import trainer_logps
from whippletree.methods import _scripted
from whippletree.tree.black_box import request_of
from whippletree.types import Batch, Claim, Kept, Method, Paper, Rollout, Services
from whippletree.update.averages import rollout_mean, token_mean


def last_of_each_prompt(rollout: Rollout) -> Kept:
    """Turns with a reply that was read, and of those with the same prompt the last request: others were retries."""
    answered = [turn for turn in rollout.turns if turn.reply_ids and turn.finish_reason != "abandoned"]
    last = {turn.prompt_ids: request_of(turn) for turn in answered}
    turns = tuple(turn for turn in answered if last[turn.prompt_ids] == request_of(turn))
    return Kept(turns, {"tree/empty": len(rollout.turns) - len(answered), "tree/retries": len(answered) - len(turns)})


async def rows(rollouts: Sequence[Rollout], batch: Batch, services: Services) -> Mapping[str, Tensor]:
    """`row_K`: which row each turn would stand in, where a turn joins the row before if it begins with all of it."""
    found = [-1]
    for rollout in rollouts:
        before: tuple[int, ...] | None = None
        for turn in rollout.turns:
            joins = before is not None and turn.prompt_ids[: len(before)] == before
            found.append(found[-1] + (not joins))
            before = turn.prompt_ids + turn.reply_ids
    return {"row_K": torch.tensor(found[1:], dtype=torch.int64)}


def over_rows(batch: Batch) -> Tensor:
    """[N] the credit that the paper replaces: mean and std over the rows of a group, so a broken rollout counts more.

    It reads the evidence `row_K`.
    """
    _, row_K = torch.unique_consecutive(batch.column("row_K"), return_inverse=True)
    rollout_R = torch.zeros(int(row_K.max()) + 1, dtype=torch.int64).index_copy(0, row_K, batch.rollout_K)
    pieces = {"group_R": batch.group_R[rollout_R], "reward_RC": batch.reward_RC[rollout_R], "rollout_K": row_K}
    return credit.group_mean(replace(batch, **pieces, extra={}))


METHOD = Method(
    paper=Paper(
        "Agent Lightning v1.0",
        authors="Microsoft",
        year=2026,
        arxiv="2608.17528",
        source="summary",
        also_called=("agent-lightning", "rollout-level advantage"),
    ),
    evidence=(trainer_logps,),
    credit=partial(credit.group_mean, scale="std"),
    objective=partial(
        objective.truncated_importance,
        objective=partial(objective.clipped_ratio, low=0.2, high=0.2, dual=3.0),
        high=2.0,
    ),
    average=rollout_mean,
    keep=last_of_each_prompt,
    differs="calls are merged into a tree by longest prefix, not into rows by the call before, so interleaved "
    "sub-agents do not break it; a token's loss is the same. No row is cut, dropped or drawn to fill mini-batches, "
    "as micro-batches here hold whole rollouts of any number. The code divides by rows where the paper has "
    "rollouts, a constant for all tokens; ours is the paper's. Replies that one request asked for are no retries "
    "of each other. A missing reward or a failed rollout is missing, where the code fills in 0; a token without a "
    "log-prob does not train, where the code drops the correction of the whole batch. The page gives no clip "
    "range; 0.2 is PPO's. Turns of all threads train, as in the paper; the recipe's choice of threads has no "
    "effect. CLAIM's harness is ours, as in the page's own, BY_ACCIDENT here, the number of rows does not depend "
    "on the reward; replies have up to three tokens, and all arms an entropy bonus of 0.01",
)


def until_right(digit: int, random: Random) -> _scripted.Run:
    """Up to three calls for a digit, until it is there; after a miss the history is kept or, as often, summed up."""
    ids: _scripted.Ids = (_scripted.COPY, digit, _scripted.SAY)
    for _ in range(3):
        reply = yield _scripted.Ask(ids)
        if _scripted.says(reply, digit):
            return 1.0
        goes_on = (*ids, *reply, _scripted.SEE, _scripted.SAY)
        ids = (_scripted.COPY, digit, _scripted.SUMMARY, _scripted.SAY) if random.random() < 0.5 else goes_on
    return 0.0


def always_three(digit: int, random: Random) -> _scripted.Run:
    """Three calls for a digit, of which the last counts; before it the history is kept or, as often, summed up."""
    ids: _scripted.Ids = (_scripted.COPY, digit, _scripted.SAY)
    for _ in range(2):
        reply = yield _scripted.Ask(ids)
        ids = (*ids, *reply, _scripted.SEE, _scripted.SAY)
    if random.random() < 0.5:
        ids = (_scripted.COPY, digit, _scripted.SUMMARY, _scripted.SAY)
    return _scripted.says((yield _scripted.Ask(ids)), digit)


def learned(arm: Method, seed: int, *, harness: _scripted.Harness = until_right, updates: int = 100) -> float:
    """The mean reward (0 to 1) over all updates, each of 8 groups of 4 rollouts: how soon it is learned."""
    told = _scripted.learn(arm, {"reward": harness}, seed=seed, updates=updates)
    return _scripted.last(told, "reward", updates=updates)


OVER_ROWS = METHOD.but(evidence=(trainer_logps, rows), credit=over_rows, average=token_mean)

CLAIM = Claim(
    says="where a rollout breaks into more rows the longer it goes wrong, statistics over rollouts learn sooner than "
    "those over rows",
    baseline=OVER_ROWS,
    method=METHOD,
    measure=learned,
    better="higher",
    seeds=12,
    arms={"only the advantage over rollouts": METHOD.but(average=token_mean)},
)

# the page's own harness, where the rows of a rollout have nothing to do with its reward
BY_ACCIDENT = replace(
    CLAIM, says="the same where it breaks by accident", measure=partial(learned, harness=always_three)
)
