"""Sessions over HTTP, without a network: who may do what, what is kept, and what a repeat or a contradiction gets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from whippletree.gateway.app import create_app
from whippletree.gateway.conftest import Desk, MakeDesk
from whippletree.gateway.render import Renderer
from whippletree.gateway.rollouts import Rollouts
from whippletree.gateway.sessions import Sessions
from whippletree.gateway.store import Store
from whippletree.models.tiny import tiny_tokenizer
from whippletree.types import Rollout

ADMIN = "an admin key of more than 32 characters"
HELLO = [*tiny_tokenizer().encode("hello", add_special_tokens=False), tiny_tokenizer().eos_token_id]
TASK = {"id": "t", "messages": [{"role": "user", "content": "hi"}], "columns": {"answer": 7}}


class Office:
    """A desk whose sessions have an admin key, and a client for each key."""

    def __init__(self, desk: Desk) -> None:
        self.desk, self.store = desk, desk.store
        desk.sessions.admit(ADMIN)

    async def ask(
        self, method: str, path: str, key: str | None = ADMIN, *, body: Any = None, raw: bytes | None = None
    ) -> httpx.Response:
        """The answer to one request; `raw` is a body as bytes."""
        headers = {b"authorization": f"Bearer {key}".encode("latin-1")} if key is not None else {}
        sent: dict[str, Any] = {"content": raw} if raw is not None else {} if body is None else {"json": body}
        async with self.desk.http() as client:
            return await client.request(method, path, headers=headers, **sent)

    async def open(self, **body: Any) -> dict[str, Any]:
        answer = await self.ask("POST", "/sessions", body=body)
        assert answer.status_code == 201, answer.text
        opened: dict[str, Any] = answer.json()
        return opened

    async def tell(self, opened: dict[str, Any], key: str | None = None, **event: Any) -> httpx.Response:
        """The answer to an event, sent with the session's own secret."""
        return await self.ask("POST", f"/sessions/{opened['id']}/events", key or opened["secret"], body=event)

    async def call(self, url: str, key: str = "any", said: str = "hi") -> httpx.Response:
        """The answer to a chat request at this OpenAI base URL."""
        messages = [{"role": "user", "content": said}]
        async with self.desk.http() as client:
            headers = {"authorization": f"Bearer {key}"}
            return await client.post(f"{url}/chat/completions", headers=headers, json={"messages": messages})

    async def export(self, opened: dict[str, Any]) -> Rollout:
        answer = await self.ask("GET", f"/sessions/{opened['id']}/export", opened["secret"])
        assert answer.status_code == 200, answer.text
        return Rollout.from_json(answer.json())


NO_LIMIT = {"tokens": None, "reply_tokens": None, "seconds": None, "calls_per_second": None}


@pytest.fixture
def office(desk: MakeDesk) -> Office:
    return Office(desk(lambda _: "hello"))


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error of this status, in OpenAI's shape."""
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# ---- from its opening to its export -----------------------------------------------------------------------------


async def test_a_session_is_opened_called_rewarded_ended_and_exported(office: Office):
    opened = await office.open(id="a/b", group="g", task=TASK, budget={"turns": 2})
    assert (opened["id"], opened["attempt"], len(opened["secret"])) == ("a/b", 0, 43)  # 256 bits in base64
    secret = opened["secret"]
    own, plain = f"http://gateway/r/{secret}", "http://gateway"
    assert opened["base_urls"] == {"openai": f"{own}/v1", "responses": f"{own}/v1", "anthropic": own, "gemini": own}
    assert opened["plain_urls"] == {
        "openai": f"{plain}/v1",
        "responses": f"{plain}/v1",
        "anthropic": plain,
        "gemini": plain,
    }
    assert opened["budget"] == {**NO_LIMIT, "turns": 2}
    assert (await office.call(opened["base_urls"]["openai"])).status_code == 200
    assert (await office.call(opened["plain_urls"]["openai"], secret, "and")).status_code == 200
    refused = await office.call(opened["base_urls"]["openai"], said="more")
    assert error_of(refused, 400)["code"] == "turn_limit_exceeded"
    for value in (0.25, 1):
        assert (await office.tell(opened, kind="reward", name="exact", value=value)).status_code == 200
    await office.tell(opened, kind="reward", value=None)
    await office.tell(opened, kind="note", text="went well", steps=[1, {"x": None}])
    told = (await office.tell(opened, kind="end", ending="done")).json()
    assert (told["state"], told["turns"], told["rewards"]) == ("ended", 2, {"exact": 1.0, "reward": None})
    rollout = await office.export(opened)
    assert (rollout.id, rollout.group, rollout.task.to_json(), rollout.ending) == ("a/b", "g", TASK, "done")
    assert [list(turn.reply_ids) for turn in rollout.turns] == [HELLO, HELLO]
    assert (rollout.rewards, rollout.blame, rollout.reason) == ({"exact": 1.0, "reward": None}, None, "")
    assert rollout.info == {"notes": [{"text": "went well", "steps": [1, {"x": None}]}]}
    assert rollout == office.store.rollout("a/b")
    assert (await office.call(opened["base_urls"]["openai"])).status_code == 401


