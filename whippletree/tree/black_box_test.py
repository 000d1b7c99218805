from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from whippletree.credit import group_mean
from whippletree.tree.black_box import apart, kept, leaves, main_paths, parents, threads
from whippletree.types import Batch, Kept, Rollout, Task, Turn
from whippletree.update.averages import rollout_mean


def turn(name: str, prompt: list[int], reply: list[int], thread: str = "main", finish: str = "stop") -> Turn:
    return Turn(name, tuple(prompt), tuple(reply), (-0.5,) * len(reply), 0, finish, thread=thread)


def rollout(*turns: Turn, name: str = "r", rewards: dict[str, float | None] | None = None) -> Rollout:
    return Rollout(name, Task("t"), "g", turns, rewards or {"reward": 1.0})


def names(turns: tuple[Turn, ...]) -> list[str]:
    return [turn.id for turn in turns]


# exact case 1 of the page: the first call, its retried successor, the retry, its successor, and a side call
#
#   c0 1 2 -> 3 ─┬─ c1 4 -> 5
#                └─ c2 4 -> 6 ── c3 7 -> 8           c4 9 -> 9 (another system prompt)
RETRIED = rollout(
    turn("c0", [1, 2], [3]),
    turn("c1", [1, 2, 3, 4], [5]),
    turn("c2", [1, 2, 3, 4], [6]),
    turn("c3", [1, 2, 3, 4, 6, 7], [8]),
    turn("c4", [9, 9], [9], "sub-agent/1"),
)


# ---- the tree ---------------------------------------------------------------------------------------------------


def test_a_parent_is_the_longest_earlier_turn_that_a_prompt_begins_with() -> None:
    assert parents(RETRIED.turns) == [-1, 0, 0, 2, -1]
    assert leaves(RETRIED.turns) == [1, 3, 4]


def test_of_equal_turns_the_latest_is_the_parent_and_a_later_one_is_none() -> None:
    same = [turn("a", [1], [2]), turn("b", [1], [2]), turn("c", [1, 2, 3], [4]), turn("d", [1], [2])]
    assert parents(same) == [-1, -1, 1, -1]
    assert parents([same[2], same[0]]) == [-1, -1]


def test_a_prompt_with_one_other_token_has_no_parent() -> None:
    # 256 begins with the byte of 0, and 1 2 is no beginning of 12
    assert parents([turn("a", [1], [2]), turn("b", [1, 3, 9], [4])]) == [-1, -1]
    assert parents([turn("a", [0], []), turn("b", [256], [1])]) == [-1, -1]
    assert parents([]) == leaves([]) == []


@pytest.mark.parametrize("seed", range(20))
def test_parents_are_those_of_the_definition(seed: int) -> None:
    rng = random.Random(seed)

    def ids() -> list[int]:
        return rng.choices([0, 1], k=rng.randrange(1, 6))

    turns = [turn(str(n), ids(), ids()) for n in range(12)]
    for k, found in enumerate(parents(turns)):
        prompt = turns[k].prompt_ids
        wholes = [t.prompt_ids + t.reply_ids for t in turns[:k]]
        fits = [(len(whole), i) for i, whole in enumerate(wholes) if prompt[: len(whole)] == whole]
        assert found == max(fits, default=(0, -1))[1]


# ---- which turns ------------------------------------------------------------------------------------------------


def test_main_paths_leave_out_the_retried_leaf_and_the_side_call() -> None:
    found = main_paths(RETRIED)
    assert names(found.turns) == ["c0", "c2", "c3"]
    assert found.removed == {"tree/dead_leaves": 1, "tree/aux": 1, "tree/over_branched": 0}


def test_an_empty_or_aborted_leaf_is_dead_unless_it_is_the_last() -> None:
    empty, aborted = turn("b", [1, 2, 5], []), turn("c", [1, 2, 6], [7], finish="abandoned")
    found = main_paths(rollout(turn("a", [1], [2]), empty, aborted, turn("d", [1, 2, 9], [9])))
    assert (names(found.turns), found.removed["tree/dead_leaves"]) == (["a", "d"], 2)
    # the last leaf stays, and a parent that lost its leaf ends its path
    assert names(main_paths(rollout(turn("a", [1], [2]), aborted, empty)).turns) == ["a", "b"]


