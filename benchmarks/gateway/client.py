"""A client so light that the server is what is measured: HTTP/1.1 over one kept connection, no library between.

The clock runs from the write of the request to the arrival of the last byte; events are read after it has stopped.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

Json = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What came back, and when: seconds from the first byte out to the first and to the last byte in."""

    status: int
    body: bytes
    first: float
    last: float

    def reply(self) -> Json:
        """`id`, `text`, `finish_reason` and `done` of a chat completion, streamed or not.

        Raises:
            ValueError: it is neither.
        """
        if self.status != 200:
            raise ValueError(f"a call is answered 200, but this one {self.status}: {self.body[:500]!r}")
        if not self.body.startswith(b"data:"):
            whole = json.loads(self.body)
            choice = whole["choices"][0]
            return _reply(whole["id"], choice["message"]["content"] or "", choice["finish_reason"], True)
        rows = [line[5:].strip() for line in self.body.split(b"\n") if line.startswith(b"data:")]
        chunks = [json.loads(row) for row in rows if row != b"[DONE]"]
        choices = [chunk["choices"][0] for chunk in chunks if chunk.get("choices")]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        finish = next((choice["finish_reason"] for choice in choices if choice.get("finish_reason")), None)
        return _reply(chunks[0]["id"], text, finish, rows[-1] == b"[DONE]")


class Connection(asyncio.Protocol):
    """One kept connection to `url`; requests go one after another.

    Raises:
        ConnectionError: the server closed it in the middle of an answer.
    """

    def __init__(self, url: str, *, key: str = "") -> None:
        parts = urlsplit(url)
        assert parts.hostname, url
        self._host, self._port = parts.hostname, parts.port or 80
        head = f"POST {parts.path or '/'} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
        self._head = (head + (f"authorization: Bearer {key}\r\n" if key else "")).encode()
        self._data = bytearray()
        self._answered: asyncio.Future[None] | None = None
        self._first = 0.0

    async def opened(self) -> Connection:
        """Itself, connected."""
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: self, self._host, self._port)
        self._transport: asyncio.Transport = transport
        return self

    async def post(self, body: bytes) -> Answer:
        """The answer to this body."""
        self._data.clear()
        self._first, self._answered = 0.0, asyncio.get_running_loop().create_future()
        sent = time.perf_counter()
        self._transport.write(self._head + b"content-length: %d\r\n\r\n" % len(body) + body)
        await self._answered
        last = time.perf_counter()
        head, _, found = bytes(self._data).partition(b"\r\n\r\n")
        content = b"".join(_chunks(found)) if _chunked(head) else found
        return Answer(int(head[9:12]), content, self._first - sent, last - sent)

    def close(self) -> None:
        """Hang up."""
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        """More of the answer came (asyncio)."""
        self._first = self._first or time.perf_counter()
        self._data += data
        if self._answered and not self._answered.done() and whole(self._data):
            self._answered.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        """The server hung up (asyncio)."""
        if self._answered and not self._answered.done():
            why = f"the server hung up after {len(self._data)} bytes of an answer"
            self._answered.set_exception(error or ConnectionError(why))


def whole(data: bytes | bytearray) -> bool:
    """Whether this answer has its last byte."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return False
    head = bytes(data[:end]).lower()
    if _chunked(head):
        return data.endswith(b"\r\n0\r\n\r\n")
    said = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
    return len(data) >= end + 4 + int(said or 0)


def _chunked(head: bytes) -> bool:
    return b"transfer-encoding: chunked" in head.lower()


def _chunks(data: bytes) -> Iterator[bytes]:
    while True:
        size, _, data = data.partition(b"\r\n")
        length = int(size.partition(b";")[0], 16)
        if not length:
            return
        yield data[:length]
        data = data[length + 2 :]


def _reply(call_id: str, text: str, finish_reason: str | None, done: bool) -> Json:
    return {"id": call_id, "text": text, "finish_reason": finish_reason, "done": done}
