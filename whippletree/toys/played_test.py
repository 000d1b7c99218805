from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from whippletree.toys.chains import chain, favour
from whippletree.toys.corridors import FORWARD, corridor
from whippletree.toys.table import Table
from whippletree.toys.world import World
from whippletree.types import Batch

WORLDS = [corridor(cells=4, steps=5), chain(positions=3), chain(positions=3, one_turn=True)]


def some(world: World, seed: int = 0, size: int = 6, **how):
    return world.play(Table.of(world), [g for g in (3, 5) for _ in range(size)], np.random.default_rng(seed), **how)


def same(one: Batch, other: Batch) -> None:
    for f in fields(Batch):
        a, b = getattr(one, f.name), getattr(other, f.name)
        assert torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, Tensor) else a == b, f.name


@pytest.mark.parametrize("world", WORLDS)
def test_the_quick_batch_is_the_batch_of_the_rollouts(world) -> None:
    played = some(world, version=7)
    same(played.batch, Batch.of(list(played)))
    part = played.select([8, 2, 3])
    same(part.batch, Batch.of(list(part)))
    same(part.joined(played).batch, Batch.of([*part, *played]))


@pytest.mark.parametrize("world", WORLDS)
async def test_prompts_tell_places_and_states_and_log_probs(world) -> None:
    played = some(world)
    turns = [(turn.prompt_ids, turn.reply_ids) for rollout in played for turn in rollout.turns]
    assert [s for turn in turns for s in world.walk(*turn)] == played.flat(played.state_RT).tolist()
    table = Table.of(world)
    torch.testing.assert_close(torch.cat(await table.logps(turns)), played.batch.logp_old_N)
    quick, slow = table.forward(played, played.batch), table.forward(list(played), played.batch)
    torch.testing.assert_close(quick.logp_N, slow.logp_N)
    torch.testing.assert_close(quick.under([prompt for prompt, _ in turns]).logp_N, slow.logp_N)


def test_turns_are_a_conversation_in_words() -> None:
    world = corridor(cells=3, steps=4)
    sure = torch.tensor([[99.0, 0, 0]] * 3)
    (rollout,) = world.play(Table.of(world, sure), [0], np.random.default_rng(0))
    # ids: actions 0 to 2, then cells from 3
    assert [(t.prompt_ids, t.reply_ids, t.link) for t in rollout.turns] == [
        ((3,), (FORWARD,), "root"),
        ((3, FORWARD, 4), (FORWARD,), "append"),
    ]
    assert [m["content"] for m in rollout.turns[1].request["messages"]] == ["cell 0", "forward", "cell 1"]
    assert rollout.turns[1].reply == {"role": "assistant", "content": "forward"}
    assert rollout.rewards == {"reward": 1.0} and rollout.ending == "done"


def test_a_word_of_one_turn_is_one_reply() -> None:
    world = chain(positions=3, one_turn=True)
    rollout = some(world)[0]
    assert len(rollout.turns) == 1 and len(rollout.turns[0].reply_ids) == 3 and rollout.turns[0].prompt_ids == (4,)


def test_who_runs_out_of_steps_is_truncated_and_has_reward_0() -> None:
    world = corridor(cells=9, steps=3)
    assert {(r.ending, r.rewards["reward"], len(r.turns)) for r in some(world)} == {("truncated", 0.0, 3)}


def test_the_same_seed_plays_the_same() -> None:
    one, other, third = some(WORLDS[0], 1), some(WORLDS[0], 1), some(WORLDS[0], 2)
    assert list(one) == list(other) and list(one) != list(third)


def test_forced_actions_are_taken_again_and_then_it_goes_on() -> None:
    world = corridor(cells=4, steps=5)
    before = some(world)
    forced_RT = np.where(np.arange(5) < 2, before.action_RT, -1)
    again = some(world, seed=9, forced_RT=forced_RT)
    assert (again.action_RT[:, :2] == before.action_RT[:, :2]).all()
    assert (again.state_RT[:, :3] == before.state_RT[:, :3]).all()
    assert (again.action_RT != before.action_RT).any()
    np.testing.assert_allclose(again.logp_RT[:, :2], before.logp_RT[:, :2])


def test_a_message_stands_in_the_prompt_moves_the_policy_and_is_taken_out() -> None:
    world = replace(chain(positions=3), messages=1)
    table = Table.of(world, message_MPV=favour(world, 99.0)[None])
    message_RT = np.tile([0, 1, 0], (200, 1))
    played = world.play(table, [0] * 200, np.random.default_rng(0), message_RT=message_RT)
    assert (played.action_RT[:, 1] == 0).all() and 0.1 < (played.action_RT[:, 0] == 0).mean() < 0.4
    told = played[0].turns[1]
    assert told.prompt_ids[-1] == 4 + 3 + 1 and told.request["messages"][-1]["content"] == "position 1 (message 1)"
    clean = [world.without_messages(turn.prompt_ids) for r in played for turn in r.turns]
    assert clean[1] == (4, told.prompt_ids[1], 5)
    logp_N = table.forward(played, played.batch).under(clean).logp_N.view(200, 3)
    torch.testing.assert_close(logp_N[:, 1], torch.full((200,), 0.25).log())


def test_tasks_that_cannot_be_told_apart_are_refused() -> None:
    world = corridor(cells=3, steps=2)
    with pytest.raises(ValueError, match="told apart by the first place"):
        replace(world, place_S=torch.zeros(3, dtype=torch.int64), start_G=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="the place counts up by one"):
        replace(world, one_turn=True)
