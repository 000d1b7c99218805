from __future__ import annotations

from typing import Any

import pytest

from whippletree.models.templates import TEMPLATES, family_tokenizer

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "123456789", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def reply(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def rendered(family: str, *chat: dict[str, Any], tools: bool = False) -> str:
    """The prompt's text, seen through the tokenizer."""
    tokenizer = family_tokenizer(family)
    ids = tokenizer.apply_chat_template(
        list(chat), tools=[TOOL] if tools else None, add_generation_prompt=True, return_dict=False
    )
    return str(tokenizer.decode(ids))


def test_qwen_keeps_reasoning_only_after_the_last_question():
    asked = (user("a"), reply("b", reasoning_content="hm", tool_calls=[CALL]), {"role": "tool", "content": "3"})
    assert "<think>\nhm\n</think>\n\nb\n<tool_call>" in rendered("qwen3", *asked)
    assert "hm" not in rendered("qwen3", *asked, reply("c"), user("d"))


def test_llama_writes_one_call_a_turn_as_json():
    text = rendered("llama3", user("a"), reply("", tool_calls=[CALL]), tools=True)
    assert '<|end_header_id|>\n\n{"name": "add", "parameters": {"a": 1}}<|eot_id|>' in text
    with pytest.raises(Exception, match="one call a turn"):
        rendered("llama3", user("a"), reply("", tool_calls=[CALL, CALL]))


def test_gemma_has_no_system_role_and_wants_alternation():
    text = rendered("gemma", {"role": "system", "content": "s"}, user("a"))
    assert text == "<bos><start_of_turn>user\ns\n\na<end_of_turn>\n<start_of_turn>model\n"
    with pytest.raises(Exception, match="roles must alternate"):
        rendered("gemma", user("a"), user("b"))


def test_mistral_states_tools_before_the_last_question():
    text = rendered("mistral", user("a"), reply("b"), user("c"), tools=True)
    assert text.startswith("<s>[INST] a[/INST] b</s>[AVAILABLE_TOOLS] [{")
    assert text.endswith("}][/AVAILABLE_TOOLS][INST] c[/INST]")
    with pytest.raises(Exception, match="nine characters"):
        rendered("mistral", user("a"), reply("", tool_calls=[CALL | {"id": "1"}]))


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_reply_spelled_in_letters_reads_back_as_other_ids(family: str):
    tokenizer = family_tokenizer(family)
    spelled = tokenizer.convert_tokens_to_ids(list("user"))
    assert tokenizer.decode(spelled) == "user"
    assert tokenizer("user", add_special_tokens=False)["input_ids"] != spelled


def test_an_unknown_family_is_refused():
    with pytest.raises(ValueError, match="a family is one of"):
        family_tokenizer("qwen9")
