"""OpenAI chat completions, as pure functions: a request to an `Ask`, a call to a reply, an error to an error.

The field names of token ids are vLLM's: `return_token_ids`, `prompt_token_ids`, `token_ids`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from whippletree.gateway.calls import Ask, Call, Choice
from whippletree.gateway.errors import ApiError, bad_request
from whippletree.types import Json

# Parameters that change what is sampled and that no engine here honours, with the values that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "top_k": (0, -1),
    "min_p": (0,),
    "typical_p": (1,),
    "min_tokens": (0,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "best_of": (1,),
    "use_beam_search": (False,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "truncate_prompt_tokens": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
}
MOST_CHOICES = 128


def ask_of(body: bytes, *, default_model: str) -> Ask:
    """What this request asks for.

    Raises:
        ApiError: it is no JSON object, a field is missing or wrong, or a parameter cannot be honoured (400).
    """
    request = _object(body)
    for name, neutral in REFUSED.items():
        value = request.get(name)
        if value is not None and value not in neutral:
            allowed = f" other than {' or '.join(json.dumps(x) for x in neutral)}" if neutral else ""
            raise bad_request(
                f"`{name}`{allowed} is not supported, and it is never ignored, but it is {json.dumps(value)[:200]}; "
                f"leave it out",
                param=name,
                code="unsupported_parameter",
            )
    number, integer = (int, float), (int,)
    temperature = _value(request, "temperature", number, lambda x: 0 <= x < math.inf, "0 or more")
    top_p = _value(request, "top_p", number, lambda x: 0 < x <= 1, "above 0 and at most 1")
    most = _value(request, "max_completion_tokens", integer, lambda x: x >= 1, "1 or more")
    older = _value(request, "max_tokens", integer, lambda x: x >= 1, "1 or more")
    options = _value(request, "stream_options", (dict,), lambda x: True, "") or {}
    return Ask(
        model=_value(request, "model", (str,), lambda x: True, "") or default_model,
        messages=_list(request, "messages"),
        tools=_list(request, "tools") if request.get("tools") and request.get("tool_choice") != "none" else (),
        n=_value(request, "n", integer, lambda x: 1 <= x <= MOST_CHOICES, f"1 to {MOST_CHOICES}") or 1,
        temperature=None if temperature is None else float(temperature),
        top_p=1.0 if top_p is None else float(top_p),
        max_tokens=older if most is None else most,
        stop=_stop(request.get("stop")),
        seed=_value(request, "seed", integer, lambda x: True, ""),
        stream=bool(_value(request, "stream", (bool,), lambda x: True, "")),
        usage_chunk=bool(options.get("include_usage")),
        logprobs=bool(_value(request, "logprobs", (bool,), lambda x: True, "")),
        token_ids=bool(_value(request, "return_token_ids", (bool,), lambda x: True, "")),
        request=request,
    )


def _object(body: bytes) -> Json:
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise bad_request(f"a request body is one JSON object, but this one cannot be read: {error}") from error
    if not isinstance(request, dict):
        raise bad_request(f"a request body is one JSON object, but this one is a {type(request).__name__}")
    return request


def _value(request: Json, name: str, kinds: tuple[type, ...], fits: Callable[[Any], bool], rule: str) -> Any:
    """The field if it is there, of one of these kinds, and fits; a bool is no number."""
    value = request.get(name)
    if value is None or (isinstance(value, kinds) and isinstance(value, bool) == (bool in kinds) and fits(value)):
        return value
    wanted = " or ".join(kind.__name__ for kind in kinds) + (f", {rule}" if rule else "")
    raise bad_request(f"`{name}` is a value of type {wanted}, but it is {json.dumps(value)[:200]}", param=name)


def _list(request: Json, name: str) -> tuple[Json, ...]:
    value = request.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise bad_request(
            f"`{name}` is a list of one or more objects, but it is {json.dumps(value)[:200]}",
            param=name,
        )
    return tuple(value)


def _stop(value: Any) -> tuple[str, ...]:
    marks = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(marks, list) or not all(isinstance(mark, str) and mark for mark in marks):
        raise bad_request(f"`stop` is a string or a list of strings, none empty, but got {value!r:.200}", param="stop")
    return tuple(marks)


# ---- replies ----


def completion(call: Call, choices: Sequence[Choice]) -> Json:
    """The reply in one piece."""
    body = _base(call, "chat.completion")
    body["choices"] = [_choice(call, choice) for choice in choices]
    body["usage"] = call.usage
    return body | ({"prompt_token_ids": call.prompt_ids} if call.ask.token_ids else {})


def kept(call: Call, choice: Choice) -> Json:
    """What of the reply stands with the turn; its ids and log-probabilities have columns of their own."""
    return {"id": f"chatcmpl-{call.id}", "message": choice.message, "finish_reason": choice.finish_reason}


def _base(call: Call, kind: str) -> Json:
    return {"id": f"chatcmpl-{call.id}", "object": kind, "created": int(time.time()), "model": call.ask.model}


def _choice(call: Call, choice: Choice) -> Json:
    out: Json = {"index": choice.index, "message": choice.message, "finish_reason": choice.finish_reason}
    return out | _columns(call, choice, 0)


def _columns(call: Call, choice: Choice, start: int) -> Json:
    """Log-probabilities and ids of the tokens from `start` on, where they were asked for."""
    out: Json = {"logprobs": None}
    if call.ask.logprobs:
        tokenizer = call.gateway.renderer.tokenizer
        rows = zip(choice.ids[start:], choice.logps[start:], strict=True)
        out["logprobs"] = {"content": [_logprob(tokenizer.decode([token]), logp) for token, logp in rows]}
    if call.ask.token_ids:
        out["token_ids"] = choice.ids[start:]
    return out


def _logprob(text: str, logp: float) -> Json:
    known = None if math.isnan(logp) else logp
    return {"token": text, "logprob": known, "bytes": list(text.encode()), "top_logprobs": []}


class Chunks:
    """The reply as server-sent events: `delta` while it is sampled, `ends` when it is on disk."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._base = _base(call, "chat.completion.chunk")
        self._sent: dict[int, int] = {}  # ids of each choice that have gone out
        self._tools: dict[int, int] = {}  # tool calls of each choice that have gone out

    def delta(self, choice: Choice, parts: Sequence[str | Json]) -> bytes:
        """The events of these parts of a choice; its role comes first."""
        return b"".join(self._part(choice, part) for part in parts)

    def ends(self) -> bytes:
        """A finish reason for each choice, usage if it was asked for, and the end."""
        finishes = b"".join(self._event(c, {}, finish_reason=c.finish_reason) for c in self._call.choices)
        usage = event({**self._base, "choices": [], "usage": self._call.usage}) if self._call.ask.usage_chunk else b""
        return finishes + usage + b"data: [DONE]\n\n"

    def alive(self) -> bytes:
        """An empty delta, so that a waiting client sees that the call is alive."""
        return self._event(self._call.choices[0], {})

    def _part(self, choice: Choice, part: str | Json) -> bytes:
        if isinstance(part, str):
            return self._event(choice, {"content": part})
        number = self._tools.get(choice.index, 0)
        self._tools[choice.index] = number + 1
        return self._event(choice, {"tool_calls": [{"index": number, **part}]})

    def _event(self, choice: Choice, delta: Json, *, finish_reason: str | None = None) -> bytes:
        role = b""
        if choice.index not in self._sent:
            self._sent[choice.index] = 0
            first = {"index": choice.index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            ids = {"prompt_token_ids": self._call.prompt_ids} if self._call.ask.token_ids else {}
            role = event({**self._base, "choices": [first], **ids})
        out: Json = {"index": choice.index, "delta": delta, "finish_reason": finish_reason}
        columns = _columns(self._call, choice, self._sent[choice.index])
        self._sent[choice.index] = len(choice.ids)
        return role + event({**self._base, "choices": [out | columns]})


def event(data: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def error_body(error: ApiError) -> Json:
    """The error in OpenAI's shape."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}
