"""The laws every method obeys, checked on the example `BATCH` of its own test, and shown to catch broken parts.

A method is excused from a law only by naming it in `excused` and arguing it in `differs`.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from whippletree import credit, objective
from whippletree.codec import from_json, to_json
from whippletree.credit import std_within
from whippletree.methods import card, discover, load, names
from whippletree.methods._tables import WORKED
from whippletree.types import Batch, Forward, Method, Paper
from whippletree.update.averages import token_mean

METHODS = discover()


def example(name: str) -> Batch:
    """The worked example of a method, with the number of each token beside it."""
    batch: Batch = importlib.import_module(f"whippletree.methods.{name}_test").BATCH
    return numbered(batch)


def numbered(batch: Batch) -> Batch:
    return batch.with_extra(row_N=torch.arange(batch.tokens))


def policy(batch: Batch) -> Tensor:
    """[N] log-probs of a policy that has moved from its sampler, by -0.2 to 0.2; a leaf."""
    return (batch.logp_old_N + torch.linspace(-0.2, 0.2, batch.tokens)).requires_grad_()


def losses(method: Method, part: Batch, leaf_N: Tensor, advantage_N: Tensor, weight_N: Tensor) -> Tensor:
    """The weighted losses of the tokens of `part`, with advantages, weights and policy numbered as in the whole."""
    row_N = part.extra["row_N"]
    known_N = leaf_N.detach()[row_N]  # stands in for what else a pass may give; NaN where the pass is
    forward = Forward(leaf_N[row_N], ask={"entropy_N": lambda: -known_N, "value_N": lambda: known_N})
    return weight_N[row_N] * method.objective(forward, advantage_N[row_N], part)


def gradient(method: Method, batch: Batch, leaf_N: Tensor) -> Tensor:
    """The gradient of one whole step at the log-probs of the policy."""
    row_N = batch.extra["row_N"]
    advantage_N = torch.zeros_like(leaf_N.detach()).index_copy(0, row_N, method.credit(batch))
    weight_N = torch.zeros_like(leaf_N.detach()).index_copy(0, row_N, method.average(batch))
    return torch.autograd.grad(losses(method, batch, leaf_N, advantage_N, weight_N).sum(), leaf_N)[0]


# ---- the laws ---------------------------------------------------------------------------------------------------


def order_changes_nothing(method: Method, batch: Batch) -> None:
    turned = batch.select(torch.arange(batch.rollouts).flip(0))
    torch.testing.assert_close(method.credit(turned), method.credit(batch)[turned.extra["row_N"]])
    torch.testing.assert_close(gradient(method, turned, policy(batch)), gradient(method, batch, policy(batch)))


def micro_batches_change_nothing(method: Method, batch: Batch) -> None:
    leaf_N, advantage_N, weight_N = policy(batch), method.credit(batch), method.average(batch)
    for rollout in range(batch.rollouts):
        part = batch.select(torch.tensor([rollout]))
        losses(method, part, leaf_N, advantage_N, weight_N).sum().backward()
    assert leaf_N.grad is not None
    torch.testing.assert_close(leaf_N.grad, gradient(method, batch, policy(batch)))


def equal_rewards_teach_nothing(method: Method, batch: Batch) -> None:
    equal_RC = (0.1 * (1 + batch.group_R.float()))[:, None].expand_as(batch.reward_RC)  # unequal between groups
    got = gradient(method, replace(batch, reward_RC=equal_RC), policy(batch))
    assert (got == 0).all(), f"equal rewards in each group gave the gradient {got.tolist()}"


def untrainable_tokens_are_as_if_never_sampled(method: Method, batch: Batch) -> None:
    gone_N = (torch.arange(batch.tokens) % 3 == 1) | (batch.rollout_N == batch.rollouts - 1)
    columns = {
        name: torch.where(gone_N, torch.nan, x)
        for name, x in batch.extra.items()
        if name.endswith("_N") and x.is_floating_point()
    }
    unknown = replace(batch, logp_old_N=torch.where(gone_N, torch.nan, batch.logp_old_N)).with_extra(**columns)
    leaf_N = torch.where(gone_N, torch.nan, policy(batch).detach()).requires_grad_()
    loss_N = losses(method, unknown, leaf_N, method.credit(unknown), method.average(unknown))
    assert (loss_N[gone_N] == 0).all(), f"tokens that may not train have the loss {loss_N[gone_N].tolist()}"
    got = gradient(method, unknown, leaf_N)
    assert (got[gone_N] == 0).all(), f"tokens that may not train got the gradient {got[gone_N].tolist()}"
    torch.testing.assert_close(got, gradient(method, _without(batch, gone_N), policy(batch)))


def _without(batch: Batch, gone_N: Tensor) -> Batch:
    """The batch as if these tokens had never been sampled; their turns remain."""
    kept = {f.name: getattr(batch, f.name)[~gone_N] for f in fields(batch) if f.name.endswith("_N")}
    extra = {name: x[~gone_N] if name.endswith("_N") else x for name, x in batch.extra.items()}
    return replace(batch, **kept, extra=extra)


Law = Callable[[Method, Batch], None]
LAWS: dict[str, Law] = {
    "the order of rollouts changes nothing": order_changes_nothing,
    "micro-batches change nothing": micro_batches_change_nothing,
    "equal rewards teach nothing": equal_rewards_teach_nothing,
    "untrainable tokens are as if never sampled": untrainable_tokens_are_as_if_never_sampled,
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", METHODS)
def test_a_method_obeys_every_law_that_it_is_not_excused_from(name: str, law: str) -> None:
    if law not in METHODS[name].excused:
        LAWS[law](METHODS[name], example(name))


@pytest.mark.parametrize("name", METHODS)
def test_an_excuse_names_a_law_that_is_broken_and_is_argued(name: str) -> None:
    for law in METHODS[name].excused:
        assert "xcused" in METHODS[name].differs, f"{name} does not argue in `differs` why it is excused"
        with pytest.raises(AssertionError):
            LAWS[law](METHODS[name], example(name))


@pytest.mark.parametrize("name", METHODS)
def test_the_worked_example_of_a_method_can_show_a_broken_law(name: str) -> None:
    batch = example(name)
    assert batch.group_R.min() < batch.group_R.max()
    assert (std_within(batch.reward_R, batch.group_R) > 0).all(), "some group has equal rewards"
    assert batch.lengths_R.min() < batch.lengths_R.max() and torch.bincount(batch.rollout_K).max() > 1
    assert gradient(METHODS[name], batch, policy(batch)).count_nonzero() > batch.tokens / 2


@pytest.mark.parametrize("name", METHODS)
def test_a_method_says_where_it_is_from_and_can_be_written_as_json(name: str) -> None:
    written = json.dumps(to_json(METHODS[name]))
    assert json.dumps(to_json(from_json(json.loads(written)))) == written
    assert METHODS[name].differs and METHODS[name].paper.title
    assert METHODS[name].reward is None, "what is rewarded is the recipe's choice"


# ---- broken parts are caught ------------------------------------------------------------------------------------


SOUND = Method(paper=Paper("none"), credit=credit.group_mean, objective=objective.clipped_ratio, average=token_mean)


def by_place(batch: Batch) -> Tensor:
    return torch.arange(batch.tokens).float()


def against_its_micro_batch(forward: Forward, advantage_N: Tensor, batch: Batch) -> Tensor:
    return objective.policy_gradient(forward, advantage_N - advantage_N.mean(), batch)


def over_its_micro_batch(forward: Forward, advantage_N: Tensor, batch: Batch) -> Tensor:
    return objective.policy_gradient(forward, advantage_N, batch) * token_mean(batch)


def unsafe(forward: Forward, advantage_N: Tensor, batch: Batch) -> Tensor:
    loss_N = -(forward.logp_N - batch.logp_old_N).exp() * advantage_N
    return torch.where(batch.trainable_N, loss_N, 0.0)  # too late: the gradient is NaN times 0


def every_token(batch: Batch) -> Tensor:
    return torch.full((batch.tokens,), 1 / batch.tokens)


def blind_whitening(batch: Batch) -> Tensor:
    return credit.whiten(credit.group_mean(batch), torch.ones_like(batch.trainable_N))


BROKEN = {
    "a credit that reads the order": (order_changes_nothing, SOUND.but(credit=by_place)),
    "an average that reads the order": (order_changes_nothing, SOUND.but(average=lambda b: by_place(b) / b.tokens)),
    "a baseline within the micro-batch": (micro_batches_change_nothing, SOUND.but(objective=against_its_micro_batch)),
    "an average within the micro-batch": (micro_batches_change_nothing, SOUND.but(objective=over_its_micro_batch)),
    "a baseline across groups": (equal_rewards_teach_nothing, SOUND.but(credit=credit.batch_mean)),
    "a mask after the ratio": (untrainable_tokens_are_as_if_never_sampled, SOUND.but(objective=unsafe)),
    "an average that counts every token": (untrainable_tokens_are_as_if_never_sampled, SOUND.but(average=every_token)),
    "statistics of every token": (untrainable_tokens_are_as_if_never_sampled, SOUND.but(credit=blind_whitening)),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_part_is_caught(what: str) -> None:
    law, method = BROKEN[what]
    law(SOUND, numbered(WORKED))
    with pytest.raises(AssertionError):
        law(method, numbered(WORKED))


# ---- the folder is the list -------------------------------------------------------------------------------------


def test_the_folder_is_the_list_without_helpers_and_tests() -> None:
    assert list(METHODS) == names() == sorted(names()) and names()
    assert not any(name.startswith("_") or name.endswith("_test") for name in names())


@pytest.mark.parametrize("name", METHODS)
def test_a_card_tells_paper_files_and_the_line_of_each_part(name: str) -> None:
    told = card(name)
    assert told["file"].endswith(f"methods/{name}.py") and told["test"].endswith(f"methods/{name}_test.py")
    parts = [part for slot in ("credit", "objective", "average") for part in told["slots"][slot]]
    for part in parts:
        path, line = part["at"].split(":")
        with open(importlib.import_module("whippletree.methods").ROOT / path, encoding="utf-8") as file:
            assert f"def {part['name']}(" in file.read().splitlines()[int(line) - 1]


def test_an_unknown_method_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=f"no method 'grop'.*{names()[0]}"):
        load("grop")
    with pytest.raises(ValueError, match="no method '_toy'"):
        load("_toy")
