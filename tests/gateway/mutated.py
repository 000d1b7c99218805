"""Requests that are nearly right: valid ones of every route, with parts of them exchanged, and then some bytes."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from tests.gateway.valid import ROUTES
from whippletree.types import Json

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Sent:
    """One request as it goes over the wire."""

    method: str
    path: str  # percent-encoded, with the query
    headers: Headers
    body: bytes

    def with_header(self, name: str, text: str) -> Sent:
        """The request with one more header."""
        return replace(self, headers=(*self.headers, (name, text)))


NESTED, DEPTHS = "@nested", (5, 40, 150, 600, *range(800, 1000, 10), 5000, 100_000)  # how deep what stands here is
METHODS = ("GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "post", "BREW", "")
WORDS = (
    *(
        "",
        " ",
        "\0",
        "x",
        "\ud800",
        "a\udfff",
        "😀",
        "ﬃ\u202e",
        "<|im_end|>",
        "<|im_start|>system\n",
        "</think>",
        "<think>",
    ),
    *("<tool_call>", '<tool_call>\n{"name": "add"', "[TOOL_CALLS]", "{{ messages }}", "{% raw %}", '{"a":', "[" * 900),
    *("auto", "none", "required", "any", "add", "assistant", "tool", "system", "text", "image", "thinking", "tool_use"),
    *("tool_result", "function_call", "reasoning", "item_reference", "function", "custom", "namespace", "NaN", "1e999"),
    *("END", "la " * 5000, "é" * 3000, "null", "../..", "%00", "c1"),
)
NUMBERS = (
    *(0, -1, 1, 2, 128, 129, 2**31, 2**63, 2**64, 10**400, -(10**400), 0.5, -0.0, 1e308, 1e-320, 10.0**20),
    *(float("nan"), float("inf"), float("-inf"), 4096, 1.0000001),
)
SETTINGS = (
    *(
        "temperature",
        "top_p",
        "n",
        "seed",
        "stop",
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "stream",
    ),
    *("tool_choice", "tools", "model", "logprobs", "return_token_ids", "stream_options", "system", "instructions"),
    *(
        "metadata",
        "stop_sequences",
        "generationConfig",
        "systemInstruction",
        "toolConfig",
        "text",
        "include",
        "contents",
    ),
    *("id", "group", "task", "sampling", "budget", "sealed", "kind", "name", "value", "ending", "blame", "reason"),
)
FIELDS = (
    *(
        "top_k",
        "logit_bias",
        "response_format",
        "n",
        "stream",
        "stop",
        "seed",
        "tools",
        "tool_choice",
        "messages",
        "id",
    ),
    *("input", "content", "role", "type", "name", "tool_calls", "function", "arguments", "parts", "text", "reasoning"),
    *("functionCall", "functionResponse", "previous_response_id", "conversation", "background", "max_tokens", "\0", ""),
    *("reasoning_content", "input_schema", "parameters", "candidateCount", "responseSchema", "thinking", "\ud83d"),
)
ODD_HEADERS: Headers = (
    *(("content-type", "text/plain"), ("content-type", "application/json; charset=utf-16"), ("content-length", "-1")),
    *(("content-length", "99999999999999999999"), ("content-length", "²"), ("content-encoding", "gzip")),
    *(("transfer-encoding", "chunked"), ("expect", "100-continue"), ("accept", "nothing"), ("host", "\xff\xfe:x")),
    *(("host", "["), ("host", "a]b"), ("host", ""), ("host", "x/v1/messages?"), ("host", "x#"), ("host", "a b")),
    *(("idempotency-key", "k"), ("idempotency-key", "\xe9" * 900), ("x-stainless-retry-count", "1")),
    *(("x-stainless-retry-count", "NaN"), ("x-codex-turn-metadata", "[]"), ("x-codex-turn-metadata", "[" * 9000)),
    *(("x-codex-turn-metadata", '{"request_kind": "compaction"}'), ("thread-id", "\xff"), ("x-openai-subagent", "s")),
    *(("x-claude-code-agent-id", "a" * 5000), ("x-parent-session-id", "\x01"), ("x-session-id", "")),
    *(("anthropic-version", ""), ("connection", "upgrade"), ("upgrade", "websocket"), ("x-forwarded-for", "\xff")),
    *(("origin", "null"), ("cookie", "a=b"), ("range", "bytes=0-1"), ("authorization", "Bearer"), ("x-api-key", "")),
)


def request(chance: random.Random, secret: str, admin: str) -> Sent:
    """A request with the key that its route needs, unless that is what is wrong with it."""
    (_, path, bodies) = chance.choices(ROUTES, [weight for weight, _, _ in ROUTES])[0]
    key = admin if path.startswith("/sessions") != (chance.random() < 0.05) else secret
    return mutated(chance, path, chance.choice(bodies), key)


def mutated(chance: random.Random, path: str, body: Json, secret: str) -> Sent:
    """This request with some of it exchanged; one in ten stays as it was."""
    body = copy.deepcopy(body)
    as_it_was = chance.random() < 0.1
    for _ in range(0 if as_it_was else chance.choice((0, 1, 1, 1, 2, 3, 6))):
        body = _exchanged(chance, body)
    if isinstance(body, dict) and not as_it_was and chance.random() < 0.3:
        body[chance.choice(SETTINGS)] = _odd(chance)
    if isinstance(body, dict) and chance.random() < 0.2:
        body["stream"] = chance.random() < 0.5
    sent = Sent(
        "GET" if bodies_unread(path) else "POST", path, (("content-type", "application/json"),), _bytes(chance, body)
    )
    sent = _with_key(chance, sent, secret)
    if as_it_was:
        return sent
    if chance.random() < 0.25:
        sent = replace(sent, body=_broken(chance, sent.body))
    for _ in range(chance.choice((0, 0, 0, 1, 2))):
        sent = sent.with_header(*chance.choice(ODD_HEADERS))
    if chance.random() < 0.05:
        sent = replace(sent, method=chance.choice((*METHODS, "POST", "GET")))
    return replace(sent, path=_odd_path(chance, sent.path, secret)) if chance.random() < 0.1 else sent


def bodies_unread(path: str) -> bool:
    """Whether this path is asked with GET."""
    return "/v1/models" in path or path in ("/", "/healthz", "/sessions/s1", "/sessions/s1/export")


# ---- the JSON ----


def _exchanged(chance: random.Random, body: Any) -> Any:
    """The value with one place in it changed."""
    places = list(_places(body)) if isinstance(body, dict | list) else []
    if not places or chance.random() < 0.02:
        return _odd(chance)
    where, key = chance.choice(places)
    other, at = chance.choice(places)
    what = chance.randrange(9)
    if what < 4:
        where[key] = _odd(chance)
    elif what == 4:
        del where[key]
    elif what == 5:
        where[key] = copy.deepcopy(other[at])
    elif what == 6:
        where[key] = [where[key]] if chance.random() < 0.5 else {chance.choice(FIELDS): where[key]}
    elif isinstance(where, dict):
        where[chance.choice(FIELDS)] = where.pop(key) if what == 7 else _odd(chance)
    else:
        where.insert(key, _odd(chance) if what == 7 else copy.deepcopy(where[key]))
    return body


def _places(value: Any) -> Any:
    """(object or list, key or number) of everything in it."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)


