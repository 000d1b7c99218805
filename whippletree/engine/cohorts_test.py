"""Cohorts against a plain forward of each whole sequence: a hybrid of convolution and attention, and a plain family."""

from __future__ import annotations

import pytest

from whippletree.engine.cohorts import CohortRows
from whippletree.engine.slots_test import Checked, ids_of, random_life
from whippletree.models.tiny import tiny_model


@pytest.mark.parametrize("family", ["lfm2", "llama", "gemma3"])
@pytest.mark.parametrize("seed", range(2))
def test_cohorts_give_the_logits_of_whole_sequences_whatever_comes_and_goes(family: str, seed: int):
    random_life(CohortRows(tiny_model(family, layers=3)), seed=seed)


def test_a_prompt_that_many_ask_for_is_computed_once():
    checked = Checked(CohortRows(tiny_model("lfm2")))
    assert checked.admit(*[ids_of(40)] * 5, ids_of(30, seed=1)) == 40 + 30
    checked.step([1, 2, 3, 4, 5, 6])


def test_very_different_lengths_are_not_padded_to_one():
    rows = CohortRows(tiny_model("lfm2"))
    checked = Checked(rows)
    checked.admit(ids_of(200), ids_of(3), ids_of(5, seed=1))
    assert [cohort.mask_BL.shape for cohort in rows.cohorts] == [(2, 5), (1, 200)]


def test_a_cohort_without_rows_is_gone():
    rows = CohortRows(tiny_model("lfm2"))
    checked = Checked(rows)
    checked.admit(ids_of(5))
    checked.admit(ids_of(9), ids_of(8))
    checked.drop(0, 2)
    checked.step([3])
    assert [cohort.rows for cohort in rows.cohorts] == [1]
    rows.clear()
    assert rows.cohorts == []
