from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from whippletree.models.tiny import VOCABULARY, tiny_model
from whippletree.tree.families import layout_of
from whippletree.tree.packed import Layout
from whippletree.tree.scorer import PackedScorer
from whippletree.types import Reader, Scored

# two turns after one prompt, one of which goes on; an empty reply; several temperatures
TURNS = [
    ((10, 11, 12), (13, 14), 1.0),
    ((10, 11, 12), (13, 15, 16), 0.7),
    ((10, 11), (), 1.0),
    ((10, 11, 12, 13, 14, 20), (21, 22, 23), 1.6),
]
LENGTHS = [2, 3, 0, 3]
# the same replies under a hint
HINTED = [((7, 8, 9, *prompt), reply, heat) for prompt, reply, heat in TURNS]


def plain(model: Any, turns: Any) -> Tensor:
    """[N, V] each turn a row of its own through the model, as transformers computes it."""
    rows = []
    for prompt, reply, heat in turns:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *reply]])).logits[0]
        rows.append((logits[len(prompt) - 1 : len(prompt) + len(reply) - 1].float() / heat).log_softmax(-1))
    return torch.cat(rows)


def ids(turns: Any) -> Tensor:
    return torch.tensor([i for _, reply, _ in turns for i in reply])


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def joined(scored: Any) -> Scored:
    return Scored(*(torch.cat([getattr(s, f) for s in scored]) for f in ("logp_N", "id_NM", "logp_NM", "tail_N")))


def scorer(model: Any, **options: Any) -> PackedScorer:
    return PackedScorer(model, **{"layout": Layout("one"), "temperature": 1.0, "token_budget": 64, **options})


@pytest.mark.parametrize("turns", [TURNS, HINTED], ids=["its own prompts", "other prompts"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "lfm2"])
async def test_every_kind_is_what_a_plain_forward_gives(family: str, turns: Any) -> None:
    model = tiny_model(family)
    ours, logp_NV = scorer(model, layout=layout_of(model)), plain(model, turns)
    alone, full = joined(await ours.score(turns)), joined(await ours.score(turns, "full"))
    close(alone.logp_N, logp_NV.gather(1, ids(turns)[:, None])[:, 0])
    assert alone.id_NM.shape == alone.logp_NM.shape == (8, 0)
    assert alone.tail_N.tolist() == pytest.approx([0.0] * 8, abs=1e-6)  # nothing was taken out: all mass is left
    close(full.logp_NM, logp_NV)
    assert full.id_NM.tolist() == [list(range(VOCABULARY))] * 8
    assert full.tail_N.tolist() == [-math.inf] * 8

    top, most = joined(await ours.score(turns, 5)), logp_NV.topk(5)
    close(top.logp_NM, most.values)
    assert (top.id_NM == most.indices).all()
    close(top.tail_N, (1 - most.values.double().exp().sum(1)).log().float())
    close(top.logp_N, alone.logp_N)

    # at ids that another model found likely
    given_NM = torch.stack([torch.randperm(VOCABULARY)[:4] for _ in range(8)])
    at = joined(await ours.score(turns, given_NM.split(LENGTHS)))
    assert (at.id_NM == given_NM).all()
    close(at.logp_NM, logp_NV.gather(1, given_NM))


@pytest.mark.parametrize("kind", ["sampled", 1, 7, VOCABULARY - 1, VOCABULARY, "full"])
async def test_the_most_likely_and_the_tail_are_all_mass(kind: Any) -> None:
    found = joined(await scorer(tiny_model()).score(TURNS, kind))
    torch.testing.assert_close(found.logp_NM.exp().sum(1) + found.tail_N.exp(), torch.ones(8))


async def test_the_tail_keeps_its_digits_where_it_is_small() -> None:
    # logits of (0, -40): the tail is log(1 / (e^40 + 1)) = -40; in float32 1 - p would be 0 and its log -inf
    model = tiny_model()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    logits = torch.full((VOCABULARY,), -1e4)
    logits[5], logits[6] = 0.0, -40.0
    model.lm_head = torch.nn.Linear(model.config.hidden_size, VOCABULARY)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias.copy_(logits)
    found = joined(await scorer(model).score([((10,), (5,), 1.0)], 1))
    assert (found.id_NM.tolist(), found.tail_N.tolist()) == ([[5]], [pytest.approx(-40.0)])


async def test_as_many_as_there_are_is_the_full_distribution() -> None:
    model = tiny_model()
    full = joined(await scorer(model).score(TURNS, "full"))
    more = joined(await scorer(model).score(TURNS, VOCABULARY + 9))
    for name in ("logp_N", "id_NM", "logp_NM", "tail_N"):
        assert torch.equal(getattr(full, name), getattr(more, name))


