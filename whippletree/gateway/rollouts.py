"""Rollout sessions over HTTP: open one, hand its URLs to a harness, say what came of it, take the rollout out.

    POST /sessions              opens one                         needs the admin key
    GET  /sessions              lists them, `limit` at a time     needs the admin key
    GET  /sessions/ID           what is known of it               admin key, or the session's own secret
    POST /sessions/ID/events    a reward, a note, or the end      likewise
    GET  /sessions/ID/export    the rollout as JSON               likewise

Rewards and notes stand in the store as events until the end, which writes them into the rollout. A repeated event
changes nothing, so a client may send again what it got no answer to.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.requests import Request

from whippletree.gateway.budget import Budget
from whippletree.gateway.errors import ApiError, bad_request
from whippletree.gateway.rows import stamp
from whippletree.gateway.sessions import SamplingDefaults, Sessions
from whippletree.gateway.store import Store, StoreError
from whippletree.types import Blame, Ending, Json, Rollout, Task

PATH = re.compile(r"/sessions(?:/(?P<id>[^\0]+?)(?:/(?P<what>events|export))?)?/?")
SERVED = {"POST": {(False, None), (True, "events")}, "GET": {(False, None), (True, None), (True, "export")}}
ID = re.compile(r"(?!(.*/)?(events|export|models)(/|$))[\w~:@-][\w.~:@-]*(/[\w~:@-][\w.~:@-]*)*", re.ASCII)
HOST = re.compile(r"([\w.-]+|\[[\da-fA-F:.]+\])(:\d+)?", re.ASCII)
LONGEST, PAGE = 200, 1000  # characters of a name; sessions of one answer
RULES = dict.fromkeys(("extra_forbidden", "unexpected_keyword_argument"), "this field is not known here")
OBJECT = TypeAdapter(dict[str, Any])
Body = TypeVar("Body")


class Strict(BaseModel):
    """Of the types that are said, with no other field."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class Opening(Strict):
    """What opens a session. The secret of a sealed one serves calls of the model and none of the paths above."""

    id: str | None = None
    group: str | None = None
    task: Task | None = None
    sampling: SamplingDefaults = SamplingDefaults()
    budget: Budget = Budget()
    sealed: bool = False


class Reward(Strict):
    """The value of a channel; the last one stands, and null does not apply."""

    kind: Literal["reward"]
    name: Annotated[str, Field(min_length=1, max_length=LONGEST)] = "reward"
    value: float | None


class Note(Strict, extra="allow"):
    """Anything that is to be read later."""

    kind: Literal["note"]


class End(Strict):
    """No call is answered any more. What is not said is what the gateway knows of it."""

    kind: Literal["end"]
    ending: Ending | None = None
    blame: Blame | None = None
    reason: Annotated[str, Field(pattern=r"^[^\x00]*$")] | None = None


OPENING = TypeAdapter(Opening)
EVENTS = {kind: TypeAdapter[Strict](of) for kind, of in (("reward", Reward), ("note", Note), ("end", End))}


def named(method: str, path: str) -> re.Match[str] | None:
    """The session that is meant, where this method and path are served here."""
    found = PATH.fullmatch(path)
    return found if found and (found["id"] is not None, found["what"]) in SERVED.get(method, ()) else None


def header_key(request: Request) -> str | None:
    """The caller's key: `Authorization: Bearer`, else `x-api-key`, else `x-goog-api-key`."""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return key.strip()
    return request.headers.get("x-api-key") or request.headers.get("x-goog-api-key")


