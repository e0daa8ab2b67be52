"""States of the web product that pages show, beyond those of its own tests' fixtures."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.files.uploadedfile import SimpleUploadedFile

from runners.jobspec import (
    BenchmarkSpec,
    CompressSpec,
    EvaluateSpec,
    FolderModel,
    GenerateSpec,
    ServeSpec,
)
from tests.webapp.conftest import EXIT_OK, STARTED, batch_of, claim, make_job
from tests.webapp.jobs.gangs import make_gang, make_hosts, start
from tests.webapp.jobs_pages.conftest import PREDICTION
from webapp.accounts.models import Membership, Role, Team
from webapp.accounts.secrets import secret_store
from webapp.agents.ingest import events_accept
from webapp.core.clock import now
from webapp.datasets.services import dataset_store
from webapp.hosts.machines import virtual_host_create
from webapp.hosts.models import Host
from webapp.hosts.services import token_create
from webapp.jobs.launching import plan_launch
from webapp.jobs.models import Attempt, Job, Measurement
from webapp.jobs.services import job_stop, job_submit
from webapp.plans.models import Plan
from webapp.plans.planning import plan_compute

PASSWORD = "correct horse battery"
SILENCE = timedelta(minutes=6)
MODEL = FolderModel(path="tiny")
SPECS = {
    "compress": CompressSpec(model=MODEL, method="gptq"),
    "evaluate": EvaluateSpec(model=MODEL),
    "benchmark": BenchmarkSpec(model=MODEL, batch_size=4),
    "generate": GenerateSpec(model=MODEL),
    "serve": ServeSpec(model=MODEL, served_name="tiny"),
}
MEASURED = {
    "compress": {
        "original_disk_bytes": 12e6, "disk_bytes": 6e6, "original_perplexity": 60.0,
        "perplexity": 60.3, "original_decode_tokens_per_second": 100.0,
        "decode_tokens_per_second": 150.0, "peak_memory_bytes": 5e8,
    },
    "evaluate": {
        "perplexity": 60.0, "capitals/acc": 0.625, "capitals/acc_stderr": 0.0321,
        "original_capitals/acc": 0.75, "original_capitals/acc_stderr": 0.03,
        "capitals/acc_difference": -0.125, "capitals/acc_difference_low": -0.2,
        "capitals/acc_difference_high": -0.05,
    },
    "benchmark": {
        "prefill_tokens_per_second": 900.0, "decode_tokens_per_second": 120.0,
        "peak_memory_bytes": 5e8, "perplexity": 61.0,
    },
    "generate": {"tokens_per_second": 210.0, "peak_memory_bytes": 6e8},
}  # fmt: skip
PREDICTED = {
    "decode_tokens_per_second": {
        "value": 110.0, "low": 90.0, "high": 140.0, "unit": "tokens_per_second",
    },
    "peak_memory_bytes": {"value": 4e8, "low": 3e8, "high": 4.5e8, "unit": "bytes"},
}  # fmt: skip


@pytest.fixture
def root() -> User:
    return User.objects.create_superuser("root", password=PASSWORD)


@pytest.fixture
def ada(team: Team) -> User:
    """An admin of alice's team."""
    user = User.objects.create_user("ada")
    Membership.objects.create(user=user, team=team, role=Role.ADMIN)
    return user


@pytest.fixture
def of_kind(team: Team, alice: User, host: Host) -> Callable[[str], Job]:
    """Return a maker of a job of a kind, which its host has started and, but a server, ended."""

    def make(kind: str) -> Job:
        job = make_job(team, alice, host, spec=SPECS[kind], name=f"A {kind} job",
                       model_name="tiny", prediction=PREDICTED)  # fmt: skip
        attempt = job_submit(job=job, by="alice").current_attempt
        assert attempt is not None
        claim(attempt)
        events: list[tuple[str, dict[str, Any]]] = [("started", STARTED)]
        if kind == "serve":
            address = {"host": "127.0.0.1", "port": 8000, "model": "tiny", "has_keys": False}
            events.append(("endpoint", address))
        else:
            notes = {"perplexity": "8192 held-out tokens"}
            events.append(("result", {"measured": MEASURED[kind], "notes": notes}))
            events.append(("exited", EXIT_OK))
        events_accept(host=host, batch=batch_of(attempt, *events))
        return Job.objects.get(pk=job.pk)

    return make


