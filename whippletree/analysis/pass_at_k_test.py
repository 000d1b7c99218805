from __future__ import annotations

from itertools import combinations

import pytest

from whippletree.analysis.pass_at_k import pass_at_k


def test_pass_at_k_by_hand() -> None:
    # of 4 attempts 1 succeeded: 3 of the 6 pairs hold it; of 4 attempts 3: only 1 failure, so no pair misses
    assert pass_at_k([1, 3], [4, 4], k=2) == [0.5, 1.0]


def test_pass_at_1_is_the_share_of_successes() -> None:
    assert pass_at_k([0, 1, 5], [5, 5, 5], k=1) == pytest.approx([0, 0.2, 1])


def test_it_is_the_mean_over_every_choice_of_k_attempts() -> None:
    outcome = [1, 0, 0, 1, 0, 0, 0]
    every = [max(choice) for choice in combinations(outcome, 3)]
    assert pass_at_k([2], [7], k=3) == pytest.approx([sum(every) / len(every)])


def test_thousands_of_attempts_do_not_overflow() -> None:
    # one success among n: a choice of k holds it with probability k / n
    assert pass_at_k([1], [10_000], k=5_000) == pytest.approx([0.5])


@pytest.mark.parametrize(("c", "n", "k"), [(1, 2, 3), (3, 2, 1), (-1, 2, 1), (1, 2, 0)])
def test_what_cannot_be_estimated_is_refused(c: int, n: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k([c], [n], k=k)