class Rollouts:
    """The sessions of a gateway for those that open and end them."""

    def __init__(self, store: Store, sessions: Sessions) -> None:
        self._store, self._sessions = store, sessions

    async def answer(
        self, request: Request, path: re.Match[str], body: Callable[[], Awaitable[bytes]]
    ) -> tuple[int, Json]:
        """Status and body. `path` is what `named` found; `body` reads the request's, once the key is known.

        Raises:
            ApiError: the key does not open this (401, 403), there is no such session (404), it has ended otherwise
                (409), a field is not as it must be (400), or the store failed (503).
        """
        key, name = header_key(request), path["id"]
        try:
            if name is None:
                if not self._sessions.is_admin(key):
                    raise ApiError(401, "this path needs the admin key of the gateway", code="invalid_api_key")
                if request.method == "POST":
                    return 201, await self._open(_read(OPENING, await body()), _server(request))
                return 200, self._list(request.query_params)
            row = self._allowed(name, key)
            if path["what"] == "events":
                return 200, await self._tell(name, key, *_event(await body()))
            return 200, self._rollout(row).to_json() if path["what"] else self._shown(row)
        except StoreError as error:
            raise ApiError(503, str(error), code="server_error", retry_after=5) from error

    async def sweep(self, idle: float, *, keep: str = "") -> list[str]:
        """End as failed what is open and was idle for so many seconds, but `keep`; gives the ids.

        Idle is what has no call running, and no turn or event on disk that is younger.
        """
        since = stamp(time.time() - idle)
        names = [row.rollout_id for row in self._store.open_rollouts(idle_since=since) if row.rollout_id != keep]
        said = {"ending": "failed", "blame": "harness", "reason": f"abandoned: no call and no event for {idle:g} s"}

        async def swept(name: str) -> bool:
            async with self._sessions.alone(name):
                (row,), session = self._store.summaries(name), self._sessions.loaded(name)
                if row["state"] != "open" or row["active"] >= since or (session and session.running):
                    return False
                await self._end(row, said)
                return True

        done = await asyncio.gather(*map(swept, names))
        return [name for name, ended in zip(names, done, strict=True) if ended]

    async def _open(self, asked: Opening, server: str) -> Json:
        name = f"session-{secrets.token_hex(8)}" if asked.id is None else asked.id
        task = asked.task or Task(id=name)
        group = task.id if asked.group is None else asked.group
        if not ID.fullmatch(name) or len(name) > LONGEST:
            rule = "letters, digits and -_~:@. in parts between slashes, none of them events, export or models"
            raise bad_request(f"`id` is at most {LONGEST} {rule}, but it is {name!r:.300}", param="id")
        if not 0 < len(group) <= LONGEST or "\0" in group:
            raise bad_request(f"`group` (by default the task's id) is 1 to {LONGEST} characters", param="group")
        async with self._sessions.alone(name):
            for row in self._store.summaries(name):
                if row["state"] == "ended" and row["ending"] != "failed":
                    raise ApiError(409, f"session {name!r} has ended as {row['ending']}; take another id", param="id")
            session = await self._sessions.open(
                name,
                group=group,
                task=task,
                stream=name,
                defaults=asked.sampling,
                budget=asked.budget,
                sealed=asked.sealed,
            )
        opened = {"id": name, "attempt": session.attempt, "secret": session.secret, "budget": vars(asked.budget)}
        return {**opened, "base_urls": _urls(f"{server}/r/{session.secret}"), "plain_urls": _urls(server)}

    def _list(self, query: Mapping[str, str]) -> Json:
        limit, state = query.get("limit", "100"), query.get("state")
        if not re.fullmatch("[1-9][0-9]{0,3}", limit) or int(limit) > PAGE:
            raise bad_request(f"`limit` is a whole number from 1 to {PAGE}, but it is {limit!r:.50}", param="limit")
        if state not in (None, "open", "ended"):
            raise bad_request(f"`state` is open or ended, but it is {state!r:.50}", param="state")
        rows = self._store.summaries(after=query.get("after", "").replace("\0", ""), limit=int(limit) + 1, state=state)
        page = [self._shown(row) for row in rows[: int(limit)]]
        return {"object": "list", "data": page, "has_more": len(rows) > len(page)}

    def _allowed(self, name: str, key: str | None) -> Json:
        """The summary of this session, if the key opens it."""
        if not self._sessions.is_admin(key):
            own = self._sessions.row_of(key) if key else None
            if own is None or own.rollout_id != name or own.state == "abandoned":
                why = "this path needs the secret of this session, or the admin key of the gateway"
                raise ApiError(401, why, code="invalid_api_key")
            if own.settings.get("sealed"):
                raise ApiError(403, "this session is sealed, so this path needs the admin key", code="sealed")
        found = self._store.summaries(name)
        if not found:
            raise ApiError(404, f"there is no session {name!r:.300}", code="session_not_found")
        return found[0]

    async def _tell(self, name: str, key: str | None, kind: str, said: Json) -> Json:
        async with self._sessions.alone(name):
            row = self._allowed(name, key)  # again, as it may have ended while the body was read
            rewards, notes = self._told(row)
            if kind == "reward":
                known = said["name"] in rewards and rewards[said["name"]] == said["value"]
            elif kind == "note":
                known = said in notes
            else:
                known = row["state"] == "ended" and all(row[k] == v for k, v in said.items() if v is not None)
            if not known and row["state"] == "ended":
                why = f"session {name!r} has ended ({row['ending']}), so an event may only repeat an earlier one"
                raise ApiError(409, f"{why}; {row['reason']}".removesuffix("; "), code="session_ended")
            if not known and kind == "end":
                await self._end(row, said)
            elif not known:
                await self._store.add_event(name, row["attempt"], kind, said)
            return self._shown(*self._store.summaries(name))

    async def _end(self, row: Json, said: Json) -> None:
        """End the calls that run, then the rollout."""
        name, session = row["id"], self._sessions.loaded(row["id"])
        cut, failure = (session.truncated, session.failure) if session else ("", "")
        ending: Ending = said["ending"] or ("truncated" if cut else "done")
        known = {"failed": failure, "truncated": cut, "done": ""}[ending]
        fault: Blame = "engine" if failure else "harness"
        blame: Blame | None = said["blame"] or (fault if ending == "failed" else None)
        reason = known if said["reason"] is None else said["reason"]
        rewards, notes = self._told(row)
        info = {"notes": notes} if notes else {}
        await self._sessions.close(name)
        await self._store.end_rollout(name, ending=ending, blame=blame, reason=reason, rewards=rewards, info=info)
        await self._sessions.close(name)  # where an earlier process opened it, a call may have come in between

    def _told(self, row: Json) -> tuple[dict[str, float | None], list[Json]]:
        """(rewards, notes) of this attempt until now."""
        events = self._store.events(row["id"], attempt=row["attempt"])
        told = {e["data"]["name"]: e["data"]["value"] for e in events if e["kind"] == "reward"}
        notes = [event["data"] for event in events if event["kind"] == "note"]
        return (row["rewards"] if row["state"] == "ended" else told), notes

    def _rollout(self, row: Json) -> Rollout:
        """The rollout as it is now; of an open one the ending is null."""
        rollout = self._store.rollout(row["id"], or_open=True)
        assert rollout, row["id"]
        if row["state"] == "ended":
            return rollout
        rewards, notes = self._told(row)
        return replace(rollout, rewards=rewards, info={"notes": notes} if notes else {})

    def _shown(self, row: Json) -> Json:
        opened, until = (datetime.fromisoformat(row[k]) if row[k] else datetime.now(UTC) for k in ("opened", "ended"))
        spent = {"turns": row["turns"], "tokens": row["tokens"], "seconds": (until - opened).total_seconds()}
        about = {k: v for k, v in row.items() if k not in ("settings", "tokens")}
        return {**about, "budget": row["settings"].get("budget"), "spent": spent, "rewards": self._told(row)[0]}


