"""Chat messages in one form: what a template reads, and by which a history is known again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any

from whippletree.gateway.errors import ApiError, bad_request
from whippletree.types import Json

# An image of any API, as {"type": "image_url", "image_url": {"url": ...}}, to the text that stands for it in the prompt
Images = Callable[[Json], str]
IN_PROMPT = """\
# Tools

You may call one or more of these functions, which are given as JSON:
<tools>
{tools}
</tools>

To call one, write a JSON object with its name and its arguments, so:
<tool_call>
{{"name": NAME, "arguments": OBJECT}}
</tool_call>"""


def spelled(chat: Sequence[Json], tools: Sequence[Json]) -> list[Json]:
    """The chat for a template without tools: they, calls and results are text, in the form of Hermes."""
    out: list[Json] = []
    for message in chat:
        content = message["content"]
        if message["role"] == "tool":
            text = f"<tool_response>\n{content}\n</tool_response>"
            if out and out[-1].get("results"):
                out[-1]["content"] += "\n" + text
            else:
                out.append({"role": "user", "content": text, "results": True})
            continue
        for call in message.get("tool_calls", ()):
            content += "\n" * bool(content) + f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>"
        said = {name: value for name, value in message.items() if name != "tool_calls"}
        out.append({**said, "content": content})
    if tools:
        text = IN_PROMPT.format(tools="\n".join(json.dumps(tool) for tool in tools))
        if out[0]["role"] == "system":
            out[0] = {**out[0], "content": out[0]["content"] + "\n\n" + text}
        else:
            out.insert(0, {"role": "system", "content": text})
    return out


def joined(chat: Sequence[Json]) -> list[Json]:
    """The chat with roles that alternate: a late system message is the user's, neighbours of one role are one."""
    out: list[Json] = []
    for place, message in enumerate(chat):
        late = {"role": "user"} if place and message["role"] == "system" else {}
        message = {**message, **late}
        same = out and out[-1]["role"] == message["role"] and message["role"] in ("user", "assistant")
        if same and not out[-1].get("tool_calls") and not message.get("tool_calls"):
            out[-1] = {**out[-1], "content": out[-1]["content"] + "\n\n" + message["content"]}
        else:
            out.append(message)
    return out


def one_call_each(chat: Sequence[Json]) -> list[Json]:
    """The chat with parallel calls as messages of their own, the text with the first."""
    out: list[Json] = []
    for message in chat:
        calls = message.get("tool_calls", ())
        for number, call in enumerate(calls):
            out.append({**message, "content": "" if number else message["content"], "tool_calls": [call]})
        if not calls:
            out.append(message)
    return out


def clean(message: Any, place: int, images: Images | None = None) -> Json:
    """The message as templates want it: plain text content, arguments as objects, no keys beyond the chat's own.

    Raises:
        ApiError: it is no message, or holds what cannot be read as text (400).
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise bad_request(f"each message is an object with a role, but messages[{place}] is not", param="messages")
    role = "system" if message["role"] == "developer" else message["role"]
    content, thought, urls = _content(message.get("content"), f"messages[{place}].content", images)
    out: Json = {"role": role, "content": content}
    if thought:
        out["reasoning_content"] = thought
    if urls:  # another image is another message, even where the same text stands for it
        out["images"] = [blake2b(url.encode("utf-8", "replace"), digest_size=16).hexdigest() for url in urls]
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            where = f"messages[{place}].tool_calls"
            raise bad_request(f"{where} is a list of calls, but it is a {type(calls).__name__}", param=where)
        out["tool_calls"] = [_call(call, place) for call in calls]
    kept = ("tool_call_id", "name", "reasoning_content")
    out |= {key: message[key] for key in kept if isinstance(message.get(key), str) and message[key]}
    if "tool_call_id" in out:
        out["tool_call_id"] = _short(out["tool_call_id"])
    return out


def image(url: Any, where: str) -> Json:
    """An image as chat completions have it, at this place of the client's own request."""
    return {"type": "image_url", "image_url": {"url": url}, "where": where}


def unreadable(kind: Any, where: str) -> ApiError:
    """The error of a part that is neither text nor an image."""
    return bad_request(f"parts of type {kind!r} cannot be read here, but {where} is one; send it as text", param=where)


def _content(content: Any, where: str, images: Images | None) -> tuple[str, str, list[str]]:
    """(text, reasoning, URLs of the images) of a message's content."""
    if content is None or isinstance(content, str):
        return content or "", "", []
    if not isinstance(content, list):
        raise bad_request(f"{where} is a string or a list of parts, but it is a {type(content).__name__}")
    texts: list[str] = []
    thoughts: list[str] = []
    urls: list[str] = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        field = {"refusal": "refusal", "thinking": "thinking", "tool_reference": "tool_name"}.get(str(kind), "text")
        if kind == "redacted_thinking":
            continue
        if kind == "image_url":
            urls.append(_url(part, f"{where}[{number}]", seen=images is not None))
            texts.append(images({"type": "image_url", "image_url": {"url": urls[-1]}}) if images else "")
        elif kind in ("text", "refusal", "thinking", "tool_reference") and isinstance(part.get(field), str):
            (thoughts if kind == "thinking" else texts).append(part[field])
        else:
            raise unreadable(kind, f"{where}[{number}]")
    return "".join(texts), "".join(thoughts), urls


def _url(part: Json, where: str, *, seen: bool) -> str:
    """The URL of an image."""
    where, given = part.get("where", where), part.get("image_url")
    url = given.get("url") if isinstance(given, dict) else given
    if not seen:
        raise bad_request(f"this model reads no images, but {where} is one; leave it out", param=where)
    if not isinstance(url, str) or not url:
        raise bad_request(f"an image has the URL of where it is, or of its data, but {where} has none", param=where)
    return url


def _call(call: Any, place: int) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"each tool call is a function with a name, but one of messages[{place}] is not")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # broken arguments are compared and rendered as they are
            arguments = json.loads(arguments)
    return {
        "id": _short(call.get("id")),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _short(name: Any) -> str:
    """A call's id as strict templates want it, nine letters and digits; harnesses cut and clean ids too."""
    letters = "".join(letter for letter in str(name or "") if letter.isalnum())[:40]
    return blake2b(letters.encode("utf-8", "replace"), digest_size=5).hexdigest()[:9]


def names(message: Json) -> list[bytes | str]:
    """Under what a reply is known again: the ids of its calls, else what it says."""
    calls = message.get("tool_calls", ())
    return [call["id"] for call in calls] if calls else [chained(b"", message)]


def said_calls(message: Json) -> list[Json]:
    return [call["function"] for call in message.get("tool_calls", ())]


def keys_of(chat: Sequence[Json], tools: Sequence[Json]) -> list[bytes]:
    """One key for each beginning of the chat, the empty one first."""
    keys = [blake2b(_canonical(tools), digest_size=16).digest()]
    for message in chat:
        keys.append(chained(keys[-1], message))
    return keys


def chained(key: bytes, message: Json) -> bytes:
    """Equal for messages that say the same: harnesses strip our text, rename calls and leave reasoning out."""
    said = {name: value for name, value in message.items() if name not in ("tool_calls", "reasoning_content")}
    if message["role"] == "assistant":
        said["content"] = said["content"].strip()
    said["calls"] = said_calls(message)
    return blake2b(key + _canonical(said), digest_size=16).digest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
