"""A gateway with a scripted engine, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from whippletree.engine.scripted import ScriptedEngine
from whippletree.gateway.app import create_app
from whippletree.gateway.render import Renderer
from whippletree.gateway.sessions import Session, Sessions
from whippletree.gateway.store import Store
from whippletree.models.tiny import tiny_tokenizer
from whippletree.types import Task, Turn


@dataclass
class Desk:
    """An app and what stands behind it."""

    engine: ScriptedEngine
    store: Store
    sessions: Sessions
    app: FastAPI

    async def open(self, rollout_id: str = "r", **settings: Any) -> Session:
        """A session of this rollout, whose random numbers are named `seed/{rollout_id}`."""
        return await self.sessions.open(
            rollout_id, group="g", task=Task(id="t"), stream=f"seed/{rollout_id}", **settings
        )

    def http(self, session: Session | None = None) -> httpx.AsyncClient:
        """A client that calls the app without a network, with the session's key."""
        headers = {"authorization": f"Bearer {session.secret}"} if session else {}
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://gateway", headers=headers)

    async def ask(self, session: Session, *messages: str | dict[str, Any], **fields: Any) -> httpx.Response:
        """The answer to one chat request; a string is a user's message."""
        chat = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
        async with self.http(session) as client:
            return await client.post("/v1/chat/completions", json={"model": "m", "messages": chat, **fields})

    def turns(self, rollout_id: str = "r") -> tuple[Turn, ...]:
        """What the store holds of this rollout."""
        return self.store.turns(rollout_id)


MakeDesk = Callable[..., Desk]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[MakeDesk]:
    """Makes a desk: `desk(replies, tools=..., renderer=..., store=..., app={...}, **settings of the engine)`."""
    stores: list[Store] = []

    def make(
        replies: Sequence[str] | Callable[[str], str] = ("hello",),
        *,
        tools: bool = False,
        store: Callable[[Path], Store] = Store,
        app: dict[str, Any] | None = None,
        renderer: Renderer | None = None,
        **engine: Any,
    ) -> Desk:
        renderer = renderer or Renderer(tiny_tokenizer(tools=tools))
        scripted = ScriptedEngine(replies, renderer.tokenizer, **engine)
        kept = store(tmp_path / f"turns{len(stores)}.sqlite")
        stores.append(kept)
        sessions = Sessions(kept)
        made = create_app(scripted, renderer, kept, sessions, model_name="tiny", **(app or {}))
        return Desk(scripted, kept, sessions, made)

    yield make
    for kept in stores:
        kept.close()
