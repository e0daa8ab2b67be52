"""What clients' keys used: pages of the API and the file, of many rows."""

import csv
from datetime import timedelta

import pytest
from django.db import connection
from django.test import AsyncClient
from django.test.utils import CaptureQueriesContext

from tests.webapp.conftest import client_of
from webapp.core.clock import now
from webapp.deployments import usage
from webapp.deployments.keys import KeyOptions, key_make
from webapp.deployments.models import Deployment, Usage
from webapp.plans.models import Plan

pytestmark = pytest.mark.django_db(databases="__all__")
NUM_DAYS, NUM_KEYS = 40, 30


@pytest.fixture
def many(team, alice, bob) -> list[Usage]:
    """Usage of thirty keys of one person, and of another one's."""
    plan = Plan.objects.create(team=team, owner=alice)
    small = Deployment.objects.create(team=team, owner=alice, name="small", plan=plan)
    keys = [
        key_make(team=team, by=by, options=KeyOptions(name=f"=key {number}"))[0]
        for by in (alice, bob)
        for number in range(NUM_KEYS)
    ]
    return Usage.objects.bulk_create(
        Usage(key=key, deployment=small, day=now().date() - timedelta(days=day), requests=1)
        for key in keys
        for day in range(NUM_DAYS)
    )


def test_pages_of_usage_are_cut_in_the_database_and_have_each_row_once(many, alice, olga):
    for person, num_rows in ((alice, 30 * NUM_KEYS), (olga, 30 * NUM_KEYS * 2)):
        client, seen, cursor, found = client_of(person), [], "", []
        while cursor is not None:
            with CaptureQueriesContext(connection) as asked:
                page = client.get("/api/v1/usage", {"limit": 150, "cursor": cursor}).json()
            found.append(len(asked))
            assert any("LIMIT 151" in each["sql"] for each in asked)
            seen += [(each["day"], each["key"]) for each in page["items"]]
            cursor = page["next_cursor"]
        assert (len(seen), len(set(seen))) == (num_rows, num_rows), person
        assert [day for day, _ in seen] == sorted((day for day, _ in seen), reverse=True)
        assert max(found) - min(found) <= 1, found
    for wrong in ("x", usage_cursor(client)[:-3]):
        assert client.get("/api/v1/usage", {"cursor": wrong}).status_code == 422, wrong
    other = {"cursor": usage_cursor(client), "days": 7}
    assert client.get("/api/v1/usage", other).status_code == 422


def usage_cursor(client) -> str:
    return client.get("/api/v1/usage", {"limit": 1}).json()["next_cursor"]


@pytest.mark.asyncio
@pytest.mark.django_db(databases="__all__", transaction=True)
async def test_the_file_of_a_year_is_streamed_in_parts_with_each_row_once(
    many, alice, monkeypatch
):
    monkeypatch.setattr(usage, "CHUNK_ROWS", 100)
    client = AsyncClient()
    await client.aforce_login(alice)
    past = await client.get("/deployments/usage.csv?month=2020-01")
    assert len([part async for part in past.streaming_content]) == 1
    answer = await client.get("/deployments/usage.csv")
    parts = [part.decode() async for part in answer.streaming_content]
    assert len(parts) == 1 + NUM_KEYS * NUM_DAYS // 100
    header, *lines = csv.reader("".join(parts).splitlines())
    assert header[:4] == ["day", "key", "owner", "deployment"]
    assert len({(line[0], line[1]) for line in lines}) == len(lines) == NUM_KEYS * NUM_DAYS
    assert {(line[1][:2], line[2], line[4]) for line in lines} == {("'=", "alice", "1")}
