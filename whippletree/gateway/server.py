"""The gateway served from inside the running event loop."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn


class _Server(uvicorn.Server):
    """Leaves signals to the process it is part of."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serve(app: Any, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve `app` while the block runs; gives its URL. Port 0 takes a free one.

    Raises:
        ValueError: the port is in use.
    """
    listening = _bound(host, port)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,  # it would hold the secrets of the URLs
        proxy_headers=False,  # nothing here asks where a call came from
        lifespan="off",
        timeout_graceful_shutdown=5,
        backlog=2048,
    )
    server = _Server(config)
    running = asyncio.create_task(server.serve([listening]))
    try:
        while not server.started and not running.done():
            await asyncio.sleep(0.001)
        yield f"http://{host}:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await running
        listening.close()


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small writes at once only on sockets that say they are TCP; else each call waits 40 ms for an ACK
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise ValueError(
            f"the gateway needs a free port, but port {port} on {host} is in use; end the process that holds it, "
            f"or choose another (0 takes any free one)"
        ) from error
    return listening
