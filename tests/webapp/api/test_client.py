"""The Python client: as the schema says, and against the site itself."""

import asyncio
import inspect
import json

import httpx
import pytest
from django.core.asgi import get_asgi_application
from django.test import Client

from runners.client import ApiError, AsyncSlipway, Slipway
from tests.webapp.api.operations import operations
from webapp.accounts.tokens import token_make
from webapp.operations.management.commands.client import (
    FOLDER,
    SCHEMA,
    client_sources,
    schema_text,
)
from webapp.wizard.documents import schema_address

pytestmark = pytest.mark.django_db(databases="__all__")


def test_it_is_what_the_schema_gives_today():
    for name, source in client_sources().items():
        assert (FOLDER / name).read_text() == source, "run python3 manage.py client"
    assert SCHEMA.read_text() == schema_text(), "run python3 manage.py client"


def test_editors_read_the_schema_of_documents_without_a_login(alice, settings, rf):
    settings.SERVESTATIC_AUTOREFRESH = settings.SERVESTATIC_USE_FINDERS = True
    assert Client().get(schema_address(rf.get("/"))).status_code == 200
    signed_in = Client()
    signed_in.force_login(alice)
    assert json.loads(SCHEMA.read_text()) == signed_in.get("/api/v1/plans/schema").json()


def test_both_halves_have_every_operation_with_types():
    names = {each.name for each in operations()}
    for half in (Slipway, AsyncSlipway):
        own = {name for name, _ in inspect.getmembers(half, inspect.isfunction)}
        assert names <= own
        for name in names:
            assert "return" in getattr(half, name).__annotations__, name
            assert getattr(half, name).__doc__, name


@pytest.fixture
def token(alice, team) -> str:
    return token_make(team=team, by=alice, name="t", scope="launch")[1]


def by_django(request: httpx.Request) -> httpx.Response:
    """Send a request through the test client, in the test's transaction; others as they are."""
    if request.url.host == "127.0.0.1":  # a test's own server
        with httpx.HTTPTransport() as transport:
            reply = transport.handle_request(request)
            return httpx.Response(reply.status_code, content=reply.read(), headers=reply.headers)
    headers = dict(request.headers)
    kind = headers.pop("content-type", "")
    path = request.url.raw_path.decode()
    answer = Client(headers=headers).generic(request.method, path, request.content, kind)
    return httpx.Response(answer.status_code, content=answer.content, headers=answer.headers)


def test_a_script_plans_launches_and_reads(token, host):
    client = httpx.Client(transport=httpx.MockTransport(by_django))
    with Slipway("http://testserver", token, client=client) as slipway:
        assert slipway.get_me().user == "alice"
        plan = slipway.create_plan(
            {"goal": "pretrain", "model": "demo", "hardware": {"host": host.slug}}
        )
        assert plan.answer is not None
        assert plan.answer.plans[0].fits
        changed = slipway.change_plan(plan.id, {"workload": {"sequence_length": 64}})
        assert (changed.version, changed.document["workload"]["sequence_length"]) == (2, 64)
        launched = slipway.launch_plan(changed.id, {"name": "run"}, idempotency_key="k")
        assert slipway.launch_plan(changed.id, {"name": "run"}, idempotency_key="k") == launched
        assert [job.name for job in slipway.list_jobs().items] == ["run"]
        assert slipway.stop_job(launched.job.id).is_final
        with pytest.raises(ApiError, match="cannot be stopped") as caught:
            slipway.stop_job(launched.job.id)
        assert caught.value.status == 409
        assert slipway.get_model("meta-llama/Llama-3.1-8B").shape is not None
        again = slipway.run_job_again(launched.job.id)
        assert slipway.compare_jobs(job=[launched.job.id, again.id]).names == ["run", again.name]


@pytest.mark.django_db(databases="__all__", transaction=True)
def test_the_asynchronous_half_does_the_same(token, host):
    async def ask() -> tuple[str, list[str]]:
        wire = httpx.ASGITransport(app=get_asgi_application())
        client = httpx.AsyncClient(transport=wire)
        async with AsyncSlipway("http://testserver", token, client=client) as slipway:
            me, hosts = await slipway.get_me(), await slipway.list_hosts()
            return me.user, [each.slug for each in hosts.items]

    assert asyncio.run(ask()) == ("alice", [host.slug])
