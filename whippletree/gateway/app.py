"""The gateway's HTTP side: who may call, how large a request may be, and how a reply leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from whippletree.gateway import chat
from whippletree.gateway.calls import Call, Gateway
from whippletree.gateway.errors import ApiError
from whippletree.gateway.render import Renderer
from whippletree.gateway.sessions import Sessions
from whippletree.gateway.store import Store
from whippletree.types import Engine, Json

KEEPALIVE = 15.0  # seconds of silence in a stream before an empty delta is sent
SSE = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


def create_app(
    engine: Engine,
    renderer: Renderer,
    store: Store,
    sessions: Sessions,
    *,
    model_name: str,
    max_request_bytes: int = 32 * 2**20,
    keepalive: float = KEEPALIVE,
) -> FastAPI:
    """The app that answers calls of the open rollouts of `sessions` with replies of `engine`, kept in `store`."""
    gateway = Gateway(engine, renderer, store, model_name)
    app = FastAPI(title="whippletree", openapi_url=None, docs_url=None, redoc_url=None)

    async def chat_completions(request: Request) -> Response:
        session = sessions.find(_secret(request))
        ask = chat.ask_of(await _body(request, max_request_bytes), default_model=model_name)
        return CallResponse(Call(gateway, session, ask), keepalive=keepalive)

    async def models(request: Request) -> Response:
        sessions.find(_secret(request))
        row = {"id": model_name, "object": "model", "created": 0, "owned_by": "whippletree"}
        return _json(200, {"object": "list", "data": [row]})

    async def healthz(request: Request) -> Response:
        return _json(200, {"status": "ok", "version": engine.version})

    async def root(request: Request) -> Response:
        return Response(status_code=200)

    for prefix in ("", "/r/{secret}"):
        app.add_route(f"{prefix}/v1/chat/completions", chat_completions, methods=["POST"])
        app.add_route(f"{prefix}/v1/models", models, methods=["GET"])
    app.add_route("/healthz", healthz, methods=["GET"])
    app.add_route("/", root, methods=["HEAD"])
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    return app


class CallResponse(Response):
    """Runs a call and sends its reply. The last byte leaves only when the reply is on disk.

    A client that goes away, or a rollout that is closed, ends the sampling.
    """

    def __init__(self, call: Call, *, keepalive: float) -> None:
        self.call, self.keepalive, self.background = call, keepalive, None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer this request (ASGI)."""
        answer = self._stream if self.call.ask.stream else self._whole
        watch = asyncio.create_task(_gone(receive))
        try:
            await answer(scope, receive, send, watch)
        finally:
            watch.cancel()

    def _start(self, watch: asyncio.Task[None], run: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(run)
        self.call.session.running.add(task)
        task.add_done_callback(self.call.session.running.discard)
        watch.add_done_callback(lambda _: task.cancel())  # also when this response itself is cancelled
        return task

    async def _whole(self, scope: Scope, receive: Receive, send: Send, watch: asyncio.Task[None]) -> None:
        run = self._start(watch, self.call.run(chat.kept))
        await asyncio.wait({run})
        error = _error_of(run)
        reply = _error(error) if error else _json(200, chat.completion(self.call, self.call.choices))
        await reply(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send, watch: asyncio.Task[None]) -> None:
        chunks, queue = chat.Chunks(self.call), asyncio.Queue[bytes]()
        run = self._start(watch, self.call.run(chat.kept, lambda *heard: queue.put_nowait(chunks.delta(*heard))))
        run.add_done_callback(lambda _: queue.put_nowait(b""))
        started = False
        while data := await self._next(queue, chunks):
            if not started:
                await send({"type": "http.response.start", "status": 200, "headers": _encoded(SSE)})
                started = True
            await send({"type": "http.response.body", "body": data, "more_body": True})
        error = _error_of(run)
        if error and not started:
            await _error(error)(scope, receive, send)
            return
        if not started:
            await send({"type": "http.response.start", "status": 200, "headers": _encoded(SSE)})
        last = chat.event(chat.error_body(error)) if error else chunks.ends()
        await send({"type": "http.response.body", "body": last})

    async def _next(self, queue: asyncio.Queue[bytes], chunks: chat.Chunks) -> bytes:
        """The events that are ready, at least one; b"" when the call has run."""
        try:
            async with asyncio.timeout(self.keepalive):
                return await queue.get()
        except TimeoutError:
            return chunks.alive()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _error_of(run: asyncio.Task[None]) -> ApiError | None:
    """Why the run gave no reply; `None` if it did."""
    if run.cancelled():
        return ApiError(400, "this rollout has ended, so its running calls were ended too", code="rollout_ended")
    error = run.exception()
    if error is None or isinstance(error, ApiError):
        return error
    raise error


async def _body(request: Request, limit: int) -> bytes:
    """The request's body.

    Raises:
        ApiError: it is larger than `limit` bytes, said or found (413).
    """
    too_large = ApiError(413, f"a request may be {limit} bytes, but this one is larger", code="request_too_large")
    said = request.headers.get("content-length", "0")
    if said.isdigit() and int(said) > limit:
        raise too_large
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise too_large
        parts.append(part)
    return b"".join(parts)


def _secret(request: Request) -> str | None:
    """The caller's key: from the path, else `Authorization: Bearer`, else `x-api-key`."""
    if "secret" in request.path_params:
        return str(request.path_params["secret"])
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key")


def _json(status: int, body: Json, headers: dict[str, str] | None = None) -> Response:
    content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    return Response(content, status, headers, media_type="application/json")


def _error(error: ApiError) -> Response:
    headers = {"retry-after": str(error.retry_after)} if error.retry_after else None
    return _json(error.status, chat.error_body(error), headers)


def _encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), error
    return _error(error)


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), error
    return _error(ApiError(error.status_code, f"{error.detail}: {request.method} is not served at this path"))


def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it
