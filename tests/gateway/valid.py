"""Valid requests of every route, rich enough that something is to be exchanged in them."""

from __future__ import annotations

from whippletree.types import Json

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ADD = {"name": "add", "description": "adds", "parameters": SCHEMA}
IMAGE = "data:image/png;base64,iVBORw0KGgo="
USER: Json = {"role": "user", "content": "more"}
CHATS: list[Json] = [
    {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    {
        "messages": [
            {"role": "system", "content": "You add."},
            {"role": "user", "content": [{"type": "text", "text": "1 + 1"}]},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
                    {"id": "c2", "type": "function", "function": {"name": "add", "arguments": "{}"}},
                ],
            },
            {"role": "tool", "tool_call_id": "c2", "content": "2"},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "2"}]},
            {"role": "developer", "content": "be short", "name": "x"},
        ],
        "tools": [{"type": "function", "function": ADD}],
        "tool_choice": "auto",
        "temperature": 0.5,
        "top_p": 0.9,
        "n": 2,
        "stop": ["END", "\n\n"],
        "seed": 7,
        "max_completion_tokens": 20,
        "logprobs": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "metadata": {"a": "b"},
    },
    {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "reasoning": "why"},
            {"role": "user", "content": "then?"},
        ],
        "tools": [{"type": "function", "function": ADD}],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "response_format": {"type": "text"},
        "max_tokens": 5,
    },
]
RESPONSES: list[Json] = [
    {"model": "m", "input": "hi"},
    {
        "instructions": "You add.",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1 + 1"}]},
            {"type": "reasoning", "id": "rs_1_0", "summary": [], "content": [{"type": "reasoning_text", "text": "h"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
            {"type": "function_call", "id": "fc_1_1", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
            {"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]},
        ],
        "tools": [
            {"type": "function", **ADD},
            {"type": "namespace", "name": "math", "tools": [{"type": "function", **ADD, "name": "plus"}]},
            {"type": "web_search"},
        ],
        "tool_choice": {"type": "function", "name": "add"},
        "text": {"format": {"type": "text"}},
        "max_output_tokens": 20,
        "temperature": 1,
        "parallel_tool_calls": True,
        "include": ["reasoning.encrypted_content"],
        "store": False,
        "stream": True,
        "metadata": {"a": "b"},
    },
    {"input": [{"role": "user", "content": "hi"}], "previous_response_id": None, "stream": True, "top_p": 1},
]
MESSAGES: list[Json] = [
    {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]},
    {
        "max_tokens": 50,
        "system": [{"type": "text", "text": "You add.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "1 + 1"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "so"},
                    {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "2"}]},
                    {"type": "tool_result", "tool_use_id": "c2", "is_error": True},
                    {"type": "text", "text": "and?"},
                ],
            },
            {"role": "system", "content": "be short"},
        ],
        "tools": [
            {"name": "add", "description": "adds", "input_schema": SCHEMA},
            {"type": "web_search_1", "name": "w"},
        ],
        "tool_choice": {"type": "tool", "name": "add"},
        "stop_sequences": ["END"],
        "temperature": 0.5,
        "thinking": {"type": "adaptive"},
        "metadata": {"user_id": "u"},
        "stream": True,
    },
]
GEMINI: list[Json] = [
    {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
    {
        "systemInstruction": {"parts": [{"text": "You add."}]},
        "contents": [
            {"role": "user", "parts": [{"text": "1 + 1"}, {"inlineData": {"mimeType": "image/png", "data": "x"}}]},
            {
                "role": "model",
                "parts": [{"text": "hm", "thought": True}, {"functionCall": {"name": "add", "args": {}}}],
            },
            {"role": "user", "parts": [{"functionResponse": {"name": "add", "response": {"output": "2"}}}]},
        ],
        "tools": [{"functionDeclarations": [{**ADD, "parametersJsonSchema": SCHEMA}]}, {"googleSearch": {}}],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["add"]}},
        "generationConfig": {"temperature": 1, "topP": 0.9, "maxOutputTokens": 9, "stopSequences": ["E"], "seed": 1},
        "generateContentRequest": {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
    },
]
SESSIONS: list[Json] = [
    {"id": "s1", "group": "g", "task": {"id": "t", "messages": [], "columns": {"a": 1}}, "budget": {"turns": 3}},
    {"sampling": {"temperature": 0.5, "max_tokens": 9}, "sealed": True, "budget": {"tokens": 9, "seconds": 1.5}},
    {"kind": "reward", "name": "r", "value": 1.0},
    {"kind": "note", "text": "well"},
    {"kind": "end", "ending": "failed", "blame": "harness", "reason": "why"},
]
GENERATE, COUNT = "/v1beta/models/m:generateContent", "/v1beta/models/m:countTokens"
ROUTES: list[tuple[int, str, list[Json]]] = [  # (weight, path, bodies)
    (6, "/v1/chat/completions", CHATS),
    (6, "/v1/responses", RESPONSES),
    (6, "/v1/messages", MESSAGES),
    (3, GENERATE, GEMINI),
    (2, "/v1beta/models/m:streamGenerateContent?alt=sse", GEMINI),
    (1, "/v1/messages/count_tokens", MESSAGES),
    (1, COUNT, GEMINI),
    (1, "/v1/models", [{}]),
    (1, "/v1/models/some/name", [{}]),
    (2, "/sessions", SESSIONS),
    (2, "/sessions/s1/events", SESSIONS),
    (1, "/sessions/s1", SESSIONS),
    (1, "/sessions/s1/export", SESSIONS),
    (1, "/healthz", [{}]),
    (1, "/", [{}]),
]


def continued(path: str, body: Json, reply: Json) -> tuple[str, Json] | None:
    """(path, body) of the request that follows this one and its reply; `None` where there is none, or it grew long."""
    at = next((route for _, route, _ in ROUTES if path.endswith(route)), "")
    if at == "/v1/chat/completions":
        name, said = "messages", [*(choice["message"] for choice in reply["choices"][:1]), USER]
    elif at == "/v1/messages":
        name, said = "messages", [{"role": "assistant", "content": reply["content"]}, USER]
    elif at == "/v1/responses" and isinstance(body["input"], list):
        name, said = "input", [*reply["output"], USER]
    elif at == GENERATE:
        name, said = "contents", [reply["candidates"][0]["content"], {"role": "user", "parts": [{"text": "more"}]}]
    else:
        return None
    return (at, {**body, name: [*body[name], *said]}) if len(body[name]) < 12 else None
