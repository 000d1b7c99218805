"""The flat table: derived columns by hand, the sub-table, the shape check, and the file it is kept in."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from whippletree.types import Batch, Rollout, Task, Turn, shape_letters

NAN = math.nan


def turn(ids: tuple[int, ...], *, version: int = 0, logps: tuple[float, ...] | None = None, top_p: float = 1.0) -> Turn:
    known = tuple(-float(i) for i in ids)
    return Turn("t", (1,), ids, known if logps is None else logps, version=version, finish_reason="stop", top_p=top_p)


def rollout(group: str, *turns: Turn, **rewards: float | None) -> Rollout:
    return Rollout(f"{group}-{len(turns)}", Task("task"), group, turns=turns, rewards=rewards)


# group a: a rollout of two turns (2 and 1 tokens) and one of no turn at all; group b: one of a turn of 3 tokens
ROLLOUTS = [
    rollout("a", turn((5, 6)), turn((7,), version=1), answer=1.0, style=None),
    rollout("a", answer=0.0),
    rollout("b", turn((8, 9, 10), version=2, logps=(-0.5, NAN, -0.25)), answer=None, style=0.5),
]
BATCH = Batch.of(ROLLOUTS, weights={"style": 2.0})


def same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.nan_to_num(99.0), right.nan_to_num(99.0))


def assert_same(left: Batch, right: Batch) -> None:
    assert left.channels == right.channels
    assert left.extra.keys() == right.extra.keys()
    names = ("group_R", "rollout_K", "turn_N", "id_N", "logp_old_N", "version_N", "reward_RC", "weight_C")
    assert [name for name in names if not same(getattr(left, name), getattr(right, name))] == []
    assert [name for name in left.extra if not same(left.extra[name], right.extra[name])] == []


# ---- from rollouts ----------------------------------------------------------------------------------------------


def test_rollouts_become_a_flat_table_by_hand() -> None:
    assert BATCH.channels == ("answer", "style")
    assert BATCH.group_R.tolist() == [0, 0, 1]
    assert BATCH.rollout_K.tolist() == [0, 0, 2]
    assert BATCH.turn_N.tolist() == [0, 0, 1, 2, 2, 2]
    assert BATCH.id_N.tolist() == [5, 6, 7, 8, 9, 10]
    assert BATCH.version_N.tolist() == [0, 0, 1, 2, 2, 2]
    assert same(BATCH.logp_old_N, torch.tensor([-5.0, -6.0, -7.0, -0.5, NAN, -0.25]))
    assert same(BATCH.reward_RC, torch.tensor([[1.0, NAN], [0.0, NAN], [NAN, 0.5]]))


def test_derived_columns_by_hand() -> None:
    assert (BATCH.rollouts, BATCH.turns, BATCH.tokens) == (3, 3, 6)
    assert BATCH.rollout_N.tolist() == [0, 0, 0, 2, 2, 2]
    assert BATCH.lengths_K.tolist() == [2, 1, 3]
    assert BATCH.lengths_R.tolist() == [3, 0, 3]
    assert BATCH.trainable_N.tolist() == [True, True, True, True, False, True]
    # answer counts once and style twice: 1, 0, and 2 * 0.5; a channel that does not apply adds nothing
    assert BATCH.reward_R.tolist() == [1.0, 0.0, 1.0]


def test_a_rollout_without_any_reward_has_none_and_not_zero() -> None:
    batch = Batch.of([rollout("a", turn((1,)), answer=None), rollout("a", turn((1,)), answer=0.0)])
    assert batch.reward_R[0].isnan()
    assert batch.reward_R[1] == 0.0


def test_a_turn_whose_distribution_was_cut_off_is_in_the_table_but_cannot_be_trained() -> None:
    batch = Batch.of([rollout("a", turn((4, 5), top_p=0.9), turn((6,)), answer=1.0)])
    assert batch.trainable_N.tolist() == [False, False, True]
    assert batch.id_N.tolist() == [4, 5, 6]


def test_channels_may_be_named_in_an_order() -> None:
    batch = Batch.of(ROLLOUTS, channels=["style", "answer", "absent"])
    assert same(batch.reward_RC[2], torch.tensor([0.5, NAN, NAN]))


def test_weights_are_numbers_of_one_type_whatever_was_passed() -> None:
    assert Batch.of(ROLLOUTS, weights={"style": 2, "answer": 1}).weight_C.dtype == torch.float32


def test_a_batch_of_nothing_or_of_a_failure_is_refused() -> None:
    failed = Rollout("broken", Task("task"), "a", rewards={"answer": 0.0}, ending="failed", blame="harness")
    with pytest.raises(ValueError, match="got 0"):
        Batch.of([])
    with pytest.raises(ValueError, match="broken"):
        Batch.of([*ROLLOUTS, failed])
    with pytest.raises(ValueError, match="score them first"):
        Batch.of([rollout("a", turn((1,)))])


# ---- shapes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "letters"),
    [
        ("logp_old_N", "N"),
        ("reward_RC", "RC"),
        ("extra", ""),
        ("met_RJ", "RJ"),
        ("group_Rx", ""),
        ("x_1", ""),
        ("", ""),
    ],
)
def test_shape_letters_are_the_capitals_at_the_end(name: str, letters: str) -> None:
    assert shape_letters(name) == letters


@pytest.mark.parametrize("column", ["score_R", "score_K", "score_N", "score_C", "met_RJ", "logits_NV"])
def test_a_column_of_the_wrong_length_is_refused(column: str) -> None:
    with pytest.raises(ValueError, match=column):
        BATCH.with_extra(**{column: torch.zeros(7, 2)})


def test_a_wrong_second_axis_is_refused() -> None:
    with pytest.raises(ValueError, match=r"axis 1 \(C\)"):
        BATCH.with_extra(target_RC=torch.zeros(3, 5))


def test_a_column_with_fewer_axes_than_letters_is_refused() -> None:
    with pytest.raises(ValueError, match="target_RC"):
        BATCH.with_extra(target_RC=torch.zeros(3))


def test_turns_of_a_rollout_must_stand_together() -> None:
    with pytest.raises(ValueError, match="rollout_K must not decrease"):
        Batch(
            group_R=torch.tensor([0, 0]),
            rollout_K=torch.tensor([1, 0]),
            turn_N=torch.tensor([0, 1]),
            id_N=torch.tensor([3, 4]),
            logp_old_N=torch.zeros(2),
            version_N=torch.zeros(2, dtype=torch.int64),
            reward_RC=torch.zeros(2, 1),
        )


def test_evidence_that_nobody_found_is_refused_by_name() -> None:
    batch = BATCH.with_extra(teacher_logp_N=torch.arange(6.0))
    assert batch.column("teacher_logp_N").tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert BATCH.extra == {}
    with pytest.raises(ValueError, match=r"'met_RJ'.*teacher_logp_N"):
        batch.column("met_RJ")


# ---- the sub-table ----------------------------------------------------------------------------------------------


EXTRA = {"a_N": torch.arange(6.0), "b_K": torch.arange(3), "c_RJ": torch.arange(6.0).view(3, 2), "d": torch.ones(9)}


def test_select_by_hand() -> None:
    part = BATCH.with_extra(**EXTRA).select(torch.tensor([2, 0]))
    assert part.group_R.tolist() == [1, 0]
    assert part.rollout_K.tolist() == [0, 1, 1]
    assert part.turn_N.tolist() == [0, 0, 0, 1, 1, 2]
    assert part.id_N.tolist() == [8, 9, 10, 5, 6, 7]
    assert part.reward_R.tolist() == [1.0, 1.0]
    assert part.extra["a_N"].tolist() == [3.0, 4.0, 5.0, 0.0, 1.0, 2.0]
    assert part.extra["b_K"].tolist() == [2, 0, 1]
    assert part.extra["c_RJ"].tolist() == [[4.0, 5.0], [0.0, 1.0]]
    assert part.extra["d"].tolist() == [1.0] * 9


def test_a_mask_selects_what_its_indices_select() -> None:
    assert_same(BATCH.select(torch.tensor([True, False, True])), BATCH.select(torch.tensor([0, 2])))


def test_selecting_a_rollout_twice_gives_it_twice() -> None:
    part = BATCH.select(torch.tensor([0, 0]))
    assert part.rollout_K.tolist() == [0, 0, 1, 1]
    assert part.turn_N.tolist() == [0, 0, 1, 2, 2, 3]
    assert part.id_N.tolist() == [5, 6, 7, 5, 6, 7]


def test_selecting_none_gives_an_empty_table() -> None:
    part = BATCH.select(torch.zeros(3, dtype=torch.bool))
    assert (part.rollouts, part.turns, part.tokens) == (0, 0, 0)


def test_a_mask_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="3 rollouts"):
        BATCH.select(torch.tensor([True, False]))


def table(turn_lengths: list[list[int]]) -> Batch:
    """Rollout r has turns of these lengths; ids count up, so that no two tokens are alike."""
    counter = iter(range(10_000))
    return Batch.of(
        [
            rollout(f"group {r // 2}", *(turn(tuple(next(counter) for _ in range(n))) for n in lengths), x=float(r))
            for r, lengths in enumerate(turn_lengths)
        ]
    )


lengths = st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(lengths, st.randoms(use_true_random=False))
def test_select_keeps_each_rollout_whole_and_undoes_itself(turn_lengths: list[list[int]], random: object) -> None:
    batch = table(turn_lengths)
    order = torch.tensor(sorted(range(batch.rollouts), key=lambda _: random.random()))  # type: ignore[attr-defined]  # hypothesis gives a Random
    part = batch.select(order)
    for new, old in enumerate(order.tolist()):
        assert part.id_N[part.rollout_N == new].tolist() == batch.id_N[batch.rollout_N == old].tolist()
        assert part.lengths_K[part.rollout_K == new].tolist() == turn_lengths[old]
    assert_same(part.select(order.argsort()), batch)


# ---- the file ---------------------------------------------------------------------------------------------------


def test_a_saved_batch_is_read_back_exactly(tmp_path: Path) -> None:
    transposed = torch.arange(6).view(2, 3).T.float()  # not contiguous
    shared = torch.arange(6.0)
    batch = BATCH.with_extra(c_RJ=transposed, flag_N=shared > 2, one_N=shared, other_N=shared, half_N=shared.bfloat16())
    batch.save(tmp_path / "batch.safetensors")
    assert_same(Batch.load(tmp_path / "batch.safetensors"), batch)


def test_an_empty_batch_is_read_back_exactly(tmp_path: Path) -> None:
    empty = BATCH.select(torch.zeros(3, dtype=torch.bool))
    empty.save(tmp_path / "batch.safetensors")
    assert_same(Batch.load(tmp_path / "batch.safetensors"), empty)
