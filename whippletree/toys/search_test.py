from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from whippletree.methods import grpo
from whippletree.toys.exact import chance, expected, optimum
from whippletree.toys.learning import learn
from whippletree.toys.search import Search, evidence_found, search_world, searcher
from whippletree.toys.table import Table
from whippletree.update.averages import constant

SEARCH = search_world(facts=3, held_out=1, steps=4)
QUERY, ANSWER = (lambda d: d), (lambda a: 3 + a)


def told(*actions: int):
    """The episode of question 0 with these actions."""
    forced_RT = np.array([[*actions, *[-1] * (4 - len(actions))]])
    return SEARCH.world.play(Table.of(SEARCH.world), [0], np.random.default_rng(0), forced_RT=forced_RT)


@pytest.mark.parametrize(
    ("actions", "reward", "grounded", "found", "used"),
    [
        ([ANSWER(0)], 1, 0, [0], 0),  # guessed right
        ([QUERY(0), ANSWER(0)], 1, 1, [1, 0], 1),
        ([QUERY(0), QUERY(1), ANSWER(0)], 1, 1, [1, 0, 0], 1),  # remembered although another was read since
        ([QUERY(0), QUERY(0), ANSWER(0)], 1, 1, [1, 0, 0], 1),  # a second reading finds nothing
        ([QUERY(1), ANSWER(1)], 0, 0, [0, 0], 1),  # wrong, but it stands in what was read
        ([QUERY(1), ANSWER(2)], 0, 0, [0, 0], 0),
        ([QUERY(1), QUERY(1), QUERY(2), QUERY(0)], 0, 0, [0, 0, 0, 1], np.nan),  # ran out of steps
    ],
)
def test_episodes_by_hand(actions, reward, grounded, found, used) -> None:
    played = told(*actions)
    assert played.length_R.tolist() == [len(actions)]
    assert (played.counted("reward")[0], played.counted("grounded")[0]) == (reward, grounded)
    assert played.counted("searches")[0] == sum(action < 3 for action in actions)
    found_RT, used_R = evidence_found(played)
    assert found_RT[0, : len(actions)].tolist() == found
    np.testing.assert_array_equal(used_R, [used])


def test_the_question_and_the_last_document_are_seen() -> None:
    words = [turn.request["messages"][-1]["content"] for turn in told(QUERY(2), ANSWER(2))[0].turns]
    assert words == ["question 0", "question 0, document 2 says 2"]


def test_the_prior_is_right_where_one_trains_and_wrong_elsewhere() -> None:
    search = search_world()
    assert search.prior_Q.tolist() == [*range(15), 16, 17, 18, 19, 0]
    assert len(search.world.start_G) == 15 and len(search.held_out.start_G) == 5
    assert optimum(search.world, "grounded").tolist() == [1.0] * 15 and optimum(search.held_out).tolist() == [1.0] * 5


def accuracy_and_grounding(search: Search, table: Table) -> tuple[float, float, float]:
    return chance(search.world)(table), chance(search.world, "grounded")(table), chance(search.held_out)(table)


def test_an_outcome_alone_raises_accuracy_and_lowers_grounding() -> None:
    search = search_world()
    start_PV, index_PV = searcher(search, guess=4.0, look=4.0, read=4.0)
    table = Table.of(search.world, start_PV, index_PV=index_PV)
    before = accuracy_and_grounding(search, table)
    method = grpo.METHOD.but(average=partial(constant, tokens=1))
    learn(method, search.world, table, seed=0, updates=60, groups=4)
    after = accuracy_and_grounding(search, table)
    assert before == pytest.approx((0.661, 0.252, 0.159), abs=0.001)
    assert after[0] > 0.95 and after[1] < 0.12 and after[2] < before[2]


def test_all_questions_share_the_parameters_of_a_searcher() -> None:
    search = search_world()
    start_PV, index_PV = searcher(search)
    assert index_PV.max() == 14 and len(set(index_PV.unique().tolist())) == 14  # nothing read: no document to repeat
    table = Table.of(search.world, start_PV, index_PV=index_PV)
    (slope,) = torch.autograd.grad(expected(search.world, table.logp_PV()), table.theta)
    assert slope[2] > 0 and slope[0].abs() < slope[2]  # guessing pays where the prior is right
