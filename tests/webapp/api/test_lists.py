"""Every list of the API: one envelope, and pages that together are the whole list."""

import base64
import json

import pytest

from tests.webapp.api.operations import operations
from tests.webapp.conftest import client_of, make_job
from webapp.accounts.models import Membership, Role, Secret
from webapp.accounts.secrets import secret_store
from webapp.accounts.tokens import token_make
from webapp.api.urls import api
from webapp.core.clock import now
from webapp.datasets.models import Dataset
from webapp.deployments.keys import KeyOptions, key_make
from webapp.deployments.models import Deployment, ServingKey, Usage
from webapp.hosts.models import HostModel, ModelCopy, Pool
from webapp.jobs.models import Attempt, Job, LaunchRequest, Measurement, ObservedJob
from webapp.modelhub.models import TeamModel
from webapp.modelhub.remote_code import code_allow
from webapp.plans.models import Plan, PlanState
from webapp.servers.models import ObservedServer
from webapp.tunings.models import Tuning
from webapp.workflows.models import Workflow

pytestmark = pytest.mark.django_db(databases="__all__")
# Numbered events are read from a position on; the formats of one plan are part of it.
NO_PAGES = {"list_job_events", "list_exports"}
LISTS = sorted(
    (each.name, each.path)
    for each in operations()
    if each.name.startswith(("list_", "search")) and each.name not in NO_PAGES
)


def test_every_list_has_the_same_envelope_and_no_reply_is_a_bare_array():
    document = api.get_openapi_schema()
    schemas, wrong = document["components"]["schemas"], []
    names = dict(LISTS)
    for path in document["paths"].values():
        for one in path.values():
            content = one["responses"].get(200, {}).get("content", {})
            reply = content.get("application/json", {}).get("schema", {})
            if "$ref" in reply:
                reply = schemas[reply["$ref"].rpartition("/")[2]]
            is_list = set(reply.get("properties", ())) == {"items", "next_cursor"}
            given = {each.get("name") for each in one.get("parameters", ())}
            has_pages = is_list and {"limit", "cursor"} <= given
            if has_pages != (one["operationId"] in names) or reply.get("type") == "array":
                wrong.append(one["operationId"])
    assert len(LISTS) == 30
    assert wrong == []


@pytest.fixture
def two_of_each(things, team, alice, bob, host, other_host) -> dict[str, str]:
    """Two rows of each list, in addition to ``things``; return what the addresses name."""
    make_job(team, alice, host)
    for name in ("acme/one", "acme/two"):
        HostModel.objects.create(
            host=host, repository=name, size_bytes=1, num_files=1, is_complete=True
        )
        ModelCopy.objects.create(host=host, repository=name, commit="a" * 40, asked_by="olga")
    job = Job.objects.get(pk=things["<job_id>"])
    secret_store(team=team, name="WANDB_KEY", value="w" * 8, by=alice)
    token_make(team=team, by=alice, name="desk", scope="read")
    plan = Plan.objects.get(pk=things["<plan_id>"])
    Workflow.objects.create(team=team, owner=alice, name="Second", document={})
    tuning = Tuning.objects.get()
    Tuning.objects.create(
        **{
            each: getattr(tuning, each)
            for each in ("team", "owner", "name", "options", "document", "figure", "candidates")
        },
        trial={},
    )
    kept = Deployment.objects.get()
    Deployment.objects.create(team=team, owner=alice, name="second", plan=kept.plan)
    ObservedServer.objects.create(team=team, owner=alice, name="second", url="http://b")
    ObservedJob.objects.create(team=team, owner=alice, host=host, job_id="18")
    key_make(team=team, by=alice, options=KeyOptions(name="desk"))
    for key in ServingKey.objects.all():
        Usage.objects.create(key=key, deployment=kept, day=now().date(), requests=1)
    LaunchRequest.objects.create(team=team, plan=plan, asked_by=alice, asked_at=now())
    TeamModel.objects.create(team=team, name="Other", source="config", config={})
    for size in (1, 2):
        Dataset.objects.create(
            team=team,
            name="b",
            sha256=str(size) * 64,
            size_bytes=size,
            num_records=1,
            format="text",
        )
    saved = [
        Plan.objects.create(
            team=team, owner=alice, name="saved", draft=plan.draft, state=PlanState.COMPUTED,
            series="S" * 26, version=version, is_latest=version == 2,
        )
        for version in (1, 2)
    ]  # fmt: skip
    Plan.objects.update(revision=1)  # a draft that nobody changed is not listed
    attempt = job.current_attempt
    for metric in ("ttft_seconds", "tpot_seconds"):
        Measurement.objects.create(
            job=job, attempt=attempt, host=host, metric=metric, predicted=1.0, measured=1.0,
            ratio=1.0, measured_at=now(),
        )  # fmt: skip
    Pool.objects.create(team=team, name="second", slug="second")
    code_allow(team=team, name=f"acme/other@{'a' * 40}", reason="", by="alice")
    client_of(alice)  # a second session
    for number in (8, 9):  # of a job that was tried again
        Attempt.objects.create(
            job=job, host=host, number=number, fence="f", checkpoint_bytes=1, output_bytes=number
        )
    return {"job_id": job.pk, "plan_id": saved[0].pk, "slug": host.slug}


