from __future__ import annotations

from typing import Any

import pytest

from whippletree.gateway.errors import ApiError
from whippletree.gateway.memory import Memory
from whippletree.gateway.render import Prompt, Renderer
from whippletree.models.templates import family_tokenizer
from whippletree.models.tiny import tiny_tokenizer
from whippletree.types import Json, Turn

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


def remembered(memory: Memory, prompt: Prompt, reply: Json, reply_ids: tuple[int, ...], *, name: str = "1.0") -> Turn:
    """The turn of this prompt and reply, which `memory` then knows."""
    parts = [{"kind": "text", "text": reply["content"]}] if reply["content"] else []
    parts += [{"kind": "call", "call": made} for made in reply.get("tool_calls", ())]
    turn = Turn(
        id=name,
        prompt_ids=prompt.ids,
        reply_ids=reply_ids,
        reply_logps=(0.0,) * len(reply_ids),
        version=0,
        finish_reason="stop",
        link=prompt.link,
        info={**prompt.noted(), "parts": parts},
    )
    memory.remember(turn)
    return turn


def fresh(chat: list[Json], tools: Any = (), *, renderer: Renderer = RENDERER) -> Prompt:
    """The prompt of a rollout that has no turns."""
    return renderer.prompt(chat, tools, Memory())


def continued(
    first: list[Json],
    reply: Json,
    reply_ids: tuple[int, ...],
    second: list[Json],
    *,
    tools: Any = (),
    renderer: Renderer = RENDERER,
) -> tuple[tuple[int, ...], Prompt]:
    """(ids of the first prompt and its reply, prompt of the second request)"""
    memory = Memory()
    turn = remembered(memory, renderer.prompt(first, tools, memory), reply, reply_ids)
    return turn.prompt_ids + turn.reply_ids, renderer.prompt(second, tools, memory)


