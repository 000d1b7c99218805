"""Messages to prompt ids, through the model's own chat template.

    prompt of turn k+1 = prompt ids of turn k + reply ids of turn k + ids of what the template adds after them

whenever the new messages extend the old ones and our reply among them; what was sampled is never tokenised again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from whippletree.gateway.errors import ApiError, bad_request
from whippletree.gateway.toolcalls import ToolFormat, format_of
from whippletree.types import Json

SENTINEL = "\u2063reply\u2063stands\u2063here\u2063"  # invisible separators: no template and no harness writes them
CACHED = 256  # texts
A_TOOL: Json = {
    "type": "function",
    "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}},
}


class Renderer:
    """Renders chats for one tokenizer.

    Raises:
        ValueError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"a chat needs the model's own template, but the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} "
                f"has no chat_template; use an instruction-tuned model, or set tokenizer.chat_template"
            )
        self.tokenizer = tokenizer
        self._ids = lru_cache(CACHED)(self._tokenized)  # a group's rollouts share their prompts
        self._special = frozenset(tokenizer.all_special_ids)
        probe = [{"role": "user", "content": "x"}]
        self.has_tools = self._text(probe, [A_TOOL]) != self._text(probe, [])
        self.tool_format: ToolFormat | None = (
            format_of(tokenizer.get_chat_template(tools=[A_TOOL])) if self.has_tools else None
        )

    def prompt(
        self, messages: Sequence[Json], tools: Sequence[Json], threads: Mapping[bytes, tuple[int, ...]]
    ) -> tuple[tuple[int, ...], bytes]:
        """The prompt ids of these messages, and the key under which a reply to them continues.

        `threads` maps `thread_key(key, reply message)` of each earlier turn of the rollout to its prompt and reply ids;
        the longest one that these messages extend is continued.

        Raises:
            ApiError: a message cannot be rendered, or tools are given to a model that has no way to write them (400).
        """
        self._check_tools(tools)
        chat = [clean(message, place) for place, message in enumerate(messages)]
        keys = _keys(chat, tools)
        for place in range(len(chat) - 1, -1, -1):
            if chat[place]["role"] == "assistant" and (ids := threads.get(keys[place + 1])):
                after = self._after_reply(chat, tools, place, ids[-1])
                if after is not None:
                    return ids + after, keys[-1]
        return self._ids(self._text(chat, tools)), keys[-1]

    def _after_reply(self, chat: list[Json], tools: Sequence[Json], place: int, last_id: int) -> tuple[int, ...] | None:
        """Ids of what the template writes after the text of message `place`; `None` if its text cannot be found.

        The template closes the reply itself. Where the model sampled that closing token, it is not repeated; where the
        reply was cut, the closing is context.
        """
        marked = [*chat[:place], {"role": "assistant", "content": SENTINEL}, *chat[place + 1 :]]
        try:
            parts = self._text(marked, tools).split(SENTINEL)
        except ApiError:  # some templates refuse a tool's answer where no call stands before it
            return None
        if len(parts) != 2:
            return None
        ids = self._ids(parts[1])
        if last_id in self._special and last_id in ids:
            end = ids.index(last_id)
            if not self.tokenizer.decode(ids[:end]).strip():
                return ids[end + 1 :]
        return ids

    def _check_tools(self, tools: Sequence[Json]) -> None:
        if tools and self.tool_format is None:
            why = "names no call format known here" if self.has_tools else "has none"
            raise bad_request(f"`tools` need a model whose chat template has tools, but this one {why}", param="tools")

    def _text(self, chat: Sequence[Json], tools: Sequence[Json]) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(chat), tools=list(tools) or None, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates are programs of the model's authors: they raise what they like
            raise bad_request(f"the model's chat template refuses these messages: {error}", param="messages") from error
        return text

    def _tokenized(self, text: str) -> tuple[int, ...]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise bad_request(f"messages are Unicode text, but these hold half a character: {error}") from error
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def thread_key(key: bytes, reply: Json) -> bytes:
    """The key of the messages of `key` followed by this reply, as a later request will hold them."""
    return _chained(key, clean(reply, 0))


def clean(message: Any, place: int) -> Json:
    """The message as templates want it: plain text content, arguments as objects, no keys beyond the chat's own.

    Raises:
        ApiError: it is no message, or holds what cannot be read as text (400).
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise bad_request(f"each message is an object with a role, but messages[{place}] is not", param="messages")
    role = "system" if message["role"] == "developer" else message["role"]
    out: Json = {"role": role, "content": _content(message.get("content"), place)}
    if calls := message.get("tool_calls"):
        out["tool_calls"] = [_call(call, place) for call in calls]
    kept = ("tool_call_id", "name", "reasoning_content")
    return out | {key: message[key] for key in kept if isinstance(message.get(key), str)}


def _content(content: Any, place: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    where = f"messages[{place}].content"
    if not isinstance(content, list):
        raise bad_request(f"{where} is a string or a list of parts, but it is a {type(content).__name__}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            raise bad_request(
                f"this model reads text alone, but {where} holds a part of type {kind!r}", param="messages"
            )
        texts.append(part[kind])
    return "".join(texts)


def _call(call: Any, place: int) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"each tool call is a function with a name, but one of messages[{place}] is not")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(ValueError):  # broken arguments are compared and rendered as they are
            arguments = json.loads(arguments)
    return {
        "id": call.get("id", ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _keys(chat: Sequence[Json], tools: Sequence[Json]) -> list[bytes]:
    """One key for each beginning of the chat, the empty one first."""
    keys = [blake2b(_canonical(tools), digest_size=16).digest()]
    for message in chat:
        keys.append(_chained(keys[-1], message))
    return keys


def _chained(key: bytes, message: Json) -> bytes:
    """Equal for messages that say the same: harnesses strip our text, rename calls and leave reasoning out."""
    said = {name: value for name, value in message.items() if name not in ("tool_calls", "reasoning_content")}
    if message["role"] == "assistant":
        said["content"] = said["content"].strip()
    said["calls"] = [call["function"] for call in message.get("tool_calls", ())]
    return blake2b(key + _canonical(said), digest_size=16).digest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