def test_a_reply_that_was_used_is_no_retry_though_its_prompt_came_again() -> None:
    used = rollout(turn("a", [1], [2]), turn("b", [1, 2, 3], [4]), turn("c", [1], [5]))
    assert names(main_paths(used).turns) == ["a", "b", "c"]


def test_replies_that_one_request_asked_for_do_not_replace_each_other() -> None:
    choices = [turn("q.0", [1], [2]), turn("q.1", [1], [3]), turn("s.0", [9], [9])]
    assert names(main_paths(rollout(*choices)).turns) == ["q.0", "q.1", "s.0"]
    # a later request for the same step replaces both
    again = rollout(*choices, turn("t.0", [1], [4]))
    assert names(main_paths(again).turns) == ["s.0", "t.0"]


def test_a_new_list_of_messages_is_main_and_the_call_that_summed_up_is_not() -> None:
    compacted = rollout(
        turn("a", [1], [2]),
        turn("s", [1, 2, 8], [5], "summary/1"),
        turn("b", [1, 5], [6]),
        turn("c", [1, 5, 6, 3], [7]),
    )
    found = main_paths(compacted)
    assert (names(found.turns), found.removed["tree/aux"]) == (["a", "b", "c"], 1)
    assert leaves(found.turns) == [0, 2]


def test_a_thicket_is_left_out_whole() -> None:
    bush = [turn(f"q{n}", [1, n], [2]) for n in range(8)]
    assert len(main_paths(rollout(*bush)).turns) == 8
    # a side call is no branch; a ninth main leaf is one too many
    assert len(main_paths(rollout(*bush, turn("t", [1, 9], [2], "title/1"))).turns) == 8
    found = main_paths(rollout(*bush, turn("q8", [1, 8], [2])))
    assert (found.turns, found.removed["tree/over_branched"]) == ((), 1)
    assert len(main_paths(rollout(*bush), most=7).turns) == 0


def test_threads_keep_the_kinds_they_are_told_and_count_the_others() -> None:
    mixed = rollout(
        turn("a", [1], [2]), turn("b", [3], [4], "sub-agent/2"), turn("c", [5], [6], "title/1"), turn("d", [1], [7])
    )
    found = threads(mixed)
    assert (names(found.turns), found.removed) == (["a", "d"], {"tree/aux/sub-agent": 1, "tree/aux/title": 1})
    both = threads(mixed, kinds=["main", "sub-agent"])
    assert (names(both.turns), both.removed) == (["a", "b", "d"], {"tree/aux/title": 1})
    for nothing in ((), "main"):
        with pytest.raises(ValueError, match="list of kinds"):
            threads(mixed, kinds=nothing)


# ---- a step -----------------------------------------------------------------------------------------------------


def everything(rollout: Rollout) -> Kept:
    return Kept(rollout.turns)


def test_the_rollouts_of_a_step_are_pruned_and_every_removal_is_counted() -> None:
    given = turn("x", [1, 2], [3], finish="abandoned")
    found, told = kept([RETRIED, rollout(given, turn("y", [1, 2], [4]))], main_paths)
    assert [names(r.turns) for r in found] == [["c0", "c2", "c3"], ["y"]]
    assert told == {
        "tree/dead_leaves": 2,
        "tree/aux": 1,
        "tree/over_branched": 0,
        "tree/abandoned": 0,
        "tree/main_trajectories": 2,
    }


@pytest.mark.parametrize("keep", [everything, threads, main_paths])
def test_an_abandoned_turn_never_trains_whatever_the_policy(keep: object) -> None:
    gone = rollout(turn("a", [1], [2], finish="abandoned"))
    ((left,), told) = kept([gone], keep)  # type: ignore[arg-type]  # each is a Keep
    assert left.turns == () and told["tree/abandoned"] == 1