def _odd(chance: random.Random) -> Any:
    kind = chance.randrange(12)
    if kind < 4:
        return chance.choice(WORDS)
    if kind < 6:
        return chance.choice(NUMBERS)
    if kind < 8:
        return chance.choice(
            (None, True, False, [], {}, [[]], [None], [{}], {"type": None}, {"type": []}, {"type": {}})
        )
    if kind == 8:
        return {chance.choice(FIELDS): _odd(chance) for _ in range(chance.randrange(4))}
    if kind == 9:
        return [_odd(chance) for _ in range(chance.randrange(4))]
    if kind == 10:
        return NESTED
    return "".join(
        chr(chance.choice((32, 127, 255, 0x2028, 0xFFFD, 0x1F600, 34, 92)) + chance.randrange(9)) for _ in range(9)
    )


def _bytes(chance: random.Random, body: Any) -> bytes:
    text = json.dumps(body, ensure_ascii=chance.random() < 0.7)
    for _ in range(text.count(f'"{NESTED}"')):
        (opened, closed), depth = chance.choice((("[", "]"), ('{"a":', "}"))), chance.choice(DEPTHS)
        text = text.replace(f'"{NESTED}"', opened * depth + "1" + closed * depth, 1)
    if chance.random() < 0.03:
        text = text.replace('"model": "m"', '"model": "x", "messages": 1, "model": "m", "input": 1', 1)
    return text.encode("utf-8", "surrogatepass")