@pytest.mark.parametrize("limits", [{"token_budget": 8}, {"token_budget": 30}, {"kept_bytes": 1}])
@pytest.mark.parametrize("kind", [3, "full"])
async def test_how_turns_are_batched_changes_nothing(kind: Any, limits: dict[str, int]) -> None:
    model, rng = tiny_model(), random.Random(0)
    prompts = [tuple(rng.choices(range(3, 90), k=9)) for _ in range(3)]
    turns = [(p, tuple(rng.choices(range(3, 90), k=4)), heat) for p in prompts for heat in (0.5, 1.0)]
    one, other = [joined(await scorer(model, **more).score(turns, kind)) for more in ({"token_budget": 10**6}, limits)]
    for name in ("logp_N", "logp_NM", "tail_N"):
        close(getattr(one, name), getattr(other, name))
    assert (one.id_NM == other.id_NM).all()


async def test_nothing_sampled_gives_empty_tensors() -> None:
    ours = scorer(tiny_model())
    assert await ours.score([], "full") == []
    for kind in ("sampled", 4, "full"):
        (found,) = await ours.score([((4, 5), (), 1.0)], kind)
        assert found.logp_N.shape == found.tail_N.shape == (0,)
        assert found.id_NM.shape == found.logp_NM.shape == (0, {"sampled": 0, "full": VOCABULARY}.get(str(kind), 4))


async def test_too_many_log_probs_are_refused_with_their_bytes() -> None:
    ours = scorer(tiny_model(), limit_bytes=4 * 8 * VOCABULARY - 1)
    with pytest.raises(ValueError, match=f"take {4 * 8 * VOCABULARY} bytes, more than the limit of"):
        await ours.score(TURNS, "full")
    assert len(await ours.score(TURNS[:2], "full")) == 2  # 5 of the 8 tokens


@pytest.mark.parametrize("kind", [0, -1, "most"])
async def test_a_kind_that_is_none_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match="a number of tokens from 1 up"):
        await scorer(tiny_model()).score(TURNS, kind)


async def test_given_ids_that_do_not_fit_or_repeat_are_refused() -> None:
    ours = scorer(tiny_model())
    with pytest.raises(ValueError, match=r"\[2, 3, 0, 3\] a turn; there are \[2, 3, 0, 2\]"):
        await ours.score(TURNS, torch.arange(7)[:, None].split([2, 3, 0, 2]))
    with pytest.raises(ValueError, match="ids that differ"):
        await ours.score(TURNS[:1], [torch.tensor([[1, 2], [3, 3]])])


async def test_log_probs_alone_are_at_the_one_temperature() -> None:
    model, pairs = tiny_model(), [turn[:2] for turn in TURNS]
    logp_NV = plain(model, [(*pair, 0.5) for pair in pairs])
    found = await scorer(model, temperature=0.5).logps(pairs)
    assert isinstance(scorer(model), Reader)
    assert [len(logp) for logp in found] == LENGTHS
    assert not any(logp.requires_grad for logp in found)
    close(torch.cat(found), logp_NV.gather(1, ids(TURNS)[:, None])[:, 0])


async def test_a_scorer_with_a_value_head_gives_its_outputs_and_no_distribution() -> None:
    model, head = tiny_model(), torch.nn.Linear(64, 1)
    ours = scorer(model, value_head=head)
    pairs = [turn[:2] for turn in TURNS]
    for (prompt, reply), value in zip(pairs, await ours.logps(pairs), strict=True):
        with torch.no_grad():
            hidden = model(torch.tensor([[*prompt, *reply]]), output_hidden_states=True).hidden_states[-1][0]
            # the value of the state in which a token is chosen
            close(value, head(hidden[len(prompt) - 1 : len(prompt) + len(reply) - 1])[:, 0])
        assert not value.requires_grad
    with pytest.raises(ValueError, match="gives values"):
        await ours.score(TURNS)


async def test_other_weights_are_held_while_it_computes_where_it_is_told_to() -> None:
    model, seen = tiny_model(), []

    @contextmanager
    def doubled() -> Iterator[None]:
        with torch.no_grad():
            model.model.norm.weight.mul_(2)
            yield
            model.model.norm.weight.div_(2)

    async def here(work: Any) -> Any:
        seen.append("computed")
        return work()

    logp_NV = plain(model, [(prompt, reply, heat / 2) for prompt, reply, heat in TURNS])
    found = joined(await scorer(model, weights=doubled, compute=here).score(TURNS, "full"))
    close(found.logp_NM, logp_NV)  # twice the logits are half the temperature
    assert seen == ["computed"]
