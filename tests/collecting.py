"""A collector on a scripted engine and a scripted harness, for tests of what is run, kept and counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from whippletree.collect import Collector, Runner
from whippletree.config import SamplingSection
from whippletree.engine.scripted import ScriptedEngine
from whippletree.gateway.app import create_app
from whippletree.gateway.render import Renderer
from whippletree.gateway.sessions import Sessions
from whippletree.gateway.store import Store
from whippletree.harness.outcome import Outcome, failure
from whippletree.models.tiny import tiny_tokenizer
from whippletree.types import Reward, Rollout, Task

Play = Callable[["Runs", Task, httpx.AsyncClient], Any]


async def once(runs: Runs, task: Task, client: httpx.AsyncClient) -> Outcome:
    """One call."""
    await ask(client, task.id)
    return Outcome()


async def ask(client: httpx.AsyncClient, *texts: str) -> None:
    messages = [{"role": "user", "content": text} for text in texts]
    (await client.post("/chat/completions", json={"model": "m", "messages": messages})).raise_for_status()


async def length(rollout: Rollout) -> dict[str, float | None]:
    return {"length": float(sum(len(turn.reply_ids) for turn in rollout.turns))}


@dataclass
class Runs:
    """A collector whose harness is a scripted function and whose gateway is called without a network."""

    store: Store
    engine: ScriptedEngine
    play: Play = once
    reward: Reward = length
    limit: int = 64
    harnesses: dict[str, Runner] = field(default_factory=dict)  # in place of the lone one
    digests: dict[str, Any] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)  # task ids, in the order in which runs began
    progress: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sessions = Sessions(self.store)
        self.app = create_app(self.engine, Renderer(tiny_tokenizer()), self.store, self.sessions, model_name="tiny")

    async def run(self, task: Task, *, base_url: str, api_key: str) -> Outcome:
        self.ran.append(task.id)
        headers = {"authorization": f"Bearer {api_key}"}
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url=base_url, headers=headers) as client:
            try:
                found: Outcome = await self.play(self, task, client)
            except httpx.HTTPStatusError as error:
                return failure(str(error))
        return found

    def collector(self, **sampling: Any) -> Collector:
        sizes = {"tasks_per_step": 2, "rollouts_per_task": 3, "unfinished_reward": 100.0, **sampling}
        return Collector(
            harnesses=self.harnesses or {"scripted": Runner(self, self.limit)},
            store=self.store,
            sessions=self.sessions,
            server="http://gateway",
            rewards={"length": self.reward},
            reward_timeout=5,
            sampling=SamplingSection(**sizes),
            digests=self.digests,
            progress=lambda done, total: self.progress.append((done, total)),
        )

    def streams(self) -> list[str]:
        """The names of the random numbers of each call."""
        return [sampling.stream for _, sampling in self.engine.calls]


def fails(*runs_that_fail: int) -> Play:
    """An agent whose runs of these numbers (of all that begin) fail after their call."""

    async def play(runs: Runs, task: Task, client: httpx.AsyncClient) -> Outcome:
        number = len(runs.ran) - 1
        await ask(client, task.id)
        return failure("the tool broke") if number in runs_that_fail else Outcome()

    return play
