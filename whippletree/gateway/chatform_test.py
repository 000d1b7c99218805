from __future__ import annotations

from typing import Any

import pytest

from whippletree.gateway.chatform import chained, clean, joined, keys_of, names, one_call_each, spelled
from whippletree.gateway.errors import ApiError
from whippletree.types import Json

CALL: Json = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def test_thinking_is_reasoning_and_a_tool_reference_is_its_name():
    parts = [
        {"type": "thinking", "thinking": "so", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "see "},
        {"type": "tool_reference", "tool_name": "add"},
    ]
    out = clean({"role": "assistant", "content": parts}, 0)
    assert out == {"role": "assistant", "content": "see add", "reasoning_content": "so"}


IMAGE: Json = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}


def test_an_image_is_refused_by_its_field_or_given_to_the_hook():
    message = {"role": "user", "content": [{"type": "text", "text": "what is "}, IMAGE]}
    with pytest.raises(ApiError, match="reads no images") as caught:
        clean(message, 3)
    assert (caught.value.status, caught.value.param) == (400, "messages[3].content[1]")
    seen: list[Json] = []

    def hook(part: Json) -> str:
        seen.append(part)
        return "<image>"

    assert clean(message, 3, hook)["content"] == "what is <image>"
    assert seen == [IMAGE]
    bare = {"type": "image_url", "image_url": IMAGE["image_url"]["url"]}  # some clients write the URL alone
    assert clean({"role": "user", "content": [bare]}, 0, hook)["content"] == "<image>"
    assert seen[1:] == [IMAGE]


def test_another_image_is_another_message():
    other = {"type": "image_url", "image_url": {"url": "data:image/png;base64,BB"}}
    said = [clean({"role": "user", "content": [part]}, 0, lambda part: "<image>") for part in (IMAGE, IMAGE, other)]
    keys = [chained(b"", message) for message in said]
    assert keys[0] == keys[1] != keys[2]
    assert {message["content"] for message in said} == {"<image>"}


@pytest.mark.parametrize("given", [None, {}, {"url": 7}, "", [1]])
def test_an_image_without_a_url_is_refused(given: Any):
    with pytest.raises(ApiError, match="has none"):
        clean({"role": "user", "content": [{"type": "image_url", "image_url": given}]}, 0, lambda part: "")


@pytest.mark.parametrize("content", [{"a": 1}, [7], [{"type": "text"}], [{"type": ["x"]}]])
def test_content_that_is_none_is_refused(content: Any):
    with pytest.raises(ApiError):
        clean({"role": "user", "content": content}, 0)


@pytest.mark.parametrize("calls", [129, "x", {"a": 1}, [7]])
def test_tool_calls_that_are_none_are_refused(calls: Any):
    with pytest.raises(ApiError, match=r"messages\[3\]") as caught:
        clean({"role": "assistant", "content": "hi", "tool_calls": calls}, 3)
    assert caught.value.status == 400


def test_ids_of_calls_have_nine_letters_however_a_harness_cuts_them():
    long = "call-" + "ab12" * 12
    cut = "call" + ("ab12" * 12)[:36]  # letters and digits only, at most 40
    ids = [names(clean({"role": "assistant", "tool_calls": [CALL | {"id": name}]}, 0)) for name in (long, cut, "c2")]
    assert ids[0] == ids[1] != ids[2]
    assert len(ids[0][0]) == 9
    answer = clean({"role": "tool", "tool_call_id": cut, "content": "3"}, 0)
    assert answer["tool_call_id"] == ids[0][0]


def test_a_chat_for_a_template_without_tools_says_all_as_text():
    chat = [user("a"), {"role": "assistant", "content": "b", "tool_calls": [CALL, CALL]}]
    chat += [{"role": "tool", "content": "3", "tool_call_id": "c1"}] * 2
    system, question, reply, results = spelled(chat, [{"type": "function", "function": {"name": "add"}}])
    assert '<tools>\n{"type": "function", "function": {"name": "add"}}\n</tools>' in system["content"]
    assert question == user("a")
    call = '\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert reply == {"role": "assistant", "content": "b" + call * 2}
    assert results["content"] == "<tool_response>\n3\n</tool_response>\n<tool_response>\n3\n</tool_response>"
    own = spelled([{"role": "system", "content": "be brief"}, user("a")], [CALL])
    assert own[0]["content"].startswith("be brief\n\n# Tools")
    assert len(own) == 2


def test_neighbours_of_one_role_are_joined():
    reply = {"role": "assistant", "content": "c"}
    late = {"role": "system", "content": "late"}
    assert joined([late, user("a"), user("b"), reply, late, user("d")]) == [
        late,
        user("a\n\nb"),
        reply,
        user("late\n\nd"),
    ]


def test_parallel_calls_are_parted():
    parts = one_call_each([user("a"), {"role": "assistant", "content": "b", "tool_calls": [CALL, CALL]}])
    assert [(part["content"], len(part.get("tool_calls", ()))) for part in parts] == [("a", 0), ("b", 1), ("", 1)]


def test_each_beginning_of_a_chat_has_its_key():
    keys = keys_of([user("a"), user("b")], [])
    assert keys[1] == chained(keys[0], user("a"))
    assert len(set(keys)) == 3
    assert keys_of([user("a")], [CALL])[1] != keys[1]