def _urls(root: str) -> Json:
    """What a client of each API takes as its base URL."""
    return {"openai": f"{root}/v1", "responses": f"{root}/v1", "anthropic": root, "gemini": root}


def _event(body: bytes) -> tuple[str, Json]:
    kind = _read(OBJECT, body).get("kind")
    if not isinstance(kind, str) or kind not in EVENTS:
        raise bad_request(f"`kind` is reward, note or end, but it is {json.dumps(kind):.200}", param="kind")
    said = _read(EVENTS[kind], body).model_dump(exclude={"kind"})
    if kind == "end" and said["blame"] and said["ending"] != "failed":
        raise bad_request("`blame` goes with the ending failed, and with no other; leave it out", param="blame")
    return kind, said


def _read(kind: TypeAdapter[Body], body: bytes) -> Body:
    """The body as this; deep nesting, and surrogates that no store takes, are refused with what cannot be read.

    Raises:
        ApiError: it is no such thing (400, by the first field at fault).
    """
    text = body.strip() or b"{}"
    try:
        row, read = OBJECT.validate_json(text), kind.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        if not field:
            raise bad_request(f"a request body is one JSON object, but of this one: {first['msg']}") from None
        rule = RULES.get(first["type"]) or first["msg"].removeprefix("Value error, ")
        came = "" if first["type"] in ("missing", "value_error") else f", but it is {json.dumps(first['input']):.200}"
        raise bad_request(f"`{field}`: {rule}{came}", param=field) from None
    for name, value in row.items():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            raise bad_request(f"`{name:.200}` holds NaN or Infinity, which are no JSON", param=name) from None
    return read


def _server(request: Request) -> str:
    """The address by which the client reached this gateway."""
    host = request.headers.get("host", "")
    if not HOST.fullmatch(host):
        host = ":".join(map(str, request.scope["server"]))
    return f"{request.scope['scheme']}://{host}"
