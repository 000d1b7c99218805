from __future__ import annotations

import asyncio
import logging
import socket

import httpx
import pytest

from whippletree.gateway.conftest import MakeDesk
from whippletree.gateway.server import _bound, serve


async def test_the_server_listens_on_loopback_and_ends_with_its_block(desk: MakeDesk):
    async with serve(desk().app) as url, httpx.AsyncClient() as client:
        assert url.startswith("http://127.0.0.1:")
        assert (await client.get(f"{url}/healthz")).json() == {"status": "ok", "version": 0}
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{url}/healthz")


async def test_a_port_in_use_is_named(desk: MakeDesk):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} on 127.0.0.1 is in use; .* choose another"):
            async with serve(desk().app, port=port):
                pass


async def test_small_writes_leave_at_once_and_wait_for_no_acknowledgement():
    found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async with await asyncio.start_server(connected, sock=_bound("127.0.0.1", 0)) as server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        assert await found
        writer.close()


async def test_the_server_ends_though_a_call_runs(desk: MakeDesk):
    made = desk(["a long reply"], delay=0.05)
    session = await made.open()
    async with serve(made.app) as url, httpx.AsyncClient() as client:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with client.stream("POST", f"{session.base_url(url)}/chat/completions", json=body) as response:
            await anext(response.aiter_bytes())
            await made.sessions.close("r")
    assert [turn.finish_reason for turn in made.turns()] == ["abandoned"]


async def test_secrets_stay_out_of_the_log(
    desk: MakeDesk, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    caplog.set_level(logging.DEBUG)
    made = desk(failure=RuntimeError("engine broke"))
    session = await made.open()
    async with serve(made.app) as url, httpx.AsyncClient() as client:
        caplog.clear()
        for path in (f"/r/{session.secret}/v1/models", f"/r/{session.secret}/nowhere"):
            await client.get(url + path)
        body = {"messages": [{"role": "user", "content": "hi"}]}
        await client.post(f"{session.base_url(url)}/chat/completions", json=body)
        await asyncio.sleep(0)
    ours = [record for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert all(session.secret not in record.getMessage() for record in ours)
    assert session.secret not in "".join(capfd.readouterr())
