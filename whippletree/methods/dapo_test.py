from __future__ import annotations

from functools import partial

import pytest
import torch

from whippletree.methods._tables import HALF, WORKED, forward_of, gradient, table
from whippletree.methods._toy import learn, negated
from whippletree.methods.dapo import METHOD, overlong, rewards_differ
from whippletree.types import Rollout, Task, Turn

BATCH = WORKED
ROOT = 1 / 2**0.5


def rollout_of(*lengths: int) -> Rollout:
    turns = [Turn(str(k), (1,), (2,) * n, (-1.0,) * n, 0, "stop") for k, n in enumerate(lengths)]
    return Rollout("r", Task("t"), "g", turns=tuple(turns))


def test_the_gradient_on_policy_by_hand() -> None:
    # every one of the 9 tokens of the batch counts 1/9
    forward = forward_of(BATCH.logp_old_N)
    loss_N = METHOD.objective(forward, METHOD.credit(BATCH), BATCH)
    expected_N = -torch.tensor([ROOT, ROOT, ROOT, -ROOT, -1, -1, 1, 1, 0]) / 9
    torch.testing.assert_close(gradient(forward, loss_N, METHOD.average(BATCH)), expected_N)


def test_the_clip_is_higher_above_than_below() -> None:
    # rho 1.25 is within 1.28, rho 1.3 is not; for bad tokens rho 0.81 is within 0.8, rho 0.79 is not
    batch = table([[2], [2]], rewards=[1.0, 0.0], old=HALF)
    forward = forward_of(batch.logp_old_N + torch.tensor([1.25, 1.3, 0.81, 0.79]).log())
    loss_N = METHOD.objective(forward, torch.tensor([1.0, 1.0, -1.0, -1.0]), batch)
    torch.testing.assert_close(loss_N.detach(), torch.tensor([-1.25, -1.28, 0.81, 0.8]))
    torch.testing.assert_close(gradient(forward, loss_N), torch.tensor([-1.25, 0.0, 0.81, 0.0]))


def test_a_group_enters_only_if_its_rewards_differ() -> None:
    assert METHOD.accept is rewards_differ
    assert rewards_differ(torch.tensor([1.0, 0.0, 1.0]))
    assert not rewards_differ(torch.tensor([1.0, 1.0]))
    assert not rewards_differ(torch.tensor([0.0])) and not rewards_differ(torch.tensor([torch.nan]))
    assert not rewards_differ(torch.tensor([1.0, torch.nan]))  # an unknown reward is not a different one


@pytest.mark.parametrize(
    ("lengths", "penalty"),
    # limit 10, cache 4: free up to 6, then -1/4 a token, -1 at 10 and beyond; the longest turn decides
    [((6,), 0.0), ((7,), -0.25), ((9, 2), -0.75), ((10,), -1.0), ((30,), -1.0), ((5, 5, 5), 0.0), ((), 0.0)],
)
async def test_an_overlong_turn_is_punished_softly(lengths: tuple[int, ...], penalty: float) -> None:
    assert await overlong(rollout_of(*lengths), limit=10, cache=4) == {"overlong": penalty}


async def test_the_paper_allows_16384_tokens_free_of_punishment() -> None:
    assert await overlong(rollout_of(16384)) == {"overlong": 0.0}
    assert await overlong(rollout_of(16384 + 1024)) == {"overlong": -0.25}


async def test_a_cache_beyond_the_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="limit of 10 tokens, but got 11"):
        await overlong(rollout_of(1), limit=10, cache=11)


def test_it_learns_the_toy_and_unlearns_it_with_the_credit_negated() -> None:
    # chance is 1/4
    assert learn(METHOD) > 0.9
    assert learn(METHOD.but(credit=partial(negated, credit=METHOD.credit))) < 0.05