@pytest.mark.parametrize(("name", "path"), LISTS)
def test_the_pages_of_a_list_are_the_whole_list(name, path, two_of_each, alice):
    Membership.objects.filter(user=alice).update(role=Role.ADMIN)
    client = client_of(alice)
    query = {"q": "e"} if name in {"list_models", "list_devices"} else {}
    query |= {"q": "llama-3"} if name in {"search", "list_models"} else {}
    address = f"/api/v1{path.format(**two_of_each)}"

    def page(limit: int, cursor: str) -> dict:
        answer = client.get(address, query | {"limit": limit, "cursor": cursor})
        assert answer.status_code == 200, answer.content
        return answer.json()

    whole = page(200, "")
    size = max(1, len(whole["items"]) // 4)
    found, cursor, num_pages = [], "", 0
    while cursor is not None:
        reply = page(size, cursor)
        assert len(reply["items"]) <= size
        found, cursor, num_pages = [*found, *reply["items"]], reply["next_cursor"], num_pages + 1
    assert (whole["next_cursor"], num_pages > 1) == (None, True), whole["items"]
    assert [without_clocks(each) for each in found] == [
        without_clocks(each) for each in whole["items"]
    ]


def without_clocks(item: dict) -> dict:
    return {name: value for name, value in item.items() if not name.endswith("_seconds")}


def test_a_page_goes_on_where_it_was_though_rows_come_and_go(alice, team):
    names = [f"KEY_{letter}" for letter in "ACDE"]
    for name in names:
        secret_store(team=team, name=name, value="x" * 8, by=alice)
    client = client_of(alice)
    first = client.get("/api/v1/secrets?limit=2").json()
    assert [each["name"] for each in first["items"]] == ["KEY_A", "KEY_C"]
    secret_store(team=team, name="KEY_B", value="x" * 8, by=alice)

    def rest() -> list[str]:
        page = client.get("/api/v1/secrets", {"cursor": first["next_cursor"]}).json()
        return [each["name"] for each in page["items"]]

    assert rest() == ["KEY_D", "KEY_E"]
    Secret.objects.filter(name__in=("KEY_B", "KEY_C")).delete()
    assert rest() == ["KEY_D", "KEY_E"]  # its last item is gone: at its place


def test_a_cursor_made_by_hand_is_refused(alice, team):
    Membership.objects.filter(user=alice).update(role=Role.ADMIN)
    client = client_of(alice)
    for name in ("desk", "laptop"):
        token_make(team=team, by=alice, name=name, scope="read")
    given = client.get("/api/v1/audit?limit=1").json()["next_cursor"]
    at, key, mark = json.loads(base64.urlsafe_b64decode(given + "=" * (-len(given) % 4)))
    for parts in (
        [at, "x", mark], [1, key, mark], ["2026", key, mark], [at, 7, mark], [at, key, 1], [], {},
    ):  # fmt: skip
        text = base64.urlsafe_b64encode(json.dumps(parts).encode()).decode().rstrip("=")
        answer = client.get("/api/v1/audit", {"cursor": text})
        assert (answer.status_code, answer.json()["code"]) == (422, "cursor"), parts
