"""The unit cases of the page are numbered as there. Labels: U 0, P 1, N 2, B 3, I 4."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from whippletree import credit
from whippletree.methods import _corridor
from whippletree.methods._tables import HALF, WORKED, forward_of, gradient, moves, table
from whippletree.methods._toy import learn, negated
from whippletree.methods.proas import CLAIM, GOAL, METHOD, Graph, annotated, made, normalised, shaped
from whippletree.toys import learning
from whippletree.toys.corridors import corridor
from whippletree.toys.table import Table
from whippletree.types import Batch, Rollout, Services, Task, Turn

U, P, N, B, I = range(5)
BATCH = WORKED.with_extra(label_K=torch.tensor([P, U, B, N, P, U, P]))


def given(advantage: float, batch: Batch) -> Tensor:
    """The same advantage on every token, for want of a group."""
    return torch.where(batch.trainable_N, advantage, 0.0)


def weighed(advantage: float, labels: Sequence[int], sizes: Sequence[int] | None = None, **settings: Any) -> Tensor:
    batch = table([sizes or [1] * len(labels)], rewards=[1.0], old=HALF).with_extra(label_K=torch.tensor(labels))
    return shaped(batch, base=partial(given, advantage), **settings)


# ---- the numbers of the page ------------------------------------------------------------------------------------


def test_case_1_of_a_success_only_progress_is_rewarded() -> None:
    assert weighed(1.0, [P, N, I, P]).tolist() == [1, 0, 0, 1]


def test_case_2_of_a_failure_the_penalty_of_progress_is_moved_to_what_is_blamed() -> None:
    # spared: 2 * 0.8 = 1.6, over two blamed tokens: 1.8
    found = weighed(-1.0, [P, N, I, P])
    torch.testing.assert_close(found, torch.tensor([-0.2, -1.8, -1.8, -0.2]))
    assert found.sum().item() == pytest.approx(-4)


def test_case_3_where_none_is_blamed_progress_is_only_spared() -> None:
    torch.testing.assert_close(weighed(-1.0, [P, P, U]), torch.tensor([-0.2, -0.2, -1.0]))


def test_case_4_what_is_moved_is_counted_in_tokens() -> None:
    found = weighed(-1.0, [P, I], [10, 30])
    # 10 * 0.8 = 8 over 30 tokens
    torch.testing.assert_close(found, torch.tensor([-0.2] * 10 + [-(1 + 8 / 30)] * 30))
    assert found.sum().item() == pytest.approx(-40)


def test_case_5_the_potential_of_a_path() -> None:
    graph = Graph()
    graph.add(["a", "b"])
    assert graph.distances() == {"a": 2, "b": 1, GOAL: 0}
    assert graph.potentials() == {"a": 0.0, "b": 0.5, GOAL: 1.0}


# ---- credit -----------------------------------------------------------------------------------------------------


def test_the_weight_of_what_is_blamed_is_bounded_and_the_rest_is_dropped() -> None:
    # nine turns of progress spare 7.2, so the one blamed would weigh 8.2
    assert weighed(-1.0, [P] * 9 + [B])[-1].item() == -5
    assert weighed(-1.0, [P] * 9 + [B], most=math.inf)[-1].item() == pytest.approx(-8.2)
    torch.testing.assert_close(weighed(-1.0, [P, B, U], most=1.0), torch.tensor([-0.2, -1.0, -1.0]))


def test_stalls_may_keep_a_share_of_a_reward_and_regress_never_does() -> None:
    assert weighed(2.0, [U, P, N, B, I], stall=0.5).tolist() == [2, 2, 1, 0, 0]


def test_an_advantage_of_0_stays_and_unknown_turns_are_as_without_the_method() -> None:
    assert weighed(0.0, [P, N, I, U]).abs().tolist() == [0, 0, 0, 0]
    unknown = BATCH.with_extra(label_K=torch.zeros(7, dtype=torch.int64))
    torch.testing.assert_close(METHOD.credit(unknown), credit.group_mean(BATCH))


def test_a_success_that_is_masked_throughout_contributes_nothing_and_keeps_its_share_of_the_average() -> None:
    batch = table([[1, 1], [2]], rewards=[1.0, 0.0], old=HALF).with_extra(label_K=torch.tensor([N, B, U]))
    torch.testing.assert_close(METHOD.credit(batch), torch.tensor([0, 0, -(0.5**0.5), -(0.5**0.5)]))
    torch.testing.assert_close(METHOD.average(batch), torch.full((4,), 1 / 4))


def test_empty_turns_move_nothing_and_groups_of_one_or_of_equals_teach_nothing() -> None:
    torch.testing.assert_close(weighed(-1.0, [P, B, P], [1, 2, 0]), torch.tensor([-0.2, -1.4, -1.4]))
    torch.testing.assert_close(weighed(-1.0, [P, B], [1, 0]), torch.tensor([-0.2]))
    for rewards in ([0.0], [0.0, 0.0], [1.0, 1.0]):
        batch = table([[1, 1]] * len(rewards), rewards=rewards).with_extra(label_K=torch.tensor([P, B] * len(rewards)))
        assert not METHOD.credit(batch).any()
    assert METHOD.credit(table([[], []], rewards=[0.0, 1.0]).with_extra(label_K=torch.zeros(0).long())).tolist() == []


@pytest.mark.parametrize("seed", range(5))
def test_what_a_failure_is_charged_in_all_stays_where_some_is_blamed(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    labels = [B, *torch.randint(0, 5, (7,), generator=random).tolist()]
    sizes = torch.randint(1, 6, (8,), generator=random).tolist()
    assert weighed(-1.0, labels, sizes, most=math.inf).sum().item() == pytest.approx(-sum(sizes))


def test_missing_rewards_and_labels_are_refused() -> None:
    with pytest.raises(ValueError, match="Missing is not zero"):
        METHOD.credit(table([[1]], rewards=[math.nan]).with_extra(label_K=torch.tensor([P])))
    with pytest.raises(ValueError, match="'label_K'"):
        METHOD.credit(WORKED)


def test_the_gradient_on_policy_by_hand_and_the_clip_range() -> None:
    # rewards 1, 0: A = 0.7071 and -0.7071; of the success the stall is masked, of the failure 0.8 is moved
    batch = table([[1, 1], [1, 1]], rewards=[1.0, 0.0], old=HALF).with_extra(label_K=torch.tensor([P, N, P, B]))
    forward = forward_of(batch.logp_old_N)
    found = gradient(forward, METHOD.objective(forward, METHOD.credit(batch), batch), METHOD.average(batch))
    torch.testing.assert_close(found, 0.5**0.5 / 4 * torch.tensor([-1, 0, 0.2, 1.8]))
    assert moves(METHOD.objective, (1.19, 1), (1.21, 1), (0.81, -1), (0.79, -1)) == [True, False, True, False]


# ---- the graph --------------------------------------------------------------------------------------------------


def run(texts: str, reward: float = 0.0, *, does: str = "go", task: str = "t") -> Rollout:
    """A rollout that sees these words, one a turn."""
    shown = [{"messages": [{"role": "user", "content": text}]} for text in texts.split()]
    said = {"content": does}
    turns = [Turn("", (1,), (2,), (HALF,), 0, "stop", request=request, reply=said) for request in shown]
    return Rollout("", Task(task), "g", tuple(turns), {"reward": reward})


async def labels(*rollouts: Rollout, **settings: Any) -> list[int]:
    found = await annotated(rollouts, Batch.of(rollouts), Services(), **settings)
    return found["label_K"].tolist()


async def test_turns_are_labelled_by_the_successes_on_their_task() -> None:
    # a 3, b 2, c 1 steps before success; the last turn of the success leads there
    assert await labels(run("a b c", 1.0)) == [P, P, P]
    # a b: on; b b: nothing; b a: back; a z: who knows; z: last; and of the other task nothing is known
    found = await labels(run("a b c", 1.0), run("a b b a z"), run("a b c", task="other"))
    assert found == [P, P, P, P, N, B, U, U, U, U, U]


async def test_without_a_success_only_errors_are_known() -> None:
    assert await labels(run("a error b")) == [I, U, U]
    assert await labels(run("a b c", 0.9)) == [U, U, U] and await labels(run("a b", 0.9), success=0.9) == [P, P]


async def test_an_error_leaves_the_agent_where_it_was() -> None:
    assert await labels(run("a b c", 1.0), run("a error b b error")) == [P, P, P, I, P, N, I, U]


async def test_a_turn_that_only_looks_is_never_blamed() -> None:
    assert await labels(run("a b", 1.0), run("a a b", does="Look around")) == [P, P, U, U, U]
    assert await labels(run("a b", 1.0), run("a a b", does="Look around"), looks="^x") == [P, P, N, P, U]


async def test_going_forth_and_back_is_progress_and_regress() -> None:
    assert await labels(run("a b c", 1.0), run("a b a b")) == [P, P, P, P, B, P, U]


async def test_a_shorter_way_counts_and_one_through_unknown_places_is_not_blamed() -> None:
    # by the second success a and b are both two steps away, so that the way over b stalls
    assert await labels(run("a b c", 1.0), run("a c", 1.0), run("a c")) == [N, P, P, P, P, P, U]
    assert await labels(run("a b c", 1.0), run("a x c")) == [P, P, P, U, U, U]


async def test_graphs_are_kept_where_they_are_given() -> None:
    graphs: dict[str, Graph] = {}
    assert await labels(run("a b c", 1.0), graphs=graphs) == [P, P, P]
    assert await labels(run("b a"), graphs=graphs) == [B, U] and await labels(run("b a")) == [U, U]


async def test_other_threads_are_no_part_of_the_way() -> None:
    aside = Turn("", (1,), (2,), (HALF,), 0, "stop", thread="title/1", request={"input": "b"})
    won = run("a b", 1.0)
    mixed = Rollout("", Task("t"), "g", (won.turns[0], aside, won.turns[1]), {"reward": 1.0})
    assert await labels(mixed) == [P, U, P]
    assert await labels(Rollout("", Task("t"), "g", (), {"reward": 1.0})) == []


def test_states_are_told_without_numbers_and_ids() -> None:
    assert normalised("Room 12,\n  id 9f3e-77a:  A Desk") == "room #, id #: a desk"
    assert normalised("deadbeef") == "deadbeef"


def test_states_that_lead_nowhere_have_no_potential() -> None:
    assert Graph().distances() == {GOAL: 0}
    graph = Graph()
    for way in (["a", "b", "c"], ["b", "a", "c"]):
        graph.add(way)
    # a and b lead to c and to each other: two steps; farther away than any first state phi is below 0
    assert graph.potentials() == {"a": 0.0, "b": 0.0, "c": 0.5, GOAL: 1.0}
    graph.before["b"].add("z")
    assert graph.potentials()["z"] == -0.5


# ---- learning ---------------------------------------------------------------------------------------------------


async def test_on_the_corridor_the_graph_of_a_batch_tells_forward_from_back() -> None:
    world = corridor()
    played = world.play(Table.of(world), [0] * 200, np.random.default_rng(0))
    found = (await annotated(played, played.batch, Services(), state=str))["label_K"]
    last_N = played.batch.rollout_K.diff(append=torch.tensor([-1])) != 0
    lost_N = played.batch.reward_R[played.batch.rollout_N] == 0
    at_N, action_N = played.flat(played.state_RT), played.batch.id_N
    expected = torch.tensor([P, N, B])[action_N]
    expected = torch.where((at_N == 0) & (action_N == 2), N, expected)  # back from the first cell
    assert torch.equal(found, torch.where(last_N & lost_N, U, expected))


def test_fewer_updates_are_needed_and_labels_dealt_anew_take_the_gain_away() -> None:
    # six seeds elsewhere, with all potentials known: 29.5, 17.5 with nothing moved, 15
    found = {name: CLAIM.measure(arm, 0) for name, arm in {"grpo": CLAIM.baseline, "it": made, **CLAIM.arms}.items()}
    assert found["it"] < found["a demonstration, nothing moved"] < found["a demonstration, masked alone"]
    assert found["a demonstration, masked alone"] < found["grpo"] < found["labels dealt anew"]


def test_it_learns_the_toy_and_unlearns_it_with_the_credit_negated() -> None:
    assert learn(METHOD) > 0.9
    assert learn(METHOD.but(credit=partial(negated, credit=METHOD.credit))) < 0.05
    world = corridor()
    blind = learning.negated(made().but(average=_corridor.SUMMED))
    assert learning.learn(blind, world, Table.of(world), seed=0, updates=30).last() < 0.05
