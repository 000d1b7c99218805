from __future__ import annotations

from typing import Any

import pytest

from whippletree.gateway.errors import ApiError
from whippletree.gateway.render import Renderer, thread_key
from whippletree.models.tiny import tiny_tokenizer
from whippletree.types import Json

TOKENIZER = tiny_tokenizer(tools=True)
RENDERER = Renderer(TOKENIZER)
END = TOKENIZER.eos_token_id
TOOLS: list[Json] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
# "u", "s", "e", "r" one by one, where the tokenizer would write the one token `user`
SPELLED = tuple(TOKENIZER.convert_tokens_to_ids(list("user")))


def user(text: Any) -> Json:
    return {"role": "user", "content": text}


def assistant(text: str | None, **fields: Any) -> Json:
    return {"role": "assistant", "content": text, **fields}


def call(arguments: Any, *, name: str = "add", call_id: str = "c1") -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def text_of(ids: tuple[int, ...]) -> str:
    return str(TOKENIZER.decode(list(ids)))


def after(
    first: list[Json], reply: Json, reply_ids: tuple[int, ...], second: list[Json], *, tools: tuple[Json, ...] = ()
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(ids of the first prompt and its reply, prompt ids of the second request)"""
    ids, key = RENDERER.prompt(first, tools, {})
    threads = {thread_key(key, reply): ids + reply_ids}
    return ids + reply_ids, RENDERER.prompt(second, tools, threads)[0]


def test_a_first_prompt_is_the_template_with_the_generation_prompt():
    ids, _ = RENDERER.prompt([{"role": "developer", "content": "be brief"}, user("hi")], (), {})
    assert text_of(ids) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_next_prompt_holds_the_exact_ids_of_the_turn_before():
    seen, prompt = after(
        [user("hi")], assistant("user"), (*SPELLED, END), [user("hi"), assistant("user"), user("more")]
    )
    assert prompt[: len(seen)] == seen
    # the model sampled <|im_end|>; the template adds the line break after it and the new message
    assert text_of(prompt[len(seen) :]) == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    fresh, _ = RENDERER.prompt([user("hi"), assistant("user"), user("more")], (), {})
    assert fresh != prompt  # a new rendering would have changed what was sampled
    assert text_of(fresh) == text_of(prompt)


def test_a_reply_cut_by_length_is_closed_by_the_template():
    seen, prompt = after([user("hi")], assistant("user"), SPELLED, [user("hi"), assistant("user"), user("more")])
    assert prompt[: len(seen)] == seen
    assert prompt[len(seen)] == END
    assert text_of(prompt[len(seen) :]) == "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("sent", "back"),
    [
        (user("hi"), user([{"type": "text", "text": "hi"}])),
        (user([{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]), user("hi")),
        (user(""), {"role": "user"}),
        (user(None), user("")),
        (user("hi"), user("hi") | {"metadata": {"x": 1}, "cache_control": {}}),
    ],
)
def test_messages_that_say_the_same_extend_each_other(sent: Json, back: Json):
    seen, prompt = after([sent], assistant("user"), (*SPELLED, END), [back, assistant("user"), user("more")])
    assert prompt[: len(seen)] == seen


@pytest.mark.parametrize(
    "back",
    [
        assistant("user\n", refusal=None, annotations=[], tool_calls=None, function_call=None),
        assistant("user", reasoning_content="left in by one harness"),
        {"role": "assistant", "content": [{"type": "text", "text": "  user"}]},
    ],
)
def test_our_reply_is_known_again_however_the_harness_writes_it(back: Json):
    seen, prompt = after([user("hi")], assistant("user"), (*SPELLED, END), [user("hi"), back, user("more")])
    assert prompt[: len(seen)] == seen


@pytest.mark.parametrize(
    "back",
    [assistant("user!"), assistant("use"), assistant("user", tool_calls=[call("{}")]), user("user")],
)
def test_a_changed_reply_starts_anew(back: Json):
    seen, prompt = after([user("hi")], assistant("user"), (*SPELLED, END), [user("hi"), back, user("more")])
    assert prompt[: len(seen)] != seen
    assert prompt == RENDERER.prompt([user("hi"), back, user("more")], (), {})[0]


def test_a_changed_first_message_starts_anew():
    seen, prompt = after([user("hi")], assistant("user"), (*SPELLED, END), [user("ho"), assistant("user"), user("x")])
    assert prompt[: len(seen)] != seen


def test_arguments_are_compared_as_json():
    reply = assistant(None, tool_calls=[call('{"a": 1, "b": [2]}')])
    sampled = tuple(TOKENIZER.encode('<tool_call>\n{"name":"add"}\n</tool_call>', add_special_tokens=False))
    answer = {"role": "tool", "tool_call_id": "c1", "content": "3"}
    for arguments in ('{"b":[2],"a":1}', {"a": 1, "b": [2]}):
        back = assistant("", tool_calls=[call(arguments, call_id="renamed")])
        seen, prompt = after([user("hi")], reply, (*sampled, END), [user("hi"), back, answer], tools=tuple(TOOLS))
        assert prompt[: len(seen)] == seen
        assert text_of(prompt[len(seen) :]).startswith("\n<|im_start|>user\n<tool_response>\n3\n</tool_response>")
    repaired = assistant("", tool_calls=[call('{"a": 2, "b": [2]}')])
    seen, prompt = after([user("hi")], reply, (*sampled, END), [user("hi"), repaired, answer], tools=tuple(TOOLS))
    assert prompt[: len(seen)] != seen


def test_broken_arguments_are_compared_as_they_are():
    reply = assistant("x", tool_calls=[call('{"a": ')])
    seen, prompt = after([user("hi")], reply, (*SPELLED, END), [user("hi"), reply, user("more")], tools=tuple(TOOLS))
    assert prompt[: len(seen)] == seen


def test_the_longest_earlier_turn_is_continued():
    one, two = [user("1")], [user("1"), assistant("user"), user("2")]
    threads: dict[bytes, tuple[int, ...]] = {}
    for chat in (one, two):
        ids, key = RENDERER.prompt(chat, (), threads)
        threads[thread_key(key, assistant("user"))] = (*ids, *SPELLED, END)
    longest = threads[thread_key(key, assistant("user"))]
    prompt, _ = RENDERER.prompt([*two, assistant("user"), user("3")], (), threads)
    assert prompt[: len(longest)] == longest
    # a branch off the first turn continues the first turn
    branch, _ = RENDERER.prompt([*one, assistant("user"), user("other")], (), threads)
    first = threads[thread_key(RENDERER.prompt(one, (), {})[1], assistant("user"))]
    assert branch[: len(first)] == first
    assert branch[: len(longest)] != longest


def test_several_messages_may_follow_a_reply():
    new = [assistant("an aside"), user("a"), user("b"), {"role": "system", "content": "late"}]
    seen, prompt = after([user("hi")], assistant("user"), (*SPELLED, END), [user("hi"), assistant("user"), *new])
    assert prompt[: len(seen)] == seen
    assert text_of(prompt[len(seen) :]).count("<|im_start|>") == len(new) + 1


def test_another_tool_list_starts_anew():
    ids, key = RENDERER.prompt([user("hi")], TOOLS, {})
    threads = {thread_key(key, assistant("user")): (*ids, *SPELLED, END)}
    chat = [user("hi"), assistant("user"), user("more")]
    assert RENDERER.prompt(chat, TOOLS, threads)[0][: len(ids)] == ids
    assert RENDERER.prompt(chat, (), threads) == RENDERER.prompt(chat, (), {})


def test_what_one_rollout_asked_never_changes_the_prompt_of_another():
    # both say the same to a reader of threads, but not to the template
    for text in ("a ", "a", " a"):
        prompt, _ = RENDERER.prompt([user("hi"), assistant(text), user("more")], (), {})
        assert f"assistant\n{text}<|im_end|>" in text_of(prompt)


def test_white_space_before_the_closing_token_is_part_of_the_closing():
    spaced = tiny_tokenizer()
    spaced.chat_template = spaced.chat_template.replace("'<|im_end|>\\n'", "' <|im_end|>\\n'")
    renderer = Renderer(spaced)
    ids, key = renderer.prompt([user("hi")], (), {})
    seen = (*ids, *SPELLED, END)
    chat = [user("hi"), assistant("user"), user("more")]
    prompt, _ = renderer.prompt(chat, (), {thread_key(key, assistant("user")): seen})
    assert spaced.decode(list(prompt[len(seen) :])).startswith("\n<|im_start|>user\nmore")


def test_a_template_that_hides_the_reply_is_rendered_anew():
    hiding = tiny_tokenizer()
    hiding.chat_template = (
        "{% for m in messages %}{{ 'reply' if m.role == 'assistant' else m.content }}<|im_end|>{% endfor %}"
    )
    renderer = Renderer(hiding)
    ids, key = renderer.prompt([user("hi")], (), {})
    chat = [user("hi"), assistant("user"), user("more")]
    prompt, _ = renderer.prompt(chat, (), {thread_key(key, assistant("user")): (*ids, *SPELLED, END)})
    assert hiding.decode(list(prompt)) == "hi<|im_end|>reply<|im_end|>more<|im_end|>"


def test_a_template_that_wants_the_call_before_its_answer_is_rendered_anew():
    strict = tiny_tokenizer(tools=True)
    strict.chat_template = (
        "{% if messages[2] and not messages[1].tool_calls %}{{ raise_exception('no call') }}{% endif %}"
    ) + strict.chat_template
    renderer = Renderer(strict)
    ids, key = renderer.prompt([user("hi")], TOOLS, {})
    reply = assistant(None, tool_calls=[call("{}")])
    chat = [user("hi"), reply, {"role": "tool", "tool_call_id": "c1", "content": "3"}]
    prompt, _ = renderer.prompt(chat, TOOLS, {thread_key(key, reply): (*ids, *SPELLED, END)})
    assert prompt == renderer.prompt(chat, TOOLS, {})[0]


def test_a_model_without_chat_template_is_refused_at_the_start():
    bare = tiny_tokenizer()
    bare.chat_template = None
    with pytest.raises(ValueError, match=r"needs the model's own template, .* has no chat_template"):
        Renderer(bare)


def test_tools_for_a_model_without_tools_are_refused_by_name():
    with pytest.raises(ApiError, match=r"`tools` need .* has none") as caught:
        Renderer(tiny_tokenizer()).prompt([user("hi")], TOOLS, {})
    assert (caught.value.status, caught.value.param) == (400, "tools")


def test_tools_in_a_format_nobody_here_reads_are_refused():
    foreign = tiny_tokenizer(tools=True)
    foreign.chat_template = "{{ tools | tojson if tools }}[CALLS]{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ApiError, match="names no call format known here"):
        Renderer(foreign).prompt([user("hi")], TOOLS, {})


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"content": "x"}, r"messages\[0\] is not"),
        (user(7), r"messages\[0\].content is a string or a list of parts, but it is a int"),
        (user([{"type": "image_url", "image_url": {}}]), "holds a part of type 'image_url'"),
        (assistant("", tool_calls=["x"]), "tool call is a function with a name"),
        (user("\ud83d"), "hold half a character"),
    ],
)
def test_messages_that_cannot_be_read_are_refused(message: Json, words: str):
    with pytest.raises(ApiError, match=words) as caught:
        RENDERER.prompt([message], (), {})
    assert caught.value.status == 400


def test_what_the_template_refuses_is_refused_in_its_words():
    strict = tiny_tokenizer()
    strict.chat_template = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}x"
    with pytest.raises(ApiError, match="chat template refuses these messages: user first"):
        Renderer(strict).prompt([assistant("hi")], (), {})
