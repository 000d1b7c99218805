"""OpenAI Responses, as pure functions: a request to an `Ask`, a call to a response, its parts to events.

No response is remembered for a later request: each one sends its whole input.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from whippletree.gateway import chat
from whippletree.gateway.api import Api, event
from whippletree.gateway.calls import Ask, Call
from whippletree.gateway.chatform import image, unreadable
from whippletree.gateway.choices import Choice
from whippletree.gateway.errors import ApiError, bad_request
from whippletree.gateway.fields import count_of, flag_of, objects_of, refuse, stop_of, temperature_of, top_p_of, value
from whippletree.gateway.parts import Part, merged
from whippletree.types import Json

REFUSED = chat.REFUSED | {"n": (1,), "background": (False,), "prompt": (), "text.format": ({"type": "text"},)}
REMEMBERED = ("previous_response_id", "conversation")
TEXT = ("input_text", "output_text", "text")
Names = dict[tuple[str, str], str]  # (namespace or "", name that the client gave) -> name in the prompt


def ask_of(request: Json, default_model: str) -> Ask:
    """What this request asks for.

    Raises:
        ApiError: a field is missing or wrong, or a parameter cannot be honoured (400).
    """
    text = value(request, "text", (dict,)) or {}
    refuse({**request, "text.format": text.get("format")}, REFUSED)
    for name in REMEMBERED:
        if request.get(name):
            raise bad_request(
                f"`{name}` is not supported, as no response is remembered here, but it is "
                f"{json.dumps(request[name])[:200]}; send the whole history as `input`",
                param=name,
                code="unsupported_parameter",
            )
    offered, names = _tools(request)
    tools, tool_choice = chat.tools_of({"tools": offered, "tool_choice": _tool_choice(request, names)})
    return Ask(
        model=value(request, "model", (str,)) or default_model,
        messages=_messages(request, names),
        tools=tools,
        tool_choice=tool_choice,
        temperature=temperature_of(request),
        top_p=top_p_of(request),
        max_tokens=count_of(request, "max_output_tokens"),
        stop=stop_of(request),
        stream=flag_of(request, "stream"),
        options={"given": {shown: given for given, shown in names.items()}},
        request=request,
    )


def _tools(request: Json) -> tuple[list[Json], Names]:
    """(the functions in the form of chat completions, the names that they have there).

    A name that stands in several places gets its namespace before it. Tools that a vendor runs are left out.
    """
    rows: list[tuple[str, Json]] = []
    for row in objects_of(request, "tools") if request.get("tools") else ():
        if row.get("type", "function") == "function":
            rows.append(("", row))
        elif row.get("type") == "namespace" and row.get("tools"):
            space = str(row.get("name"))
            rows += [(space, tool) for tool in objects_of(row, "tools") if tool.get("type") == "function"]
    count = Counter(str(tool.get("name")) for _, tool in rows)
    tools: list[Json] = []
    names: Names = {}
    for space, tool in rows:
        name = str(tool.get("name"))
        names[space, name] = f"{space}__{name}" if space and count[name] > 1 else name
        tools.append(_function(tool, names[space, name]))
    if len({*names.values()}) < len(names):
        shown = [*names.values()]
        raise bad_request(f"each tool has a name of its own, but they are {shown}; rename one", param="tools")
    return tools, names


def _function(tool: Json, shown: str) -> Json:
    said = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": said | ({"name": shown} if isinstance(tool.get("name"), str) else {})}


def _tool_choice(request: Json, names: Names) -> Any:
    choice = request.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": _shown(choice, names)}}
    return choice


def _shown(item: Json, names: Names) -> Any:
    """The name in the prompt of the tool that a call, or a choice, names."""
    return names.get((str(item.get("namespace") or ""), str(item.get("name"))), item.get("name"))


# ---- input ----


def _messages(request: Json, names: Names) -> tuple[Json, ...]:
    """The instructions and the input as chat messages."""
    instructions, items = value(request, "instructions", (str,)), request.get("input")
    messages: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(items, str):
        return (*messages, {"role": "user", "content": items})
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items) or not (items or messages):
        raise bad_request(
            f"`input` is a string or a list of one or more items, but it is {json.dumps(items)[:200]}", param="input"
        )
    sources: list[str] = [""] * len(messages)
    for place, item in enumerate(items):
        message = _message(item, f"input[{place}]", names)
        if message is None:
            continue
        source = _source(item)
        if messages and _one_reply(messages[-1], sources[-1], message, source):
            _join(messages[-1], message)
            sources[-1] = sources[-1] or source
        else:
            messages.append(message)
            sources.append(source)
    if items and len(messages) == bool(instructions):
        raise bad_request("`input` says something, but each of its items was empty or cannot be read", param="input")
    for message in messages:
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
    return tuple(messages)


def _message(item: Json, where: str, names: Names) -> Json | None:
    """The message that this item alone would be; `None` if it says nothing."""
    kind = item.get("type", "message")
    if kind == "message" and isinstance(item.get("role"), str):
        return {"role": item["role"], "content": _content(item.get("content"), f"{where}.content")}
    if kind == "reasoning":
        lists = [item[name] for name in ("content", "summary") if isinstance(item.get(name), list)]
        rows = [row for row in next(filter(None, lists), []) if isinstance(row, dict)]
        thought = "".join(row["text"] for row in rows if isinstance(row.get("text"), str))
        return {"role": "assistant", "content": None, "reasoning_content": thought} if thought else None
    if kind == "function_call":
        if not isinstance(item.get("name"), str):
            raise bad_request(f"each function_call has a name, but {where} has none", param=where)
        function = {"name": _shown(item, names), "arguments": item.get("arguments", "{}")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        content = _content(item.get("output"), f"{where}.output")
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
    if kind in ("message", "item_reference") or any(item.get(name) for name in ("content", "output", "input", "text")):
        raise bad_request(
            f"an input item is a message with a role, a reasoning, a function_call or a function_call_output, but "
            f"{where} is {json.dumps(item)[:200]}; send it as text or leave it out",
            param=where,
        )
    return None


def _content(content: Any, where: str) -> Any:
    """Text as one string; parts in the form of chat completions where there are images among them."""
    if content is not None and not isinstance(content, str | list):
        raise bad_request(f"{where} is a string or a list of parts, but it is {json.dumps(content)[:200]}", param=where)
    if not isinstance(content, list):
        return content or ""
    parts = [_part(part, f"{where}[{number}]") for number, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(part: Any, where: str) -> Json:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    name = "refusal" if kind == "refusal" else "text"
    if kind in (*TEXT, "refusal") and isinstance(part.get(name), str):
        return {"type": "text", "text": part[name]}
    if kind == "input_image":
        return image(part.get("image_url"), where)
    raise unreadable(kind, where)


def _source(item: Json) -> str:
    """The call of ours that an item's id names; "" where it names none."""
    names = str(item.get("id")).split("_")
    return names[1] if len(names) == 3 and names[0] in ("rs", "msg", "fc") else ""


