from __future__ import annotations

import random

import pytest
import torch
from peft import LoraConfig, get_peft_model

from whippletree.models.tiny import FAMILIES, VOCABULARY, tiny_model
from whippletree.tree.families import layout_of
from whippletree.tree.forward import forward
from whippletree.tree.pack import micro_batches, pack
from whippletree.tree.packed import Layout, packed_forward
from whippletree.types import Turn


def _conversation(seed, groups=2, rollouts=3):
    """Turns that extend one another, fork, repeat a reply, say nothing or are cut short, and their owners."""
    rng = random.Random(seed)

    def words(most, least=1):
        return tuple(rng.choices(range(3, VOCABULARY), k=rng.randrange(least, most + 1)))

    turns, rollout_K = [], []
    for group in range(groups):
        prompt, said = words(14, 8), words(5)
        for rollout in range(rollouts):
            context = prompt
            for turn in range(rng.randrange(1, 4)):
                reply = said if turn == 0 and rollout < 2 else words(6, 0)
                turns.append((context, reply, rng.choice([1.0, 1.0, 0.7])))
                rollout_K.append(group * rollouts + rollout)
                forgets = rng.random() < 0.3  # the harness rewrites the end of the reply: a fork
                context = (*context, *(reply[:-1] if forgets else reply), *words(5))
    return turns, torch.tensor(rollout_K), torch.arange(groups * rollouts) // rollouts


def _apart(model, turns, head=None):
    """Log-probs, entropies and values, each turn a row of its own."""
    found = []
    for prompt, reply, temperature in turns:
        out = model(input_ids=torch.tensor([[*prompt, *reply]]), output_hidden_states=True)
        at = slice(len(prompt) - 1, len(prompt) + len(reply) - 1)
        logp = (out.logits[0, at].float() / temperature).log_softmax(-1)
        value = head(out.hidden_states[-1][0, at])[:, 0] if head else logp[:, 0]
        found.append((logp.gather(1, torch.tensor([reply]).long().T)[:, 0], -(logp.exp() * logp).sum(-1), value))
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def _gradient(loss, modules):
    """Flat, with zeros where a parameter has no part (the last layers in the gradient of a value)."""
    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in found])


def _relative(a, b):
    return float((a - b).norm() / b.norm())


