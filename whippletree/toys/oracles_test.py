from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch

from whippletree.toys.chains import chain
from whippletree.toys.corridors import corridor
from whippletree.toys.oracles import Judge, TrueValue, first_wrong, flipped, looked_up, misplaced, states_of
from whippletree.toys.table import Table
from whippletree.types import Services


@pytest.mark.parametrize("one_turn", [False, True])
async def test_true_values_are_the_mean_of_what_followed(one_turn: bool) -> None:
    # for a chain of two positions: 1/16 at first, then 1/4 after a right symbol, else 0
    world = chain(positions=2, one_turn=one_turn)
    table = Table.of(world)
    played = world.play(table, [0] * 20, np.random.default_rng(0))
    turns = [(turn.prompt_ids, turn.reply_ids) for r in played for turn in r.turns]
    value_N = torch.cat(await TrueValue(world, table).logps(turns)).view(20, 2)
    torch.testing.assert_close(value_N[:, 0], torch.full((20,), 1 / 16))
    torch.testing.assert_close(value_N[:, 1], torch.from_numpy(played.action_RT[:, 0] == 0).float() / 4)


async def test_true_values_know_the_steps_that_are_left_and_may_be_noisy() -> None:
    world = corridor(cells=3, steps=2)
    table = Table.of(world)
    turns = [((3,), (1,)), ((3, 1, 3), (1,))]  # two steps left in cell 0: 1/9; one: 0
    exact = torch.cat(await TrueValue(world, table).logps(turns))
    torch.testing.assert_close(exact, torch.tensor([1 / 9, 0.0]))
    scorer = TrueValue(world, table, noise=0.1)
    drawn = torch.stack([torch.cat(await scorer.logps(turns)) for _ in range(400)])
    torch.testing.assert_close(drawn.mean(0), exact, atol=0.02, rtol=0)
    torch.testing.assert_close(drawn.std(0), torch.full((2,), 0.1), atol=0.02, rtol=0)


async def test_columns_are_looked_up_by_state_and_by_action() -> None:
    world = corridor(cells=4, steps=3)
    played = world.play(Table.of(world), [0, 0, 0], np.random.default_rng(0))
    potential_S = torch.arange(4) / 4
    waste_SV = torch.tensor([[0.0, 1.0, 1.0]]).expand(4, 3)
    for rollouts in (played, list(played)):
        by_state = await looked_up(world, "potential_K", potential_S)(rollouts, played.batch, Services())
        torch.testing.assert_close(by_state["potential_K"], states_of(world, list(played)) / 4)
        by_action = await looked_up(world, "waste_N", waste_SV)(rollouts, played.batch, Services())
        torch.testing.assert_close(by_action["waste_N"], (played.batch.id_N != 0).float())


async def test_a_turn_has_the_number_of_its_first_token() -> None:
    world = chain(positions=3, one_turn=True)
    played = world.play(Table.of(world), [0, 0], np.random.default_rng(0))
    found = await looked_up(world, "place_K", world.place_S)(played, played.batch, Services())
    assert found["place_K"].tolist() == [0, 0]


def test_the_first_mistake_by_hand() -> None:
    world = chain(positions=3)
    forced_RT = np.array([[0, 0, 0], [0, 2, 1], [3, 0, 0]])
    played = world.play(Table.of(world), [0] * 3, np.random.default_rng(0), forced_RT=forced_RT)
    assert first_wrong(played).tolist() == [3, 1, 0]


def test_labels_are_wrong_as_often_as_said() -> None:
    random = np.random.default_rng(0)
    truth = np.arange(20_000) % 3 == 0
    assert abs((flipped(truth, 0.15, random) != truth).mean() - 0.15) < 0.01  # 4 times 0.0025
    assert (flipped(truth, 0.0, random) == truth).all() and (flipped(truth, 1.0, random) != truth).all()
    place_R, length_R = np.full(20_000, 2), np.full(20_000, 4)
    moved_R = misplaced(place_R, length_R, 0.3, random)
    assert abs((moved_R != 2).mean() - 0.3 * 3 / 4) < 0.012  # a fourth of the replacements hits it again
    assert set(moved_R) == {0, 1, 2, 3}


async def test_a_judge_errs_as_often_as_said_and_the_same_way_each_time() -> None:
    def no(question: str, random: Random) -> str:
        return "no"

    judge = Judge(lambda question: "yes", no, flip=0.2, seed=1)
    questions = [[{"role": "user", "content": f"is {n} a number?"}] for n in range(2000)]
    told = [await judge.ask(question) for question in questions]
    assert abs(told.count("no") / 2000 - 0.2) < 0.036  # 4 times 0.009
    assert [await judge.ask(question) for question in questions[:50]] == told[:50] and judge.asked == 2050
    other = Judge(lambda question: "yes", no, flip=0.2, seed=2)
    assert [await other.ask(question) for question in questions] != told
