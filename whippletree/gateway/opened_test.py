"""Replies that the prompt opens: with a forced call, with the end of reasoning, or with the client's own words."""

from __future__ import annotations

from typing import Any

import pytest

from whippletree.gateway.conftest import MakeDesk
from whippletree.gateway.errors import ApiError
from whippletree.gateway.memory import Memory
from whippletree.gateway.render import Prompt, Renderer
from whippletree.gateway.render_test import RENDERER, TOOLS, assistant, call, fresh, remembered, user
from whippletree.models.templates import family_tokenizer
from whippletree.models.tiny import tiny_tokenizer
from whippletree.types import Json


def thinking() -> Renderer:
    """A Qwen-like model whose prompts open the reasoning."""
    tokenizer = family_tokenizer("qwen3")
    asked = "add_generation_prompt -%}{{- '<|im_start|>assistant\\n"
    tokenizer.chat_template = tokenizer.chat_template.replace(asked, asked + "<think>\\n")
    return Renderer(tokenizer)


THINKS = thinking()
CLOSED = "<think>\n\n</think>\n\n"


def spelled(ids: tuple[int, ...]) -> str:
    return " ".join(map(str, ids))


def end_of(renderer: Renderer, prompt: Prompt) -> str:
    return str(renderer.tokenizer.decode(list(prompt.ids))).rpartition("<|im_start|>assistant\n")[2]


@pytest.mark.parametrize(("choice", "forced"), [("required", '{"name": "'), ("add", '{"name": "add", "arguments": ')])
def test_a_forced_call_ends_the_reasoning_that_the_prompt_opened(choice: str, forced: str):
    forced = "<tool_call>\n" + forced
    assert fresh([user("hi")], TOOLS, renderer=THINKS).thinking
    prompt = THINKS.prompt([user("hi")], TOOLS, Memory(), tool_choice=choice)
    assert (end_of(THINKS, prompt), prompt.forced, prompt.thinking) == (CLOSED + forced, forced, False)
    assert THINKS.tokenizer.decode(list(prompt.ids[-prompt.opened :])) == forced


def test_a_forced_call_is_continued_exactly_and_stands_in_a_fork_without_the_empty_reasoning():
    memory, tokenizer = Memory(), THINKS.tokenizer
    first = THINKS.prompt([user("hi")], TOOLS, memory, tool_choice="add")
    # letter by letter, where the tokenizer writes }} as one token
    sampled = tuple(map(tokenizer.convert_tokens_to_ids, [*'{"a": 1}}\n', "</tool_call>", tokenizer.eos_token]))
    reply = assistant(None, tool_calls=[call('{"a": 1}')])
    turn = remembered(memory, first, reply, sampled)
    chat = [user("hi"), reply, {"role": "tool", "tool_call_id": "c1", "content": "2"}]
    prompt = THINKS.prompt(chat, TOOLS, memory)
    assert (prompt.link, prompt.ids[: len(first.ids + sampled)]) == ("append", turn.prompt_ids + sampled)
    other = THINKS.prompt([user("ho"), *chat[1:]], TOOLS, memory)  # the harness changed what stood before
    anew = fresh([user("ho"), *chat[1:]], TOOLS, renderer=THINKS)
    assert tokenizer.decode(list(other.ids)) == tokenizer.decode(list(anew.ids))
    assert (other.link, other.drift, spelled(sampled) in spelled(other.ids)) == ("fork", 0, True)


def test_reasoning_that_stayed_empty_stands_in_no_later_prompt_half():
    memory, tokenizer = Memory(), THINKS.tokenizer
    first = THINKS.prompt([user("hi")], (), memory)
    sampled = tuple(map(tokenizer.convert_tokens_to_ids, ["</think>", "\n\n", "o", "k", tokenizer.eos_token]))
    remembered(memory, first, assistant("ok"), sampled)
    chat = [user("ho"), assistant("ok"), user("more")]
    prompt = THINKS.prompt(chat, (), memory)
    assert tokenizer.decode(list(prompt.ids)) == tokenizer.decode(list(fresh(chat, renderer=THINKS).ids))


def begun(text: str, **fields: Any) -> Json:
    return assistant(text, prefix=True, **fields)


