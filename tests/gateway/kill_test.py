"""The gateway is killed again and again under load: every call that was answered is on disk, exactly once.

`WHIPPLETREE_KILLS` is how often (`make test-gateway`: 100).
"""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.gateway.serving import Gateway, reply_of, request
from whippletree.gateway.sessions import Session, Sessions
from whippletree.gateway.store import Store
from whippletree.types import Task, Turn

KILLS = int(os.environ.get("WHIPPLETREE_KILLS", "3"))
CLIENTS = 32
APIS = ("chat", "responses", "messages", "gemini")
TELLS = ("key", "header", "nothing")  # how a client says that it asks again
LONGEST = 0.5  # seconds from a gateway's first replies to its end, at most
PATIENCE = 60.0  # seconds after which a call hangs


@dataclass(frozen=True)
class Heard:
    """A reply that a client has whole."""

    rollout_id: str
    turn_id: str
    text: str
    after: str  # id of the turn that it goes on from; "" for the first of a conversation


@dataclass
class Client:
    """Holds one conversation after the other, and asks again for what was cut off."""

    number: int
    gateway: Gateway
    http: httpx.AsyncClient
    chance: random.Random
    sessions: list[Session] = field(default_factory=list)
    heard: list[Heard] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    asking: bool = False
    over: bool = False

    @property
    def api(self) -> str:
        return APIS[self.number % len(APIS)]

    @property
    def tells(self) -> str:
        return TELLS[self.number // len(APIS) % len(TELLS)]

    async def talk(self) -> None:
        """Conversations of up to six turns, each in one of the last three rollouts, until it is over."""
        while not self.over:
            self.counts["conversations"] += 1
            session, last = self.chance.choice(self.sessions[-3:]), ""
            said = [("user", f"client {self.number} begins talk {self.counts['conversations']}")]
            for _ in range(self.chance.randint(1, 6)):
                reply = await self.ask(session, said, last)
                if (
                    self.tells == "key" and last and self.chance.random() < 0.1
                ):  # under another key it is another sample
                    self.counts["repeats"] += 1
                    reply = await self.ask(session, said, last)
                said += [("assistant", reply.text), ("user", "go on")]
                last = reply.turn_id
                if self.over:
                    return

    async def ask(self, session: Session, said: Sequence[tuple[str, str]], after: str) -> Heard:
        """Ask until a reply has come whole."""
        self.counts["calls"] += 1
        key = f"{self.number}/{self.counts['calls']}"
        for attempt in range(1000):
            headers = {"authorization": f"Bearer {session.secret}"}
            headers |= {"idempotency-key": key} if self.tells == "key" else {}
            headers |= {"x-stainless-retry-count": str(attempt)} if self.tells == "header" else {}
            since = self.gateway.starts
            found = await self.attempt(said, headers)
            if found is None:
                self.counts["attempts cut off"] += 1
                await asyncio.sleep(0.02)
                continue
            self.counts["retried calls"] += attempt > 0
            self.counts["replies of a killed gateway"] += int(found[1].partition(".")[0]) < since
            self.heard.append(Heard(session.rollout_id, f"{found[0]}.0", found[1], after))
            return self.heard[-1]
        raise AssertionError("no reply in 1000 attempts")

    async def attempt(self, said: Sequence[tuple[str, str]], headers: dict[str, str]) -> tuple[str, str] | None:
        """(id of the call, text) of a reply that came whole; `None` where it was cut off, or the client hung up."""
        stream = self.chance.random() < 0.5
        path, body = request(self.api, said, stream=stream)
        # one that does not tell that it asks again cannot hang up and be known at once
        patience = self.chance.uniform(0, 0.1) if self.tells != "nothing" and self.chance.random() < 0.05 else PATIENCE
        text = ""
        self.asking = True
        try:
            async with (
                asyncio.timeout(patience),
                self.http.stream("POST", self.gateway.url + path, json=body, headers=headers) as answer,
            ):
                assert answer.status_code == 200, (answer.status_code, await answer.aread())
                async for piece in answer.aiter_text():
                    text += piece
        except (httpx.TransportError, TimeoutError) as error:
            hangs = isinstance(error, httpx.ReadTimeout) or (isinstance(error, TimeoutError) and patience == PATIENCE)
            assert not hangs, f"no reply in {PATIENCE} seconds"
            self.counts["hung up"] += isinstance(error, TimeoutError)
            return reply_of(self.api, text, stream=True) if stream else None
        finally:
            self.asking = False
        return reply_of(self.api, text, stream=stream)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # httpcore leaves the sockets of calls that hung up
async def test_every_answered_call_is_on_disk_exactly_once_however_often_the_gateway_is_killed(tmp_path: Path) -> None:
    seed, began = time.time_ns(), time.perf_counter()
    print(f"seeded by {seed}")
    gateway = Gateway(tmp_path)
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=PATIENCE) as http:
        clients = [Client(n, gateway, http, random.Random(f"{seed}/{n}")) for n in range(CLIENTS)]
        try:
            asked = await load(gateway, clients, random.Random(seed))
            gateway.end()
        finally:
            gateway.kill()
    secrets = [session.secret for client in clients for session in client.sessions]
    log = gateway.log.read_text()
    assert "Traceback" not in log and not any(secret in log for secret in secrets), log[-3000:]
    store = Store(gateway.store)
    kept = [check(client, store) for client in clients]
    store.close()
    counts = sum((client.counts for client in clients), Counter())
    counts |= {"answered calls": sum(len(client.heard) for client in clients), "turns": sum(kept)}
    seconds = time.perf_counter() - began
    print(f"{KILLS} kills, {asked} calls ran when they came, {seconds:.0f} s in all:", dict(counts))