def _one_reply(last: Json, last_source: str, message: Json, source: str) -> bool:
    """Whether an item goes on with the assistant's message before it: ids tell, else their kinds."""
    if last["role"] != "assistant" or message["role"] != "assistant":
        return False
    if isinstance(last["content"], list) or isinstance(message["content"], list):
        return "tool_calls" in message
    if last_source and source:
        return last_source == source
    return "tool_calls" in message or (last["content"] is None and "tool_calls" not in last)


def _join(last: Json, message: Json) -> None:
    if message["content"] is not None:
        last["content"] = (last["content"] or "") + message["content"]
    if "reasoning_content" in message:
        last["reasoning_content"] = last.get("reasoning_content", "") + message["reasoning_content"]
    if "tool_calls" in message:
        last.setdefault("tool_calls", []).extend(message["tool_calls"])


# ---- replies ----


def reply(call: Call) -> Json:
    """The response in one piece."""
    choice = call.choices[0]
    cut = choice.finish_reason == "length"
    body = _base(call, "incomplete" if cut else "completed")
    body["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
    body["output"] = _output(call, choice)
    body["usage"] = {
        "input_tokens": call.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": call.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": call.prompt_tokens + call.completion_tokens,
    }
    return body


def kept(call: Call, choice: Choice) -> Json:
    """What of the response stands with the turn."""
    status = "incomplete" if choice.finish_reason in ("length", "abandoned") else "completed"
    return {"id": f"resp_{call.id}", "output": _output(call, choice), "status": status}


def _base(call: Call, status: str) -> Json:
    request = call.ask.request
    return {
        "id": f"resp_{call.id}",
        "object": "response",
        "created_at": call.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": request.get("instructions"),
        "max_output_tokens": call.ask.max_tokens,
        "metadata": request.get("metadata") or {},
        "model": call.ask.model,
        "output": [],
        "parallel_tool_calls": request.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "store": False,
        "temperature": call.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": request.get("tool_choice") or "auto",
        "tools": request.get("tools") or [],
        "top_p": call.ask.top_p,
        "usage": None,
    }


def _output(call: Call, choice: Choice) -> list[Json]:
    # without an item, the next request would not show that there was a reply
    parts = merged([part for part in choice.parts if part.call or part.text]) or [Part("text")]
    last = len(parts) - 1
    # a call is made once it is whole: what was cut after it is not
    cut = [n == last and not part.call for n, part in enumerate(parts)]
    return [_item(call, part, n, _status(choice) if cut[n] else "completed") for n, part in enumerate(parts)]


def _status(choice: Choice) -> str:
    return "incomplete" if choice.finish_reason in ("length", "abandoned") else "completed"


def _item(call: Call, part: Part, place: int, status: str) -> Json:
    """A part as a whole output item."""
    if part.call:
        function = part.call["function"]
        space, name = call.ask.options["given"].get(function["name"], ("", function["name"]))
        return {
            "type": "function_call",
            "id": f"fc_{call.id}_{place}",
            "call_id": part.call["id"],
            "name": name,
            "arguments": function["arguments"],
            "status": status,
        } | ({"namespace": space} if space else {})
    if part.kind == "reasoning":
        return {"type": "reasoning", "id": f"rs_{call.id}_{place}", "summary": [], "content": [_inner(part)]}
    item = {"type": "message", "id": f"msg_{call.id}_{place}", "role": "assistant", "status": status}
    return item | {"content": [_inner(part)]}


def _inner(part: Part) -> Json:
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}


