"""Anthropic Messages, as pure functions: a request to an `Ask`, a call to a reply, an error to an error."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from whippletree.gateway.api import Api, event
from whippletree.gateway.calls import Ask, Call
from whippletree.gateway.choices import Choice
from whippletree.gateway.errors import ApiError, bad_request
from whippletree.gateway.fields import (
    Neutral,
    count_of,
    flag_of,
    objects_of,
    refuse,
    stop_of,
    temperature_of,
    top_p_of,
    value,
)
from whippletree.gateway.parts import Part, merged
from whippletree.types import Json

REFUSED: dict[str, Neutral] = {"top_k": ()}  # changes what is sampled, and no engine here honours it
ROLES = ("user", "assistant", "system")
NO_ARGUMENTS: Json = {"type": "object", "properties": {}}
ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def ask_of(request: Json, default_model: str) -> Ask:
    """What this request asks for.

    Raises:
        ApiError: a field is missing or wrong, or a parameter cannot be honoured (400).
    """
    refuse(request, REFUSED)
    tools, tool_choice = _tools(request)
    system = _plain(_blocks(request.get("system"), "system"))
    messages: list[Json] = [{"role": "system", "content": system}] if system else []
    for place, message in enumerate(objects_of(request, "messages")):
        messages += _read(message, place)
    return Ask(
        model=value(request, "model", (str,)) or default_model,
        messages=tuple(messages),
        tools=tools,
        tool_choice=tool_choice,
        temperature=temperature_of(request),
        top_p=top_p_of(request),
        max_tokens=count_of(request, "max_tokens"),
        stop=stop_of(request, "stop_sequences"),
        stream=flag_of(request, "stream"),
        request=request,
    )


def _tools(request: Json) -> tuple[tuple[Json, ...], str]:
    """(the tools that the model is told of, the choice among them); those of a type that the vendor made are left out."""
    rows = objects_of(request, "tools") if request.get("tools") else ()
    tools = tuple(_tool(row, place) for place, row in enumerate(rows) if row.get("type") in (None, "custom"))
    names = [tool["function"]["name"] for tool in tools]
    asked: Json = value(request, "tool_choice", (dict,)) or {"type": "auto"}
    kind = asked.get("type")
    if kind == "none":
        return (), "none"
    if kind == "auto" or (kind == "any" and tools):
        return tools, "auto" if kind == "auto" else "required"
    if kind == "tool" and asked.get("name") in names:
        return tools, asked["name"]
    raise bad_request(
        f"`tool_choice` is of type auto, none, any (with tools) or tool (with the name of one of {names}), but it is "
        f"{json.dumps(asked)[:200]}",
        param="tool_choice",
    )


def _tool(row: Json, place: int) -> Json:
    name, schema = row.get("name"), row.get("input_schema") or NO_ARGUMENTS
    if not isinstance(name, str) or not isinstance(schema, dict):
        raise bad_request(f"each of `tools` has a name and an input_schema, but tools[{place}] has not", param="tools")
    said = {"name": name, "description": row.get("description") or "", "parameters": schema}
    return {"type": "function", "function": said}


def _read(message: Json, place: int) -> list[Json]:
    """The chat messages that this one is: the results of tools come first, each on its own."""
    role, blocks = message.get("role"), _blocks(message.get("content"), f"messages[{place}].content")
    if role not in ROLES:
        raise bad_request(f"a role is one of {ROLES}, but messages[{place}] has {role!r:.80}", param="messages")
    if role == "assistant":
        return [_assistant(blocks)]
    results = [block for block in blocks if role == "user" and block.get("type") == "tool_result"]
    rest = [block for block in blocks if not any(block is result for result in results)]
    out = [_result(block, place) for block in results]
    return out if results and not rest else [*out, {"role": role, "content": _plain(rest)}]


def _assistant(blocks: Sequence[Json]) -> Json:
    thoughts = [block for block in blocks if isinstance(block.get("thinking"), str)]
    calls = [block for block in blocks if block.get("type") == "tool_use"]
    apart = ("tool_use", "redacted_thinking", "thinking")
    out: Json = {"role": "assistant", "content": _plain([b for b in blocks if b.get("type") not in apart])}
    if thought := "".join(block["thinking"] for block in thoughts):
        out["reasoning_content"] = thought
    return out | ({"tool_calls": [_call(block) for block in calls]} if calls else {})


def _call(block: Json) -> Json:
    arguments = json.dumps(block.get("input") or {})
    return {
        "id": block.get("id"),
        "type": "function",
        "function": {"name": block.get("name"), "arguments": arguments},
    }


def _result(block: Json, place: int) -> Json:
    content = _plain(_blocks(block.get("content"), f"the content of a tool_result in messages[{place}]"))
    if block.get("is_error") and not content:
        content = "error"  # otherwise the text says it
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}


def _blocks(content: Any, where: str) -> list[Json]:
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise bad_request(
            f"{where} is a string or a list of blocks, but it is {json.dumps(content)[:200]}",
            param=where.partition("[")[0] if where[0] != "t" else "messages",
        )
    return content


def _plain(blocks: Sequence[Json]) -> str | list[Json]:
    """Text as one string; with anything else among it, the parts, less what only a vendor's cache reads."""
    if all(block.get("type") == "text" and isinstance(block.get("text"), str) for block in blocks):
        return "".join(block["text"] for block in blocks)
    return [{name: x for name, x in block.items() if name != "cache_control"} for block in blocks]