# ---- bytes, headers, paths ----


def _broken(chance: random.Random, body: bytes) -> bytes:
    for _ in range(chance.randint(1, 3)):
        place, end = sorted(chance.randrange(len(body) + 1) for _ in range(2))
        how = chance.randrange(8)
        if how == 0:
            body = body[:place]
        elif how == 1:
            body = body[:place] + bytes([chance.randrange(256)]) + body[place + 1 :]
        elif how == 2:
            body = body[:place] + chance.choice((b"\xff", b"\xed\xa0\x80", b"\0", b"\xc3", b"\xf8\x88")) + body[place:]
        elif how == 3:
            body = (
                body[:place]
                + chance.choice((b"NaN", b"Infinity", b"1e999", b"9" * 5000, b"-", b'"', b"\\u"))
                + body[place:]
            )
        elif how == 4:
            body = body[:place] + body[place:end] * 2 + body[end:]
        elif how == 5:
            body = body[:place] + body[end:]
        elif how == 6:
            body = chance.choice(
                (b"\xef\xbb\xbf" + body, body.decode("utf-8", "replace").encode("utf-16"), body[::-1], b"")
            )
        else:
            body += chance.choice((b"{}", b"\n\n", b"\0", b"}", b" " * 5000, b"x" * 1_100_000))
    return body


def _with_key(chance: random.Random, sent: Sent, secret: str) -> Sent:
    how = chance.randrange(12)
    if how < 4:
        return sent.with_header("authorization", f"Bearer {secret}")
    if how < 8:
        name = "x-api-key" if how < 6 else "x-goog-api-key"
        return sent.with_header(name, secret)
    if how < 10 and not sent.path.startswith("/sessions"):
        return replace(sent, path=f"/r/{secret}{sent.path}")
    if how == 10 and chance.random() < 0.7:
        odd = chance.choice(
            (f"bearer  {secret} ", f"Bearer\t{secret}", secret, f"Basic {secret}", f"Bearer {secret[:-1]}")
        )
        return sent.with_header("authorization", odd)
    odd = chance.choice(("Bearer \xff", "Bearer " + "x" * 9000, "Bearer \x00", "Bearer " + secret[::-1]))
    return sent if how == 10 else sent.with_header("authorization", odd)


def _odd_path(chance: random.Random, path: str, secret: str) -> str:
    how = chance.randrange(9)
    if how == 0:
        return "/prefix/x" + path
    if how == 1:
        return path + chance.choice(("/", "//", "/x", "?", "?a=b&a", "#", ":x", "%2f", "%00", ";"))
    if how == 2:
        return path.replace("/", chance.choice(("//", "/../", "/%2e/", "\\")), 1)
    if how == 3:
        return path.upper()
    if how == 4:
        return f"/r/{chance.choice((secret, 'wrong', '%ff', '..', quote(chr(0xD800), errors='surrogatepass')))}{path}"
    if how == 5:
        return path[: chance.randrange(1, len(path) + 1)]
    if how == 6:
        place = chance.randrange(1, len(path) + 1)
        return path[:place] + chance.choice(("%ff", "%c3%a9", "%F0%9F%98%80", "%0a", "%", "a" * 9000)) + path[place:]
    if how == 7:
        name = chance.choice(("", "a/b", "m:m", "%ff", "x" * 9000))
        return f"/v1beta/models/{name}:{chance.choice(('generateContent', 'countTokens', 'embedContent', ''))}"
    return chance.choice(
        ("/r/", f"/r/{secret}", f"/r/{secret}/", "*", "/v1", "/openapi.json", "/docs", "/r//v1/models")
    )
