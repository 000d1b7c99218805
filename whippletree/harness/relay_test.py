from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from whippletree.harness import relay


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


@asynccontextmanager
async def shouting() -> AsyncIterator[int]:
    """A server that sends back each line in upper case, and ends with the client; gives its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line.upper())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=2**20)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def inside(port: int, path: Path, *command: str) -> tuple[int | None, str]:
    """Exit code and output of a command that runs behind the inner end, as it would in a sandbox."""
    settings = json.dumps({"port": port, "socket": str(path)})
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", relay.__file__, settings, *command),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(60):
        said, _ = await process.communicate()
    return process.returncode, said.decode()


CLIENT = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), 30) as gateway:
    gateway.sendall(b"a" * 200_000 + b"\\n")
    gateway.shutdown(socket.SHUT_WR)
    said = b"".join(iter(lambda: gateway.recv(65536), b""))
print(len(said), said.count(b"A"))
"""


async def test_what_is_sent_to_the_port_reaches_the_server_and_its_answer_comes_back(tmp_path: Path):
    port = free_port()
    async with shouting() as server, relay.serve_socket(tmp_path / "s", host="127.0.0.1", port=server):
        code, said = await inside(port, tmp_path / "s", sys.executable, "-c", CLIENT, str(port))
    assert (code, said) == (0, "200001 200000\n")


async def test_many_connections_are_passed_on_at_once(tmp_path: Path):
    async def one(word: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
        writer.write(word + b"\n")
        said = await reader.readline()
        writer.close()
        return said

    words = [f"word{number}".encode() for number in range(40)]
    async with shouting() as server, relay.serve_socket(tmp_path / "s", host="127.0.0.1", port=server):
        assert await asyncio.gather(*map(one, words)) == [word.upper() + b"\n" for word in words]


async def test_a_server_that_does_not_listen_closes_the_connection(tmp_path: Path):
    async with relay.serve_socket(tmp_path / "s", host="127.0.0.1", port=free_port()):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
        assert await reader.read() == b""
        writer.close()


async def test_a_client_that_leaves_ends_the_connection_to_the_server(tmp_path: Path):
    left = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.read() == b"half a line"
        writer.close()
        left.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with relay.serve_socket(tmp_path / "s", host="127.0.0.1", port=port):
        _, writer = await asyncio.open_unix_connection(tmp_path / "s")
        writer.write(b"half a line")
        writer.close()
        async with asyncio.timeout(30):
            await left.wait()
    server.close()


async def test_a_command_that_is_not_there_is_said_and_exits_with_127(tmp_path: Path):
    code, said = await inside(free_port(), tmp_path / "s", "no-such-command-here")
    assert code == 127 and "could not be started" in said and "no-such-command-here" in said