# ---- replies ----


def message(call: Call) -> Json:
    """The reply in one piece."""
    return {**kept(call, call.choices[0]), "usage": _usage(call, call.completion_tokens)}


def kept(call: Call, choice: Choice) -> Json:
    """What of the reply stands with the turn; its counts follow from its ids."""
    return {**_head(call), "content": [_block(part) for part in _shown(choice.parts)], **_end(choice)}


def counted(tokens: int) -> Json:
    """The answer to a count of a prompt's tokens."""
    return {"input_tokens": tokens}


def _head(call: Call) -> Json:
    return {"id": f"msg_{call.id}", "type": "message", "role": "assistant", "model": call.ask.model}


def _shown(parts: Sequence[Part]) -> list[Part]:
    return merged([part for part in parts if part.text or part.call])


def _block(part: Part) -> Json:
    if part.call:
        return _begun(part) | {"input": _input(part.call)}
    return _begun(part) | {"thinking" if part.kind == "reasoning" else "text": part.text}


def _begun(part: Part) -> Json:
    """The block before anything is in it."""
    if part.call:
        return {"type": "tool_use", "id": part.call["id"], "name": part.call["function"]["name"], "input": {}}
    return {"type": "thinking", "thinking": "", "signature": ""} if part.kind == "reasoning" else _text("")


def _text(text: str) -> Json:
    return {"type": "text", "text": text}


def _input(call: Json) -> Json:
    found: Json = json.loads(call["function"]["arguments"])
    return found


def _end(choice: Choice) -> Json:
    words = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}
    reason = words.get(choice.finish_reason)  # of an abandoned reply there is none
    by_string = reason == "end_turn" and bool(choice.stopped)
    return {
        "stop_reason": "stop_sequence" if by_string else reason,
        "stop_sequence": choice.stopped if by_string else None,
    }


def _usage(call: Call, sampled: int) -> Json:
    cache = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": call.prompt_tokens, "output_tokens": sampled, **cache}


class MessageEvents:
    """The reply as server-sent events: one block after the other."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._open = ""  # kind of the block that is open
        self._index = -1  # of the latest block

    def begins(self) -> bytes:
        """The message before it has content, with the size of its prompt."""
        ends = {"stop_reason": None, "stop_sequence": None, "usage": _usage(self._call, 0)}
        return _event("message_start", message={**_head(self._call), "content": [], **ends})

    def delta(self, choice: Choice, parts: Sequence[Part]) -> bytes:
        """The events of these parts; text of the kind that came last goes on in its block."""
        return b"".join(self._part(part) for part in _shown(parts))

    def alive(self) -> bytes:
        """A ping, so that a waiting client sees that the call is alive."""
        return _event("ping")

    def ends(self) -> bytes:
        """The end of the last block, why the reply ended, and its size."""
        usage = _usage(self._call, self._call.completion_tokens)
        last = _event("message_delta", delta=_end(self._call.choices[0]), usage=usage)
        return self._close() + last + _event("message_stop")

    def fails(self, error: ApiError) -> bytes:
        """The error as an event."""
        return event(error_body(error), name="error")

    def _part(self, part: Part) -> bytes:
        begin = b""
        if part.call or part.kind != self._open:
            begin = self._close()
            self._open, self._index = part.kind, self._index + 1
            begin += _event("content_block_start", index=self._index, content_block=_begun(part))
        return begin + _event("content_block_delta", index=self._index, delta=_delta(part))

    def _close(self) -> bytes:
        closed, self._open = bool(self._open), ""
        return _event("content_block_stop", index=self._index) if closed else b""


def _delta(part: Part) -> Json:
    if part.call:
        return {"type": "input_json_delta", "partial_json": json.dumps(_input(part.call))}
    if part.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": part.text}
    return {"type": "text_delta", "text": part.text}


def _event(name: str, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name=name)


def error_body(error: ApiError) -> Json:
    """The error in Anthropic's shape."""
    kind = ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


API = Api("messages", "messages", ask_of, message, kept, MessageEvents, error_body, counted)
