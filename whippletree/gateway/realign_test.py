from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whippletree.gateway.realign import realigned
from whippletree.models.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id
SPELLED = tuple(TOKENIZER.convert_tokens_to_ids(list("user")))  # four ids where the tokenizer would write one


def tokenized(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def changed(ids: tuple[int, ...], old: str, new: str, limit: int = 16) -> tuple[int, tuple[int, ...] | None]:
    return realigned(TOKENIZER, ids, old, new, tokenized, limit=limit)


def test_only_the_changed_span_is_tokenised():
    ids = (*SPELLED, *tokenized("  "), *SPELLED, END)
    # one of two spaces went: one token of the reply, and none came
    assert changed(ids, "user  user", "user user") == (1, (*SPELLED, *tokenized(" "), *SPELLED, END))


def test_what_is_added_at_the_end_stands_before_the_closing_token():
    assert changed((*SPELLED, END), "user", "user!") == (1, (*SPELLED, *tokenized("!"), END))


def test_spans_far_apart_are_counted_alone():
    ids = (*tokenized("  "), *SPELLED * 9, *tokenized("  "), END)
    old = "  " + "user" * 9 + "  "
    # two spaces became one twice, and the 36 tokens between stay as they were
    assert changed(ids, old, f" {old.strip()} ") == (2, (*tokenized(" "), *SPELLED * 9, *tokenized(" "), END))


def test_more_than_the_limit_is_no_realignment():
    ids = tokenized("abcd")
    assert changed(ids, "abcd", "abXY", limit=2) == (2, tokenized("abXY"))
    assert changed(ids, "abcd", "aXYZ", limit=2) == (3, None)


def test_a_text_that_is_not_in_the_reply_is_no_realignment():
    assert changed(tokenized("abc"), "xyz", "xy") == (0, None)
    assert changed(tokenized("abc"), "", "xy") == (0, None)


def test_half_a_token_is_widened_to_the_whole():
    (role,) = tokenized("user")
    # "s" became "S" within the one token `user`: u, S, e and r come for it
    assert changed((role, END), "user", "uSer") == (4, (*tokenized("uSer"), END))
    assert tokenized("uSer") != (role,)


def test_the_text_after_the_reasoning_is_meant():
    ids = tokenized("<think>a b</think>a b")
    assert changed(ids, "a b", "a  b") == (1, tokenized("<think>a b</think>a  b"))


@pytest.mark.parametrize("count", [5000])
def test_a_long_reply_is_compared_in_time(count: int):
    size, ids = changed(tokenized("ab" * count), "ab" * count, "ba" * count)
    assert ids is None
    assert size > 16


@given(st.text("ab \n", min_size=1, max_size=40), st.text("ab \n", max_size=40))
def test_the_realigned_reply_says_the_new_text(old: str, new: str):
    ids = tuple(TOKENIZER.convert_tokens_to_ids(list(old)))
    size, out = changed((*ids, END), old, new, limit=100)
    assert out is not None
    assert TOKENIZER.decode(list(out)) == new + "<|im_end|>"
    assert out[-1] == END
    assert (size == 0) == (old == new)