class Stream:
    """The response as server-sent events: each item is opened, filled and closed before the next."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._number = 0  # of the next event
        self._place = 0  # of the open item, else of the next
        self._open: Part | None = None  # the text of the open item so far

    def begins(self) -> bytes:
        """The response, empty."""
        body = _base(self._call, "in_progress")
        return self._event("response.created", response=body) + self._event("response.in_progress", response=body)

    def delta(self, choice: Choice, parts: Sequence[Part]) -> bytes:
        """The events of these parts."""
        return b"".join(self._said(part) for part in parts if part.call or part.text)

    def alive(self) -> bytes:
        """An event of a type that no client knows, as comments do not count as life."""
        return self._event("response.keepalive")

    def ends(self) -> bytes:
        """The last item's end, then the whole response."""
        opened = b"" if self._open or self._place else self._begun("text")
        closed = opened + self._close(_status(self._call.choices[0]))
        body = reply(self._call)
        return closed + self._event(f"response.{body['status']}", response=body)

    def fails(self, error: ApiError) -> bytes:
        """The response as one that failed."""
        body = _base(self._call, "failed")
        body["error"] = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response=body)

    def _said(self, part: Part) -> bytes:
        if part.call:
            return self._close() + self._called(part)
        out = b""
        if self._open is None or self._open.kind != part.kind:
            out = self._close() + self._begun(part.kind)
        assert self._open is not None
        self._open = merged([self._open, part])[0]
        return out + self._inside(f"response.{_inner(part)['type']}.delta", delta=part.text, **_logprobs(part))

    def _begun(self, kind: Literal["text", "reasoning", "call"]) -> bytes:
        self._open = Part(kind)
        empty = _item(self._call, self._open, self._place, "in_progress") | {"content": []}
        out = self._event("response.output_item.added", output_index=self._place, item=empty)
        return out + self._inside("response.content_part.added", part=_inner(self._open))

    def _called(self, part: Part) -> bytes:
        item = _item(self._call, part, self._place, "completed")
        where = {"item_id": item["id"], "output_index": self._place}
        empty = item | {"arguments": "", "status": "in_progress"}
        arguments, name = item["arguments"], "response.function_call_arguments"
        out = self._event("response.output_item.added", output_index=self._place, item=empty)
        out += self._event(f"{name}.delta", **where, delta=arguments)
        out += self._event(f"{name}.done", **where, name=item["name"], arguments=arguments)
        out += self._event("response.output_item.done", output_index=self._place, item=item)
        self._place += 1
        return out

    def _close(self, status: str = "completed") -> bytes:
        if self._open is None:
            return b""
        part = self._open
        out = self._inside(f"response.{_inner(part)['type']}.done", text=part.text, **_logprobs(part))
        out += self._inside("response.content_part.done", part=_inner(part))
        item = _item(self._call, part, self._place, status)
        out += self._event("response.output_item.done", output_index=self._place, item=item)
        self._open, self._place = None, self._place + 1
        return out

    def _inside(self, kind: str, /, **fields: Any) -> bytes:
        """An event of the open item's only content part."""
        assert self._open is not None
        item = _item(self._call, self._open, self._place, "")
        return self._event(kind, item_id=item["id"], output_index=self._place, content_index=0, **fields)

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **fields}, name=kind)


def _logprobs(part: Part) -> Json:
    return {"logprobs": []} if part.kind == "text" else {}


API = Api("responses", "responses", ask_of, reply, kept, Stream, chat.error_body)
