from __future__ import annotations

import json
from typing import Any

import pytest

from whippletree.gateway.chat import ask_of, error_body
from whippletree.gateway.errors import ApiError
from whippletree.gateway.fields import json_object

MESSAGES = [{"role": "user", "content": "hi"}]


def ask(**fields: Any) -> Any:
    return ask_of(json.loads(json.dumps({"messages": MESSAGES, **fields})), "tiny")


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        ask(**fields)
    assert caught.value.status == 400
    return caught.value


def test_a_bare_request_leaves_everything_to_the_rollout():
    bare = ask()
    assert (bare.model, bare.messages, bare.n, bare.top_p, bare.stop) == ("tiny", tuple(MESSAGES), 1, 1.0, ())
    assert (bare.temperature, bare.max_tokens, bare.seed) == (None, None, None)
    assert not (bare.stream or any(bare.options.values()))


def test_every_honoured_parameter_is_read():
    full = ask(
        model="any", n=2, temperature=0, top_p=0.5, max_tokens=7, stop="x", seed=-3, stream=True,
        stream_options={"include_usage": True}, logprobs=True, return_token_ids=True,
    )  # fmt: skip
    assert (full.model, full.n, full.temperature, full.top_p, full.max_tokens) == ("any", 2, 0.0, 0.5, 7)
    assert (full.stop, full.seed) == (("x",), -3)
    assert full.stream and full.options == {"usage_chunk": True, "logprobs": True, "token_ids": True}
    assert ask(max_tokens=7, max_completion_tokens=9).max_tokens == 9  # the newer name
    assert ask(stop=["a", "b"]).stop == ("a", "b")


def test_tools_are_left_out_where_none_may_be_called():
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert ask(tools=tools, tool_choice="auto").tools == tuple(tools)
    assert ask(tools=tools, tool_choice="none").tools == ()
    assert ask(tools=[]).tools == ()


def test_a_tool_may_be_required_or_named():
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert ask(tools=tools, tool_choice="required").tool_choice == "required"
    named = {"type": "function", "function": {"name": "add"}}
    assert ask(tools=tools, tool_choice=named).tool_choice == "add"
    other = {"type": "function", "function": {"name": "sub"}}
    for fields in ({"tool_choice": "required"}, {"tools": tools, "tool_choice": other}, {"tool_choice": named}):
        assert refusal(**fields).param == "tool_choice"


def test_tools_that_a_vendor_runs_are_left_out():
    tools = [{"type": "web_search"}, {"type": "function", "function": {"name": "add"}}]
    assert ask(tools=tools).tools == (tools[1],)
    assert refusal(tools=[{"type": "function"}]).param == "tools"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("frequency_penalty", 0.5),
        ("presence_penalty", -1),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"5": 1}),
        ("top_k", 40),
        ("min_p", 0.1),
        ("top_logprobs", 3),
        ("response_format", {"type": "json_object"}),
        ("stop_token_ids", [1]),
        ("chat_template_kwargs", {"enable_thinking": False}),
    ],
)
def test_a_parameter_that_is_not_honoured_is_refused_by_name(name: str, value: Any):
    error = refusal(**{name: value})
    assert error.param == name
    assert f"`{name}`" in error.message
    assert error.code == "unsupported_parameter"


def test_the_values_that_ask_for_nothing_are_taken():
    ask(
        frequency_penalty=0, presence_penalty=0.0, repetition_penalty=1.0, logit_bias={}, top_k=-1, top_logprobs=0,
        response_format={"type": "text"}, parallel_tool_calls=True, tool_choice="auto", min_p=None,
        reasoning_effort=None,
    )  # fmt: skip


def test_unknown_keys_are_harmless_and_kept():
    fields = {"metadata": {"a": 1}, "user": "u", "store": True, "x-anything": [1], "reasoning_effort": "high"}
    assert fields.items() <= ask(**fields).request.items()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("max_tokens", 0),
        ("max_completion_tokens", 1.5),
        ("n", 0),
        ("n", 129),
        ("seed", "x"),
        ("stop", ""),
        ("stop", [1]),
        ("stream", "yes"),
        ("logprobs", 5),
        ("model", 7),
        ("messages", []),
        ("messages", "hi"),
        ("messages", ["hi"]),
        ("messages", None),
        ("tools", {"x": 1}),
        ("stream_options", []),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: Any):
    error = refusal(**{name: value})
    assert error.param == name
    assert f"`{name}`" in error.message


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[1]", b'"x"', b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_refused(body: bytes):
    with pytest.raises(ApiError, match="a request body is one JSON object") as caught:
        json_object(body)
    assert caught.value.status == 400


def test_errors_have_openais_shape():
    assert error_body(ApiError(400, "no", code="c", param="p")) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "p", "code": "c"}
    }
    assert error_body(ApiError(503, "later"))["error"]["type"] == "server_error"