def _weights(size):
    return torch.randn(size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_is_exact_in_log_probs_entropies_values_and_gradients(family):
    model, head = tiny_model(family), torch.nn.Linear(64, 1)
    for seed in range(6):
        turns, rollout_K, group_R = _conversation(seed)
        packed = forward(model, turns, group_R[rollout_K], value_head=head)
        ours = (packed.logp_N, packed.entropy_N, packed.value_N)
        theirs = _apart(model, turns, head)
        weight_N = _weights(len(packed.logp_N))
        for name, a, b in zip(("logp", "entropy", "value"), ours, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=0)
            modules = (model, head) if name == "value" else (model,)
            gap = _relative(_gradient((a * weight_N).sum(), modules), _gradient((b * weight_N).sum(), modules))
            assert gap < 1e-4, (name, seed, gap)


def test_the_windows_are_shorter_than_the_conversations():
    turns, _, _ = _conversation(0)
    assert min(len(prompt) for prompt, _, _ in turns) > tiny_model("gemma3").config.sliding_window == 6


def test_each_shared_token_is_computed_once():
    # 2 groups of 8 rollouts: prompt 50, reply 12 of which the last is not computed: 50 + 8 * 11 = 138 against 8 * 62
    turns = [([g] * 50, [10 + r] * 12, 1.0) for g in range(2) for r in range(8)]
    groups = [k // 8 for k in range(16)]
    assert pack(turns, groups, unroll=False).computed == 2 * 138
    # a rollout of 6 calls, 20 seen and 12 said each, is one chain of 6 * 32 - 1 tokens; separate rows are 20 + 12 up
    chain = [(range(20 * (t + 1) + 12 * t), range(12), 1.0) for t in range(6)]
    grown = [([7] * len(p), [7] * len(r), t) for p, r, t in chain]
    assert pack(grown, [0] * 6, unroll=True).computed == 191


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_micro_batches_add_up_to_the_full_gradient(family):
    model = tiny_model(family)
    turns, rollout_K, group_R = _conversation(3, groups=3)
    turn_N = torch.repeat_interleave(torch.arange(len(turns)), torch.tensor([len(r) for _, r, _ in turns]))
    weight_N = _weights(len(turn_N))
    whole = _gradient((forward(model, turns, group_R[rollout_K]).logp_N * weight_N).sum(), (model,))
    unroll = layout_of(model).masks == "none"
    batches = micro_batches(turns, rollout_K, group_R, token_budget=60, unroll=unroll)
    assert len(batches) > 2
    total = torch.zeros_like(whole)
    for rollouts in batches:
        picked_K = torch.isin(rollout_K, rollouts)
        part = [turn for turn, picked in zip(turns, picked_K, strict=True) if picked]
        packed = forward(model, part, group_R[rollout_K[picked_K]], token_budget=64)
        total += _gradient((packed.logp_N * weight_N[picked_K[turn_N]]).sum(), (model,))
    assert _relative(total, whole) < 1e-5


def test_logits_and_hidden_states_are_those_of_the_sampled_tokens():
    model = tiny_model()
    turns, rollout_K, group_R = _conversation(1)
    packed = forward(model, turns, group_R[rollout_K])
    id_N = torch.tensor([i for _, reply, _ in turns for i in reply])
    torch.testing.assert_close(packed.logits_NV.log_softmax(-1).gather(1, id_N[:, None])[:, 0], packed.logp_N)
    heat_N = torch.tensor([heat for _, reply, heat in turns for _ in reply])
    torch.testing.assert_close(model.lm_head(packed.hidden_ND) / heat_N[:, None], packed.logits_NV)


def test_the_same_tokens_under_another_prompt():
    model = tiny_model("qwen3")
    turns, rollout_K, group_R = _conversation(2)
    prompts = [(5, *prompt[2:]) for prompt, _, _ in turns]
    again = forward(model, turns, group_R[rollout_K]).under(prompts)
    changed = [(prompt, reply, heat) for prompt, (_, reply, heat) in zip(prompts, turns, strict=True)]
    logp_N = _apart(model, changed)[0]
    torch.testing.assert_close(again.logp_N, logp_N, atol=1e-4, rtol=0)
    assert _relative(_gradient(again.logp_N.sum(), (model,)), _gradient(logp_N.sum(), (model,))) < 1e-4


@pytest.mark.parametrize("changes", [{"kept_bytes": 4 * VOCABULARY * 5}, {"token_budget": 30}, {"kept_bytes": 1}])
def test_computing_logits_again_and_small_calls_change_nothing(changes):
    model = tiny_model()
    turns, rollout_K, group_R = _conversation(4)
    groups = group_R[rollout_K].tolist()
    plain = packed_forward(model, turns, groups, layout=Layout("one"))
    other = packed_forward(model, turns, groups, layout=Layout("one"), **changes)
    for a, b in ((plain.logp_N, other.logp_N), (plain.entropy_N, other.entropy_N), (plain.logits_NV, other.logits_NV)):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)
        assert _relative(_gradient(b.mean(), (model,)), _gradient(a.mean(), (model,))) < 1e-4


def test_a_head_with_a_softcap_goes_its_own_way():
    model = tiny_model("gemma3")
    model.config.final_logit_softcapping = 2.0
    assert not layout_of(model).plain_head and layout_of(model).masks == "by_type"
    turns, rollout_K, group_R = _conversation(5)
    packed, (logp_N, entropy_N, _) = forward(model, turns, group_R[rollout_K]), _apart(model, turns)
    torch.testing.assert_close(packed.logp_N, logp_N, atol=1e-4, rtol=0)
    torch.testing.assert_close(packed.entropy_N, entropy_N, atol=1e-4, rtol=0)
    assert _relative(_gradient(packed.logp_N.sum(), (model,)), _gradient(logp_N.sum(), (model,))) < 1e-4


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["q_proj", "lm_head"]])
def test_adapters_train_and_the_rest_stays_frozen(targets):
    model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules=targets, init_lora_weights=False)).eval()
    turns, rollout_K, group_R = _conversation(6)
    packed, logp_N = forward(model, turns, group_R[rollout_K]).logp_N, _apart(model, turns)[0]
    torch.testing.assert_close(packed, logp_N, atol=1e-4, rtol=0)
    assert _relative(_gradient(packed.sum(), (model,)), _gradient(logp_N.sum(), (model,))) < 1e-4
    with model.disable_adapter(), torch.no_grad():
        base = forward(model, turns, group_R[rollout_K]).logp_N
    torch.testing.assert_close(base, _apart(tiny_model(), turns)[0], atol=1e-4, rtol=0)


def test_gradient_checkpointing_changes_nothing():
    model = tiny_model("qwen3")
    turns, rollout_K, group_R = _conversation(7)
    plain = _gradient(forward(model, turns, group_R[rollout_K]).logp_N.sum(), (model,))
    model.gradient_checkpointing_enable()
    model.train()
    again = _gradient(forward(model, turns, group_R[rollout_K]).logp_N.sum(), (model,))
    assert _relative(again, plain) < 1e-6


def test_bfloat16_stays_near_float32():
    turns, rollout_K, group_R = _conversation(8)
    exact = forward(tiny_model(), turns, group_R[rollout_K]).logp_N
    narrow = forward(tiny_model().bfloat16(), turns, group_R[rollout_K]).logp_N
    assert narrow.dtype == torch.float32
    # 8 bits of mantissa and logits of about 1
    assert 0 < (narrow - exact).abs().mean() < 2**-6


def test_a_turn_brings_its_own_temperature_and_the_most_likely_token_is_read_at_one():
    model, ids = tiny_model(), (4, 5, 6)
    turns = [
        Turn("a", ids, (7,), (0.0,), version=0, finish_reason="stop", temperature=0.5),
        Turn("b", ids, (7,), (0.0,), version=0, finish_reason="stop", temperature=0.0),
    ]
    logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
    expected = torch.stack([(logits / 0.5).log_softmax(-1)[7], logits.log_softmax(-1)[7]])
    torch.testing.assert_close(forward(model, turns, [0, 0]).logp_N, expected)


def test_nothing_sampled_is_an_empty_sum_with_a_gradient():
    packed = forward(tiny_model(), [((4, 5), (), 1.0)], [0])
    assert packed.logp_N.shape == packed.entropy_N.shape == (0,)
    packed.logp_N.sum().backward()
