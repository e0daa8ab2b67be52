"""Databases of before the queue and of before compressions come along."""

import importlib
from datetime import UTC, datetime

import pytest
from django.apps import apps
from django.contrib.auth.hashers import make_password
from django.db import connection
from django.db.migrations.executor import MigrationExecutor

from runners.jobspec import ArtefactModel, CompressSpec
from tests.webapp.conftest import make_job
from tests.webapp.jobs.undone import undone
from webapp.hosts.models import Device, Host, Pool
from webapp.jobs.models import Allocation, Attempt, Job

BEFORE = [
    ("accounts", "0004_login_tries_and_sessions"),
    ("hosts", "0003_clock_offset"),
    ("jobs", "0003_plan_request"),
]
NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)
GPUS = [{"index": i, "uuid": f"GPU-{i}", "name": "L4", "memory_bytes": 24} for i in range(2)]


@pytest.fixture
def migrated(transactional_db) -> None:
    """Go back, fill the old tables as the old code did, and come forward again."""
    leaves = MigrationExecutor(connection).loader.graph.leaf_nodes()
    executor = MigrationExecutor(connection)
    executor.migrate(BEFORE)
    fill(executor.loader.project_state(BEFORE).apps)
    MigrationExecutor(connection).migrate(leaves)


def fill(apps) -> None:
    apps.get_model("auth", "User").objects.create(username="ada", password=make_password("words"))
    host_model = apps.get_model("hosts", "Host")
    job_model = apps.get_model("jobs", "Job")
    for name in ("A", "B"):
        team = apps.get_model("accounts", "Team").objects.create(name=name)
        facts = {"gpus": GPUS} if name == "A" else {"cpu_model": "Xeon", "memory_bytes": 16}
        host = host_model.objects.create(
            team=team, name=f"host {name}", slug=name, pool="rack", facts=facts
        )
        for state in ("queued", "running", "succeeded"):
            job = job_model.objects.create(
                team=team, name=f"{state} {name}", kind="train", spec={}, host=host, state=state
            )
            job.current_attempt = apps.get_model("jobs", "Attempt").objects.create(
                job=job, number=1, host=host, fence="f", claimed_at=claimed_at(state)
            )
            job.save()


def claimed_at(state: str) -> datetime | None:
    return None if state == "queued" else NOON


@pytest.mark.django_db(transaction=True)
def test_an_old_database_comes_along(migrated, client):
    sent = {"username": "ada", "password": "words"}
    assert client.post("/login/", sent)["Location"] == "/"
    assert client.get("/").status_code == 200  # an old password is not an initial one
    rack = Pool.objects.filter(slug="rack")
    assert sorted(rack.values_list("team__name", flat=True)) == ["A", "B"]
    assert set(Host.objects.values_list("pool__slug", "pool__team__name")) == {
        ("rack", "A"),
        ("rack", "B"),
    }
    assert sorted(Device.objects.values_list("host__slug", "kind", "uuid")) == [
        ("A", "gpu", "GPU-0"),
        ("A", "gpu", "GPU-1"),
        ("B", "cpu", "cpu"),
    ]
    waiting = Job.objects.get(name="queued A")
    assert (waiting.host, waiting.requested_host.slug, waiting.pool.slug) == (None, "A", "rack")
    assert not Attempt.objects.filter(job__state="queued").exists()
    held = Allocation.objects.filter(released_at=None)
    assert sorted(held.values_list("attempt__job__name", "device__uuid")) == [
        ("running A", "GPU-0"),
        ("running A", "GPU-1"),
        ("running B", "cpu"),
    ]
    assert Job.objects.get(name="succeeded A").host.slug == "A"


# Jobs that were stored as quantisations are compressions after the migration.


migration = importlib.import_module("webapp.jobs.migrations.0009_compress_kind")
MODEL = ArtefactModel(attempt_id="a1")


@pytest.mark.django_db(databases="__all__")
def test_a_stored_quantisation_becomes_a_compression(team, alice, host):
    for dtype, method in [("int8", "int8"), ("int4", "nf4")]:
        with undone(dtype, method):
            job = make_job(team, alice, host)
            old = {
                "kind": "quantize",
                "model": MODEL.model_dump(),
                "weight_dtype": dtype,
                "seed": 5,
            }
            Job.objects.filter(pk=job.pk).update(kind="quantize", spec=old)

            migration.forward(apps, None)

            job.refresh_from_db()
            assert job.kind == "compress"
            assert CompressSpec(**job.spec) == CompressSpec(model=MODEL, method=method, seed=5)
