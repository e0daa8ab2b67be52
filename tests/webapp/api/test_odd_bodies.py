"""What a person sends is kept as it was sent, or refused by its field."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client

from tests.system.faults import contract
from tests.webapp.api.conftest import HostClient
from tests.webapp.conftest import client_of, make_beat
from webapp.accounts.models import AccessToken, Membership, Role
from webapp.api.urls import api
from webapp.core.names import name_fault
from webapp.datasets.models import Dataset
from webapp.hosts.models import Host
from webapp.jobs.models import Job
from webapp.modelhub.models import TeamModel
from webapp.plans.models import Plan, PlanState

pytestmark = pytest.mark.django_db(databases="__all__")
UNSEEN = ["\u200b", "\u3164", "a\u3164b", "a\u0000b", "a\u0007b", "x\ud83d", "a\u202eb", "a\u2028b",
          "\u2800", "\u00ad", "\u200d", "   ", "\ufeffa", "\U000e0001x"]  # fmt: skip
SEEN = ["Sämann", "👩‍🔬", "می‌خواهم", "☃️", "日本", "ᠮᠣᠩ᠎ᠭᠣᠯ", "a b", "e\u0301"]


@pytest.fixture
def admin(alice) -> Client:
    Membership.objects.filter(user=alice).update(role=Role.ADMIN)
    return client_of(alice)


def sent(client: Client, method: str, path: str, text: str) -> Any:
    return client.generic(method, f"/api/v1{path}", text, content_type="application/json")


def named_fields(document: dict[str, Any]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield method, address and place of every field ``name`` of what people send."""
    schemas = document["components"]["schemas"]

    def places(schema: dict[str, Any], seen: frozenset[str]) -> Iterator[tuple[str, ...]]:
        name = schema.get("$ref", "").rpartition("/")[2]
        if name and name not in seen:
            yield from places(schemas[name], seen | {name})
        for part in (
            each for kind in ("anyOf", "oneOf", "allOf") for each in schema.get(kind, ())
        ):
            yield from places(part, seen)
        if "items" in schema:
            yield from (("0", *rest) for rest in places(schema["items"], seen))
        for key, value in schema.get("properties", {}).items():
            if key == "name":
                yield (key,)
            yield from ((key, *rest) for rest in places(value, seen))

    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if body and {"TokenAuth": []} in operation.get("security", ()):
                for place in dict.fromkeys(places(body["schema"], frozenset())):
                    yield method, re.sub("{[^}]*}", "1", path.removeprefix("/api/v1")), place


def holding(place: tuple[str, ...], value: object) -> object:
    """Return a document with a value at a place."""
    for key in reversed(place):
        value = [value] if key == "0" else {key: value}
    return value


def test_every_name_that_people_send_shows(admin):
    fields = list(named_fields(api.get_openapi_schema()))
    assert len(fields) > 20
    places = {".".join(place) for *_, place in fields}
    assert {"name", "launch.name", "document.launch.name"} <= places
    for at, (method, path, place) in enumerate(fields):
        for odd in (UNSEEN[at % len(UNSEEN)], "\u200b"):
            answer = sent(admin, method.upper(), path, json.dumps(holding(place, odd)))
            assert answer.status_code == 422, (path, place, odd, answer.content)
            assert answer.json()["errors"][0]["field"] == ".".join(place), (path, ascii(odd))
    assert [name for name in UNSEEN if not name_fault(name.strip())] == []
    assert [name for name in SEEN if name_fault(name)] == []


def test_pages_and_files_take_no_name_that_does_not_show(admin, things, team, alice):
    plan = Plan.objects.get(pk=things["<plan_id>"])
    jobs, models, tokens = (
        Job.objects.count(),
        TeamModel.objects.count(),
        AccessToken.objects.count(),
    )
    for name in ("a\u200b", "\u3164"):
        for button in ({"go": "keep"}, {"run": "job"}):
            page = admin.post(f"/plans/{plan.pk}/launch/", {**button, "name": name})
            assert page.status_code == 422
            assert "does not show" in page.content.decode(), (button, ascii(name))
        config = json.dumps(TeamModel.objects.get().config)
        admin.post("/models/new/", {"name": name, "config": config})
        admin.post("/hosts/add/", {"name": name, "pool": "default"})
        admin.post("/settings/tokens/save/", {"name": name, "scope": "read", "days": "1"})
        # Django leaves out what Python does not call printable, such as U+200B, by itself.
        file = SimpleUploadedFile("\u3164.jsonl", b'{"text": "a"}\n{"text": "b"}\n')
        assert admin.post("/api/v1/data", {"file": file}).json()["errors"][0]["field"] == "file"
    plan.refresh_from_db()
    assert plan.state == PlanState.DRAFT
    counts = Job.objects.count(), TeamModel.objects.count(), AccessToken.objects.count()
    assert counts == (jobs, models, tokens)
    assert not Dataset.objects.filter(name__contains="\u3164").exists()


def test_nothing_in_a_persons_body_is_exchanged_or_dropped(admin, credential):
    """A host's evidence arrives in any case, repaired."""
    for text, field, words in [
        ('{"goal": "pretrain", "goal": "serve"}', "goal", "stands twice"),
        ('{"workload": {"a": 1, "b": [{"c": 1, "c": 2}]}}', "c", "stands twice"),
        ('{"model": "a\\u0000b"}', "model", "NUL character"),
        ('{"workload": {"prompts": ["a", "x\\ud83d"]}}', "workload.prompts.1", "surrogate"),
        ('{"a\\u0000": 1}', "body", "NUL character"),
        ('{"workload": {"x": NaN}}', "body", "NaN"),
        ('{"workload": {"x": -Infinity}}', "body", "-Infinity"),
        ('{"workload": {"x": 1e999}}', "body", "1e999"),
        ('["a\\u0000"]', "0", "NUL character"),
    ]:  # fmt: skip
        answer = sent(admin, "POST", "/plans", text)
        assert answer.status_code == 422, text
        (fault,) = answer.json()["errors"]
        assert (fault["field"], words in fault["message"]) == (field, True), (text, fault)
    nested = f'{{"a": {"[" * 5000}{"]" * 5000}}}'
    assert sent(admin, "POST", "/plans", nested).status_code in {400, 422}

    beat = make_beat(problems=("a\u0000b",)).model_dump_json()
    assert HostClient(credential).post("/hosts/beat", beat).status_code == 200
    assert Host.objects.get().last_beat["problems"] == ["a�b"]


def test_the_contract_soak_sends_a_host_to_every_operation_of_hosts():
    paths = api.get_openapi_schema()["paths"]
    of_hosts = {
        path
        for path, operations in paths.items()
        if any({"HostAuth": []} in each.get("security", ()) for each in operations.values())
    }
    found = {path for path in paths if re.search(contract.OF_HOSTS, path)}
    assert found == {*of_hosts, "/api/v1/hosts/enroll"}