@pytest.fixture
def draft(team: Team, alice: User, host: Host) -> Job:
    """A job that nobody has submitted, with a prediction."""
    return make_job(team, alice, host, prediction=PREDICTION)


@pytest.fixture
def queued(job: Job, team: Team, alice: User, host: Host) -> Job:
    """A job that waits for the host, which another one has."""
    waiting = make_job(team, alice, host, name="Wait for the host", max_duration_seconds=3600.0)
    return job_submit(job=waiting, by="alice")


@pytest.fixture
def stopped(job: Job) -> Job:
    return job_stop(job=job, by="alice")


@pytest.fixture
def stopping(running: Job) -> Job:
    return job_stop(job=running, by="alice")


@pytest.fixture
def ended_as(draft: Job) -> Callable[[str, str], Job]:
    """Return a setter of a final state and its reason."""

    def make(state: str, reason: str) -> Job:
        Job.objects.filter(pk=draft.pk).update(state=state, reason=reason, ended_at=now())
        draft.refresh_from_db()
        return draft

    return make


@pytest.fixture
def gang(team: Team, alice: User) -> Job:
    """A training that runs on two hosts."""
    job = make_gang(team, alice, make_hosts(team, 2))
    start(job)
    job.refresh_from_db()
    return job


@pytest.fixture
def starved(demo_plan: Plan, alice: User) -> Job:
    """A launched plan whose training was refused an allocation."""
    plan_compute(demo_plan)
    job = plan_launch(plan=demo_plan, by=alice)
    assert job.current_attempt is not None
    claim(job.current_attempt)
    attempt = Attempt.objects.get(pk=job.current_attempt_id)
    record = EXIT_OK | {
        "exit_code": 1, "reason": "oom_host", "last_lines": ["Training", "Killed"],
        "conditions": {"memory_available_bytes": 40 * 2**20},
    }  # fmt: skip
    events_accept(
        host=attempt.host, batch=batch_of(attempt, ("started", STARTED), ("exited", record))
    )
    return Job.objects.get(pk=job.pk)


@pytest.fixture
def rack(team: Team) -> Host:
    """A host that is planned for alone."""
    return virtual_host_create(
        team=team, name="Next rack", device="h100-sxm5-80gb", num_devices=8,
        memory_bytes=2 * 1024**4, by="olga",
    )  # fmt: skip


@pytest.fixture
def silent(host: Host) -> Host:
    """A host that was heard six minutes ago."""
    Host.objects.filter(pk=host.pk).update(last_seen_at=now() - SILENCE)
    host.refresh_from_db()
    return host


@pytest.fixture
def measured(host: Host, team: Team, alice: User) -> Host:
    """A host with ten measurements, nine of them inside their interval."""
    job = make_job(team, alice, host)
    attempt = job.attempts.create(number=1, host=host, fence="f")
    for number in range(10):
        value = 130.0 if number == 0 else 104.0
        Measurement.objects.create(
            job=job, attempt=attempt, host=host, metric=f"m{number}", unit="seconds",
            predicted=100.0, predicted_low=90.0, predicted_high=110.0, measured=value,
            ratio=value / 100, measured_at=now(),
        )  # fmt: skip
    factor = {"factor": 1.25, "n": 4, "spread": 0.1}
    host.calibration = {"host": host.pk, "factors": {"compute": factor}}
    host.save()
    return host


@pytest.fixture
def token(team: Team, olga: User) -> str:
    """The id of an enrolment token that no host has used."""
    return str(token_create(team=team, by=olga, name="New box")[0].pk)


@pytest.fixture
def secret(team: Team, olga: User) -> None:
    secret_store(team=team, name="HF_TOKEN", value="hf_0123456789", by=olga)


@pytest.fixture
def dataset(team: Team, alice: User, settings: Any, tmp_path: Any) -> None:
    settings.DATASETS_DIR = tmp_path / "datasets"
    lines = "".join(
        f'{{"instruction": "Say {number}.", "output": "It is {number}."}}\n'
        for number in range(12)
    )
    dataset_store(team=team, by=alice, upload=SimpleUploadedFile("own.jsonl", lines.encode()))