@pytest.mark.parametrize("family", ["qwen3", "thinking", "llama3", "gemma", "mistral"])
def test_every_family_goes_on_with_the_beginning_of_a_reply(family: str):
    renderer = THINKS if family == "thinking" else Renderer(family_tokenizer(family))
    memory, tokenizer = Memory(), renderer.tokenizer
    bare, prompt = (renderer.prompt(chat, (), memory) for chat in ([user("hi")], [user("hi"), begun("It is")]))
    closes = "\n</think>\n\n" if family == "thinking" else ""
    assert tokenizer.decode(list(prompt.ids[len(bare.ids) :])) == closes + "It is"
    assert (prompt.begun, prompt.opened, prompt.thinking) == ("It is", 5, False)
    assert prompt.key != bare.key  # so it is another step
    sampled = (*map(tokenizer.convert_tokens_to_ids, " 3"), tokenizer.eos_token_id)
    turn = remembered(memory, prompt, assistant(" 3"), sampled)
    after = renderer.prompt([user("hi"), assistant("It is 3"), user("more")], (), memory)
    assert (after.link, after.drift) == ("append", 0)
    assert after.ids[: len(prompt.ids + sampled)] == turn.prompt_ids + sampled


@pytest.mark.parametrize(
    ("last", "choice", "words"),
    [
        (begun("x", tool_calls=[call("{}")]), "auto", "holds tool_calls too"),
        (begun("x", reasoning_content="hm"), "auto", "holds reasoning_content too"),
        (begun("x"), "required", "`tool_choice` is required"),
    ],
)
def test_a_beginning_that_no_reply_can_go_on_with_is_refused(last: Json, choice: str, words: str):
    with pytest.raises(ApiError, match=words) as caught:
        RENDERER.prompt([user("hi"), last], TOOLS, Memory(), tool_choice=choice)
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_a_template_whose_prompts_end_elsewhere_refuses_a_beginning():
    strange = tiny_tokenizer()
    strange.chat_template = (
        "{% for m in messages %}{{ '[' + m.role + ': ' + m.content + ']' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'answer:' }}{% endif %}"
    )
    with pytest.raises(ApiError, match="does not end its prompts where a reply begins"):
        fresh([user("hi"), begun("x")], renderer=Renderer(strange))


# ---- over HTTP ----

SCHEMA: Json = {"type": "object", "properties": {}}
FORCED: dict[str, tuple[str, Json]] = {  # path, body that forces a call of `add`
    "chat": ("/v1/chat/completions", {"messages": [user("hi")], "tools": TOOLS, "tool_choice": "required"}),
    "chat named": (
        "/v1/chat/completions",
        {"messages": [user("hi")], "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}},
    ),
    "responses": (
        "/v1/responses",
        {
            "input": "hi",
            "tools": [{"type": "function", "name": "add", "parameters": SCHEMA}],
            "tool_choice": {"type": "function", "name": "add"},
        },
    ),
    "messages": (
        "/v1/messages",
        {
            "messages": [user("hi")],
            "max_tokens": 500,
            "tools": [{"name": "add", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
        },
    ),
    "gemini": (
        "/v1beta/models/m:generateContent",
        {
            "contents": [{"role": "user", "parts": [{"text": "hi"}]}],
            "tools": [{"functionDeclarations": [{"name": "add", "parameters": SCHEMA}]}],
            "toolConfig": {"functionCallingConfig": {"mode": "ANY"}},
        },
    ),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", FORCED)
async def test_a_forced_call_of_a_model_that_thinks_is_a_call_in_every_api(desk: MakeDesk, api: str, stream: bool):
    def rest(prompt: str) -> str:
        assert prompt.rpartition("<|im_start|>assistant\n")[2].startswith(CLOSED + "<tool_call>\n")
        named = prompt.endswith('"arguments": ')
        return '{"a": 1}}\n</tool_call>' if named else 'add", "arguments": {"a": 1}}\n</tool_call>'

    made = desk(rest, renderer=THINKS)
    path, body = FORCED[api]
    path = path.replace(":generate", ":streamGenerate") if stream and api == "gemini" else path
    async with made.http(await made.open()) as client:
        answer = await client.post(path, json={**body, "stream": stream})
    assert answer.status_code == 200
    (turn,) = made.turns()
    (part,) = turn.info["parts"]
    assert (part["kind"], turn.finish_reason) == ("call", "tool_calls")
    assert part["call"]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert part["call"]["id"] in answer.text
    assert "think" not in answer.text
