"""The dummy upstream: a server of chat completions that says the same to everybody, at next to no cost.

`python -m benchmarks.gateway.upstream` prints its URL as JSON and serves until its standard input ends. Replies carry
token ids and log-probabilities, streamed ones a token an event, as vLLM's do where they are asked for.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

Json = dict[str, Any]
WORDS = ("The", " answer", " is", " four", ",", " as", " two", " and", " two", " make", " four", ".")  # a token each
TEXT = "".join(WORDS)
USAGE = {"prompt_tokens": 9, "completion_tokens": len(WORDS), "total_tokens": 9 + len(WORDS)}


def completion(ids: list[int]) -> bytes:
    """The answer in one piece; `ids` are the reply's, its end among them."""
    rows: list[Json] = [{"token": word, "logprob": -0.5, "bytes": None, "top_logprobs": []} for word in [*WORDS, ""]]
    choice: Json = {"index": 0, "message": {"role": "assistant", "content": TEXT}, "finish_reason": "stop"}
    choice |= {"logprobs": {"content": rows}, "token_ids": ids}
    body = {"choices": [choice], "usage": USAGE, "prompt_token_ids": [1]}
    return json.dumps(_base("chat.completion") | body).encode()


def events() -> bytes:
    """The answer as events."""
    deltas: list[Json] = [{"role": "assistant", "content": ""}, *({"content": word} for word in WORDS)]
    rows: list[Json] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    rows.append({"index": 0, "delta": {}, "finish_reason": "stop"})
    sent = [_base("chat.completion.chunk") | {"choices": [row]} for row in rows]
    return b"".join(b"data: " + json.dumps(row).encode() + b"\n\n" for row in sent) + b"data: [DONE]\n\n"


def _base(kind: str) -> Json:
    return {"id": "chatcmpl-dummy", "object": kind, "created": 1, "model": "dummy"}


class Answers(asyncio.Protocol):
    """One connection: each request that is whole gets an answer at once."""

    def __init__(self, whole: bytes, streamed: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: "
        self._whole = head + b"application/json\r\ncontent-length: %d\r\n\r\n" % len(whole) + whole
        self._streamed = head + b"text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        self._streamed += b"%x\r\n" % len(streamed) + streamed + b"\r\n0\r\n\r\n"
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client came (asyncio)."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """More of a request came (asyncio)."""
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            said = self._data[:end].lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
            size = end + 4 + int(said or 0)
            if len(self._data) < size:
                return
            body, self._data = self._data[end + 4 : size], self._data[size:]
            streams = b'"stream": true' in body or b'"stream":true' in body
            self._transport.write(self._streamed if streams else self._whole)


async def main() -> None:
    """Serve on a free port of the loopback."""
    whole, streamed = completion([*range(1, len(WORDS) + 1), 2]), events()
    server = await asyncio.get_running_loop().create_server(lambda: Answers(whole, streamed), "127.0.0.1", 0)
    print(json.dumps({"ready": True, "url": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"}), flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
