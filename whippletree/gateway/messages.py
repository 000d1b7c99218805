"""Anthropic Messages, as pure functions: a request to an `Ask`, a call to a reply, an error to an error."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from whippletree.gateway.api import Api, event
from whippletree.gateway.calls import Ask, Call
from whippletree.gateway.chatform import image, unreadable
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

REFUSED: dict[str, Neutral] = {"top_k": (), "mcp_servers": ([],), "container": ()}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
READ = ("text", "thinking", "redacted_thinking", "tool_reference")


def ask_of(request: Json, default_model: str) -> Ask:
    """What this request asks for.

    Raises:
        ApiError: a field is missing or wrong, or a parameter cannot be honoured (400).
    """
    refuse(request, REFUSED)
    tools, tool_choice = _tools(request)
    system = request.get("system")
    messages: list[Json] = [{"role": "system", "content": system}] if system else []
    for place, message in enumerate(objects_of(request, "messages")):
        messages += _chat(message, f"messages[{place}].content")
    if _is_beginning(messages[-1]):
        messages[-1] = {**messages[-1], "prefix": True}
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


def _is_beginning(last: Json) -> bool:
    """Whether the reply goes on with this last message: text of the assistant, and nothing else."""
    content = last.get("content")
    blocks = content if isinstance(content, list) else []
    others = "tool_calls" in last or any(block["type"] != "text" for block in blocks)
    return last.get("role") == "assistant" and not others


def _tools(request: Json) -> tuple[tuple[Json, ...], str]:
    """(the tools as chat completions have them, the choice among them); those that the vendor runs are left out."""
    rows = objects_of(request, "tools") if request.get("tools") else ()
    own = [row for row in rows if row.get("type") in (None, "custom")]
    tools = tuple(_tool(row, place) for place, row in enumerate(own))
    names = [tool["function"]["name"] for tool in tools]
    asked = value(request, "tool_choice", (dict,)) or {"type": "auto"}
    choice: Any = asked.get("name") if asked.get("type") == "tool" else CHOICES.get(str(asked.get("type")))
    if not isinstance(choice, str) or choice not in ("auto", "none", "required", *names):
        raise bad_request(
            f"`tool_choice` is auto, any, none or one of the tools {names}, but it is {json.dumps(asked)[:200]}",
            param="tool_choice",
        )
    if choice == "required" and not tools:
        raise bad_request("`tool_choice` any needs `tools`, but there are none", param="tool_choice")
    return ((), "none") if choice == "none" else (tools, choice)


def _tool(row: Json, place: int) -> Json:
    if not isinstance(row.get("name"), str):
        raise bad_request(f"each of `tools` has a name, but tools[{place}] has none", param="tools")
    told = {"description": row["description"]} if isinstance(row.get("description"), str) else {}
    schema = row.get("input_schema") or {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": row["name"], **told, "parameters": schema}}


def _chat(message: Json, where: str) -> list[Json]:
    """The message as those of chat completions: results of tools are messages of their own, before what is said."""
    content = message.get("content")
    if not isinstance(message.get("role"), str) or not (content is None or isinstance(content, str | list)):
        told = f"a message has a role, and a string or a list of blocks at {where}, but it is "
        raise bad_request(told + json.dumps(message)[:200], param=where)
    if not isinstance(content, list):
        return [message]
    said: list[Json] = []
    calls: list[Json] = []
    results: list[Json] = []
    for number, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            calls.append(_call(block, f"{where}[{number}]"))
        elif kind == "tool_result":
            result = _result(block, f"{where}[{number}].content")
            results.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": result})
        else:
            said.append(_read(block, f"{where}[{number}]"))
    out = {"role": message.get("role"), "content": said} | ({"tool_calls": calls} if calls else {})
    return results + ([out] if said or calls or not results else [])


def _read(block: Any, where: str) -> Json:
    """The block as it is, an image as chat completions have it."""
    kind = block.get("type") if isinstance(block, dict) else type(block).__name__
    if kind in READ:
        return dict(block)
    source = block.get("source") if kind == "image" else None
    if not isinstance(source, dict):
        raise unreadable(kind, where)
    data = f"data:{source.get('media_type')};base64,{source.get('data')}"
    return image(data if source.get("type") == "base64" else source.get("url"), where)


def _call(block: Json, where: str) -> Json:
    if not isinstance(block.get("name"), str):
        raise bad_request(f"a tool_use block has a name, but {where} has none", param=where)
    arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
    return {"id": block.get("id"), "type": "function", "function": {"name": block["name"], "arguments": arguments}}


def _result(block: Json, where: str) -> Any:
    """The content of a tool's result; a list of blocks is read as that of any message."""
    content = block.get("content")
    if isinstance(content, list):
        content = [_read(part, f"{where}[{number}]") for number, part in enumerate(content)]
    if content is not None and not isinstance(content, str | list):
        raise bad_request(f"a tool_result's content is a string or a list, but it is {json.dumps(content)[:200]}")
    return content or ("error" if block.get("is_error") else "")


