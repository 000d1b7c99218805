from __future__ import annotations

import asyncio
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from whippletree.reward import error_counts, exact_answer, from_harness, score
from whippletree.types import Batch, Reward, Rollout, Task, Turn

TURN = Turn("k", (1,), (2,), (-0.5,), 0, "stop", reply={"message": {"content": "4"}})
ROLLOUT = Rollout("r", Task("t", (), {"answer": "4"}), "g", (TURN,), rewards={"mine": 0.25}, info={"exit_code": 0})


def gives(*values: Any) -> Reward:
    """A reward with these values as its channels a, b, ..."""

    async def scripted(_: Rollout) -> dict[str, Any]:
        return dict(zip("abc", values, strict=False))

    return scripted


async def fails(_: Rollout) -> dict[str, float]:
    raise KeyError("tests")


async def test_channels_are_merged_and_named():
    scored = await score(ROLLOUT, {"correct": exact_answer, "own": from_harness, "more": gives(1, None)}, timeout=9)
    # one channel goes by its key, several by their own names
    assert scored.rewards == {"correct": 1.0, "own": 0.25, "a": 1.0, "b": None}
    assert scored.info == {"exit_code": 0}
    assert (await score(ROLLOUT, [exact_answer, from_harness], timeout=9)).rewards == {
        "exact_answer": 1.0,
        "mine": 0.25,
    }


async def test_what_raises_is_missing_and_named_and_spares_the_others():
    scored = await score(ROLLOUT, {"tests": fails, "correct": exact_answer}, timeout=9)
    assert scored.rewards == {"tests": None, "correct": 1.0}
    assert scored.info == {"exit_code": 0, "reward_errors": {"tests": "KeyError: 'tests'"}}
    assert (scored.ending, scored.blame) == ("done", None)
    # and in the batch it is NaN, which no mean takes for 0
    assert Batch.of([scored]).reward_RC.isnan().tolist() == [[False, True]]
    assert (await score(ROLLOUT, [partial(fails)], timeout=9)).rewards == {"fails": None}


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, "1.0", [1.0], 1j, torch.ones(2), torch.tensor(math.nan)]
)
async def test_what_is_no_finite_number_is_missing_and_named(value: Any):
    scored = await score(ROLLOUT, {"x": gives(value, 0.5)}, timeout=9)
    assert scored.rewards == {"a": None, "b": 0.5}
    assert list(scored.info["reward_errors"]) == ["a"]


@pytest.mark.parametrize("value", [1, True, 1.0, np.float32(1), np.int64(1), np.bool_(True), torch.tensor(1.0)])
async def test_numbers_of_every_library_are_floats(value: Any):
    (worth,) = (await score(ROLLOUT, [gives(value)], timeout=9)).rewards.values()
    assert worth == 1.0 and type(worth) is float


async def test_none_does_not_apply_and_is_no_error():
    scored = await score(ROLLOUT, {"x": gives(None)}, timeout=9)
    assert (scored.rewards, scored.info) == ({"x": None}, {"exit_code": 0})


async def test_a_reward_that_takes_too_long_is_missing():
    async def slow(_: Rollout) -> dict[str, float]:
        await asyncio.sleep(60)
        return {"slow": 1.0}

    scored = await score(ROLLOUT, [slow], timeout=0.01)
    assert scored.rewards == {"slow": None}
    assert scored.info["reward_errors"] == {"slow": "TimeoutError: timed out after 0.01 s"}


async def test_a_reward_that_gives_no_channel_is_missing():
    silent = await score(Rollout("r", Task("t"), "g"), {"own": from_harness}, timeout=9)
    assert silent.rewards == {"own": None}
    assert "one channel or more, but it gave {}" in silent.info["reward_errors"]["own"]


async def test_a_failed_rollout_is_not_scored_and_a_truncated_one_is():
    failed = Rollout("r", Task("t"), "g", (TURN,), ending="failed", blame="harness", reason="why")
    assert await score(failed, [exact_answer], timeout=9) is failed
    cut = Rollout("r", ROLLOUT.task, "g", (TURN,), ending="truncated")
    assert (await score(cut, [exact_answer], timeout=9)).rewards == {"exact_answer": 1.0}


async def test_scoring_again_forgets_the_errors_of_before():
    once = await score(ROLLOUT, {"x": fails}, timeout=9)
    assert await score(once, {"x": exact_answer}, timeout=9) == await score(ROLLOUT, {"x": exact_answer}, timeout=9)


async def test_two_rewards_of_one_channel_are_refused_and_none_too():
    with pytest.raises(ValueError, match=r"\['a'\] came from two"):
        await score(ROLLOUT, [gives(1), gives(0)], timeout=9)
    with pytest.raises(ValueError, match="there is none"):
        await score(ROLLOUT, [], timeout=9)


async def test_errors_are_counted_by_channel():
    good = await score(ROLLOUT, {"x": exact_answer, "y": gives(math.nan)}, timeout=9)
    bad = await score(ROLLOUT, {"x": fails, "y": fails}, timeout=9)
    assert error_counts([good, bad, ROLLOUT]) == {"x": 1, "y": 2}
