"""Google's generateContent, as pure functions: a request to an `Ask`, a call to a reply, an error to an error.

The model's name, and whether to stream, stand in the path: `request_of` puts them into the request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from whippletree.gateway.api import Api, event
from whippletree.gateway.calls import Ask, Call
from whippletree.gateway.chatform import image, unreadable
from whippletree.gateway.choices import Choice
from whippletree.gateway.errors import ApiError, bad_request
from whippletree.gateway.fields import (
    Neutral,
    count_of,
    objects_of,
    refuse,
    stop_of,
    temperature_of,
    top_p_of,
    value,
)
from whippletree.gateway.parts import Part
from whippletree.types import Json

PATH = re.compile(r".*/models/(?P<model>[^/:]+):(?P<method>generateContent|streamGenerateContent|countTokens)/?")
REFUSED: dict[str, Neutral] = {
    "candidateCount": (1,),
    "presencePenalty": (0,),
    "frequencyPenalty": (0,),
    "responseMimeType": ("text/plain",),
    "responseSchema": (),
    "responseJsonSchema": (),
    "responseLogprobs": (False,),
    "logprobs": (0,),
}
ERRORS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    404: "NOT_FOUND",
    413: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
}


def request_of(request: Json, path: re.Match[str]) -> Json:
    """The request with what its path says."""
    inner = request.get("generateContentRequest") if path["method"] == "countTokens" else None
    said = {"model": path["model"], "stream": path["method"] == "streamGenerateContent"}
    return {**request, **(inner if isinstance(inner, dict) else {}), **said}


def ask_of(request: Json, default_model: str) -> Ask:
    """What this request asks for. `topK` is left to the gateway, as its sampling cannot be trained on.

    Raises:
        ApiError: a field is missing or wrong, or a parameter cannot be honoured (400).
    """
    settings = value(request, "generationConfig", (dict,)) or {}
    refuse(settings, REFUSED)
    tools, tool_choice = _tools(request)
    system = value(request, "systemInstruction", (dict,)) or value(request, "system_instruction", (dict,))
    messages: list[Json] = []
    if system:
        messages.append({"role": "system", "content": _texts(system)})
    names = _Names()
    for place, content in enumerate(objects_of(request, "contents")):
        messages += _chat(content, f"contents[{place}]", names)
    return Ask(
        model=value(request, "model", (str,)) or default_model,
        messages=tuple(messages),
        tools=tools,
        tool_choice=tool_choice,
        temperature=temperature_of(settings),
        top_p=top_p_of(settings, "topP"),
        max_tokens=count_of(settings, "maxOutputTokens"),
        stop=stop_of(settings, "stopSequences"),
        seed=value(settings, "seed", (int,)),
        stream=bool(request.get("stream")),
        request=request,
    )


class _Names:
    """Ids of calls, where the client gives none: results follow their calls in order."""

    def __init__(self) -> None:
        self._count = 0
        self._waiting: list[tuple[str, str]] = []

    def called(self, name: str, given: Any) -> str:
        self._count += 1
        made = blake2b(f"{self._count} {name}".encode("utf-8", "replace"), digest_size=8).hexdigest()
        self._waiting.append((name, str(given or made)))
        return self._waiting[-1][1]

    def answered(self, name: str, given: Any) -> str:
        place = next((n for n, (called, _) in enumerate(self._waiting) if called == name), None)
        made = self._waiting.pop(place)[1] if place is not None else name
        return str(given or made)


def _tools(request: Json) -> tuple[tuple[Json, ...], str]:
    """(the tools as chat completions have them, the choice among them); those that the vendor runs are left out."""
    rows = objects_of(request, "tools") if request.get("tools") else ()
    lists = [row.get("functionDeclarations") or [] for row in rows]
    declared = [function for some in lists for function in (some if isinstance(some, list) else [some])]
    if not all(isinstance(function, dict) and isinstance(function.get("name"), str) for function in declared):
        raise bad_request("each of `functionDeclarations` is an object with a name, but one is not", param="tools")
    config = value(request, "toolConfig", (dict,)) or {}
    asked: Json = value(config, "functionCallingConfig", (dict,)) or {}
    mode, allowed = str(asked.get("mode", "AUTO")).upper(), asked.get("allowedFunctionNames") or []
    if mode == "NONE":
        return (), "none"
    tools = tuple(_tool(function) for function in declared)
    if mode != "ANY" or not tools:
        return tools, "auto"
    return tools, allowed[0] if isinstance(allowed, list) and len(allowed) == 1 else "required"


def _tool(function: Json) -> Json:
    schema = function.get("parametersJsonSchema") or function.get("parameters") or {"type": "object", "properties": {}}
    told = {"description": function["description"]} if isinstance(function.get("description"), str) else {}
    return {"type": "function", "function": {"name": function["name"], **told, "parameters": schema}}


def _texts(content: Json) -> str:
    parts = content.get("parts")
    rows = parts if isinstance(parts, list) else [parts]
    return "".join(str(part.get("text", "")) for part in rows if isinstance(part, dict))


def _chat(content: Json, where: str, names: _Names) -> list[Json]:
    """The content as messages of chat completions."""
    said: list[Json] = []
    calls: list[Json] = []
    results: list[Json] = []
    parts = content.get("parts")
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise bad_request(f"{where}.parts is a list of objects, but it is {json.dumps(parts)[:200]}", param="contents")
    for number, part in enumerate(parts):
        call, result = part.get("functionCall"), part.get("functionResponse")
        if isinstance(call, dict):
            name, given = str(call.get("name")), json.dumps(call.get("args") or {}, ensure_ascii=False)
            function = {"name": name, "arguments": given}
            calls.append({"id": names.called(name, call.get("id")), "type": "function", "function": function})
        elif isinstance(result, dict):
            call_id = names.answered(str(result.get("name")), result.get("id"))
            said_back = _answer(result, f"{where}.parts[{number}].functionResponse")
            results.append({"role": "tool", "tool_call_id": call_id, "content": said_back})
        elif isinstance(part.get("text"), str):
            said.append({"type": "thinking", "thinking": part["text"]} if part.get("thought") else _text(part["text"]))
        elif file := part.get("inlineData") or part.get("fileData"):
            said.append(_file(file, f"{where}.parts[{number}]"))
    role = "assistant" if content.get("role") == "model" else "user"
    out = {"role": role, "content": said} | ({"tool_calls": calls} if calls else {})
    return results + ([out] if said or calls or not results else [])


def _text(text: str) -> Json:
    return {"type": "text", "text": text}


def _file(file: Any, where: str) -> Json:
    """An image as chat completions have it."""
    kind = str(file.get("mimeType")) if isinstance(file, dict) else "file"
    if not kind.startswith("image/"):
        raise unreadable(kind, where)
    return image(f"data:{kind};base64,{file['data']}" if "data" in file else file.get("fileUri"), where)


def _answer(result: Json, where: str) -> Any:
    """What a function answered: text, with the images that came beside it."""
    said, parts = _result(result.get("response")), result.get("parts")
    more = parts if isinstance(parts, list) else []
    files = [part.get("inlineData") or part.get("fileData") for part in more if isinstance(part, dict)]
    images = [_file(file, f"{where}.parts[{number}]") for number, file in enumerate(files)]
    return [_text(said), *images] if images else said


def _result(response: Any) -> str:
    only = response.get("output") if isinstance(response, dict) and len(response) == 1 else None
    return only if isinstance(only, str) else json.dumps(response, ensure_ascii=False)


# ---- replies ----


def reply(call: Call) -> Json:
    """The reply in one piece."""
    (choice,) = call.choices
    parts = [_part(part) for part in choice.parts]
    return _body(call, parts, finish=_finish(choice))


def kept(call: Call, choice: Choice) -> Json:
    """What of the reply stands with the turn."""
    return {"candidates": [_candidate([_part(part) for part in choice.parts], _finish(choice))]}


def _finish(choice: Choice) -> str:
    return "MAX_TOKENS" if choice.finish_reason == "length" else "STOP"


def _candidate(parts: list[Json], finish: str) -> Json:
    out: Json = {"content": {"role": "model", "parts": parts}, "index": 0}
    return out | ({"finishReason": finish} if finish else {})


def _body(call: Call, parts: list[Json], *, finish: str = "") -> Json:
    prompt, sampled = call.prompt_tokens, call.completion_tokens
    usage = {"promptTokenCount": prompt, "candidatesTokenCount": sampled, "totalTokenCount": prompt + sampled}
    said = {"modelVersion": call.ask.model, "responseId": call.id}
    return {"candidates": [_candidate(parts, finish)], "usageMetadata": usage, **said}


def _part(part: Part) -> Json:
    if part.call:
        function = part.call["function"]
        called = {"id": part.call["id"], "name": function["name"], "args": json.loads(function["arguments"])}
        return {"functionCall": called}
    return {"text": part.text} | ({"thought": True} if part.kind == "reasoning" else {})


class Stream:
    """The reply as server-sent events: each holds what is new, the last one how it ended."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def begins(self) -> bytes:
        """Nothing."""
        return b""

    def delta(self, choice: Choice, parts: Sequence[Part]) -> bytes:
        """One event of these parts."""
        return event(_body(self._call, [_part(part) for part in parts]))

    def alive(self) -> bytes:
        """An event without text."""
        return event(_body(self._call, [{"text": ""}]))

    def ends(self) -> bytes:
        """How it ended."""
        return event(_body(self._call, [{"text": ""}], finish=_finish(self._call.choices[0])))

    def fails(self, error: ApiError) -> bytes:
        """The error as an event."""
        return event(error_body(error))


def error_body(error: ApiError) -> Json:
    """The error in Google's shape."""
    status = ERRORS.get(error.status, "INVALID_ARGUMENT" if error.status < 500 else "INTERNAL")
    return {"error": {"code": error.status, "message": error.message, "status": status}}


def counted(tokens: int) -> Json:
    """The answer to a question for the count of tokens."""
    return {"totalTokens": tokens}


API = Api("gemini", "models/*", ask_of, reply, kept, Stream, error_body, counted)
