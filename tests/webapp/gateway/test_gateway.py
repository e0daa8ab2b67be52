"""The gateway: keys, limits, routes, held and retried requests, streams, and what is counted."""

import asyncio
import errno
import fcntl
import json
import os
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import IO

import pytest
from django.contrib.auth.models import User

from runners.jobspec.serve import key_hash
from runners.shared.event_streams import TokensUsed
from tests.webapp.conftest import make_job
from webapp.accounts.models import Membership
from webapp.core.clock import now
from webapp.core.ids import new_ulid
from webapp.deployments.keys import KeyOptions, key_make
from webapp.deployments.models import Deployment, Replica, ServingKey, Usage, UsageJournal
from webapp.deployments.services import deployment_advance
from webapp.deployments.states import DeploymentState, view_of
from webapp.gateway import application, cards, key_limits, routes
from webapp.gateway import journal as journal_module
from webapp.gateway.application import Gateway
from webapp.gateway.journal import Answer, Journal, count_file, count_left, read_answer
from webapp.gateway.routes import Key, Route, Routes, Snapshot, Target, load_snapshot
from webapp.gateway.tunnels import TunnelError
from webapp.gateway.usage import UsageComments
from webapp.jobs.models import Job
from webapp.plans.models import Plan

SECRET = "sk-slipway-x"
KEY = Key("k1", "t1", frozenset(), None, None, None, None, 5.0, None)
TARGET = Target("r1", "h1", "a1", "inner")
ROUTE = Route(
    "d1", "t1", "small", DeploymentState.READY, datetime(2026, 11, 30, tzinfo=UTC), "", None,
    None, None, (TARGET,), ("french",),
)  # fmt: skip
ASLEEP = replace(ROUTE, state=DeploymentState.ASLEEP, targets=())
CHAT = {"model": "small", "messages": [{"role": "user", "content": "Hi"}]}


class Response:
    """A scripted answer; ``then`` is awaited before the last chunk."""

    def __init__(self, *chunks: bytes, status: int = 200, then=None, fault=None, **headers):
        self.status, self.parts, self.then, self.fault = status, chunks, then, fault
        fields = {"content-type": "application/json"} | headers
        self.headers = [
            (name.replace("_", "-").encode(), each.encode()) for name, each in fields.items()
        ]
        self.is_closed = False

    async def chunks(self):
        for chunk in self.parts:
            yield chunk
        if self.then is not None:
            await self.then.wait()
        if self.fault is not None:
            raise self.fault

    async def close(self) -> None:
        self.is_closed = True


class Host:
    """A tunnel that answers with what is scripted, one request after the other."""

    def __init__(self, *answers) -> None:
        self.answers, self.asked = list(answers), []

    def of(self, host_id: str):
        return self if host_id == "h1" else None

    async def request(self, attempt_id, method, path, headers, body):
        self.asked.append((attempt_id, method, path, dict(headers), body))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Fixed(Routes):
    """Routes that the test sets."""

    def __init__(self, *routes: Route, key: Key = KEY) -> None:
        super().__init__()
        self.woken: list[str] = []
        self.num_renewed = 0
        self.set(*routes, key=key)

    def set(self, *routes: Route, key: Key | None = KEY) -> None:
        keys = {key_hash(SECRET): key} if key else {}
        named = {
            (each.team_id, name): each for each in routes for name in (each.name, *each.aliases)
        }
        self._publish(Snapshot(keys, named))

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    async def renewed(self, _seconds: float) -> None:
        self.num_renewed += 1

    def wake(self, deployment_id: str) -> None:
        self.woken.append(deployment_id)