async def test_each_base_url_is_what_a_client_of_its_api_takes(office: Office):
    urls = (await office.open())["base_urls"]
    hi = [{"role": "user", "content": "hi"}]
    async with office.desk.http() as client:
        answers = [
            await client.post(f"{urls['openai']}/chat/completions", json={"messages": hi}),
            await client.post(f"{urls['responses']}/responses", json={"input": "hi"}),
            await client.post(f"{urls['anthropic']}/v1/messages", json={"messages": hi, "max_tokens": 9}),
            await client.post(
                f"{urls['gemini']}/v1beta/models/m:generateContent",
                json={"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
            ),
        ]
    assert [answer.status_code for answer in answers] == [200] * 4, [answer.text for answer in answers]


async def test_an_empty_body_opens_a_session_with_every_default(office: Office):
    answer = await office.ask("POST", "/sessions")
    assert answer.status_code == 201
    opened, other = answer.json(), await office.open()
    assert opened["id"] != other["id"]
    rollout = await office.export(opened)
    assert (rollout.task.id, rollout.group) == (opened["id"], opened["id"])


async def test_sampling_defaults_of_a_session_reach_the_engine(office: Office):
    opened = await office.open(sampling={"temperature": 0.5, "max_tokens": 3})
    await office.call(opened["base_urls"]["openai"])
    ((_, sampling),) = office.desk.engine.calls
    assert (sampling.temperature, sampling.max_tokens) == (0.5, 3)


async def test_an_open_session_is_exported_as_it_is_now(office: Office):
    opened = await office.open(task=TASK)
    await office.call(opened["base_urls"]["openai"])
    await office.tell(opened, kind="reward", value=0.5)
    await office.tell(opened, kind="note", text="x")
    rollout = await office.export(opened)
    assert rollout.to_json()["ending"] is None
    assert (rollout.rewards, rollout.info) == ({"reward": 0.5}, {"notes": [{"text": "x"}]})
    assert [list(turn.reply_ids) for turn in rollout.turns] == [HELLO]
    assert office.store.rollout(opened["id"]) is None  # for those that train


async def test_what_is_known_of_a_session_is_told(office: Office):
    opened = await office.open(id="r", group="g", budget={"tokens": 100})
    await office.call(opened["base_urls"]["openai"])
    said = (await office.ask("GET", "/sessions/r", opened["secret"])).json()
    seconds = said["spent"].pop("seconds")
    assert 0 <= seconds < 600
    assert said["spent"] == {"turns": 1, "tokens": 6}
    assert said["budget"] == {**NO_LIMIT, "turns": 1000, "tokens": 100}
    assert {name: said[name] for name in ("id", "attempt", "group", "state", "turns", "ending", "rewards")} == {
        "id": "r", "attempt": 0, "group": "g", "state": "open", "turns": 1, "ending": None, "rewards": {},
    }  # fmt: skip
    assert opened["secret"] not in json.dumps(said)


async def test_sessions_are_listed_page_by_page(office: Office):
    for name in ("c", "a", "b"):
        await office.open(id=name)
    await office.tell({"id": "b"}, ADMIN, kind="end")
    first = (await office.ask("GET", "/sessions?limit=2")).json()
    rest = (await office.ask("GET", f"/sessions?limit=2&after={first['data'][-1]['id']}")).json()
    assert [(row["id"], row["state"]) for row in first["data"]] == [("a", "open"), ("b", "ended")]
    assert ([row["id"] for row in rest["data"]], first["has_more"], rest["has_more"]) == (["c"], True, False)
    ended = (await office.ask("GET", "/sessions?state=ended")).json()
    assert [row["id"] for row in ended["data"]] == ["b"]
    for query, field in (("limit=0", "limit"), ("limit=1001", "limit"), ("limit=x", "limit"), ("state=x", "state")):
        assert error_of(await office.ask("GET", f"/sessions?{query}"), 400)["param"] == field


# ---- who may --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, "", "wrong", ADMIN[:-1], ADMIN + "x", "\xff"])
async def test_without_the_admin_key_nothing_is_opened_or_listed(office: Office, key: str | None):
    await office.open(id="r")
    for method in ("GET", "POST"):
        assert error_of(await office.ask(method, "/sessions", key), 401)["code"] == "invalid_api_key"
    for method, path in (("GET", "/sessions/r"), ("GET", "/sessions/r/export"), ("POST", "/sessions/r/events")):
        assert error_of(await office.ask(method, path, key), 401)["code"] == "invalid_api_key"
    assert [row.rollout_id for row in office.store.open_rollouts()] == ["r"]


async def test_a_secret_opens_its_own_session_alone(office: Office):
    one, two = await office.open(id="one"), await office.open(id="two")
    assert (await office.ask("GET", "/sessions/one", one["secret"])).status_code == 200
    for path in ("/sessions/two", "/sessions/two/export", "/sessions/nowhere", "/sessions"):
        error_of(await office.ask("GET", path, one["secret"]), 401)
    error_of(await office.tell(two, one["secret"], kind="end"), 401)
    error_of(await office.ask("POST", "/sessions", one["secret"]), 401)
    assert error_of(await office.ask("GET", "/sessions/nowhere"), 404)["code"] == "session_not_found"


async def test_the_admin_key_is_no_key_of_a_rollout(office: Office):
    await office.open()
    assert (await office.call("/v1", ADMIN)).status_code == 401


async def test_a_sealed_secret_calls_the_model_and_no_more(office: Office):
    opened = await office.open(id="r", sealed=True)
    assert (await office.call(opened["base_urls"]["openai"])).status_code == 200
    for method, path in (("GET", "/sessions/r"), ("GET", "/sessions/r/export"), ("POST", "/sessions/r/events")):
        assert error_of(await office.ask(method, path, opened["secret"]), 403)["code"] == "sealed"
    assert (await office.tell(opened, ADMIN, kind="reward", value=1)).json()["rewards"] == {"reward": 1}


async def test_without_an_admin_key_these_paths_are_unknown(desk: MakeDesk):
    made = desk()
    session = await made.open("r")
    async with made.http(session) as client:
        for method, path in (("POST", "/sessions"), ("GET", "/sessions/r"), ("POST", "/sessions/r/events")):
            error_of(await client.request(method, path), 404)


async def test_other_verbs_and_paths_are_answered_as_everywhere(office: Office):
    await office.open(id="r")
    tried = (("PUT", "/sessions"), ("DELETE", "/sessions/r"), ("GET", "/sessions/r/events"), ("POST", "/sessions/r"))
    for method, path in (*tried, ("POST", "/x/sessions"), ("GET", "/sessions/%00")):
        error_of(await office.ask(method, path), 404)
    opened = await office.open(id="s")  # the APIs are served below every prefix, and so below this one
    assert (await office.call("/sessions/s/v1", opened["secret"])).status_code == 200
    assert (await office.ask("GET", "/sessions/v1/models", opened["secret"])).json()["data"][0]["id"] == "tiny"


# ---- what is said twice, or otherwise ---------------------------------------------------------------------------


async def test_a_repeated_event_changes_nothing(office: Office):
    opened = await office.open(id="r")
    events: list[dict[str, Any]] = [
        {"kind": "reward", "value": 1},
        {"kind": "note", "text": "x"},
        {"kind": "end", "ending": "failed", "blame": "sandbox", "reason": "it broke"},
    ]
    first = [(await office.tell(opened, **event)).json() for event in events]
    again = [(await office.tell(opened, **event)) for event in events]  # also after the end
    assert [answer.status_code for answer in again] == [200] * 3
    assert all(answer.json() == first[-1] for answer in again)
    assert [event["kind"] for event in office.store.events("r")] == ["reward", "note"]
    assert (first[-1]["ending"], first[-1]["blame"], first[-1]["reason"]) == ("failed", "sandbox", "it broke")


async def test_what_contradicts_an_end_is_refused(office: Office):
    opened = await office.open()
    await office.tell(opened, kind="reward", value=1)
    ended = (await office.tell(opened, kind="end", reason="all there")).json()
    for event in (
        {"kind": "end", "ending": "failed"},
        {"kind": "end", "reason": "another"},
        {"kind": "reward", "value": 0},
        {"kind": "reward", "name": "other", "value": 1},
        {"kind": "note"},
    ):
        assert error_of(await office.tell(opened, **event), 409)["code"] == "session_ended"
    assert (await office.ask("GET", f"/sessions/{opened['id']}")).json() == ended


async def test_a_reward_that_changes_and_comes_back_is_the_last_one(office: Office):
    opened = await office.open()
    for value in (1, None, 1, 0, 0.0):
        told = await office.tell(opened, kind="reward", value=value)
    assert told.json()["rewards"] == {"reward": 0}
    assert len(office.store.events(opened["id"])) == 4


async def test_a_new_attempt_takes_the_place_of_an_open_or_a_failed_one(office: Office):
    first = await office.open(id="r")
    await office.tell(first, kind="reward", value=1)
    second = await office.open(id="r")
    assert (second["attempt"], (await office.tell(first, kind="end")).status_code) == (1, 401)
    assert (await office.call(first["base_urls"]["openai"])).status_code == 401
    assert (await office.tell(second, kind="end", ending="failed")).json()["rewards"] == {}
    third = await office.open(id="r")
    await office.tell(third, kind="end")
    refused = await office.ask("POST", "/sessions", body={"id": "r"})
    assert (third["attempt"], error_of(refused, 409)["param"]) == (2, "id")  # what is done is not lost


async def test_events_that_come_together_are_all_kept(office: Office):
    opened = await office.open()
    sent = [office.tell(opened, kind="reward", name=f"c{n}", value=n) for n in range(8)]
    answers = await asyncio.gather(*sent, office.tell(opened, kind="end"), office.tell(opened, kind="end"))
    kept = (await office.export(opened)).rewards
    accepted = {f"c{n}": n for n, answer in enumerate(answers[:8]) if answer.status_code == 200}
    assert kept == accepted  # what was accepted stands in the rollout, and nothing else
    assert {answer.status_code for answer in answers} <= {200, 409}
    assert [answer.status_code for answer in answers[8:]] == [200, 200]


# ---- what ends it, and whose fault that was ---------------------------------------------------------------------


async def test_the_end_ends_calls_that_run(desk: MakeDesk):
    office = Office(desk(["a long reply"], delay=0.05))
    opened = await office.open()
    call = asyncio.create_task(office.call(opened["base_urls"]["openai"]))
    while not office.desk.engine.calls:
        await asyncio.sleep(0.01)
    assert (await office.tell(opened, kind="end", ending="truncated")).json()["ending"] == "truncated"
    assert error_of(await call, 400)["code"] == "rollout_ended"
    assert all(turn.finish_reason == "abandoned" for turn in (await office.export(opened)).turns)


async def test_what_an_end_does_not_say_is_what_the_gateway_knows(desk: MakeDesk):
    office = Office(desk(["one", "two"]))
    spent = await office.open(budget={"turns": 1})
    for _ in range(2):
        await office.call(spent["base_urls"]["openai"])
    told = (await office.tell(spent, kind="end")).json()
    assert (told["ending"], told["blame"], "1 turns" in told["reason"]) == ("truncated", None, True)
    told = (await office.tell(await office.open(), kind="end", ending="failed")).json()
    assert (told["ending"], told["blame"], told["reason"]) == ("failed", "harness", "")
    office = Office(desk(failure=RuntimeError("engine broke")))
    broken = await office.open()
    assert (await office.call(broken["base_urls"]["openai"])).status_code == 500
    told = (await office.tell(broken, kind="end", ending="failed")).json()
    assert (told["blame"], "engine broke" in told["reason"]) == ("engine", True)


async def test_a_session_that_is_left_alone_is_ended_as_failed(desk: MakeDesk):
    office = Office(desk(["a long reply"], delay=0.05))
    for name in ("left", "mine", "calls"):
        opened = await office.open(id=name)
    await office.tell({"id": "left"}, ADMIN, kind="reward", value=1)
    call = asyncio.create_task(office.call(opened["base_urls"]["openai"]))
    while not office.desk.engine.calls:
        await asyncio.sleep(0.01)
    rollouts = Rollouts(office.store, office.desk.sessions)
    assert await rollouts.sweep(3600) == []
    assert await rollouts.sweep(-1, keep="mine") == ["left"]  # a second from now all are idle but the one with a call
    rollout = office.store.rollout("left")
    assert rollout is not None
    assert (rollout.ending, rollout.blame, rollout.rewards) == ("failed", "harness", {"reward": 1})
    assert "abandoned: no call and no event for -1 s" in rollout.reason
    assert (await call).status_code == 200
    assert "abandoned" in error_of(await office.tell({"id": "left"}, ADMIN, kind="end", ending="done"), 409)["message"]


async def test_sessions_go_on_after_a_restart_and_are_swept_there(office: Office):
    opened = [await office.open(id=name) for name in ("goes-on", "left")]
    await office.call(opened[0]["base_urls"]["openai"])
    store = Store(office.store.path)  # as a second process has it
    sessions = Sessions(store)
    tokenizer = tiny_tokenizer()
    app = create_app(office.desk.engine, Renderer(tokenizer), store, sessions, model_name="tiny")
    again = Office(Desk(office.desk.engine, store, sessions, app))
    assert (await again.call(opened[0]["base_urls"]["openai"], said="more")).status_code == 200
    told = (await again.tell(opened[0], kind="end")).json()
    assert (told["turns"], told["ending"]) == (2, "done")
    assert await Rollouts(store, sessions).sweep(-1) == ["left"]
    assert (await again.call(opened[1]["base_urls"]["openai"])).status_code == 401
    store.close()
