"""Requests that break HTTP itself, over real connections: the server answers or hangs up, keeps nothing, serves on.

`WHIPPLETREE_FUZZ` is how many requests are mutated in all; one in twenty of as many is sent here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from tests.gateway import mutated
from tests.gateway.fuzz_test import ADMIN, COUNT, PATIENCE, SEED, Place
from tests.gateway.mutated import Sent
from whippletree.gateway.server import serve

ODD = (
    *(b"", b"\0", b"\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    *(
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.0\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\nHost: [\r\n\r\n",
    ),
    *(b"POST /v1/messages HTTP/1.1\r\n\r\n", b"POST * HTTP/1.1\r\nHost: a\r\n\r\n", b"A" * 200_000),
    *(b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", b"GET /\xff\xfe HTTP/1.1\r\nHost: a\r\n\r\n"),
    *(
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 5000 + b"\r\n",
        b"GET / HTTP/1.1\nHost: a\n\n",
        b"GET / HTTP/1.1\r\nHost\r\n\r\n",
    ),
    *(b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\n folded\r\n\r\n"),
)
ALIVE = Sent("GET", "/healthz", (), b"")


class Counted:
    """The app, and how many requests it is at."""

    def __init__(self, app: Any) -> None:
        self.app, self.running = app, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.running += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.running -= 1


def good(number: int, secret: str) -> Sent:
    """A request that nobody else sends, as the kept reply of one that was cut off would be given to the next."""
    body = json.dumps({"messages": [{"role": "user", "content": f"hi {number}"}]})
    return Sent("POST", "/v1/chat/completions", (("x-api-key", secret),), body.encode())


def written(sent: Sent, *, length: str = "content-length", size: int | None = None, close: bool = True) -> bytes:
    """The request in HTTP/1.1, whether or not that allows it; `size` is what it says of its body's."""
    said = (("host", "a"), (length, str(len(sent.body) if size is None else size)))
    head = [f"{sent.method} {sent.path} HTTP/1.1", *(f"{name}: {text}" for name, text in (*said, *sent.headers))]
    head += ["connection: close"] * close
    return "\r\n".join([*head, "", ""]).encode("latin-1") + sent.body


def chunked(sent: Sent, size: str) -> bytes:
    """The request with a body in one chunk of that size."""
    body = f"{size}\r\n".encode() + sent.body + b"\r\n0\r\n\r\n"
    return written(Sent(sent.method, sent.path, sent.headers, body), length="transfer-encoding").replace(
        f"transfer-encoding: {len(body)}".encode(), b"transfer-encoding: chunked"
    )


def broken(chance: random.Random, sound: Sent) -> bytes:
    """What no client sends: a good request with something wrong of its HTTP."""
    raw, how = written(sound), chance.randrange(7)
    if how == 0:
        return chance.choice(ODD)
    if how == 1:  # half a request
        return raw[: chance.randrange(len(raw))]
    if how == 2:
        return written(sound, size=chance.choice((0, 1, 20, 10_000, -1, 10**30)))
    if how == 3:
        return chunked(sound, chance.choice(("", "0", "-1", "zz", "ffffffffffffffffff", "1", "31;a=b", "0x31")))
    if how == 4:
        return written(sound.with_header("transfer-encoding", chance.choice(("chunked", "gzip", "chunked, chunked"))))
    for _ in range(chance.randint(1, 8)):
        place = chance.randrange(len(raw))
        raw = (
            raw[:place] + chance.choice((b"", b"\r", b"\n", b"\0", b" ", b":", b"\xff", raw[:place])) + raw[place + 1 :]
        )
    return raw


@pytest.mark.slow
async def test_broken_http_is_answered_or_cut_and_the_server_serves_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    chance, statuses = random.Random(SEED), Counter[int]()
    place = Place(tmp_path / "t.sqlite", chance)
    await place.open()
    app = Counted(place.app)
    async with serve(app) as url:
        for number in range(COUNT // 20):
            try:
                statuses.update(await one(place, app, url, chance, good(number, place.secrets[1])))
                assert await told(url, written(ALIVE), ends=False) == [200]
            except BaseException as error:
                error.add_note(f"seed {SEED!r}, request {number}")
                raise
    place.close()
    logged = "".join([caplog.text, *capfd.readouterr()])
    assert not any(secret in logged for secret in place.secrets), logged[-3000:]
    with capfd.disabled():
        print(f"\n{COUNT // 20} connections:", dict(sorted(statuses.items())))


async def one(place: Place, app: Counted, url: str, chance: random.Random, sound: Sent) -> list[int]:
    """One connection: a broken request, a mutated one, or several good ones at once; gives the statuses."""
    before, how = place.rows(), chance.randrange(4)
    if how < 2:
        statuses = await told(url, broken(chance, sound), ends=True)
    elif how == 2:
        sent = mutated.request(chance, place.secrets[1], ADMIN)
        statuses = await told(url, written(sent), ends=True)
    else:
        count = chance.randint(1, 4)
        pieces = [written(sound, close=False)] * (count - 1) + [written(sound)]
        statuses = await told(url, b"".join(pieces), ends=False)
        assert statuses == [200] * count, statuses
        assert place.rows()[0] - before[0] == count
    async with asyncio.timeout(PATIENCE):
        while app.running:  # at what nobody waits for
            await asyncio.sleep(0.001)
    place.engine.calls.clear()
    assert all(status < 500 for status in statuses), statuses
    if statuses and min(statuses) >= 400:
        assert place.rows() == before, "a refused request left something"
    return statuses


async def told(url: str, raw: bytes, *, ends: bool) -> list[int]:
    """The statuses of what comes back until the server closes; with `ends` nothing more is sent after `raw`."""
    port = int(url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(PATIENCE):
            writer.write(raw)
            await writer.drain()
            if ends:
                writer.write_eof()
            body = await reader.read()
    except ConnectionError:  # closed before it had read all
        body = b""
    finally:
        writer.close()
    return [int(status) for status in re.findall(rb"HTTP/1\.1 ([2-5]\d\d) ", body)]