async def load(gateway: Gateway, clients: Sequence[Client], chance: random.Random) -> int:
    """All clients talk while the gateway is killed and started again; how many calls ran when the kills came."""
    asked = 0
    await open_rollouts(gateway, clients)
    async with asyncio.TaskGroup() as talks:
        await gateway.start()
        for client in clients:
            talks.create_task(client.talk())
        for kill in range(KILLS):
            await more_heard(clients)
            await asyncio.sleep(chance.uniform(0, LONGEST))
            asked += sum(client.asking for client in clients)
            gateway.kill()
            if kill % 2 == 0:  # else the next gateway is the first to open what the killed one left
                check_opens(gateway.store)
                await open_rollouts(gateway, clients)
            await gateway.start()
        await more_heard(clients)
        for client in clients:
            client.over = True
    return asked


async def more_heard(clients: Sequence[Client]) -> None:
    """Until a quarter of the clients have heard a further reply."""
    before = [len(client.heard) for client in clients]
    async with asyncio.timeout(PATIENCE):
        while sum(len(c.heard) > n for c, n in zip(clients, before, strict=True)) < len(clients) / 4:
            await asyncio.sleep(0.005)


async def open_rollouts(gateway: Gateway, clients: Sequence[Client]) -> None:
    """One more rollout for each client, from another process than the gateway's."""
    store = Store(gateway.store)
    sessions = Sessions(store)
    names = [f"client {client.number}/{len(client.sessions)}" for client in clients]
    opened = (sessions.open(name, group="g", task=Task(id="t"), stream=name) for name in names)
    for client, session in zip(clients, await asyncio.gather(*opened), strict=True):
        client.sessions.append(session)
    store.close()


def check_opens(path: Path) -> None:
    """Whoever opens the file that a killed process left finds it whole."""
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def check(client: Client, store: Store) -> int:
    """What the client heard is what its rollouts hold, turn by turn; the number of turns, abandoned ones included."""
    turns = {turn.id: turn for session in client.sessions for turn in store.turns(session.rollout_id)}
    rollouts = {turn.id: s.rollout_id for s in client.sessions for turn in store.turns(s.rollout_id)}
    heard = Counter(heard.turn_id for heard in client.heard)
    who = (client.number, client.api, client.tells)
    assert set(heard.values()) == {1}, (who, "one reply to two calls", heard.most_common(3))
    to_train = {turn.id for turn in turns.values() if turn.trainable}
    steps = {turns[name].info["step"] for name in to_train - set(heard)}
    doubled = [(t.id, t.finish_reason, t.info) for t in turns.values() if t.info["step"] in steps]
    assert to_train == set(heard), (who, "kept and not heard", doubled, "lost", set(heard) - to_train)
    for reply in client.heard:
        turn = turns[reply.turn_id]
        assert rollouts[turn.id] == reply.rollout_id
        assert said_in(client.api, turn) == reply.text
        assert turn.link == ("append" if reply.after else "root"), (who, turn.link, reply)
        before = turns[reply.after] if reply.after else None
        assert turn.info.get("parent", "") == reply.after
        ids = before.prompt_ids + before.reply_ids if before else ()
        assert turn.prompt_ids[: len(ids)] == ids
    return len(turns)


def said_in(api: str, turn: Turn) -> str:
    """The text of the reply, as it was kept in the API's own form."""
    reply = turn.reply
    if api == "chat":
        return str(reply["message"]["content"])
    if api == "responses":
        return str(reply["output"][0]["content"][0]["text"])
    if api == "messages":
        return str(reply["content"][0]["text"])
    return str(reply["candidates"][0]["content"]["parts"][0]["text"])
