"""Images of every API come to the renderer's hook in one form; a model without one refuses them by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import pytest

from whippletree.gateway.conftest import Desk, MakeDesk
from whippletree.gateway.render import Renderer
from whippletree.gateway.sessions import Session
from whippletree.models.tiny import tiny_tokenizer
from whippletree.types import Json

DATA, PLACE = "data:image/png;base64,iVBORw0KGgo=", "https://example.org/cat.png"
URLS = {"data": DATA, "place": PLACE}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
SCHEMA: Json = {"type": "object", "properties": {}}


@dataclass
class Eyes:
    """A processor of images as an engine may have one: it keeps each and writes a name by which it is found again."""

    kept: dict[str, str] = field(default_factory=dict)  # URL by name

    def __call__(self, part: Json) -> str:
        assert part.keys() == {"type", "image_url"} and part["image_url"].keys() == {"url"}
        url = part["image_url"]["url"]
        name = f"<image {sha256(url.encode()).hexdigest()[:8]}>"
        self.kept[name] = url
        return name


def image_of(api: str, url: str) -> Json:
    """An image as this API writes it."""
    data = url.partition("base64,")[2]
    given: dict[str, Json] = {
        "chat": {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        "responses": {"type": "input_image", "image_url": url, "detail": "low"},
        "messages": {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": data}
            if data
            else {"type": "url", "url": url},
        },
        "gemini": {"inlineData": {"mimeType": "image/png", "data": data}}
        if data
        else {"fileData": {"mimeType": "image/png", "fileUri": url}},
    }
    return given[api]


def asked(api: str, url: str) -> tuple[str, Json]:
    """(path, body) of a question with an image."""
    image = image_of(api, url)
    if api == "chat":
        parts = [{"type": "text", "text": "see "}, image]
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]}
    if api == "responses":
        parts = [{"type": "input_text", "text": "see "}, image]
        return "/v1/responses", {"instructions": "brief", "input": [{"role": "user", "content": parts}]}
    if api == "messages":
        parts = [{"type": "text", "text": "see "}, image]
        messages = [{"role": "user", "content": parts}]
        return "/v1/messages", {"max_tokens": 9, "system": "brief", "messages": messages}
    contents = [{"role": "user", "parts": [{"text": "see "}, image]}]
    return "/v1beta/models/m:generateContent", {"contents": contents}


def answered(api: str, url: str) -> tuple[str, Json]:
    """(path, body) of a conversation whose tool gave an image."""
    image = image_of(api, url)
    if api == "chat":
        call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
        said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        result: Json = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "got "}, image]}
        return "/v1/chat/completions", {"messages": [*said, result]}
    if api == "responses":
        output = [{"type": "input_text", "text": "got "}, image]
        items: list[Json] = [
            {"role": "user", "content": "hi"},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": output},
        ]
        return "/v1/responses", {"input": items}
    if api == "messages":
        used = {"type": "tool_use", "id": "c1", "name": "add", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "got "}, image]}
        messages = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [used]},
            {"role": "user", "content": [result]},
        ]
        return "/v1/messages", {"max_tokens": 9, "messages": messages}
    result = {"name": "add", "response": {"output": "got "}, "parts": [image]}
    contents = [
        {"role": "user", "parts": [{"text": "hi"}]},
        {"role": "model", "parts": [{"functionCall": {"name": "add", "args": {}}}]},
        {"role": "user", "parts": [{"functionResponse": result}]},
    ]
    return "/v1beta/models/m:generateContent", {"contents": contents}


APIS = ["chat", "responses", "messages", "gemini"]
WHERE = {  # the image's place in the client's own request
    ("asked", "chat"): "messages[0].content[1]",
    ("asked", "responses"): "input[0].content[1]",
    ("asked", "messages"): "messages[0].content[1]",
    ("asked", "gemini"): "contents[0].parts[1]",
    ("answered", "chat"): "messages[2].content[1]",
    ("answered", "responses"): "input[2].output[1]",
    ("answered", "messages"): "messages[2].content[0].content[1]",
    ("answered", "gemini"): "contents[2].parts[0].functionResponse.parts[0]",
}


async def post(made: Desk, session: Session, request: tuple[str, Json]) -> Any:
    async with made.http(session) as client:
        return await client.post(request[0], json={"model": "m", **request[1]})


@pytest.mark.parametrize("kind", URLS)
@pytest.mark.parametrize("how", [asked, answered])
@pytest.mark.parametrize("api", APIS)
async def test_an_image_comes_to_the_hook_and_its_text_stands_in_the_prompt(
    desk: MakeDesk, api: str, how: Any, kind: str
):
    eyes = Eyes()
    made = desk(["a cat"], renderer=Renderer(tiny_tokenizer(tools=True), images=eyes))
    answer = await post(made, await made.open(), how(api, URLS[kind]))
    assert answer.status_code == 200
    ((name, url),) = eyes.kept.items()
    assert url == URLS[kind]
    said = "see " if how is asked else "got "
    assert f"{said}{name}" in made.engine.prompts[0]


@pytest.mark.parametrize("how", [asked, answered])
@pytest.mark.parametrize("api", APIS)
async def test_a_model_without_images_refuses_them_where_the_client_sent_them(desk: MakeDesk, api: str, how: Any):
    made = desk(["a cat"], tools=True)
    answer = await post(made, await made.open(), how(api, DATA))
    assert answer.status_code == 400
    assert f"this model reads no images, but {WHERE[how.__name__, api]} is one" in answer.json()["error"]["message"]
    assert made.engine.calls == [] and made.turns() == ()


@pytest.mark.parametrize("api", APIS)
async def test_a_conversation_about_an_image_is_continued_and_one_about_another_is_not(desk: MakeDesk, api: str):
    made = desk(lambda _: "a cat", renderer=Renderer(tiny_tokenizer(tools=True), images=lambda part: "<image>"))
    session = await made.open()
    first, other = asked(api, DATA), asked(api, PLACE)
    await post(made, session, first)
    field = {"chat": "messages", "responses": "input", "messages": "messages", "gemini": "contents"}[api]
    said: list[Json] = [{"role": "assistant", "content": "a cat"}, {"role": "user", "content": "sure?"}]
    if api == "gemini":
        said = [
            {"role": "model", "parts": [{"text": "a cat"}]},
            {"role": "user", "parts": [{"text": "sure?"}]},
        ]
    for path, body in (first, other):
        await post(made, session, (path, {**body, field: [*body[field], *said]}))
    one, two, three = made.turns()
    assert (two.link, two.info["parent"]) == ("append", one.id)
    assert three.link != "append"  # the same text stands for another image


@pytest.mark.parametrize("api", ["responses", "messages", "gemini"])
async def test_what_is_no_image_is_refused_though_there_is_a_hook(desk: MakeDesk, api: str):
    made = desk(["x"], renderer=Renderer(tiny_tokenizer(tools=True), images=Eyes()))
    path, body = asked(api, DATA)
    parts = {"responses": "input", "messages": "messages", "gemini": "contents"}[api]
    row = body[parts][0]
    row["parts" if api == "gemini" else "content"][1] = {
        "responses": {"type": "input_file", "file_id": "f"},
        "messages": {"type": "image", "source": {"type": "file", "file_id": "f"}},
        "gemini": {"inlineData": {"mimeType": "application/pdf", "data": "AA"}},
    }[api]
    answer = await post(made, await made.open(), (path, body))
    assert answer.status_code == 400
    assert WHERE["asked", api] in answer.json()["error"]["message"]
