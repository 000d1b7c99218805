from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch

from whippletree.credit import gae, whitened
from whippletree.methods import grpo, ppo, reinforce, rloo
from whippletree.toys.chains import chain, favour
from whippletree.toys.corridors import corridor
from whippletree.toys.exact import chance
from whippletree.toys.learning import Curve, learn, negated, reached
from whippletree.toys.oracles import states_of
from whippletree.toys.table import Table
from whippletree.types import Batch, Method, Rollout, Services
from whippletree.update.averages import constant

# gradients of turns are summed over a rollout and averaged over rollouts
SUMMED = partial(constant, tokens=1)
GRPO = grpo.METHOD.but(average=SUMMED)


def corridor_updates(method: Method, seed: int, updates: int = 100) -> float:
    world = corridor()
    curve = learn(method, world, Table.of(world), seed=seed, updates=updates, until=reached(0.9))
    return curve.updates_to(0.9)


def chain_updates(method: Method, seed: int, bonus: float, updates: int = 200) -> float:
    world = chain()
    until = reached(0.9, name="solved", over=1, exact=True)
    table = Table.of(world, favour(world, bonus))
    exact = {"solved": chance(world)}
    curve = learn(method, world, table, seed=seed, updates=updates, groups=1, rate=0.5, exact=exact, until=until)
    return curve.updates_to(0.9, name="solved", over=1, exact=True)


def test_groups_learn_the_corridor_in_about_thirty_updates() -> None:
    # a trial of 6 seeds elsewhere, dividing by the population's deviation: 29.5; ours is larger by sqrt(8 / 7)
    assert 27 <= statistics.median(corridor_updates(GRPO, seed) for seed in range(6)) <= 35


@pytest.mark.parametrize(("bonus", "low", "high"), [(1.0, 110, 140), (2.0, 58, 78)])
def test_groups_learn_the_chain_in_the_known_number_of_updates(bonus: float, low: float, high: float) -> None:
    # the same trials: 124 and 64
    assert low <= statistics.median(chain_updates(GRPO, seed, bonus) for seed in range(4)) <= high


def test_a_chain_that_nearly_never_succeeds_is_not_learned() -> None:
    assert chain_updates(GRPO, 0, bonus=0.0, updates=60) == math.inf


def test_plain_reinforce_learns_and_credit_turned_around_unlearns() -> None:
    world = corridor()
    assert corridor_updates(reinforce.METHOD, 0) < 80
    for method in (GRPO, reinforce.METHOD):
        assert learn(negated(method), world, Table.of(world), seed=0, updates=40).last() < 0.05


# ---- the same numbers as trials that were made elsewhere, with other code and other seeds ----------------------------


def critic(noise: float, seed: int) -> Method:
    """Advantages from a critic that says how far one is, s / 8, with noise."""
    random, world = torch.Generator().manual_seed(seed), corridor()

    async def values(rollouts: Sequence[Rollout], batch: Batch, services: Services) -> dict[str, torch.Tensor]:
        return {"value_N": states_of(world, rollouts) / 8 + noise * torch.randn(batch.tokens, generator=random)}

    return GRPO.but(evidence=(values,), credit=partial(whitened, credit=partial(gae, lam=0.95)))


@pytest.mark.parametrize(("noise", "low", "high"), [(0.1, 20, 27), (1.0, 40, 90)])
def test_a_critic_that_knows_the_way_saves_updates_until_its_noise_drowns_it(noise, low, high) -> None:
    # the trial: 23 at noise 0.1, against 29.5 without a critic
    assert low <= statistics.median(corridor_updates(critic(noise, seed), seed) for seed in range(3)) <= high


def last_turns(batch: Batch, *, breadth: int) -> torch.Tensor:
    """GRPO's credit on the last turns alone, with the same sum; divided by the population's deviation."""
    advantage_N = GRPO.credit(batch) * (8 / 7) ** 0.5
    return torch.where(torch.arange(batch.tokens) % 6 >= 6 - breadth, advantage_N * 6 / breadth, 0.0)


@pytest.mark.parametrize(("breadth", "solved"), [(1, 0.001), (3, 0.016), (5, 0.246), (6, 0.986)])
def test_turns_without_credit_are_never_learned(breadth: int, solved: float) -> None:
    # the trial gives exactly these means; what is left out stays at 1/4 a turn: 4^-5, 4^-3, 4^-1
    world = chain(reward="share")
    table = Table.of(world)
    method = GRPO.but(credit=partial(last_turns, breadth=breadth))
    learn(method, world, table, seed=0, updates=300, groups=1, rate=0.5)
    assert chance(world, "solved")(table) == pytest.approx(solved, abs=0.004)


def test_leaving_one_out_on_the_chain() -> None:
    # the trial: success 0.106 after 100 updates, 0.9 after 239
    world, ends, updates = chain(), [], []
    for seed in range(3):
        table = Table.of(world, favour(world, 1.0))
        exact = {"solved": chance(world)}
        method = rloo.METHOD.but(average=SUMMED)
        curve = learn(method, world, table, seed=seed, updates=280, groups=1, rate=0.5, exact=exact)
        ends.append(curve.exact["solved"][100])
        updates.append(curve.updates_to(0.9, name="solved", over=1, exact=True))
    assert 0.07 < statistics.mean(ends) < 0.15 and 215 < statistics.median(updates) < 265


# ---- the ways of a run ----------------------------------------------------------------------------------------------


def test_a_method_with_a_learned_value_learns_through_the_same_interface() -> None:
    world = corridor()
    curve = learn(ppo.METHOD, world, Table.of(world), seed=0, updates=60, rate=0.05, optimizer="adam", passes=4)
    assert curve.last() > 0.9


def test_the_same_seed_is_the_same_run() -> None:
    world = corridor()
    runs = [learn(GRPO, world, Table.of(world), seed=seed, updates=8).mean for seed in (3, 3, 4)]
    assert runs[0] == runs[1] != runs[2]


def test_a_stale_sampler_is_used_until_it_is_synced() -> None:
    versions = []

    def note(batch: Batch) -> torch.Tensor:
        versions.append(int(batch.version_N[0]))
        return torch.ones(batch.tokens)

    world = corridor()
    table = Table.of(world)
    method = reinforce.METHOD.but(credit=note)
    learn(method, world, table, seed=0, updates=5, sync=3)
    assert versions == [0, 0, 0, 3, 3]


def test_groups_that_are_not_accepted_teach_nothing_but_are_counted() -> None:
    world = corridor()
    table = Table.of(world)
    curve = learn(GRPO.but(accept=lambda reward_R: False), world, table, seed=0, updates=3)
    assert curve.episodes == 48 and not table.theta.any()


def test_rollouts_may_be_added_before_anything_is_computed() -> None:
    world, seen = corridor(), []

    def twice(played, random: np.random.Generator):
        return played.joined(world.play(Table.of(world), played.group_R, random))

    def note(batch: Batch) -> torch.Tensor:
        seen.append(batch.rollouts)
        return torch.zeros(batch.tokens)

    learn(GRPO.but(credit=note), world, Table.of(world), seed=0, updates=2, revise=twice)
    assert seen == [32, 32]


def test_updates_to_a_level_by_hand() -> None:
    curve = Curve(mean={"reward": [0.0, 1.0, 0.8, 1.0]})
    assert curve.updates_to(0.9, over=2) == 3  # the mean of the second and third
    assert curve.updates_to(1.0, over=1) == 2
    assert curve.updates_to(0.95, over=2) == math.inf and curve.updates_to(0.1, over=9) == math.inf
    assert curve.last(over=2) == pytest.approx(0.9)
