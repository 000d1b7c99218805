"""The exact cases of the page are numbered as there."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import partial

import pytest
import torch

from whippletree import credit
from whippletree.methods import _scripted
from whippletree.methods._tables import HALF, WORKED, forward_of, gradient, moves, table
from whippletree.methods._toy import learn, negated
from whippletree.methods.clawgym_ii import (
    CLAIM,
    HARNESSES,
    METHOD,
    PPO,
    SOONER,
    branches,
    everything,
    gae_on_paths,
    learned,
    paths,
)
from whippletree.methods.contract_test import LAWS, numbered
from whippletree.reward.channels import error_counts, score
from whippletree.tree.black_box import kept
from whippletree.tree.grow import grow
from whippletree.types import Batch, Rollout, Services, Task, Tree, Turn

BATCH = WORKED.with_extra(logp_train_N=WORKED.logp_old_N + torch.tensor([0.1, 0, -0.1, 0.2, 0, 0.9, 0, -0.3, 0]))

KEEP = METHOD.keep or everything

BLIND = METHOD.but(credit=partial(negated, credit=METHOD.credit))


def turn(name: str, prompt: list[int], reply: list[int], thread: str = "main") -> Turn:
    return Turn(name, tuple(prompt), tuple(reply), (HALF,) * len(reply), 0, "stop", thread=thread)


def rollout(*turns: Turn, group: str = "g", reward: float = 1.0) -> Rollout:
    return Rollout("r", Task("t"), group, turns, {"reward": reward})


def tree_of(found: Rollout) -> Tree:
    return grow([(turn.prompt_ids, turn.reply_ids) for turn in found.turns])


RETRIED = rollout(
    turn("c0", [1, 2], [3]),
    turn("c1", [1, 2, 3, 4], [5]),
    turn("c2", [1, 2, 3, 4], [6]),
    turn("c3", [1, 2, 3, 4, 6, 7], [8]),
    turn("c4", [9, 9], [9], "sub-agent/1"),
)
FORKED = rollout(turn("c0", [1], [2]), turn("c1", [1, 2, 3], [4]), turn("c2", [1, 2, 5], [6]))


# ---- which tokens train -----------------------------------------------------------------------------------------


def test_case_1_the_retried_leaf_and_the_side_call_do_not_train() -> None:
    (found,), told = kept([RETRIED], KEEP)
    assert [t.id for t in found.turns] == ["c0", "c2", "c3"]
    assert (told["tree/dead_leaves"], told["tree/aux"], told["tree/main_trajectories"]) == (1, 1, 1)
    # mask 0 0 1 0 1 0 1
    tree = tree_of(found)
    assert (tree.id_T.tolist(), tree.node_N.tolist()) == ([1, 2, 3, 4, 6, 7, 8], [2, 4, 6])


def test_case_2_a_token_that_paths_share_is_computed_once_and_trains_once() -> None:
    (found,), told = kept([FORKED], KEEP)
    assert told["tree/main_trajectories"] == 2
    batch = Batch.of([found])
    assert batch.id_N.tolist() == [2, 4, 6]
    torch.testing.assert_close(METHOD.average(batch), torch.full((3,), 1 / 3))
    # the paths are nodes 0 1 2 3 and 0 1 4 5; of them 1, 3, 5 train: masks 0 1 0 1 and, as 1 is taken, 0 0 0 1
    tree = tree_of(found)
    assert (tree.id_T.tolist(), tree.node_N.tolist()) == ([1, 2, 3, 4, 5, 6], [1, 3, 5])


def test_with_the_filters_off_each_sample_still_trains_once() -> None:
    (found,), _ = kept([RETRIED], everything)
    assert Batch.of([found]).id_N.tolist() == [3, 5, 6, 8, 9]
    assert len(set(tree_of(found).node_N.tolist())) == 5


# ---- GRPO on trees ----------------------------------------------------------------------------------------------


def rewarded(rewards: Sequence[float], groups: Sequence[str]) -> Batch:
    runs = zip(rewards, groups, strict=True)
    return Batch.of([rollout(turn("a", [1], [2]), group=group, reward=reward) for reward, group in runs])


def test_case_3_the_same_task_under_two_harnesses_is_two_groups() -> None:
    apart = rewarded([1.0, 0.0, 1.0, 1.0], ["t/openclaw", "t/openclaw", "t/claude-code", "t/claude-code"])
    torch.testing.assert_close(credit.group_mean(apart, scale="none"), torch.tensor([0.5, -0.5, 0.0, 0.0]))
    # 1/2 over a std of sqrt(1/2), with the divisor n - 1
    torch.testing.assert_close(METHOD.credit(apart), torch.tensor([0.5**0.5, -(0.5**0.5), 0.0, 0.0]))
    # pooled, which is wrong: the mean is 3/4
    pooled = rewarded([1.0, 0.0, 1.0, 1.0], ["t"] * 4)
    torch.testing.assert_close(credit.group_mean(pooled, scale="none"), torch.tensor([0.25, -0.75, 0.25, 0.25]))


async def test_case_5_a_reward_that_is_not_finite_is_missing_and_leaves_the_others_as_they_are() -> None:
    async def judged(rollout: Rollout) -> dict[str, float | None]:
        return {"reward": float(rollout.info["says"])}

    asked = [Rollout(s, Task("t"), "g", FORKED.turns, info={"says": s}) for s in ("nan", "1", "0")]
    scored = [await score(r, [judged], timeout=1.0) for r in asked]
    assert [r.rewards["reward"] for r in scored] == [None, 1.0, 0.0]
    assert error_counts(scored) == {"reward": 1}
    others = METHOD.credit(Batch.of(scored[1:]))
    torch.testing.assert_close(others, 0.5**0.5 * torch.tensor([1.0, 1, 1, -1, -1, -1]))
    with pytest.raises(ValueError, match=r"rollouts \[0\] have none"):
        METHOD.credit(Batch.of(scored))


def test_an_over_branched_rollout_does_not_train_but_its_reward_counts() -> None:
    # nine leaves; rewards 1 (left out), 0, 1/2: mean 1/2, std 1/2
    bush = rollout(*(turn(f"q{n}", [1, n], [2]) for n in range(9)), reward=1.0)
    others = [rollout(turn("a", [1], [2]), reward=reward) for reward in (0.0, 0.5)]
    rollouts, told = kept([bush, *others], KEEP)
    assert told["tree/over_branched"] == 1
    torch.testing.assert_close(METHOD.credit(Batch.of(rollouts)), torch.tensor([-1.0, 0.0]))


def test_the_gradient_on_policy_by_hand() -> None:
    # A: 0.7071 and -0.7071 of rewards 1, 0; tokens of 3 and 1; the first token's weight e^0.5 = 1.65, the second's
    # e^1 = 2.718, cut to 2
    batch = table([[2, 1], [1]], rewards=[1.0, 0.0], old=HALF, logp_train_N=[HALF + 0.5, HALF + 1, HALF, HALF])
    forward = forward_of(batch.extra["logp_train_N"])
    found = gradient(forward, METHOD.objective(forward, METHOD.credit(batch), batch), METHOD.average(batch))
    expected = 0.5**0.5 / 2 * torch.tensor([-math.exp(0.5) / 3, -2 / 3, -1 / 3, 1.0])
    torch.testing.assert_close(found, expected)


def test_the_clip_range() -> None:
    seen = moves(METHOD.objective, (1.19, 1), (1.21, 1), (0.81, -1), (0.79, -1))
    assert seen == [True, False, True, False]


# ---- PPO on trees -----------------------------------------------------------------------------------------------


def tree_table(back: Sequence[Sequence[int]], values: Sequence[float], rewards: Sequence[float] = (1.0,)) -> Batch:
    """Turns of one token each with these parents."""
    batch = table([[1] * len(turns) for turns in back], rewards=rewards, old=HALF, value_N=values)
    return batch.with_extra(back_K=torch.tensor([b for turns in back for b in turns], dtype=torch.int64))


async def test_the_tree_of_each_rollout_is_told_by_how_far_back_parents_stand() -> None:
    found = await branches([RETRIED, rollout(), FORKED], WORKED, Services())
    assert found["back_K"].tolist() == [0, 1, 2, 1, 0, 0, 1, 2]


def test_paths_go_from_root_to_leaf() -> None:
    # turns 0 <- 1, 0 <- 2 <- 3, and 4 alone
    turn_E, path_E = paths(torch.tensor([0, 1, 2, 1, 0]))
    assert turn_E.tolist() == [0, 1, 0, 2, 3, 4]
    assert path_E.tolist() == [0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize(("lam", "advantages"), [(1.0, [0.8, 0.4]), (0.5, [0.6, 0.4])])
def test_case_4_context_carries_value_through(lam: float, advantages: list[float]) -> None:
    # the context token of value 9 between the two is in no batch; lam = 1/2: 0.6 - 0.2 + (1 - 0.6) / 2
    batch = tree_table([[0, 1]], [0.2, 0.6])
    torch.testing.assert_close(gae_on_paths(batch, lam=lam), torch.tensor(advantages))


async def test_a_token_on_two_paths_has_the_mean_of_its_advantages_and_targets() -> None:
    # c1: 1 - 0.6 = 0.4, so c0: 0.6 - 0.2 + 0.4 / 2 = 0.6;  c2: 1 - 0.9 = 0.1, so c0: 0.9 - 0.2 + 0.1 / 2 = 0.75
    batch = tree_table([[0, 1, 2]], [0.2, 0.6, 0.9])
    half = partial(gae_on_paths, gamma=1.0, lam=0.5)
    torch.testing.assert_close(half(batch), torch.tensor([0.675, 0.4, 0.1]))
    # gamma = 1/2, lam = 1: c0 has 1/2 - 0.2 on both
    torch.testing.assert_close(gae_on_paths(batch, gamma=0.5, lam=1.0), torch.tensor([0.3, 0.4, 0.1]))
    # the method's own lam is 0.95: c0 0.4 + 0.95 * 0.4 = 0.78 and 0.7 + 0.95 * 0.1 = 0.795; targets add V
    found = await PPO.evidence[-1]([], batch, Services())
    torch.testing.assert_close(found["return_N"], torch.tensor([0.7875 + 0.2, 1.0, 1.0]))


def test_a_rollout_without_turns_has_no_path() -> None:
    batch = tree_table([[], [0, 1]], [0.2, 0.6], rewards=[1.0, 0.0])
    torch.testing.assert_close(gae_on_paths(batch, lam=1.0), torch.tensor([-0.2, -0.6]))
    assert gae_on_paths(tree_table([[]], [])).tolist() == []


def test_on_rollouts_of_one_path_it_is_the_usual_estimate() -> None:
    batch = WORKED.with_extra(value_N=torch.linspace(0, 1, 9), back_K=torch.tensor([0, 1, 0, 0, 1, 0, 0]))
    torch.testing.assert_close(gae_on_paths(batch, gamma=0.9, lam=0.8), credit.gae(batch, gamma=0.9, lam=0.8))


@pytest.mark.parametrize("seed", range(10))
def test_the_estimate_is_that_of_the_definition(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randrange(3) for _ in range(8)]  # one rollout, some turns without a reply
    back = [draw.randrange(k + 1) for k in range(8)]
    values = [draw.random() for _ in range(sum(lengths))]
    batch = table([lengths], rewards=[2.0], old=HALF, value_N=values).with_extra(back_K=torch.tensor(back))
    tokens = [[n for n, k in enumerate(batch.turn_N.tolist()) if k == turn] for turn in range(8)]
    found: list[list[float]] = [[] for _ in values]
    for leaf in set(range(8)) - {k - b for k, b in enumerate(back) if b}:
        path = [leaf]
        while back[path[0]]:
            path.insert(0, path[0] - back[path[0]])
        after, value, reward = 0.0, 0.0, 2.0
        for n in reversed([n for turn in path for n in tokens[turn]]):
            after = reward + 0.9 * value - values[n] + 0.9 * 0.8 * after
            value, reward = values[n], 0.0
            found[n].append(after)
    expected = torch.tensor([sum(each) / len(each) for each in found])
    torch.testing.assert_close(gae_on_paths(batch, gamma=0.9, lam=0.8), expected)


FOREST = table(
    [[2, 1, 1], [1], [1, 1], [2], [1]],
    groups=[0, 0, 1, 1, 1],
    rewards=[1.0, 0.0, 0.0, 2.0, 1.0],
    old=HALF,
    value_N=[0.5, 0.75, 0.5, 0.25, 0.5, 1.0, 0.5, 1.0, 1.5, 1.0],
    return_N=[1.0] * 10,
    logp_train_N=[HALF, HALF + 0.1, HALF, HALF - 0.1, HALF, HALF, HALF + 0.9, HALF, HALF, HALF],
).with_extra(back_K=torch.tensor([0, 1, 2, 0, 0, 0, 0, 0]))


@pytest.mark.parametrize("law", LAWS)
def test_ppo_obeys_every_law_that_it_is_not_excused_from(law: str) -> None:
    if law not in PPO.excused:
        LAWS[law](PPO, numbered(FOREST))
    else:
        with pytest.raises(AssertionError):
            LAWS[law](PPO, numbered(FOREST))


def test_the_gradient_of_ppo_by_hand_at_policy_and_value() -> None:
    # one rollout of three tokens: -A / 3 at the policy, 0.5 * 2 (V - G) / 3 = -A / 3 at the value too
    columns = {"logp_train_N": torch.full((3,), HALF), "return_N": torch.tensor([0.9875, 1.0, 1.0])}
    batch = tree_table([[0, 1, 2]], [0.2, 0.6, 0.9]).with_extra(**columns)
    forward = forward_of(batch.logp_old_N, value_N=batch.extra["value_N"])
    loss_N = PPO.objective(forward, PPO.credit(batch), batch)
    expected = -torch.tensor([0.7875, 0.4, 0.1]) / 3
    torch.testing.assert_close(gradient(forward, loss_N, PPO.average(batch)), expected)
    (at_value,) = torch.autograd.grad((PPO.average(batch) * loss_N).sum(), forward.value_N)
    torch.testing.assert_close(at_value, expected)


# ---- two harnesses, one policy ----------------------------------------------------------------------------------


def test_only_the_harness_that_retries_and_asks_aside_has_anything_left_out() -> None:
    rollouts = _scripted.step(_scripted.Policy(0), HARNESSES, 0, tasks=8, size=4)
    assert len({r.group for r in rollouts}) == 16 and len(rollouts) == 64
    calls = {name: [r for r in rollouts if r.id.startswith(name)] for name in HARNESSES}
    told = {name: kept(runs, KEEP)[1] for name, runs in calls.items()}
    assert (told["appends"]["tree/dead_leaves"], told["appends"]["tree/aux"]) == (0, 0)
    assert told["appends"]["tree/main_trajectories"] == 32
    # each run has a first call, a title and a last call, and what is more are first calls asked twice
    retries = sum(len(r.turns) for r in calls["rewrites"]) - 3 * 32
    assert 8 < retries < 24
    assert (told["rewrites"]["tree/dead_leaves"], told["rewrites"]["tree/aux"]) == (retries, 32)
    assert told["rewrites"]["tree/main_trajectories"] == 64  # the rewritten history begins a path


def test_the_harnesses_of_the_claim_are_learned_and_a_blind_arm_learns_nothing() -> None:
    # the lower of two shares of right digits; a reply that begins with a digit of ten at random: under 0.1
    assert learned(METHOD, 2, updates=30, over=10) > 0.3
    assert learned(BLIND, 2, updates=15, over=5) < 0.1


def test_the_claim_differs_from_its_baseline_in_what_is_kept_alone() -> None:
    assert CLAIM.baseline == CLAIM.method.but(keep=everything)
    assert SOONER.baseline is CLAIM.baseline


@pytest.mark.parametrize("method", [METHOD, PPO])
def test_it_learns_the_toy_and_unlearns_it_with_the_credit_negated(method: object) -> None:
    assert isinstance(method, type(METHOD))
    # chance is 1/4
    assert learn(method) > 0.9
    assert learn(method.but(credit=partial(negated, credit=method.credit))) < 0.05
