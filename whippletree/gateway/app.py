"""The gateway's HTTP side: who may call, how large a request may be, and how a reply leaves.

Every API is served below any path prefix, as harnesses keep what their base URL holds; `/r/KEY` in it names a rollout.
Where the sessions have an admin key, the paths of `rollouts` are served too.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from whippletree.gateway import chat, gemini, messages, responses
from whippletree.gateway.api import Api
from whippletree.gateway.calls import Call, Gateway
from whippletree.gateway.choices import Choice
from whippletree.gateway.errors import ApiError
from whippletree.gateway.fields import json_object
from whippletree.gateway.parts import Part
from whippletree.gateway.render import Renderer
from whippletree.gateway.rollouts import Rollouts, header_key, named
from whippletree.gateway.sessions import Sessions
from whippletree.gateway.store import Store
from whippletree.types import Engine, Json

APIS = (chat.API, responses.API, messages.API)
KEEPALIVE = 15.0  # seconds of silence in a stream before an event that changes nothing is sent
SSE = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
KEY = re.compile(r"/r/([^/]+)(?=/)")
MODELS = re.compile(r".*/models(?:/(?P<name>.+))?")


def create_app(
    engine: Engine,
    renderer: Renderer,
    store: Store,
    sessions: Sessions,
    *,
    model_name: str,
    max_request_bytes: int = 32 * 2**20,
    keepalive: float = KEEPALIVE,
    hold: float = 60.0,
) -> FastAPI:
    """The app that answers calls of the open rollouts of `sessions` with replies of `engine`, kept in `store`.

    A stream is sent a sign of life after `keepalive` seconds of silence. A call waits up to `hold` seconds while
    weights change, and is then answered 503.
    """
    gateway, rollouts = Gateway(engine, renderer, store, model_name, hold), Rollouts(store, sessions)
    app = FastAPI(title="whippletree", openapi_url=None, docs_url=None, redoc_url=None)

    async def healthz(request: Request) -> Response:
        return _json(200, {"status": "ok", "version": engine.version})

    async def root(request: Request) -> Response:
        return Response(status_code=200)

    async def called(request: Request) -> Response:
        """A call, a count of tokens, or the list of models."""
        api = _api_of(request.scope["path"])
        if api is None:
            sessions.find(_secret(request))
            return _models(model_name, MODELS.fullmatch(request.scope["path"]))
        if request.method != "POST":
            raise ApiError(405, f"{request.method} is not served at this path; use POST")
        session = sessions.find(_secret(request))
        asked = json_object(await _body(request, max_request_bytes))
        if of_gemini := gemini.PATH.fullmatch(request.scope["path"]):
            asked = gemini.request_of(asked, of_gemini)
        ask = api.ask_of(asked, model_name)
        if request.scope["path"].rstrip("/").endswith(("/count_tokens", ":countTokens")):
            assert api.counted
            return _json(200, api.counted(gateway.counted(ask)))
        ask = replace(ask, headers={name.lower(): value for name, value in request.headers.items()})
        return CallResponse(Call(gateway, session, ask, api=api.name), api, keepalive=keepalive)

    async def any_path(request: Request) -> Response:
        known = _api_of(request.scope["path"]) or (request.method == "GET" and MODELS.fullmatch(request.scope["path"]))
        if known:
            return await called(request)
        if sessions.administered and (path := named(request.method, request.scope["path"])):
            return _json(*await rollouts.answer(request, path, lambda: _body(request, max_request_bytes)))
        raise HTTPException(404)

    app.add_route("/healthz", healthz, methods=["GET"])
    app.add_route("/", root, methods=["GET", "HEAD"])
    app.add_route("/{path:path}", any_path, methods=["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(Exception, _own_fault)
    return app


class CallResponse(Response):
    """Runs a call and sends its reply. The last byte leaves only when the reply is on disk.

    A client that goes away, or a rollout that is closed, ends the sampling.
    """

    def __init__(self, call: Call, api: Api, *, keepalive: float) -> None:
        self.call, self.api, self.keepalive, self.background = call, api, keepalive, None
        self._events, self._queue, self._begun = api.events(call), asyncio.Queue[bytes](), False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer this request (ASGI)."""
        streams, running, whole = self.call.ask.stream, self.call.session.running, False
        run = asyncio.create_task(self.call.run(lambda _, choice: self._kept(choice), self._hear if streams else None))
        running.add(run)
        run.add_done_callback(running.discard)
        run.add_done_callback(lambda _: self._queue.put_nowait(b""))
        watch = asyncio.create_task(_gone(receive))
        watch.add_done_callback(lambda _: run.cancel())
        try:
            data = await self._next() if streams else b""
            error = None if data else await _error_of(run)
            if error:
                await _error(error, self.api)(scope, receive, send)
            elif streams:
                await self._stream(data, run, send)
            else:
                await _json(200, self.api.reply(self.call))(scope, receive, send)
            whole = not (run.cancelled() or run.exception() or watch.done())
        finally:
            watch.cancel()
            run.cancel()
            await asyncio.wait({run})  # so that an abandoned turn is on disk before the server may end
            self.call.delivered(whole)

    async def _stream(self, data: bytes, run: asyncio.Task[None], send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": SSE})
        while data:
            await send({"type": "http.response.body", "body": data, "more_body": True})
            data = await self._next()
        error = await _error_of(run)
        last = self._events.fails(error) if error else self._first() + self._events.ends()
        await send({"type": "http.response.body", "body": last})

    def _kept(self, choice: Choice) -> Json:
        return self.api.kept(self.call, choice)

    def _hear(self, choice: Choice, parts: list[Part]) -> None:
        self._queue.put_nowait(self._first() + self._events.delta(choice, parts))

    def _first(self) -> bytes:
        begun, self._begun = self._begun, True
        return b"" if begun else self._events.begins()

    async def _next(self) -> bytes:
        """The next events; b"" when the call has run."""
        while True:
            try:
                async with asyncio.timeout(self.keepalive):
                    return await self._queue.get()
            except TimeoutError:
                if self.call.sampling:  # until then it may yet be refused with a status
                    return self._first() + self._events.alive()


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


def _api_of(path: str) -> Api | None:
    """The API that is served at this path, whatever its prefix."""
    path = path.rstrip("/")
    if gemini.PATH.fullmatch(path):
        return gemini.API
    for api in APIS:
        ends = [f"/{api.path}"] + ([f"/{api.path}/count_tokens"] if api.counted else [])
        if any(path.endswith(end) for end in ends):
            return api
    return None


async def _body(request: Request, limit: int) -> bytes:
    """The request's body.

    Raises:
        ApiError: it is larger than `limit` bytes, said or found (413).
    """
    too_large = ApiError(413, f"a request may be {limit} bytes, but this one is larger", code="request_too_large")
    said = request.headers.get("content-length", "0")
    if re.fullmatch("[0-9]{1,19}", said) and int(said) > limit:
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
    """The caller's key: from the path, else from a header."""
    found = KEY.search(request.scope["path"])
    return found[1] if found else header_key(request)


def _models(name: str, path: re.Match[str] | None) -> Response:
    """The list of models, or the one that was asked for: any name is the policy's. Both vendors' fields stand in it."""
    asked = path["name"] if path else None
    row = {"id": asked or name, "object": "model", "created": 0, "owned_by": "whippletree"}
    row |= {"type": "model", "display_name": asked or name, "created_at": "1970-01-01T00:00:00Z"}
    if asked:
        return _json(200, row)
    return _json(200, {"object": "list", "data": [row], "has_more": False, "first_id": name, "last_id": name})


def _json(status: int, body: Json, headers: dict[str, str] | None = None) -> Response:
    content = json.dumps(body, separators=(",", ":")).encode()
    return Response(content, status, headers, media_type="application/json")


def _error(error: ApiError, api: Api) -> Response:
    headers = {"retry-after": str(error.retry_after)} if error.retry_after else None
    return _json(error.status, api.error_body(error), headers)


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), error
    return _error(error, _api_of(request.scope["path"]) or chat.API)


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), error
    what = f"{error.detail}: {request.method} is not served at this path"
    return _refused(request, ApiError(error.status_code, what))


def _own_fault(request: Request, error: Exception) -> Response:
    """Our own bug: the client gets the API's shape, and the server's log the traceback."""
    api = _api_of(request.scope["path"]) or chat.API
    return _error(ApiError(500, f"the gateway failed: {type(error).__name__}: {error}", code="server_error"), api)


def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it
