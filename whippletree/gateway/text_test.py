from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from whippletree.gateway.parts import Part, merged, message_of
from whippletree.gateway.text import Decoder, ShownText, Thinking
from whippletree.gateway.toolcalls import FORMATS, ToolScanner, format_of, held_back

HERMES = FORMATS["hermes"]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so a character beyond ASCII is several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


TOKENIZER = byte_tokenizer()


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def shown(text: str, *, step: int = 1, stop: tuple[str, ...] = (), tools: bool = False) -> list[Part]:
    """Everything that a reply of these bytes shows, fed `step` ids at a time."""
    reply = ShownText(TOKENIZER, stop=stop, tools=HERMES if tools else None, name="r")
    ids = ids_of(text)
    parts: list[Part] = []
    for start in range(0, len(ids), step):
        parts += reply.feed(ids[start : start + step], last=start + step >= len(ids))
    return parts


def joined(parts: list[Part]) -> str:
    return "".join(part.text for part in parts)


def calls_of(parts: list[Part]) -> list[dict[str, Any]]:
    return [part.call for part in parts if part.call]


@pytest.mark.parametrize("text", ["h\u00e9llo", "\U0001f600!", "\u4f60\u597d", "a\u2028b", "e\u0301"])
def test_no_character_is_shown_before_it_is_whole(text: str):
    parts = shown(text)
    assert joined(parts) == text
    assert all(part.text in text and "\ufffd" not in part.text for part in parts)


def test_bytes_that_never_become_a_character_are_shown_at_the_end():
    decoder = Decoder(TOKENIZER)
    first, second = ids_of("\u00e9")
    assert decoder.feed([first]) == ""
    assert decoder.feed([], last=True) == "\ufffd"
    again = Decoder(TOKENIZER)
    assert again.feed([first]) + again.feed([second]) == "\u00e9"


def test_special_tokens_are_not_text():
    assert Decoder(TOKENIZER).feed([*ids_of("hi"), TOKENIZER.eos_token_id], last=True) == "hi"


@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_a_stop_string_and_what_follows_is_never_shown(step: int):
    assert joined(shown("one STOP two", step=step, stop=("STOP", "zz"))) == "one "
    assert joined(shown("one STOP two END", step=step, stop=("END", "STOP"))) == "one "  # the first in the text
    assert joined(shown("one STO", step=step, stop=("STOP",))) == "one STO"  # begun but never finished


def test_the_beginning_of_a_call_before_a_stop_string_is_text():
    reply = ShownText(TOKENIZER, stop=("STOP",), tools=HERMES)
    assert joined(reply.feed(ids_of("a <tool_STOP"))) == "a <tool_"


def test_a_stop_string_ends_the_reply():
    reply = ShownText(TOKENIZER, stop=("b",), tools=None)
    assert reply.feed(ids_of("a")) == [Part("text", "a")]
    assert reply.feed(ids_of("bc")) == []
    assert reply.stopped == "b"
    assert reply.feed(ids_of("d"), last=True) == []


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_calls_are_calls_and_the_text_around_them_is_text(step: int):
    parts = shown(f"I add.\n{CALL}\n{CALL}\n", step=step, tools=True)
    calls = calls_of(parts)
    assert joined(parts) == "I add.\n"  # white space after a call is the template's, not the reply's
    assert [call["function"]["name"] for call in calls] == ["add", "add"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"a": 1}, {"a": 1}]
    assert [call["type"] for call in calls] == ["function", "function"]


def test_ids_of_calls_are_unique_short_and_repeatable():
    ids = [call["id"] for call in calls_of(shown(f"{CALL}{CALL}", tools=True))]
    assert len(set(ids)) == 2
    assert all(name.isalnum() and name.isascii() and len(name) <= 40 for name in ids)
    assert ids == [call["id"] for call in calls_of(shown(f"{CALL}{CALL}", tools=True, step=9))]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "add", "arguments": \n</tool_call>',  # broken JSON
        '<tool_call>{"arguments": {}}</tool_call>',  # no name
        '<tool_call>{"name": "add", "arguments": "a"}</tool_call>',  # arguments are no object
        '<tool_call>{"name": "add"',  # cut
        "a < b <tool_cal",
        "<tool_call>[1]</tool_call> tail",
    ],
)
@pytest.mark.parametrize("step", [1, 1000])
def test_a_malformed_call_is_passed_on_as_the_model_wrote_it(text: str, step: int):
    assert joined(shown(text, step=step, tools=True)) == text
    assert not calls_of(shown(text, step=step, tools=True))
    assert any(part.malformed for part in shown(text, step=step, tools=True)) == (CALL[:11] in text)


def test_text_after_a_call_keeps_its_white_space():
    assert joined(shown(f"{CALL}\nso 3", tools=True)) == "\nso 3"


def test_text_before_a_call_is_shown_as_soon_as_it_is_certain():
    scanner = ToolScanner(HERMES, "r")
    assert scanner.feed("a <too") == [Part("text", "a ")]
    assert scanner.feed("l") == []
    assert scanner.feed("s") == [Part("text", "<tools")]


def test_what_is_held_back_is_the_longest_possible_beginning():
    assert held_back("xab", ("abc", "b!")) == 2
    assert held_back("abc", ("abc",)) == 0  # whole, not a beginning
    assert held_back("x", ()) == 0


def test_the_format_is_found_by_its_start_mark():
    assert format_of("... <tool_call> ...") is HERMES
    assert format_of("[TOOL_CALLS] [") is FORMATS["mistral"]
    assert format_of('{"name": "", "parameters": ') is FORMATS["llama"]
    assert format_of("[CALLS]") is None


THINK = ("<think>", "</think>")


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "opened", "thought", "said"),
    [
        ("<think>\nso\n\n3\n</think>\n\nIt is 3.\n", False, "so\n\n3", "It is 3.\n"),
        ("so\n</think>\n\n3", True, "so", "3"),  # the template wrote the first mark
        ("3 <think>no</think>", False, "", "3 <think>no</think>"),  # later marks are text
        ("<thin", False, "", "<thin"),
        ("<think>\nnever ends\n", False, "never ends\n", ""),
        ("<think>\n\n</think>\n\nhi", False, "", "hi"),
    ],
)
def test_reasoning_is_split_from_the_text(step: int, text: str, opened: bool, thought: str, said: str):
    split = Thinking(THINK, opened=opened)
    found = [split.feed(text[k : k + step], last=k + step >= len(text)) for k in range(0, len(text), step)]
    assert "".join(first for first, _ in found) == thought
    assert "".join(second for _, second in found) == said


def test_a_call_that_the_prompt_opened_is_whole():
    head, rest = CALL[:30], CALL[30:]
    reply = ShownText(TOKENIZER, stop=(), tools=HERMES, forced=head)
    parts = reply.feed(ids_of(rest), last=True)
    assert [call["function"]["name"] for call in calls_of(parts)] == ["add"]
    assert joined(parts) == ""


def test_the_message_of_a_reply_keeps_each_kind_apart():
    parts = [Part("reasoning", "a"), Part("reasoning", "b"), Part("text", "c"), Part("call", call={"id": "x"})]
    assert merged(parts) == [Part("reasoning", "ab"), *parts[2:]]
    said = {"role": "assistant", "content": "c", "reasoning_content": "ab", "tool_calls": [{"id": "x"}]}
    assert message_of(parts) == said
    assert message_of(parts[3:])["content"] is None