class Client:
    """One client of a gateway; ``left`` is set when it disconnects."""

    def __init__(self, tmp_path, host, *routes: Route, key: Key = KEY) -> None:
        self.routes = Fixed(*routes, key=key)
        self.host = host
        self.gateway = Gateway(tmp_path / new_ulid(), routes=self.routes, tunnels=host)
        self.gateway.journal.start = lambda: None
        self.left, self.came = asyncio.Event(), asyncio.Event()
        self.reading, self.may_read = asyncio.Event(), asyncio.Event()  # of the request's body
        self.may_read.set()
        self.status, self.headers, self.body = 0, {}, b""

    async def send(self, path="/v1/chat/completions", document=CHAT, method="POST", **headers):
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        fields = {"authorization": f"Bearer {SECRET}"} | headers
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": [
                (name.replace("_", "-").encode(), each.encode()) for name, each in fields.items()
            ],
        }
        first = [{"type": "http.request", "body": body}]

        async def receive():
            if first:
                self.reading.set()
                await self.may_read.wait()
                return first.pop()
            await self.left.wait()
            return {"type": "http.disconnect"}

        async def sent(message):
            if message["type"] == "http.response.start":
                self.status = message["status"]
                self.headers = {key.decode(): value.decode() for key, value in message["headers"]}
                self.body = b""
            else:
                self.body += message.get("body", b"")
                self.came.set()

        async with asyncio.timeout(20):
            await self.gateway(scope, receive, sent)
        return self

    @property
    def counted(self) -> list[Answer]:
        """What is in the journal."""
        lines = [each.read_bytes() for each in self.gateway.journal._folder.glob("*.jsonl")]
        return [read_answer(line) for line in b"".join(lines).splitlines()]

    @property
    def error(self) -> dict:
        return json.loads(self.body)["error"]


@pytest.mark.asyncio
async def test_a_request_reaches_the_replica_with_the_sites_key_and_is_counted(tmp_path):
    host = Host(Response(b'{"id": 1}', x_slipway_usage="7 2 3"))
    client = await Client(tmp_path, host, ROUTE).send(x_api_key="other", cookie="c")
    assert (client.status, client.body) == (200, b'{"id": 1}')
    assert "x-slipway-usage" not in client.headers
    attempt, method, path, headers, body = host.asked[0]
    assert (attempt, method, path) == ("a1", "POST", "/v1/chat/completions")
    assert headers[b"authorization"] == b"Bearer inner"
    assert {b"cookie", b"x-api-key"}.isdisjoint(headers)
    assert json.loads(body) == CHAT
    (answer,) = client.counted
    assert (answer.status, answer.is_cut, answer.used) == (200, False, TokensUsed(7, 2, 3))
    await client.send(document=CHAT | {"model": "small/french"})
    assert json.loads(host.asked[1][4])["model"] == "french"
    client.routes.set(replace(ROUTE, name="tiny", aliases=("gpt-4o", "openai/gpt-4o")))
    assert (await client.send()).status == 404
    for alias in ("gpt-4o", "openai/gpt-4o"):
        await client.send(document=CHAT | {"model": alias})
        assert json.loads(host.asked[-1][4])["model"] == "tiny"
    for path in application.ANSWERED:
        await client.send(path, document=CHAT | {"model": "tiny"})
        assert (client.status, host.asked[-1][2]) == (200, path)


@pytest.mark.asyncio
async def test_what_cannot_be_passed_on_is_refused_in_the_form_of_its_api(tmp_path):
    client = Client(tmp_path, Host(Response()), ROUTE)
    cases = [
        ({"authorization": "Bearer no"}, 401, "invalid_api_key"),
        ({"document": CHAT | {"model": "large"}}, 404, "model_not_found"),
        ({"document": b"{"}, 400, "invalid_json"),
        ({"document": b"[]"}, 400, "invalid_json"),
        ({"document": {"messages": []}}, 400, "model_not_found"),
        ({"document": b" " * (4 * 1024**2 + 1)}, 413, "too_large"),
        ({"path": "/v1/files"}, 404, "not_found"),
        ({"method": "PUT"}, 405, "method_not_allowed"),
    ]
    for sent, status, code in cases:
        await client.send(**sent)
        assert (client.status, client.error["code"]) == (status, code)
        await client.send(**{"path": "/v1/messages", **sent})
        if "path" not in sent:
            assert (client.status, json.loads(client.body)["type"]) == (status, "error")
    assert client.counted == []
    only = Client(tmp_path, Host(Response()), ROUTE, key=replace(KEY, model_names=frozenset("a")))
    assert (await only.send()).status == 404
    listed = json.loads((await client.send("/v1/models", method="GET")).body)["data"]
    assert [each["id"] for each in listed] == ["small", "small/french"]
    assert json.loads((await client.send("/v1/models/small")).body)["state"] == "ready"


