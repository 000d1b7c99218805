"""What is no opening and no event is refused by the name of its field, and no secret is ever kept or shown."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from whippletree.gateway.conftest import MakeDesk
from whippletree.gateway.rollouts_test import ADMIN, Office, error_of
from whippletree.gateway.store import Store


@pytest.fixture
def office(desk: MakeDesk) -> Office:
    return Office(desk(lambda _: "hello"))


OPENINGS = [
    (b'{"x": 1}', "x"),
    (b'{"id": 7}', "id"),
    (b'{"id": ""}', "id"),
    (b'{"id": "a//b"}', "id"),
    (b'{"id": "../a"}', "id"),
    (b'{"id": "a b"}', "id"),
    (b'{"id": "a/export"}', "id"),
    (b'{"id": "models"}', "id"),
    (b'{"id": "%s"}' % (b"x" * 201), "id"),
    (b'{"group": ""}', "group"),
    (b'{"task": {"id": "a\\u0000"}}', "group"),
    (b'{"task": []}', "task"),
    (b'{"task": {}}', "task.id"),
    (b'{"task": {"id": "t", "x": 1}}', "task.x"),
    (b'{"task": {"id": "t", "messages": [1]}}', "task.messages.0"),
    (b'{"task": {"id": "t", "columns": {"x": NaN}}}', "task"),
    (b'{"sampling": {"temperature": -1}}', "sampling"),
    (b'{"sampling": {"temperature": "1"}}', "sampling.temperature"),
    (b'{"sampling": {"max_tokens": 0}}', "sampling"),
    (b'{"budget": {"turns": 0}}', "budget"),
    (b'{"budget": {"turns": true}}', "budget.turns"),
    (b'{"budget": {"tokens": 1.5}}', "budget.tokens"),
    (b'{"budget": {"seconds": 1e999}}', "budget.seconds"),
    (b'{"budget": {"calls_per_second": NaN}}', "budget.calls_per_second"),
    (b'{"budget": {"minutes": 1}}', "budget.minutes"),
    (b'{"sealed": 1}', "sealed"),
    (b"[]", None),
    (b"{", None),
    (b"\xff", None),
    (b'{"id": "\\ud800"}', None),
    (b'{"task": {"id": "t", "columns": {"x": %s}}}' % (b"[" * 5000 + b"]" * 5000), None),
]
EVENTS = [
    (b"", "kind"),
    (b'{"kind": "x"}', "kind"),
    (b'{"kind": ["end"]}', "kind"),
    (b'{"kind": "reward"}', "value"),
    (b'{"kind": "reward", "value": "1"}', "value"),
    (b'{"kind": "reward", "value": true}', "value"),
    (b'{"kind": "reward", "value": NaN}', "value"),
    (b'{"kind": "reward", "value": -Infinity}', "value"),
    (b'{"kind": "reward", "value": 1%s}' % (b"0" * 400), "value"),
    (b'{"kind": "reward", "value": 1, "name": ""}', "name"),
    (b'{"kind": "reward", "value": 1, "name": null}', "name"),
    (b'{"kind": "reward", "value": 1, "x": 1}', "x"),
    (b'{"kind": "note", "x": {"y": [Infinity]}}', "x"),
    (b'{"kind": "note", "x": "\\udfff"}', None),
    (b'{"kind": "end", "ending": "ok"}', "ending"),
    (b'{"kind": "end", "ending": "failed", "blame": "me"}', "blame"),
    (b'{"kind": "end", "ending": "done", "blame": "harness"}', "blame"),
    (b'{"kind": "end", "blame": "harness"}', "blame"),
    (b'{"kind": "end", "reason": "\\u0000"}', "reason"),
    (b"null", None),
]


@pytest.mark.parametrize(("body", "field"), OPENINGS)
async def test_an_opening_that_cannot_be_read_is_refused_by_field(office: Office, body: bytes, field: str | None):
    error = error_of(await office.ask("POST", "/sessions", raw=body), 400)
    assert error["param"] == field
    assert field is None or f"`{field}`" in error["message"]
    assert office.store.open_rollouts() == []


@pytest.mark.parametrize(("body", "field"), EVENTS)
async def test_an_event_that_cannot_be_read_is_refused_by_field(office: Office, body: bytes, field: str | None):
    opened = await office.open(id="r")
    error = error_of(await office.ask("POST", "/sessions/r/events", opened["secret"], raw=body), 400)
    assert error["param"] == field
    assert field is None or f"`{field}`" in error["message"]
    assert (office.store.events("r"), len(office.store.open_rollouts())) == ([], 1)


async def test_a_note_may_hold_any_names_of_fields(office: Office):
    opened = await office.open(id="r")
    note: dict[str, Any] = {"blame": "x", "ending": [], "name": None, "model_dump": 1, "__class__": {}, "\0": "\0"}
    assert (await office.tell(opened, kind="note", **note)).status_code == 200
    assert office.store.events("r")[0]["data"] == note


async def test_a_body_that_is_too_large_is_refused(desk: MakeDesk):
    office = Office(desk(app={"max_request_bytes": 100}))
    error_of(await office.ask("POST", "/sessions", raw=b" " * 101), 413)


@pytest.mark.parametrize("host", ["", "[", "a b", "x" * 3000, "\xff", "h:p", "[::1]:80", "example.org:8000"])
async def test_any_host_that_a_client_names_is_answered(office: Office, host: str):
    async with office.desk.http() as client:
        headers = [(b"host", host.encode("latin-1")), (b"authorization", f"Bearer {ADMIN}".encode())]
        answer = await client.post("/sessions", headers=headers)
    named = host if host in ("[::1]:80", "example.org:8000", "x" * 3000) else "gateway:80"
    assert answer.status_code == 201
    assert answer.json()["plain_urls"]["anthropic"] in (f"http://{named}", "http://gateway:None")


async def test_a_store_that_fails_is_a_503_that_may_be_tried_again(desk: MakeDesk):
    office = Office(desk(store=lambda path: Store(path, max_pages=40)))
    opened = await office.open()
    answer = await office.tell(opened, kind="note", text="x" * 400_000)
    assert error_of(answer, 503)["code"] == "server_error"
    assert answer.headers["retry-after"] == "5"
    assert (await office.tell(opened, kind="reward", value=1)).status_code == 200


# ---- secrets ----------------------------------------------------------------------------------------------------


async def test_secrets_are_in_no_file_and_in_no_log(
    office: Office, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    caplog.set_level(logging.DEBUG)
    opened = await office.open()
    await office.call(opened["base_urls"]["openai"])
    await office.tell(opened, kind="reward", value=1)
    exported = await office.ask("GET", f"/sessions/{opened['id']}/export")
    await office.tell(opened, kind="end")
    await office.tell(opened, kind="end", ending="failed")
    office.store.close()
    kept = b"".join(path.read_bytes() for path in office.store.path.parent.iterdir())
    ours = [record for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    said = "".join([exported.text, *capfd.readouterr(), *(record.getMessage() for record in ours)])
    assert opened["id"].encode() in kept
    for secret in (opened["secret"], ADMIN):
        assert (secret.encode() in kept, secret in said) == (False, False)
    assert ADMIN not in repr(vars(office.desk.sessions))