# ---- replies ----


def message(call: Call) -> Json:
    """The reply in one piece."""
    (choice,) = call.choices
    return kept(call, choice) | {"usage": _usage(call)}


def kept(call: Call, choice: Choice) -> Json:
    """What of the reply stands with the turn."""
    return _base(call) | {
        "content": [_block(part) for part in choice.parts],
        "stop_reason": _stop_reason(choice),
        "stop_sequence": choice.stopped or None,
    }


def _base(call: Call) -> Json:
    return {"id": f"msg_{call.id}", "type": "message", "role": "assistant", "model": call.ask.model}


def _usage(call: Call) -> Json:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": call.prompt_tokens, **cached, "output_tokens": call.completion_tokens}


def _stop_reason(choice: Choice) -> str | None:
    """Why it ended; harnesses run calls for `tool_use` alone, so that comes before a stop string."""
    if choice.finish_reason == "abandoned":
        return None
    otherwise = "stop_sequence" if choice.stopped else "end_turn"
    return {"tool_calls": "tool_use", "length": "max_tokens"}.get(choice.finish_reason, otherwise)


def _block(part: Part) -> Json:
    if part.call:
        function = part.call["function"]
        called = {"id": part.call["id"], "name": function["name"], "input": json.loads(function["arguments"])}
        return {"type": "tool_use", **called}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "text", "text": part.text}


class Events:
    """The reply as server-sent events: one block at a time is open."""

    def __init__(self, call: Call) -> None:
        self._call, self._open, self._index = call, "", -1

    def begins(self) -> bytes:
        """The message without content."""
        empty: Json = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(self._call)}
        return _event("message_start", message=_base(self._call) | empty)

    def delta(self, choice: Choice, parts: Sequence[Part]) -> bytes:
        """The blocks of these parts; text goes on in the block that is open."""
        return b"".join(map(self._part, merged(parts)))

    def alive(self) -> bytes:
        """A ping."""
        return _event("ping")

    def ends(self) -> bytes:
        """The open block's end, the stop reason with the usage, and the message's end."""
        (choice,) = self._call.choices
        reason = {"stop_reason": _stop_reason(choice), "stop_sequence": choice.stopped or None}
        last = _event("message_delta", delta=reason, usage=_usage(self._call))
        return self._close() + last + _event("message_stop")

    def fails(self, error: ApiError) -> bytes:
        """The error as an event."""
        return event(error_body(error), name="error")

    def _part(self, part: Part) -> bytes:
        whole = _block(part)
        if part.call:
            given = json.dumps(whole["input"], ensure_ascii=False)
            opened = self._begin("call", whole | {"input": {}})
            return opened + self._said("input_json_delta", partial_json=given) + self._close()
        text = "thinking" if part.kind == "reasoning" else "text"
        opened = b"" if self._open == text else self._begin(text, whole | {text: ""})
        return opened + self._said(f"{text}_delta", **{text: part.text})

    def _begin(self, kind: str, block: Json) -> bytes:
        closed = self._close()
        self._open, self._index = kind, self._index + 1
        return closed + _event("content_block_start", index=self._index, content_block=block)

    def _said(self, kind: str, **said: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **said})

    def _close(self) -> bytes:
        was, self._open = self._open, ""
        return _event("content_block_stop", index=self._index) if was else b""


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, name=kind)


def error_body(error: ApiError) -> Json:
    """The error in Anthropic's shape."""
    kind = ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def counted(tokens: int) -> Json:
    """The answer to a question for the count of tokens."""
    return {"input_tokens": tokens}


API = Api("messages", "messages", ask_of, message, kept, Events, error_body, counted)
