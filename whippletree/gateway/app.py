"""The gateway's HTTP side: who may call, how large a request may be, and how a reply leaves."""

from __future__ import annotations

import asyncio
import json

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from whippletree.gateway import chat
from whippletree.gateway.calls import Call, Choice, Gateway
from whippletree.gateway.errors import ApiError
from whippletree.gateway.render import Renderer
from whippletree.gateway.sessions import Sessions
from whippletree.gateway.store import Store
from whippletree.types import Engine, Json

KEEPALIVE = 15.0  # seconds of silence in a stream before an empty delta is sent
SSE = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


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
    app.add_exception_handler(Exception, _own_fault)
    return app


class CallResponse(Response):
    """Runs a call and sends its reply. The last byte leaves only when the reply is on disk.

    A client that goes away, or a rollout that is closed, ends the sampling.
    """

    def __init__(self, call: Call, *, keepalive: float) -> None:
        self.call, self.keepalive, self.background = call, keepalive, None
        self._chunks, self._queue = chat.Chunks(call), asyncio.Queue[bytes]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer this request (ASGI)."""
        streams, running = self.call.ask.stream, self.call.session.running
        run = asyncio.create_task(self.call.run(chat.kept, self._hear if streams else None))
        running.add(run)
        run.add_done_callback(running.discard)
        run.add_done_callback(lambda _: self._queue.put_nowait(b""))
        watch = asyncio.create_task(_gone(receive))
        watch.add_done_callback(lambda _: run.cancel())
        try:
            data = await self._next() if streams else b""
            error = None if data else await _error_of(run)
            if error:
                await _error(error)(scope, receive, send)
            elif streams:
                await self._stream(data, run, send)
            else:
                await _json(200, chat.completion(self.call, self.call.choices))(scope, receive, send)
        finally:
            watch.cancel()
            run.cancel()
            await asyncio.wait({run})  # so that an abandoned turn is on disk before the server may end

    async def _stream(self, data: bytes, run: asyncio.Task[None], send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": SSE})
        while data:
            await send({"type": "http.response.body", "body": data, "more_body": True})
            data = await self._next()
        error = await _error_of(run)
        last = chat.event(chat.error_body(error)) if error else self._chunks.ends()
        await send({"type": "http.response.body", "body": last})

    def _hear(self, choice: Choice, parts: list[str | Json]) -> None:
        self._queue.put_nowait(self._chunks.delta(choice, parts))

    async def _next(self) -> bytes:
        """The next events; b"" when the call has run."""
        try:
            async with asyncio.timeout(self.keepalive):
                return await self._queue.get()
        except TimeoutError:
            return self._chunks.alive()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _error_of(run: asyncio.Task[None]) -> ApiError | None:
    """Why the run gave no reply, once it is over; `None` if it gave one."""
    await asyncio.wait({run})
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
    content = json.dumps(body, separators=(",", ":")).encode()
    return Response(content, status, headers, media_type="application/json")


def _error(error: ApiError) -> Response:
    headers = {"retry-after": str(error.retry_after)} if error.retry_after else None
    return _json(error.status, chat.error_body(error), headers)


def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), error
    return _error(error)


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), error
    return _error(ApiError(error.status_code, f"{error.detail}: {request.method} is not served at this path"))


def _own_fault(request: Request, error: Exception) -> Response:
    """Our own bug: the client gets the API's shape, and the server's log the traceback."""
    return _error(ApiError(500, f"the gateway failed: {type(error).__name__}: {error}", code="server_error"))


def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it