@pytest.mark.asyncio
async def test_a_key_and_a_deployment_that_were_made_just_now_are_waited_for(tmp_path):
    class Late(Fixed):
        async def renewed(self, seconds):
            await super().renewed(seconds)
            self.set(*([ROUTE] if self.snapshot.keys else []))  # the key is made first

    client = Client(tmp_path, Host(Response()))
    client.gateway.routes = routes = Late(key=None)
    assert (await client.send()).status == 200
    assert routes.num_renewed == 2
    assert (await client.send(document=CHAT | {"model": "other"})).status == 404
    assert (await client.send(authorization="")).status == 401  # nothing to wait for
    assert routes.num_renewed == 3


@pytest.mark.asyncio
async def test_strangers_and_each_key_have_places_of_their_own_to_wait_for_what_is_new(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(application, "MOST_STRANGERS", 3)
    monkeypatch.setattr(application, "MOST_NEW_NAMES", 2)
    client, going = Client(tmp_path, Host(Response()), ROUTE), asyncio.Event()
    waiting = []

    async def renewed(_seconds):
        waiting.append(1)
        await going.wait()

    client.routes.renewed = renewed
    other = key_hash("other")
    keys = client.routes.snapshot.keys | {other: replace(KEY, id="k2")}
    client.routes._publish(Snapshot(keys, client.routes.snapshot.routes))
    sending = []
    for sent, places in (
        ({"authorization": "Bearer no"}, 3),
        ({"document": CHAT | {"model": "new"}}, 2),
        ({"document": CHAT | {"model": "new"}, "authorization": "Bearer other"}, 2),
    ):
        before = len(waiting)
        sending += [asyncio.ensure_future(client.send(**sent)) for _ in range(places + 2)]
        await asyncio.sleep(0.05)
        assert len(waiting) == before + places, sent
    going.set()
    await asyncio.gather(*sending)
    assert client.gateway._renewing == {}


@pytest.mark.asyncio
async def test_routes_are_renewed_by_a_look_at_the_database_that_begins_later(monkeypatch):
    begun, going = threading.Event(), threading.Event()

    def load(_used) -> Snapshot:
        begun.set()
        going.wait(20)
        return Snapshot()

    monkeypatch.setattr(routes, "tokens_used", dict)
    found = Routes(load)
    found._loop = asyncio.get_running_loop()
    reading = asyncio.create_task(asyncio.to_thread(found.refresh))
    await asyncio.to_thread(begun.wait, 20)
    waiting = asyncio.create_task(found.renewed(20))
    await asyncio.sleep(0)
    going.set()
    await reading
    await found.change(0.01)
    assert not waiting.done()
    await asyncio.to_thread(found.refresh)
    async with asyncio.timeout(5):
        await waiting
    await found.renewed(0.01)  # nobody reads any more


@pytest.mark.asyncio
async def test_a_model_is_listed_with_what_its_endpoint_said_last(tmp_path, monkeypatch):
    monkeypatch.setattr(cards, "SECONDS", 0.05)
    monkeypatch.setattr(cards, "FAILED_SECONDS", 0.0)
    said = {"max_model_len": 8192, "capabilities": ["chat", "tools"]}
    told = json.dumps({"data": [{"id": "small", "secret": 1, **said}, {"id": "french"}]}).encode()
    never = Response(then=asyncio.Event())
    dark = [TunnelError("lost", "gone"), never, Response(b"{}"), Response(told[:-9]),
            Response(json.dumps({"data": [{"capabilities": ["x" * 41]}]}).encode())]  # fmt: skip
    client = Client(tmp_path, Host(*dark, Response(told)), ROUTE)

    async def listed() -> list[dict]:
        return json.loads((await client.send("/v1/models", method="GET")).body)["data"]

    for _ in dark:
        assert {"max_model_len", "capabilities"}.isdisjoint((await listed())[0])
    assert never.is_closed
    for each in await listed():
        assert said.items() <= each.items()
        assert "secret" not in each
    assert client.host.asked[-1][:3] == ("a1", "GET", "/v1/models")
    assert client.host.asked[-1][3] == {b"authorization": b"Bearer inner"}
    client.routes.set(ASLEEP)  # nobody can be asked
    assert (await listed())[0].items() >= {"state": "asleep", **said}.items()
    assert len(client.host.asked) == len(dark) + 1
    client.routes.set(replace(ROUTE, targets=(TARGET._replace(attempt_id="a2"),)))
    await listed()
    assert client.host.asked[-1][0] == "a2"


@pytest.mark.asyncio
async def test_an_endpoint_is_asked_once_for_all_and_again_a_while_after_it_failed(
    tmp_path, monkeypatch
):
    told = Response(b'{"data": [{"max_model_len": 8192}]}', then=asyncio.Event())
    client = Client(tmp_path, Host(TunnelError("lost", "gone"), told), ROUTE)
    found = client.gateway._cards
    for _ in range(3):
        assert "max_model_len" not in (await found.of([ROUTE]))[0]
    assert len(client.host.asked) == 1
    later = cards.monotonic() + cards.FAILED_SECONDS
    monkeypatch.setattr(cards, "monotonic", lambda: later)
    asking = [asyncio.ensure_future(found.of([ROUTE])) for _ in range(4)]
    await asyncio.sleep(0.01)
    asking.pop(0).cancel()  # its client has left
    told.then.set()
    assert [each[0]["max_model_len"] for each in await asyncio.gather(*asking)] == [8192] * 3
    assert len(client.host.asked) == 2


@pytest.mark.asyncio
async def test_a_stream_passes_without_the_comments_wherever_its_chunks_end():
    text = b'data: {"a": ": usage 1 1 1"}\n\n: usage 5 0 1\n\n: waiting\n\ndata: b\n\n: usage 5 0 2\n\n'
    plain = b'data: {"a": ": usage 1 1 1"}\n\n: waiting\n\ndata: b\n\n'
    for first in range(len(text)):
        for second in range(first, len(text), 3):
            comments = UsageComments()
            parts = (text[:first], text[first:second], text[second:])
            shown = b"".join(comments.feed(each) for each in parts) + comments.rest()
            assert (shown, comments.used) == (plain, TokensUsed(5, 0, 2)), (first, second)


@pytest.mark.asyncio
async def test_a_client_that_leaves_or_a_revoked_key_ends_the_generation_and_counts(tmp_path):
    for is_revoked in (False, True):
        go_on = asyncio.Event()
        stream = b"data: a\n\n: usage 4 0 1\n\n"
        response = Response(stream, then=go_on, content_type="text/event-stream")
        client = Client(tmp_path, Host(response), ROUTE)
        sending = asyncio.ensure_future(client.send(document=CHAT | {"stream": True}))
        await client.came.wait()
        if is_revoked:
            client.routes.set(ROUTE, key=None)
        else:
            client.left.set()
        await sending
        assert response.is_closed
        assert (b"revoked" in client.body) == is_revoked
        (answer,) = client.counted
        assert (answer.used, answer.status, answer.is_cut) == (TokensUsed(4, 0, 1), 200, True)


@pytest.mark.asyncio
async def test_a_replica_that_does_not_answer_is_left_for_another_or_for_itself_again(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(application, "LOOK_SECONDS", 0.01)
    lost = TunnelError("lost", "The connection broke.")
    ending = Response(b"{}", status=503)
    client = Client(tmp_path, Host(lost, ending, Response(b"yes")), ROUTE)
    assert (await client.send()).body == b"yes"
    assert (len(client.host.asked), ending.is_closed, len(client.counted)) == (3, True, 1)
    refused = TunnelError("refused", "Nothing listens.")
    client = Client(tmp_path, Host(refused, Response(b"yes")), ROUTE)
    seen = []
    client.routes.meet = lambda replica_id, is_silent: seen.append(
        (replica_id, is_silent, client.routes._open[replica_id])
    )
    assert (await client.send()).body == b"yes"
    assert seen == [("r1", True, 1), ("r1", False, 1)]  # while it counts as used
    for host, words in (("h1", "no replica takes requests"), ("h2", "is not connected")):
        there = replace(ROUTE, targets=(TARGET._replace(host_id=host),))
        client = await Client(tmp_path, Host(refused), there).send(prefer="wait=0")
        assert (client.status, client.error["code"]) == (503, "unreachable")
        assert words in client.error["message"]
    client = Client(tmp_path, Host(lost), ROUTE)
    await client.send()
    assert (client.status, client.error["code"]) == (502, "unreachable")
    assert client.counted[0].status == 502
    broken = Response(b'{"half', fault=lost)
    client = await Client(tmp_path, Host(broken), ROUTE).send()
    assert (client.status, client.error["code"]) == (502, "lost")
    stream = Response(b"data: a\n\n", fault=lost, content_type="text/event-stream")
    client = await Client(tmp_path, Host(stream), ROUTE).send()
    assert b'"code":"lost"' in client.body
    assert client.counted[0].is_cut


@pytest.mark.asyncio
async def test_a_sleeping_model_is_woken_and_the_request_held_with_heartbeats(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(application, "HEARTBEAT_SECONDS", 0.01)
    stream = Response(b"data: a\n\n", content_type="text/event-stream")
    client = Client(tmp_path, Host(stream), ASLEEP)
    sending = asyncio.ensure_future(client.send(document=CHAT | {"stream": True}))
    await client.came.wait()
    assert (client.routes.woken, client.body) == (["d1"], b": waiting\n\n")
    client.routes.set(replace(ROUTE, state=DeploymentState.READY))
    await sending
    assert client.body.endswith(b": waiting\n\ndata: a\n\n")
    assert client.counted[0].status == 200


@pytest.mark.asyncio
async def test_a_deployment_is_in_use_while_a_request_is_at_a_replica_not_while_it_waits(tmp_path):
    go_on = asyncio.Event()
    response = Response(b"data: a\n\n", then=go_on, content_type="text/event-stream")
    client = Client(tmp_path, Host(response), ASLEEP)
    woken = asyncio.Event()
    client.routes.wake = lambda _: woken.set()
    sending = asyncio.ensure_future(client.send(document=CHAT | {"stream": True}))
    await woken.wait()
    assert (client.routes._open, client.routes._ended) == ({}, set())
    client.routes.set(ROUTE)
    await client.came.wait()
    assert client.routes._open == {"r1": 1}
    go_on.set()
    await sending
    assert (client.routes._open, client.routes._ended) == ({}, {"r1"})
    assert client.gateway._running == {}


@pytest.mark.django_db(databases="__all__")
def test_use_is_stored_as_long_as_it_lasts(team, alice, host):
    plan = Plan.objects.create(team=team, owner=alice)
    used, unused = (
        Replica.objects.create(
            deployment=Deployment.objects.create(team=team, owner=alice, name=name, plan=plan),
            job=make_job(team, alice, host), plan=plan, created_at=now(),
        )
        for name in "ab"
    )  # fmt: skip
    found = Routes()

    def reported() -> bool:
        for rows in (Replica.objects.all(), Deployment.objects.all()):
            rows.update(last_used_at=None)
        found.report()
        for each in (used, used.deployment, unused, unused.deployment):
            each.refresh_from_db()
        assert (unused.last_used_at, unused.deployment.last_used_at) == (None, None)
        assert (used.last_used_at is None) == (used.deployment.last_used_at is None)
        return used.last_used_at is not None

    assert not reported()
    assert not reported()
    with found.use(used.pk):
        assert reported()
        assert reported()
    assert reported()  # one ended since
    assert not reported()


@pytest.mark.django_db(databases="__all__")
def test_a_replica_that_takes_no_connection_is_known_until_it_answers(team, alice, host):
    plan = Plan.objects.create(team=team, owner=alice)
    row = Deployment.objects.create(team=team, owner=alice, name="a", plan=plan)
    job = make_job(team, alice, host)
    attempt = job.attempts.create(host=host, number=1, fence=1)
    Job.objects.filter(pk=job.pk).update(state="running", current_attempt=attempt)
    replica = Replica.objects.create(
        deployment=row, job=job, plan=plan, created_at=now(), ready_at=now()
    )
    ready = replace(ROUTE, targets=(TARGET._replace(replica_id=replica.pk),))
    found, since = Fixed(ready), []

    def state_after(*, is_silent: bool) -> str:
        with found.use(replica.pk):
            found.meet(replica.pk, is_silent=is_silent)
        found.report()
        since.append(view_of(row).silent_since)
        return view_of(row).state

    assert [state_after(is_silent=each) for each in (False, True, True)] == [
        "ready", "silent", "silent"
    ]  # fmt: skip
    assert since[0] is None
    assert since[1] == since[2]
    other_gateway = Fixed(ready)
    with other_gateway.use(replica.pk):
        other_gateway.meet(replica.pk, is_silent=False)
    other_gateway.report()
    assert view_of(row).state == "ready"
    assert state_after(is_silent=True) == "silent"
    again = job.attempts.create(host=host, number=2, fence=2)  # retried: it loads anew
    Job.objects.filter(pk=job.pk).update(current_attempt=again)
    again.events.create(kind="endpoint", seq=1, t_ms=0, body={})
    view = view_of(row)  # before the ticker has seen it
    assert (view.state, view.replicas[0].silent_since is None) == ("ready", False)
    deployment_advance(row)
    assert Replica.objects.get().silent_since is None


@pytest.mark.asyncio
async def test_use_is_stored_while_the_routes_wait_for_a_slow_database(monkeypatch):
    is_read, stored = threading.Event(), threading.Semaphore(0)
    monkeypatch.setattr(routes, "tokens_used", lambda: is_read.wait(60) and {})
    monkeypatch.setattr(routes, "REFRESH_SECONDS", 0.01)
    monkeypatch.setattr(Routes, "report", lambda _: stored.release())
    found = Routes(load=lambda _: Snapshot())
    found.start()
    try:
        for _ in range(3):
            assert await asyncio.to_thread(stored.acquire, timeout=60)
        assert not found.is_known
    finally:
        found.stop()
        is_read.set()


@pytest.mark.asyncio
async def test_a_request_is_held_no_longer_than_allowed_or_than_makes_sense(tmp_path):
    soon = now() + timedelta(seconds=40)
    cases = [
        (ASLEEP, {"prefer": "wait=0"}, "loading", "30"),
        (replace(ASLEEP, load_seconds=90.0), {}, "loading", "90"),
        (replace(ASLEEP, seconds_to_go=12.0, load_seconds=90.0), {}, "loading", "12"),
        (replace(ASLEEP, state=DeploymentState.PAUSED), {}, "paused", None),
        (
            replace(ASLEEP, state=DeploymentState.FAILING, problem="no GPU", next_try_at=soon),
            {},
            "failing",
            "40",
        ),
    ]
    for route, headers, code, again in cases:
        client = await Client(tmp_path, Host(Response()), route).send(**headers)
        assert (client.status, client.error["code"]) == (503, code)
        assert client.headers.get("retry-after") == again
        assert client.counted[0].status == 503
        assert client.routes.woken == (["d1"] if code == "loading" else [])


@pytest.mark.asyncio
async def test_limits_answer_429_and_say_when_to_come_back(tmp_path):
    answer = Response(b"{}", x_slipway_usage="50 0 50")
    minute = Client(tmp_path, Host(answer), ROUTE, key=replace(KEY, requests_per_minute=1))
    assert (await minute.send()).headers["x-ratelimit-remaining-requests"] == "0"
    assert ((await minute.send()).status, minute.error["code"]) == (429, "requests_per_minute")
    assert 0 < int(minute.headers["retry-after"]) <= 60
    go_on = asyncio.Event()
    waits = Response(b"data: a\n\n", then=go_on, content_type="text/event-stream")
    one = Client(tmp_path, Host(waits), ROUTE, key=replace(KEY, max_concurrency=1))
    sending = asyncio.ensure_future(one.send())
    await one.came.wait()
    other = Client(tmp_path, Host(waits), ROUTE, key=replace(KEY, max_concurrency=1))
    other.gateway = one.gateway
    assert ((await other.send()).status, other.error["code"]) == (429, "max_concurrency")
    go_on.set()
    await sending


@pytest.mark.django_db(databases="__all__")
def test_a_key_opens_as_long_as_its_owner_may_launch(team, alice, bob):
    key_make(team=team, by=alice, options=KeyOptions(name="laptop"))
    held = Membership.objects.filter(user=alice)
    for change, back in (
        (lambda: held.update(role="viewer"), lambda: held.update(role="practitioner")),
        (
            lambda: ServingKey.objects.update(owner=None),
            lambda: ServingKey.objects.update(owner=bob),
        ),
        (
            lambda: User.objects.update(is_active=False),
            lambda: User.objects.update(is_active=True),
        ),
        (lambda: Membership.objects.filter(user=bob).delete(), None),
    ):
        assert len(load_snapshot({}).keys) == 1
        change()
        assert not load_snapshot({}).keys
        if back is not None:
            back()


@pytest.mark.django_db(databases="__all__")
def test_a_journal_on_nfs_is_counted_where_only_what_is_writable_takes_an_exclusive_lock(
    tmp_path, db, monkeypatch
):
    flock = fcntl.flock

    def of_nfs(file: int | IO[bytes], operation: int) -> None:  # flock(2): NFS details
        handle = file if isinstance(file, int) else file.fileno()
        if operation & fcntl.LOCK_EX and fcntl.fcntl(handle, fcntl.F_GETFL) & 3 == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", of_nfs)
    left = tmp_path / "left.jsonl"
    left.touch()
    assert (count_left(left), left.exists()) == ({}, False)


def test_each_answer_is_counted_once_through_any_death(tmp_path, team, alice):
    plan = Plan.objects.create(team=team, owner=alice)
    deployment = Deployment.objects.create(team=team, owner=alice, name="small", plan=plan)
    key, _ = key_make(team=team, by=alice, options=KeyOptions(name="laptop"))
    journal = Journal(tmp_path)

    def answered(tokens: TokensUsed, status: int = 200, *, is_cut: bool = False) -> None:
        opened = journal.begin(key.pk, deployment.pk)
        opened.note(tokens)
        opened.end(status, is_cut=is_cut)

    for _ in range(3):
        answered(TokensUsed(10, 4, 5))
    day = now().date().isoformat()
    for counted, pending in (([], 45), ([journal.count] * 2, 0)):
        for count in counted:
            count()
            assert journal.pending_tokens(key.pk, day) == 45  # no snapshot has them yet
        with journal.settling():
            assert journal.pending_tokens(key.pk, day[:7]) == 45
        assert journal.pending_tokens(key.pk, day) == pending
    answered(TokensUsed(10, 4, 5), 500, is_cut=True)
    journal.begin(key.pk, deployment.pk).note(TokensUsed(1, 0, 2))
    journal.begin(key.pk, deployment.pk)
    (left,) = tmp_path.glob("*.jsonl")
    assert (count_left(left), left.exists()) == ({}, True)  # its gateway lives
    journal._close()
    with left.open("ab") as file:
        file.write(b'["no answer"]\n["torn')  # killed while it wrote
    count_file(left, is_left=True)
    count_file(left, is_left=True)  # and the counting one, before it deleted the files
    Journal(tmp_path).count()
    assert not list(tmp_path.iterdir())
    assert not UsageJournal.objects.exists()
    row = Usage.objects.get()
    found = (row.requests, row.failed, row.cut, row.prompt_tokens, row.completion_tokens)
    assert found == (6, 1, 3, 41, 22)
    assert row.cached_tokens == 16
    assert ServingKey.objects.get().last_used_at is not None


@pytest.mark.django_db(databases="__all__")
def test_a_full_journal_is_changed_and_takes_what_is_open_along(
    tmp_path, team, alice, monkeypatch
):
    monkeypatch.setattr("webapp.gateway.journal.MOST_BYTES", 0)
    plan = Plan.objects.create(team=team, owner=alice)
    deployment = Deployment.objects.create(team=team, owner=alice, name="small", plan=plan)
    key, _ = key_make(team=team, by=alice, options=KeyOptions(name="laptop"))
    journal = Journal(tmp_path)
    opened = journal.begin(key.pk, deployment.pk)
    journal.begin(key.pk, deployment.pk).end(200, is_cut=False)
    journal.count()
    assert [each.suffix for each in sorted(tmp_path.iterdir())] == [".jsonl", ".open"]
    opened.note(TokensUsed(1, 0, 7))
    opened.end(200, is_cut=False)
    journal.count()
    row = Usage.objects.get()
    assert (row.requests, row.cut, row.completion_tokens) == (2, 0, 7)


@pytest.mark.asyncio
async def test_limits_holds_and_the_journal_go_on_when_the_clock_is_set(tmp_path, monkeypatch):
    key = replace(KEY, requests_per_minute=3)
    for hours in (1, -1):
        stream = Response(b"data: a\n\n: usage 4 0 1\n\n", content_type="text/event-stream")
        client = Client(tmp_path, Host(stream), ASLEEP, key=key)
        held = [asyncio.ensure_future(client.send()) for _ in range(2)]
        await asyncio.sleep(0)
        with monkeypatch.context() as patch:
            for module in (application, journal_module, key_limits, routes):
                patch.setattr(module, "now", lambda hours=hours: now() + timedelta(hours=hours))
            await asyncio.sleep(0.05)
            assert not any(each.done() for each in held), hours
            client.routes.set(ROUTE, key=key)
            await asyncio.gather(*held)
            assert client.status == 200, hours
            await client.send()
            assert client.headers["x-ratelimit-remaining-requests"] == "0", hours
            assert (await client.send()).status == 429, hours  # no minute has passed
        assert (await client.send()).status == 429, hours
        assert [each.used for each in client.counted] == [TokensUsed(4, 0, 1)] * 3, hours


@pytest.mark.django_db(databases="__all__")
def test_a_failure_after_which_the_clock_was_set_back_is_not_waited_for(team, alice):
    plan = Plan.objects.create(team=team, owner=alice)
    row = Deployment.objects.create(
        team=team, owner=alice, name="small", plan=plan, problem="no GPU", failures=3
    )
    for failed_at, rest in ((now(), timedelta(seconds=20)), (now() + timedelta(hours=1), None)):
        row.failed_at = failed_at
        row.save()
        route = load_snapshot({}).routes[team.pk, "small"]
        assert route.next_try_at == (rest and failed_at + rest)
