from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from whippletree.methods import grpo, ppo
from whippletree.toys.chains import chain
from whippletree.toys.corridors import corridor
from whippletree.toys.learning import learn, negated
from whippletree.toys.transformer import Language, Transformer, pretrain
from whippletree.types import Batch

WORLDS = [corridor(cells=4, steps=5), chain(positions=3), chain(positions=3, one_turn=True)]


def stirred(world, seed: int = 0) -> Language:
    """A policy of this world that is not uniform."""
    policy = Language.of(world, seed=seed)
    with torch.no_grad():
        policy.model.head.weight.normal_(generator=torch.Generator().manual_seed(seed))
    return policy


@pytest.mark.parametrize("world", WORLDS)
async def test_it_samples_what_its_forward_says(world) -> None:
    policy = stirred(world)
    played = world.play(policy, [0] * 6, np.random.default_rng(0))
    passed = policy.forward(played, played.batch)
    torch.testing.assert_close(passed.logp_N.detach(), played.batch.logp_old_N, atol=1e-5, rtol=0)
    turns = [(turn.prompt_ids, turn.reply_ids) for rollout in played for turn in rollout.turns]
    torch.testing.assert_close(torch.cat(await policy.logps(turns)), passed.logp_N.detach())
    assert torch.equal(Batch.of(list(played)).logp_old_N, played.batch.logp_old_N)
    assert passed.logp_N.std() > 0.1 and passed.hidden_ND.shape == (played.batch.tokens, 64)


def test_rows_of_turns_that_go_on_from_one_another_are_shared_without_a_difference() -> None:
    policy = stirred(WORLDS[0])
    played = WORLDS[0].play(policy, [0] * 3, np.random.default_rng(0))
    turns = [(turn.prompt_ids, turn.reply_ids) for rollout in played for turn in rollout.turns]
    apart = torch.cat([policy.passed([turn]).logp_N for turn in turns])
    torch.testing.assert_close(policy.passed(turns).logp_N, apart, atol=1e-5, rtol=0)


def test_a_second_pass_under_other_prompts_reads_them() -> None:
    world = replace(chain(positions=2), messages=1)
    policy = stirred(world)
    played = world.play(policy, [0] * 3, np.random.default_rng(0), message_RT=np.array([[0, 1]] * 3))
    passed = policy.forward(played, played.batch)
    told = [turn.prompt_ids for rollout in played for turn in rollout.turns]
    clean = [world.without_messages(prompt) for prompt in told]
    torch.testing.assert_close(passed.under(told).logp_N, passed.logp_N)
    moved_N = (passed.under(clean).logp_N - passed.logp_N).abs().detach() > 1e-4
    assert moved_N.tolist() == [False, True] * 3


def test_the_same_seed_gives_the_same_weights_and_a_uniform_start() -> None:
    one, other, third = Transformer(9, 4), Transformer(9, 4), Transformer(9, 4, seed=1)
    assert torch.equal(one.embed.weight, other.embed.weight) and not torch.equal(one.embed.weight, third.embed.weight)
    policy = Language(one)
    logp_N = policy.passed([((5, 6), (1, 2, 3))]).logp_N
    torch.testing.assert_close(logp_N, torch.full((3,), 0.25).log())


def test_replies_end_where_they_say_and_their_log_probs_are_exact() -> None:
    policy = Language(Transformer(6, 4))
    with torch.no_grad():
        policy.model.head.weight.normal_(std=0.05, generator=torch.Generator().manual_seed(0))
    prompts = [(4,), (5, 4, 4)] * 50
    replies = policy.sample(prompts, np.random.default_rng(0), most=3, end=3)
    assert {len(ids) for ids, _ in replies} == {1, 2, 3}
    assert all(3 not in ids[:-1] and (ids[-1] == 3 or len(ids) == 3) for ids, _ in replies)
    passed = policy.passed([(prompt, ids) for prompt, (ids, _) in zip(prompts, replies, strict=True)])
    sampled_N = torch.tensor([x for _, logps in replies for x in logps])
    torch.testing.assert_close(passed.logp_N.detach(), sampled_N, atol=1e-5, rtol=0)


def test_replies_are_sampled_as_often_as_they_are_likely() -> None:
    policy = Language(Transformer(4, 3))
    with torch.no_grad():
        policy.model.head.bias.copy_(torch.tensor([0.5, 0.2, 0.3]).log())
    replies = policy.sample([(3,)] * 4000, np.random.default_rng(0), most=2, end=2)
    assert abs(sum(ids == (2,) for ids, _ in replies) / 4000 - 0.3) < 0.03  # 4 times 0.0072
    assert abs(sum(ids == (0, 1) for ids, _ in replies) / 4000 - 0.1) < 0.02


def test_it_learns_to_say_what_it_is_shown() -> None:
    policy = Language(Transformer(6, 4, width=32))
    losses = pretrain(policy, lambda random: [((4, x), (x, 3)) for x in range(3)], steps=60)
    assert losses[0] == pytest.approx(np.log(4), abs=1e-5) and losses[-1] < 0.05


@pytest.mark.parametrize("method", [grpo.METHOD, ppo.METHOD])
def test_the_methods_of_tables_train_a_transformer(method) -> None:
    world = corridor(cells=5, steps=8)
    curve = learn(method, world, Language.of(world), seed=0, updates=30, rate=3e-3, optimizer="adam")
    assert curve.mean["reward"][0] < 0.7 and curve.last() > 0.9


def test_a_transformer_unlearns_with_the_credit_negated() -> None:
    world = corridor(cells=5, steps=8)
    curve = learn(negated(grpo.METHOD), world, Language.of(world), seed=0, updates=20, rate=3e-3, optimizer="adam")
    assert curve.last(over=5) < 0.1
