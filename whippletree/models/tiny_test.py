from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from whippletree.models.tiny import FAMILIES, save_tiny, tiny_model, tiny_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def test_one_token_a_character_and_one_a_role():
    # 3 specials, 4 roles, 95 printable characters and the newline
    tokenizer = tiny_tokenizer()
    assert len(tokenizer) == 3 + 4 + 95 + 1
    ids = tokenizer.encode("user: 1+1\n", add_special_tokens=False)
    assert [tokenizer.decode([i]) for i in ids] == ["user", ":", " ", "1", "+", "1", "\n"]
    assert tokenizer.decode(ids) == "user: 1+1\n"
    assert tokenizer.decode(tokenizer.encode("é")) == "?"


def test_a_conversation_renders_as_chatml_and_extends_itself():
    tokenizer = tiny_tokenizer()
    asked = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    longer = [*asked, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    assert tokenizer.apply_chat_template(longer, add_generation_prompt=True, tokenize=False) == (
        prompt + "a<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert (
        len(ids) == 1 + 1 + 1 + 2 + 1 + 1 + 1 + 1 + 1
    )  # start, user, newline, h, i, end, newline, start, role, newline
    assert tokenizer.decode(ids) == prompt
    assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == "<|im_end|>"


def test_tools_and_their_calls_and_results_are_rendered():
    tokenizer = tiny_tokenizer(tools=True)
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "2"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, tokenize=False)
    said = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert text.startswith("<|im_start|>system\nS\n<tools>\n{")
    assert text.endswith(
        "</tools><|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
        f"<|im_start|>assistant\n{said}\n{said}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_seed_decides_the_weights_and_the_logits_spread(family: str):
    state = torch.random.get_rng_state()
    model, twin, other = tiny_model(family), tiny_model(family), tiny_model(family, seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        logits, same, different = (m(input_ids=ids).logits for m in (model, twin, other))
    assert torch.equal(logits, same)
    assert not torch.allclose(logits, different, atol=0.1)
    assert (
        0.3 < float(logits.std()) < 3
    )  # rows of length about 1 against normed vectors of length sqrt(64)... see below
    assert not model.training and logits.shape[-1] == len(tiny_tokenizer())


def test_what_is_written_reads_back_the_same(tmp_path):
    folder = save_tiny(tmp_path / "m", "qwen3", tools=True, seed=3)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer.encode("user, what is 1+1?", add_special_tokens=False)])
    assert ids.tolist() == [tiny_tokenizer().encode("user, what is 1+1?", add_special_tokens=False)]
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, tiny_model("qwen3", seed=3)(input_ids=ids).logits)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tools=TOOLS, tokenize=False).count(
        "<tools>"
    )


def test_an_unknown_family_is_refused():
    with pytest.raises(ValueError, match="one of"):
        tiny_model("gpt9")
