"""Deployments that answer for another one: when, in which order, and for whom it counts."""

import asyncio
import json
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runners.shared.event_streams import TokensUsed
from tests.webapp.gateway.test_gateway import (
    ASLEEP,
    CHAT,
    KEY,
    ROUTE,
    TARGET,
    Client,
    Host,
    Response,
)
from webapp.core.clock import now
from webapp.core.problems import InvalidProblem
from webapp.deployments.models import Deployment
from webapp.deployments.services import _checked_fallbacks, reachable
from webapp.deployments.states import DeploymentState
from webapp.gateway import application
from webapp.gateway.routes import Snapshot, load_snapshot
from webapp.gateway.tunnels import TunnelError
from webapp.plans.models import Plan

FIRST = replace(ROUTE, fallbacks=("tiny",))
TINY = replace(
    ROUTE, id="d2", name="tiny", aliases=("t",), adapters=(),
    targets=(TARGET._replace(replica_id="r2", attempt_id="a2"),),
)  # fmt: skip
YES = b'{"model": "tiny"}'


def answer() -> Response:
    return Response(YES, x_slipway_usage="7 2 3")


@pytest.mark.asyncio
async def test_another_deployment_answers_for_one_that_fails_is_full_or_cannot_be_loaded(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(application, "LOOK_SECONDS", 0.01)
    lost = TunnelError("lost", "The connection broke.")
    soon = now() + timedelta(seconds=40)
    failing = replace(FIRST, state=DeploymentState.FAILING, targets=(), next_try_at=soon)
    asleep = replace(FIRST, state=DeploymentState.ASLEEP, targets=(), load_seconds=90.0)
    for name, first, answers in (
        ("lost", FIRST, [lost, lost, answer()]),
        ("full", FIRST, [Response(b"{}", status=429), answer()]),
        ("failed", FIRST, [Response(b"{}", status=500), answer()]),
        ("paused", replace(failing, state=DeploymentState.PAUSED), [answer()]),
        ("failing", failing, [answer()]),
        ("slow to load", asleep, [answer()]),
    ):
        client = Client(tmp_path, Host(*answers), first, TINY)
        for model in ("small", "small/french"):
            client.host.answers = list(answers)
            await client.send(document=CHAT | {"model": model})
            assert (client.status, client.body) == (200, YES), name
            assert client.headers["x-slipway-model"] == "tiny", name
            attempt, *_, body = client.host.asked[-1]
            assert (attempt, json.loads(body)) == ("a2", CHAT | {"model": "tiny"}), name
            counted = client.counted[-1]
            assert (counted.deployment_id, counted.used) == ("d2", TokensUsed(7, 2, 3)), name
        assert len(client.counted) == 2, name
        assert client.routes.woken == (["d1", "d1"] if name == "slow to load" else []), name
        assert all(each.is_closed for each in answers if isinstance(each, Response)), name


@pytest.mark.asyncio
async def test_an_answer_that_has_begun_a_refusal_and_a_key_for_others_do_not_fall_back(tmp_path):
    lost = TunnelError("lost", "The connection broke.")
    begun = Response(b"data: a\n\n", fault=lost, content_type="text/event-stream")
    only = replace(KEY, model_names=frozenset({"small"}))
    for key, first, status, words in (
        (KEY, begun, 200, b"lost"),
        (KEY, Response(b"no", status=400), 400, b"no"),
        (only, Response(b"full", status=429), 429, b"full"),
    ):
        client = Client(tmp_path, Host(first, answer()), FIRST, TINY, key=key)
        await client.send()
        assert client.status == status
        assert words in client.body
        assert [each[0] for each in client.host.asked] == ["a1"]
        assert [each.deployment_id for each in client.counted] == ["d1"]
        assert client.headers["x-slipway-model"] == "small"


@pytest.mark.asyncio
async def test_where_none_answers_the_client_is_told_why_the_first_one_did_not(tmp_path):
    paused = replace(FIRST, state=DeploymentState.PAUSED, targets=())
    other = replace(TINY, state=DeploymentState.PAUSED, targets=())
    client = await Client(tmp_path, Host(answer()), paused, other).send()
    assert (client.status, client.error["code"]) == (503, "paused")
    assert "small" in client.error["message"]
    assert [each.deployment_id for each in client.counted] == ["d1"]
    full = Response(b"full", status=429, retry_after="7")
    for first, status, code in ((paused, 503, "paused"), (FIRST, 429, "upstream")):
        client = await Client(tmp_path, Host(full), first, TINY).send()
        assert (client.status, client.error["code"]) == (status, code)
        assert client.headers.get("retry-after") == ("7" if status == 429 else None)


class Several(Host):
    """A host, or two, whose answers are told by attempt."""

    def __init__(self, **answers) -> None:
        super().__init__()
        self.by_attempt = answers

    async def request(self, attempt_id, *rest):
        self.answers = [self.by_attempt[attempt_id]]
        return await super().request(attempt_id, *rest)


@pytest.mark.asyncio
async def test_a_fall_back_is_asked_at_once_where_no_replica_takes_requests(tmp_path, monkeypatch):
    monkeypatch.setattr(application, "LOOK_SECONDS", 0.01)
    two = replace(FIRST, targets=(TARGET, TARGET._replace(replica_id="r3", attempt_id="a3")))
    away = replace(FIRST, targets=(TARGET._replace(host_id="h2"),))
    refused, none, busy = (TunnelError(each, "") for each in ("refused", "no_endpoint", "busy"))
    unready = Response(b"{}", status=503)
    for name, first, at_first, asked in (
        ("nothing listens", FIRST, refused, 1),
        ("no endpoint", FIRST, none, 1),
        ("full host", FIRST, busy, 1),
        ("two replicas", two, refused, 2),
        ("unready", FIRST, unready, 2),  # it may have been ending
        ("two unready", two, unready, 4),
        ("not connected", away, refused, 0),
    ):
        host = Several(a1=at_first, a3=at_first, a2=answer())
        client = Client(tmp_path, host, first, TINY, key=replace(KEY, hold_seconds=600.0))
        async with asyncio.timeout(5):
            await client.send()
        assert (client.status, client.body) == (200, YES), name
        assert len(host.asked) == asked + 1, name
    host = Several(a1=refused, a2=refused)
    waits = await Client(tmp_path, host, FIRST, TINY).send(prefer="wait=1")
    assert "small" in waits.error["message"]
    assert [each[0] for each in host.asked[:3]] == ["a1", "a2", "a2"]  # the last one is waited for
    paused = replace(TINY, state=DeploymentState.PAUSED, targets=())
    back = Host(refused, refused, answer())
    assert (await Client(tmp_path, back, FIRST, paused).send()).status == 200
    assert len(back.asked) == 3


@pytest.mark.asyncio
async def test_a_fall_back_that_is_deleted_meanwhile_is_left_out(tmp_path):
    paused = replace(FIRST, state=DeploymentState.PAUSED, targets=(), fallbacks=("gone", "tiny"))
    gone = replace(TINY, id="d3", name="gone", aliases=())
    for others, status, code in (((TINY,), 200, ""), ((), 503, "paused")):
        client = Client(tmp_path, Host(answer()), paused, *others)
        ways = [paused, gone, *others]
        client.routes.snapshot.__dict__["ways"] = lambda *_, ways=ways: ways
        await client.send()
        assert client.status == status
        assert not code or client.error["code"] == code


@pytest.mark.asyncio
async def test_a_stream_that_waits_falls_back_with_its_heartbeats(tmp_path, monkeypatch):
    monkeypatch.setattr(application, "HEARTBEAT_SECONDS", 0.01)
    stream = Response(b"data: a\n\n", content_type="text/event-stream")
    asleep = replace(ASLEEP, fallbacks=("tiny",))
    client = Client(tmp_path, Host(stream), asleep, replace(TINY, is_scaled=True))
    sending = asyncio.ensure_future(client.send(document=CHAT | {"stream": True}))
    await client.came.wait()
    client.routes.set(replace(asleep, state=DeploymentState.PAUSED), replace(TINY, is_scaled=True))
    await sending
    assert client.body.endswith(b": waiting\n\ndata: a\n\n")
    assert client.routes._load_of == {"d2": 0}  # was counted where it was, and is no more


def test_fall_backs_are_tried_in_their_order_each_with_its_own():
    named = {
        name: replace(ROUTE, id=name, name=name, fallbacks=tuple(after))
        for name, after in {"a": "bdx", "b": "c", "c": "d", "d": ""}.items()
    }
    snapshot = Snapshot({}, {("t1", name): each for name, each in named.items()})
    assert [each.name for each in snapshot.with_fallbacks(KEY, named["a"])] == ["a", "b", "c", "d"]
    only = replace(KEY, model_names=frozenset("ad"))
    assert [each.name for each in snapshot.with_fallbacks(only, named["a"])] == ["a", "d"]


@pytest.mark.django_db(databases="__all__")
@settings(
    deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    changes=st.lists(
        st.tuples(st.sampled_from("abcd"), st.lists(st.sampled_from("abcd"), max_size=3)),
        max_size=8,
    )
)
def test_whatever_is_saved_in_any_order_leads_nowhere_in_a_circle(team, alice, changes):
    Deployment.objects.all().delete()
    plan = Plan.objects.create(team=team, owner=alice)
    for name in "abcd":
        Deployment.objects.create(team=team, owner=alice, name=name, plan=plan)
    kept: dict[str, list[str]] = {name: [] for name in "abcd"}
    for name, fallbacks in changes:
        wanted = kept | {name: list(dict.fromkeys(fallbacks))}
        has_circle = any(name in reachable(each, wanted.__getitem__) for each in fallbacks)
        if has_circle:
            with pytest.raises(InvalidProblem):
                _checked_fallbacks(team, name, fallbacks)
            continue
        checked = _checked_fallbacks(team, name, fallbacks)
        Deployment.objects.filter(name=name).update(fallbacks=checked)
        kept = wanted
    stored = {each.name: each.fallbacks for each in load_snapshot({}).routes.values()}
    assert {name: list(after) for name, after in stored.items()} == kept
    for name, after in kept.items():
        assert all(name not in reachable(each, kept.__getitem__) for each in after)
    with pytest.raises(InvalidProblem):
        _checked_fallbacks(team, "a", ["e"])
