"""The update: exact under any split, nothing from what cannot teach, nothing half done."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from whippletree.credit.baselines import group_mean
from whippletree.learn import Learner, setting, teaching
from whippletree.models.tiny import tiny_model
from whippletree.objective.addons import with_entropy
from whippletree.objective.policy import clipped_ratio
from whippletree.tree.families import prove
from whippletree.tree.forward import forward
from whippletree.tree.pack import micro_batches
from whippletree.types import Batch, Method, Paper, Rollout, Task, Turn
from whippletree.update.adamw import AdamW, Updater
from whippletree.update.averages import rollout_mean, token_mean

METHOD = Method(paper=Paper("a test"), credit=group_mean, objective=clipped_ratio, average=token_mean)


def rollout(name: str, group: str, reward: float, *replies: tuple[int, ...], logp: float = -4.0) -> Rollout:
    """Turns that extend each other: prompt (5, 6), then reply, then (7,), then reply."""
    turns: list[Turn] = []
    seen: tuple[int, ...] = (5, 6)
    for reply in replies:
        turns.append(Turn(name, seen, reply, (logp,) * len(reply), 0, "stop"))
        seen = (*seen, *reply, 7)
    return Rollout(name, Task(group), group, tuple(turns), {"reward": reward})


ROLLOUTS = [
    rollout("a0", "a", 1.0, (10, 11), (12,)),
    rollout("a1", "a", 0.0, (10, 13, 14)),
    rollout("a2", "a", 0.25, (15,), (16, 17), (18,)),
    rollout("b0", "b", 0.0, (20, 21)),
    rollout("b1", "b", 2.0, (22,), (23, 24, 25, 26)),
]


def gradient(method: Method, rollouts: list[Rollout], *, budget: int) -> dict[str, Tensor]:
    """What the update's backward leaves in the parameters: a step of rate 0 reports through its moments."""
    model = tiny_model("llama")
    layout = prove(model)
    # beta1 = 0: after one step the first moment is the gradient itself
    updater = Updater(dict(model.named_parameters()), AdamW(learning_rate=1.0, beta1=0.0, clip_norm=0.0))
    learner = Learner(
        method, updater, partial(forward, model, layout=layout), partial(micro_batches, token_budget=budget)
    )
    learner.update(rollouts, Batch.of(rollouts), step=0, rate=0.0)
    return {name: x for name, x in updater.moments().items() if name.endswith("exp_avg")}


def close(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys() and a
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("average", [token_mean, rollout_mean])
def test_micro_batches_of_whole_rollouts_give_the_gradient_of_the_whole_batch(average) -> None:
    method = METHOD.but(average=average)
    close(gradient(method, ROLLOUTS, budget=10_000), gradient(method, ROLLOUTS, budget=1))


def test_the_gradient_is_the_one_of_every_turn_alone() -> None:
    """By hand: loss = -(1/N) sum A rho, and rho's gradient is rho times that of the log-prob."""
    batch = Batch.of(ROLLOUTS)
    model = tiny_model("llama")
    advantage_N, n, total = group_mean(batch), 0, torch.zeros(())
    for turn in (turn for r in ROLLOUTS for turn in r.turns):
        ids = torch.tensor([turn.prompt_ids + turn.reply_ids])
        logp = model(ids).logits[0].log_softmax(-1)
        for place, token in enumerate(turn.reply_ids, start=len(turn.prompt_ids) - 1):
            ratio = (logp[place, token] + 4.0).exp()
            clipped = ratio.clamp(0.8, 1.2)
            total = total - torch.minimum(ratio * advantage_N[n], clipped * advantage_N[n]) / batch.tokens
            n += 1
    total.backward()
    found = gradient(METHOD, ROLLOUTS, budget=10_000)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[f"{name}/exp_avg"], parameter.grad, rtol=1e-4, atol=1e-7)


def test_leaving_out_groups_that_cannot_teach_changes_nothing_but_their_work() -> None:
    """Two groups teach; the equal one counts in the average, and does not go through the model."""
    equal = [rollout("c0", "c", 1.0, (30,)), rollout("c1", "c", 1.0, (31, 32))]
    batch = Batch.of([*ROLLOUTS, *equal])
    assert teaching(METHOD, batch, group_mean(batch)).tolist() == [True] * 5 + [False] * 2
    # 20 tokens in place of 17: each weighs 17/20 of what it weighed
    without, with_equal = gradient(METHOD, ROLLOUTS, budget=100), gradient(METHOD, [*ROLLOUTS, *equal], budget=100)
    close({name: x * 17 / 20 for name, x in without.items()}, with_equal)


def test_an_objective_that_reads_more_has_something_to_teach_everywhere() -> None:
    batch = Batch.of([rollout("c0", "c", 1.0, (30,)), rollout("c1", "c", 1.0, (31, 32))])
    bonus = METHOD.but(objective=partial(with_entropy, objective=clipped_ratio, bonus=0.01))
    assert teaching(bonus, batch, torch.zeros(3)).tolist() == [True, True]


def test_minibatches_make_as_many_steps_and_epochs_repeat_them() -> None:
    model = tiny_model("llama")
    updater = Updater(dict(model.named_parameters()), AdamW(learning_rate=1e-3))
    layout = prove(model)
    run = partial(forward, model, layout=layout)
    seen: list[int] = []
    learner = Learner(
        METHOD,
        updater,
        run,
        partial(micro_batches, token_budget=100),
        epochs=3,
        minibatches=2,
        check=lambda rollouts, batch, logp_N: seen.append(int((~logp_N.isnan()).sum())),
    )
    learned = learner.update(ROLLOUTS, Batch.of(ROLLOUTS), step=0, rate=1e-3)
    assert int(updater.moments()["model.norm.weight/step"]) == 6
    # fidelity is looked at on the first pass only, over what has gone through so far
    assert len(seen) == 2 and seen[1] == 17 and not learned.logp_N.isnan().any()


def test_an_advantage_that_is_not_finite_moves_nothing() -> None:
    model = tiny_model("llama")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    broken = METHOD.but(credit=lambda batch: torch.full((batch.tokens,), math.inf))
    updater = Updater(dict(model.named_parameters()), AdamW(learning_rate=1e-3))
    learner = Learner(broken, updater, partial(forward, model), partial(micro_batches, token_budget=100))
    with pytest.raises(FloatingPointError, match="not finite"):
        learner.update(ROLLOUTS, Batch.of(ROLLOUTS), step=3, rate=1e-3)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_a_keyword_is_found_through_the_parts_that_wrap_it() -> None:
    inner = partial(clipped_ratio, high=0.28)
    assert setting(partial(with_entropy, objective=inner, bonus=0.1), "high", 0.2) == 0.28
    assert setting(clipped_ratio, "high", 0.2) == 0.2