def after(
    first: list[Json], reply: Json, reply_ids: tuple[int, ...], second: list[Json], *, tools: tuple[Json, ...] = ()
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(ids of the first prompt and its reply, prompt ids of the second request)"""
    seen, prompt = continued(first, reply, reply_ids, second, tools=tools)
    return seen, prompt.ids


def test_a_first_prompt_is_the_template_with_the_generation_prompt():
    prompt = fresh([{"role": "developer", "content": "be brief"}, user("hi")])
    assert (prompt.link, prompt.parent) == ("root", "")
    assert text_of(prompt.ids) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_next_prompt_holds_the_exact_ids_of_the_turn_before():
    seen, prompt = after(
        [user("hi")], assistant("user"), (*SPELLED, END), [user("hi"), assistant("user"), user("more")]
    )
    assert prompt[: len(seen)] == seen
    # the model sampled <|im_end|>; the template adds the line break after it and the new message
    assert text_of(prompt[len(seen) :]) == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    anew = fresh([user("hi"), assistant("user"), user("more")]).ids
    assert anew != prompt  # a new rendering would have changed what was sampled
    assert text_of(anew) == text_of(prompt)


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
    ("back", "drift"),
    [
        (assistant("user", tool_calls=[call("{}")]), 5),  # another call: all that was sampled is lost
        (assistant("x" * 40), 5),
        (user("user"), 0),  # no reply of ours stands in it
    ],
)
def test_a_changed_reply_starts_anew(back: Json, drift: int):
    chat = [user("hi"), back, user("more")]
    seen, prompt = continued([user("hi")], assistant("user"), (*SPELLED, END), chat)
    assert prompt.ids[: len(seen)] != seen
    assert prompt.ids == fresh(chat).ids
    assert (prompt.link, prompt.parent, prompt.drift) == ("fork", "1.0", drift)


@pytest.mark.parametrize(("text", "drift"), [("user!", 1), ("use", 1), ("u se r", 2)])
def test_a_reply_that_came_back_a_little_changed_is_realigned(text: str, drift: int):
    chat = [user("hi"), assistant(text), user("more")]
    seen, prompt = continued([user("hi")], assistant("user"), (*SPELLED, END), chat)
    start = len(seen) - 5
    changed = tuple(TOKENIZER.convert_tokens_to_ids(list(text)))
    assert prompt.ids[: start + len(text)] == seen[:start] + changed  # letter by letter, as it was sampled
    assert prompt.ids[start + len(text)] == END
    assert (prompt.link, prompt.parent, prompt.drift) == ("realign", "1.0", drift)


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
    memory, seen = Memory(), []
    for name, chat in (("1", one), ("2", two)):
        turn = remembered(memory, RENDERER.prompt(chat, (), memory), assistant("user"), (*SPELLED, END), name=name)
        seen.append(turn.prompt_ids + turn.reply_ids)
    prompt = RENDERER.prompt([*two, assistant("user"), user("3")], (), memory)
    assert prompt.ids[: len(seen[1])] == seen[1]
    assert (prompt.link, prompt.parent) == ("append", "2")
    # a branch off the first turn continues the first turn
    branch = RENDERER.prompt([*one, assistant("user"), user("other")], (), memory)
    assert branch.ids[: len(seen[0])] == seen[0]
    assert branch.ids[: len(seen[1])] != seen[1]
    assert (branch.link, branch.parent) == ("append", "1")


def test_several_messages_may_follow_a_reply():
    new = [assistant("an aside"), user("a"), user("b"), {"role": "system", "content": "late"}]
    seen, prompt = after([user("hi")], assistant("user"), (*SPELLED, END), [user("hi"), assistant("user"), *new])
    assert prompt[: len(seen)] == seen
    assert text_of(prompt[len(seen) :]).count("<|im_start|>") == len(new) + 1


def test_another_tool_list_starts_anew():
    chat = [user("hi"), assistant("user"), user("more")]
    memory = Memory()
    turn = remembered(memory, RENDERER.prompt([user("hi")], TOOLS, memory), assistant("user"), (*SPELLED, END))
    same, other = RENDERER.prompt(chat, TOOLS, memory), RENDERER.prompt(chat, (), memory)
    assert same.ids[: len(turn.prompt_ids)] == turn.prompt_ids
    assert (same.link, other.link) == ("append", "fork")
    # what was sampled stands in it, in a new place
    assert text_of(other.ids) == text_of(fresh(chat).ids)
    assert other.ids[len(fresh([user("hi")]).ids) :][:4] == SPELLED


def test_what_one_rollout_asked_never_changes_the_prompt_of_another():
    # both say the same to a reader of threads, but not to the template
    for text in ("a ", "a", " a"):
        prompt = fresh([user("hi"), assistant(text), user("more")])
        assert f"assistant\n{text}<|im_end|>" in text_of(prompt.ids)


def test_white_space_before_the_closing_token_is_part_of_the_closing():
    spaced = tiny_tokenizer()
    spaced.chat_template = spaced.chat_template.replace("'<|im_end|>\\n'", "' <|im_end|>\\n'")
    chat = [user("hi"), assistant("user"), user("more")]
    seen, prompt = continued([user("hi")], chat[1], (*SPELLED, END), chat, renderer=Renderer(spaced))
    assert spaced.decode(list(prompt.ids[len(seen) :])).startswith("\n<|im_start|>user\nmore")


def test_a_template_that_hides_the_reply_is_rendered_anew():
    hiding = tiny_tokenizer()
    hiding.chat_template = (
        "{% for m in messages %}{{ 'reply' if m.role == 'assistant' else m.content }}<|im_end|>{% endfor %}"
    )
    chat = [user("hi"), assistant("user"), user("more")]
    _, prompt = continued([user("hi")], chat[1], (*SPELLED, END), chat, renderer=Renderer(hiding))
    assert hiding.decode(list(prompt.ids)) == "hi<|im_end|>reply<|im_end|>more<|im_end|>"
    assert prompt.link == "fork"


@pytest.mark.parametrize("family", ["qwen3", "llama3", "gemma", "mistral"])
def test_every_family_continues_a_call_and_its_result_exactly(family: str):
    tokenizer = family_tokenizer(family)
    renderer = Renderer(tokenizer)
    assert renderer.tool_format
    reply = assistant(None, tool_calls=[call('{"a": 1}')])
    opening = renderer.tool_format.opening("add") + '{"a": 1}'
    closing = {"qwen3": "}\n</tool_call>", "llama3": "}", "gemma": "}\n</tool_call>", "mistral": "}]"}[family]
    # letter by letter, where the tokenizer writes words as one token
    sampled = (*map(tokenizer.convert_tokens_to_ids, opening + closing), tokenizer.eos_token_id)
    chat = [user("hi"), reply, {"role": "tool", "tool_call_id": "c1", "content": "seven"}]
    seen, prompt = continued([user("hi")], reply, sampled, chat, tools=TOOLS, renderer=renderer)
    assert prompt.ids[: len(seen)] == seen
    assert (prompt.link, prompt.drift) == ("append", 0)
    rest = tokenizer.decode(list(prompt.ids[len(seen) :]))
    assert "seven" in rest
    assert tokenizer.eos_token not in rest.split("seven")[0]  # the reply is closed once


def test_a_model_without_chat_template_is_refused_at_the_start():
    bare = tiny_tokenizer()
    bare.chat_template = None
    with pytest.raises(ValueError, match=r"needs the model's own template, .* has no chat_template"):
        Renderer(bare)


def test_tools_for_a_model_without_tools_are_refused_by_name():
    with pytest.raises(ApiError, match=r"`tools` need .* has none") as caught:
        fresh([user("hi")], TOOLS, renderer=Renderer(tiny_tokenizer(), tools_in_prompt=False))
    assert (caught.value.status, caught.value.param) == (400, "tools")


def test_tools_in_a_format_nobody_here_reads_are_refused():
    foreign = tiny_tokenizer(tools=True)
    foreign.chat_template = "{{ tools | tojson if tools }}[CALLS]{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ApiError, match="names no call format known here"):
        fresh([user("hi")], TOOLS, renderer=Renderer(foreign, tools_in_prompt=False))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"content": "x"}, r"messages\[0\] is not"),
        (user(7), r"messages\[0\].content is a string or a list of parts, but it is a int"),
        (user([{"type": "image_url", "image_url": {}}]), "this model reads no images"),
        (user([{"type": "video_url"}]), r"'video_url' cannot be read here, but messages\[0\].content\[0\] is one"),
        (assistant("", tool_calls=["x"]), "tool call is a function with a name"),
        (user("\ud83d"), "hold half a character"),
    ],
)
def test_messages_that_cannot_be_read_are_refused(message: Json, words: str):
    with pytest.raises(ApiError, match=words) as caught:
        fresh([message])
    assert caught.value.status == 400


def test_what_the_template_refuses_is_refused_in_its_words():
    strict = tiny_tokenizer()
    strict.chat_template = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}x"
    with pytest.raises(ApiError, match="chat template refuses these messages: user first"):
        fresh([assistant("hi")], renderer=Renderer(strict))


def test_a_reply_with_more_text_after_it_is_continued_exactly():
    # cut by a stop string: no closing token was sampled, and the harness writes on in the same message
    chat = [user("hi"), assistant("user\nand calls"), user("more")]
    seen, prompt = continued([user("hi")], assistant("use"), SPELLED, chat)
    assert prompt.ids[: len(seen)] == seen
    assert text_of(prompt.ids[len(seen) :]).startswith("\nand calls<|im_end|>\n<|im_start|>user\nmore")
    assert (prompt.link, prompt.drift) == ("append", 0)
