"""OpenAI chat completions, as pure functions: a request to an `Ask`, a call to a reply, an error to an error.

The field names of token ids are vLLM's: `return_token_ids`, `prompt_token_ids`, `token_ids`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from whippletree.gateway.api import Api, event
from whippletree.gateway.calls import Ask, Call
from whippletree.gateway.choices import Choice
from whippletree.gateway.errors import ApiError, bad_request
from whippletree.gateway.fields import (
    MOST_CHOICES,
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
from whippletree.gateway.parts import Part
from whippletree.types import Json

# Parameters that change what is sampled and that no engine here honours, with the values that ask for nothing.
REFUSED: dict[str, Neutral] = {
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
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "audio": (),
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


def ask_of(request: Json, default_model: str) -> Ask:
    """What this request asks for.

    Raises:
        ApiError: a field is missing or wrong, or a parameter cannot be honoured (400).
    """
    refuse(request, REFUSED)
    options = value(request, "stream_options", (dict,)) or {}
    most, older = count_of(request, "max_completion_tokens"), count_of(request, "max_tokens")
    tools, tool_choice = tools_of(request)
    return Ask(
        model=value(request, "model", (str,)) or default_model,
        messages=tuple(map(_read, objects_of(request, "messages"))),
        tools=tools,
        tool_choice=tool_choice,
        n=value(request, "n", (int,), lambda x: 1 <= x <= MOST_CHOICES, f"1 to {MOST_CHOICES}") or 1,
        temperature=temperature_of(request),
        top_p=top_p_of(request),
        max_tokens=older if most is None else most,
        stop=stop_of(request),
        seed=value(request, "seed", (int,)),
        stream=flag_of(request, "stream"),
        options={
            "usage_chunk": bool(options.get("include_usage")),
            "logprobs": flag_of(request, "logprobs"),
            "token_ids": flag_of(request, "return_token_ids"),
        },
        request=request,
    )


def tools_of(request: Json) -> tuple[tuple[Json, ...], str]:
    """(the tools that the model is told of, the choice among them); those that a vendor runs itself are left out."""
    choice: Any = request.get("tool_choice") or "auto"
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("function"), dict):
        choice = choice["function"].get("name")
    rows = objects_of(request, "tools") if request.get("tools") else ()
    tools = tuple(row for row in rows if row.get("type", "function") == "function")
    names = [_name_of(row, place) for place, row in enumerate(tools)]
    if not isinstance(choice, str) or choice not in ("auto", "none", "required", *names):
        raise bad_request(
            f"`tool_choice` is auto, none, required or one of the tools {names}, but it is "
            f"{json.dumps(request['tool_choice'])[:200]}",
            param="tool_choice",
            code="unsupported_parameter",
        )
    if choice == "required" and not tools:
        raise bad_request("`tool_choice` required needs `tools`, but there are none", param="tool_choice")
    return ((), "none") if choice == "none" else (tools, choice)


def _name_of(tool: Json, place: int) -> str:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"each of `tools` is a function with a name, but tools[{place}] is not", param="tools")
    return str(function["name"])


def _read(message: Json) -> Json:
    """The message; reasoning under the name that some servers give it stands under ours too."""
    thought = message.get("reasoning")
    return {"reasoning_content": thought, **message} if isinstance(thought, str) else message


# ---- replies ----


def completion(call: Call) -> Json:
    """The reply in one piece."""
    body = _base(call, "chat.completion")
    body["choices"] = [_choice(call, choice) for choice in call.choices]
    body["usage"] = _usage(call)
    return body | ({"prompt_token_ids": list(call.prompt.ids)} if call.ask.options["token_ids"] else {})


def kept(call: Call, choice: Choice) -> Json:
    """What of the reply stands with the turn; its ids and log-probabilities have columns of their own."""
    return {"id": f"chatcmpl-{call.id}", "message": choice.message, "finish_reason": choice.finish_reason}


def _usage(call: Call) -> Json:
    prompt, completion = call.prompt_tokens, call.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _base(call: Call, kind: str) -> Json:
    return {"id": f"chatcmpl-{call.id}", "object": kind, "created": call.created, "model": call.ask.model}


def _choice(call: Call, choice: Choice) -> Json:
    out: Json = {"index": choice.index, "message": choice.message, "finish_reason": choice.finish_reason}
    return out | _columns(call, choice, 0)


def _columns(call: Call, choice: Choice, start: int) -> Json:
    """Log-probabilities and ids of the tokens from `start` on, where they were asked for."""
    out: Json = {"logprobs": None}
    if call.ask.options["logprobs"]:
        tokenizer = call.gateway.renderer.tokenizer
        rows = zip(choice.ids[start:], choice.logps[start:], strict=True)
        out["logprobs"] = {"content": [_logprob(tokenizer.decode([token]), logp) for token, logp in rows]}
    if call.ask.options["token_ids"]:
        out["token_ids"] = choice.ids[start:]
    return out


def _logprob(text: str, logp: float) -> Json:
    known = None if math.isnan(logp) else logp
    return {"token": text, "logprob": known, "bytes": list(text.encode()), "top_logprobs": []}


class Chunks:
    """The reply as server-sent events."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._sent: dict[int, int] = {}  # ids of each choice that have gone out
        self._tools: dict[int, int] = {}  # tool calls of each choice that have gone out

    def begins(self) -> bytes:
        """Nothing: the role of each choice comes with its first event."""
        return b""

    def delta(self, choice: Choice, parts: Sequence[Part]) -> bytes:
        """The events of these parts of a choice; its role comes first."""
        return b"".join(self._event(choice, self._said(choice, part)) for part in parts)

    def alive(self) -> bytes:
        """An empty delta, so that a waiting client sees that the call is alive."""
        return self._event(self._call.choices[0], {})

    def ends(self) -> bytes:
        """A finish reason for each choice, usage if it was asked for, and the end."""
        finishes = b"".join(self._event(c, {}, finish_reason=c.finish_reason) for c in self._call.choices)
        asked = self._call.ask.options["usage_chunk"]
        usage = event({**self._base, "choices": [], "usage": _usage(self._call)}) if asked else b""
        return finishes + usage + b"data: [DONE]\n\n"

    def fails(self, error: ApiError) -> bytes:
        """The error as an event."""
        return event(error_body(error))

    @property
    def _base(self) -> Json:
        return _base(self._call, "chat.completion.chunk")  # a reply that was kept gives its call its own id

    def _said(self, choice: Choice, part: Part) -> Json:
        if part.call is None:
            return {"reasoning_content" if part.kind == "reasoning" else "content": part.text}
        number = self._tools.get(choice.index, 0)
        self._tools[choice.index] = number + 1
        return {"tool_calls": [{"index": number, **part.call}]}

    def _event(self, choice: Choice, delta: Json, *, finish_reason: str | None = None) -> bytes:
        role = b""
        if choice.index not in self._sent:
            self._sent[choice.index] = 0
            first = {"index": choice.index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            ids = {"prompt_token_ids": list(self._call.prompt.ids)} if self._call.ask.options["token_ids"] else {}
            role = event({**self._base, "choices": [first], **ids})
        out: Json = {"index": choice.index, "delta": delta, "finish_reason": finish_reason}
        columns = _columns(self._call, choice, self._sent[choice.index])
        self._sent[choice.index] = len(choice.ids)
        return role + event({**self._base, "choices": [out | columns]})


def error_body(error: ApiError) -> Json:
    """The error in OpenAI's shape."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


API = Api("chat", "chat/completions", ask_of, completion, kept, Chunks, error_body)
