"""A port inside a sandbox that leads to the gateway outside it, through a Unix socket; standard library alone.

`serve_socket` is the outer end. Run as a program inside the sandbox, this file sets limits, opens the inner end, runs a
command and exits as the command did:

    python relay.py '{"port": 8080, "socket": "/agent.sock", "data": 4294967296, "processes": 512}' COMMAND ...
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]
LIMITS = {"data": resource.RLIMIT_DATA, "processes": resource.RLIMIT_NPROC}
_PIECE = 2**16  # bytes read at once


@asynccontextmanager
async def serve_socket(path: Path, *, host: str, port: int) -> AsyncIterator[None]:
    """While the block runs, what connects to the Unix socket at `path` talks to host:port."""
    running: set[asyncio.Task[None]] = set()
    serve = _joined(lambda: asyncio.open_connection(host, port), running)
    server = await asyncio.start_unix_server(serve, path)
    try:
        yield
    finally:
        server.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _joined(connect: Callable[[], Awaitable[Ends]], running: set[asyncio.Task[None]]) -> Serve:
    """Serves a connection by passing its bytes on to another one, both ways, until both sides have ended."""

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        # nobody listens, or rollout and run are over: the client sees its connection closed, as it would without us
        with suppress(OSError, asyncio.CancelledError):
            far_reader, far_writer = await connect()
            ends.append(far_writer)
            await asyncio.gather(_pass_on(reader, far_writer), _pass_on(far_reader, writer))
        for end in ends:
            end.close()

    def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(join(reader, writer))
        running.add(task)
        task.add_done_callback(running.discard)

    return serve


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Every byte until the sender ends; a receiver that has gone ends its own sender too."""
    with suppress(ConnectionError):
        while data := await reader.read(_PIECE):
            writer.write(data)
            await writer.drain()
    with suppress(OSError, RuntimeError):
        if writer.can_write_eof():
            writer.write_eof()


async def _run(port: int | None, socket: str | None, command: list[str]) -> int:
    if port is not None:
        await asyncio.start_server(_joined(lambda: asyncio.open_unix_connection(socket), set()), "127.0.0.1", port)
    process = await asyncio.create_subprocess_exec(*command)
    code = await process.wait()
    return code if code >= 0 else 128 - code  # as a shell tells of a signal


def main(settings: str, *command: str) -> int:
    """The command's exit code, once it has ended."""
    wanted = json.loads(settings)
    for name, kind in LIMITS.items():
        if wanted.get(name) is not None:
            hard = resource.getrlimit(kind)[1]
            most = wanted[name] if hard == resource.RLIM_INFINITY else min(wanted[name], hard)
            resource.setrlimit(kind, (most, most))
    try:
        return asyncio.run(_run(wanted.get("port"), wanted.get("socket"), list(command)))
    except OSError as error:
        print(f"the command could not be started: {error}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