def test_a_rollout_that_is_left_out_still_counts_in_the_baseline_and_in_no_average() -> None:
    # rewards 1 (a thicket), 0, 1/2: mean 1/2, so the others get -1/2 and 0, and share the weight
    bush = rollout(*(turn(f"q{n}", [1, n], [2]) for n in range(9)), name="bush", rewards={"reward": 1.0})
    plain = [rollout(turn("a", [1], [2]), name=str(r), rewards={"reward": r}) for r in (0.0, 0.5)]
    batch = Batch.of(kept([bush, *plain], main_paths)[0])
    torch.testing.assert_close(group_mean(batch, scale="none"), torch.tensor([-0.5, 0.0]))
    torch.testing.assert_close(rollout_mean(batch), torch.tensor([0.5, 0.5]))


# ---- apart ------------------------------------------------------------------------------------------------------


def with_sub_agents(name: str, count: int, **rewards: float | None) -> Rollout:
    subs = [turn(f"{name}s{n}", [7, n], [8], f"sub-agent/{n}") for n in range(count)]
    return rollout(turn(f"{name}m", [1], [2]), *subs, name=name, rewards=dict(rewards))


ASKED = [
    with_sub_agents("a", 3, answer=1.0, search=0.5),
    with_sub_agents("b", 1, answer=0.0, search=1.0),
    with_sub_agents("c", 0, answer=0.5, search=None),
]


def test_sub_agents_are_a_part_with_a_group_of_their_own() -> None:
    parts, told = apart(ASKED, kinds=("sub-agent", "title"))
    assert [(p.id, p.group, len(p.turns)) for p in parts] == [
        ("a", "g", 1),
        ("a#sub-agent", "g#sub-agent", 3),
        ("b", "g", 1),
        ("b#sub-agent", "g#sub-agent", 1),
        ("c", "g", 1),
    ]
    assert all(part.rewards == whole.rewards for part, whole in zip(parts[1::2], ASKED[:2], strict=True))
    assert told == {"tree/parts_unpaid": 0, "tree/parts_alone": 0}


def test_like_is_compared_with_like_and_the_busiest_rollout_does_not_set_the_baseline() -> None:
    # main: rewards 1, 0, 1/2 about their mean 1/2. Sub-agents: 1 and 0 about 1/2, though there are three turns to one;
    # as one part a turn the mean would be 3/4, and together with the main parts it would be (3 + 1 + 0 + 0 + 1/2) / 7
    answers = [Rollout(r.id, r.task, r.group, r.turns, {"answer": r.rewards["answer"]}) for r in ASKED]
    batch = Batch.of(apart(answers, kinds=("sub-agent",))[0])
    expected_N = torch.tensor([0.5, 0.5, 0.5, 0.5, -0.5, -0.5, 0.0])
    torch.testing.assert_close(group_mean(batch, scale="none"), expected_N)


def test_a_channel_of_its_own_is_taken_from_the_main_part() -> None:
    parts, _ = apart(ASKED, kinds=("sub-agent",), own={"sub-agent": ("search",)})
    assert [p.rewards for p in parts[:2]] == [{"answer": 1.0}, {"search": 0.5}]
    # main: 1, 0, 1/2 about 1/2; sub-agents: 1/2 and 1 about 3/4
    expected_N = torch.tensor([0.5, -0.25, -0.25, -0.25, -0.5, 0.25, 0.0])
    torch.testing.assert_close(group_mean(Batch.of(parts), scale="none"), expected_N)


def test_a_part_without_a_reward_or_without_another_to_compare_with_is_left_out() -> None:
    unpaid = with_sub_agents("d", 1, answer=1.0, search=None)
    parts, told = apart([unpaid, *ASKED[1:]], kinds=("sub-agent",), own={"sub-agent": ("search",)})
    assert [p.id for p in parts] == ["d", "b", "c"]
    assert told == {"tree/parts_unpaid": 1, "tree/parts_alone": 1}
    # a lone rollout of a step is nobody's part and stays
    assert [p.id for p in apart(ASKED[:1], kinds=("sub-agent",))[0]] == ["a"]


def test_without_any_kind_nothing_changes() -> None:
    assert apart(ASKED, kinds=())[0] == ASKED
    both = partial(threads, kinds=("main", "sub-agent"))
    assert kept(ASKED, both)[0] == ASKED
