"""Reasoning of earlier replies: what the template keeps is continued exactly, what it leaves out makes a fork."""

from __future__ import annotations

from typing import Any

from whippletree.gateway.memory import Memory
from whippletree.gateway.parts import Part
from whippletree.gateway.render import Prompt, Renderer
from whippletree.models.templates import family_tokenizer
from whippletree.types import Json, Turn

TOKENIZER = family_tokenizer("qwen3")
RENDERER = Renderer(TOKENIZER)
END = TOKENIZER.eos_token_id
TOOLS: list[Json] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL: Json = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def ids_of(*words: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.convert_tokens_to_ids(list(words)))


def text_of(ids: tuple[int, ...]) -> str:
    return str(TOKENIZER.decode(list(ids)))


def remembered(
    memory: Memory, prompt: Prompt, ids: tuple[int, ...], *parts: Part, name: str = "1.0"
) -> tuple[int, ...]:
    """Prompt and reply of the turn that `memory` now knows."""
    rows = [{"kind": part.kind, "text": part.text, "call": part.call} for part in parts]
    info: Json = {**prompt.noted(), "parts": rows}
    kept: dict[str, Any] = {"version": 0, "finish_reason": "stop", "link": prompt.link, "info": info}
    memory.remember(Turn(id=name, prompt_ids=prompt.ids, reply_ids=ids, reply_logps=(0.0,) * len(ids), **kept))
    return prompt.ids + ids


THOUGHT = ids_of("<think>", "\n", "h", "m", "\n", "</think>", "\n\n")


def test_reasoning_that_the_template_leaves_out_makes_a_fork_with_the_sampled_answer():
    memory = Memory()
    answer = ids_of(*"user")  # letter by letter, where the tokenizer would write one token
    first = RENDERER.prompt([user("hi")], (), memory)
    seen = remembered(memory, first, (*THOUGHT, *answer, END), Part("reasoning", "hm"), Part("text", "user"))
    chat = [user("hi"), {"role": "assistant", "content": "user"}, user("more")]
    prompt = RENDERER.prompt(chat, (), memory)
    assert prompt.ids[: len(seen)] != seen
    assert prompt.ids[: len(first.ids) + 5] == (*first.ids, *answer, END)
    assert text_of(prompt.ids) == text_of(RENDERER.prompt(chat, (), Memory()).ids)
    assert (prompt.link, prompt.parent, prompt.drift, prompt.dropped_reasoning) == ("fork", "1.0", 0, True)


def test_reasoning_before_a_call_is_kept_though_the_harness_drops_it():
    memory = Memory()
    called = ids_of(
        "<tool_call>", "\n", *'{"', "name", *'": "add", "', "arguments", *'": {"a": 1}}', "\n", "</tool_call>"
    )
    first = RENDERER.prompt([user("hi")], TOOLS, memory)
    seen = remembered(memory, first, (*THOUGHT, *called, END), Part("reasoning", "hm"), Part("call", call=CALL))
    result = {"role": "tool", "tool_call_id": "c1", "content": "2"}
    chat = [user("hi"), {"role": "assistant", "content": None, "tool_calls": [CALL]}, result]
    prompt = RENDERER.prompt(chat, TOOLS, memory)
    assert prompt.ids[: len(seen)] == seen
    assert (prompt.link, prompt.drift, prompt.dropped_reasoning) == ("append", 0, True)
    assert prompt.thought == {1}


def test_a_new_question_forks_off_all_that_was_reasoned_before():
    memory = Memory()
    first = RENDERER.prompt([user("hi")], TOOLS, memory)
    remembered(memory, first, (*THOUGHT, *ids_of(*"ok"), END), Part("reasoning", "hm"), Part("text", "ok"))
    said = {"role": "assistant", "content": "ok", "reasoning_content": "hm"}  # this harness gives it back
    prompt = RENDERER.prompt([user("hi"), said, user("more")], TOOLS, memory)
    assert "hm" not in text_of(prompt.ids)[len(text_of(first.ids)) :]
    assert (prompt.link, prompt.drift, prompt.dropped_reasoning) == ("fork", 0, True)


def test_of_two_threads_that_said_the_same_a_fork_goes_on_from_its_own():
    memory = Memory()
    first, aside = (RENDERER.prompt([user(text)], (), memory) for text in ("hi", "a title, please"))
    remembered(memory, first, (*THOUGHT, *ids_of(*"ok"), END), Part("reasoning", "hm"), Part("text", "ok"))
    remembered(memory, aside, (*ids_of(*"ok"), END), Part("text", "ok"), name="2.0")
    chat = [user("hi"), user("it is late"), {"role": "assistant", "content": "ok"}, user("more")]  # written anew
    prompt = RENDERER.prompt(chat, (), memory)
    assert (prompt.link, prompt.parent) == ("fork", "1.0")


def test_a_conversation_whose_every_reply_comes_back_changed_is_continued_from_its_latest():
    for wrote, link in (("ok\n", "append"), ("k", "realign")):
        memory, chat = Memory(), [user("hi")]
        seen: tuple[int, ...] = ()
        for n in range(3):
            prompt = RENDERER.prompt(chat, (), memory)
            assert prompt.link == (link if n else "root")
            if link == "append":
                assert prompt.ids[: len(seen)] == seen
            spoken = ids_of(*"ok") if link == "append" else (*ids_of(*"ok"), END)
            seen = remembered(memory, prompt, spoken, Part("text", "ok"), name=f"{n}.0")
            assert prompt.parent == (f"{n - 1}.0" if n else "")
            more = "```" if link == "append" else ""
            chat = [*chat, {"role": "assistant", "content": wrote + more}, user(f"more {n}")]
