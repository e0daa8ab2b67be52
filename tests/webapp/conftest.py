"""People, a host, jobs and a real Redis, for every test of the web side.

alice owns what is made here, bob is on her team, charlie on another, olga is operator and
vera viewer of alice's team.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from django.contrib.auth.models import User
from django.middleware.csrf import CSRF_SECRET_LENGTH, CSRF_SESSION_KEY
from django.test import Client
from django.utils.crypto import get_random_string

from planner.techniques.registry import TECHNIQUES
from runners.jobspec import TrainSpec
from runners.prove.report import Report
from runners.shared.facts import DeviceMeasurement, HostFacts, Microbench
from runners.shared.messages import Beat, ClaimRequest, EnrollRequest, EventBatch, RunEvent
from tests.runners.tools import redis_program
from tests.webapp import answers
from webapp.accounts import tokens
from webapp.accounts.models import Membership, Role, Team
from webapp.accounts.secrets import secret_store
from webapp.accounts.tokens import token_make
from webapp.agents.dispatch import attempt_claim
from webapp.agents.heartbeats import host_beat
from webapp.core.clock import now
from webapp.core.pace import calls
from webapp.datasets.models import Dataset
from webapp.deployments.keys import KeyOptions, key_make
from webapp.deployments.models import Deployment, DeploymentDraft
from webapp.hosts import pools
from webapp.hosts.models import Host, ModelCopy
from webapp.hosts.services import host_enroll, token_create
from webapp.jobs.allocation import attempts_make
from webapp.jobs.artefacts import folder_of
from webapp.jobs.models import Artefact, Attempt, Job, LaunchRequest, Measurement, ObservedJob
from webapp.jobs.services import job_create, job_submit
from webapp.modelhub.models import TeamModel, demo_config
from webapp.modelhub.remote_code import code_allow
from webapp.plans.models import Plan
from webapp.servers.models import ObservedServer
from webapp.tunings.models import Tuning
from webapp.wizard.drafts import draft_begin
from webapp.workflows.models import Workflow

GIB = 1024**3


@pytest.fixture(autouse=True)
def _cheap_passwords(settings) -> None:
    """Hash with the fastest hasher: what is tested here is not the cost of a guess."""
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]


@pytest.fixture(autouse=True)
def _shared_answers() -> Iterator[None]:
    """Let the planner answer each question once in a process."""
    with answers.shared():
        yield


@pytest.fixture(autouse=True)
def _no_calls_before() -> None:
    """Start every test with nobody having called."""
    calls.forget()
    pools.forget()
    tokens.uses.forget()


@pytest.fixture
def team(db) -> Team:
    return Team.objects.create(name="Alice's team")


@pytest.fixture
def other_team(db) -> Team:
    return Team.objects.create(name="Charlie's team")


def _member(name: str, team: Team, role: Role) -> User:
    user = User.objects.create_user(name)
    Membership.objects.create(user=user, team=team, role=role)
    return user


@pytest.fixture
def alice(team) -> User:
    return _member("alice", team, Role.PRACTITIONER)


@pytest.fixture
def bob(team) -> User:
    return _member("bob", team, Role.PRACTITIONER)


@pytest.fixture
def charlie(other_team) -> User:
    return _member("charlie", other_team, Role.PRACTITIONER)


@pytest.fixture
def olga(team) -> User:
    return _member("olga", team, Role.OPERATOR)


@pytest.fixture
def vera(team) -> User:
    return _member("vera", team, Role.VIEWER)


def client_of(user: User) -> Client:
    """Return a browser in which somebody is logged in and has seen a page with a form."""
    client = Client()
    client.force_login(user)
    session = client.session
    session[CSRF_SESSION_KEY] = get_random_string(CSRF_SECRET_LENGTH)
    session.save()
    return client


# A host that reports


def make_facts(**changes) -> HostFacts:
    facts = {
        "hostname": "box",
        "os": "Debian 12",
        "kernel": "6.1",
        "architecture": "x86_64",
        "cpu_model": "Test CPU",
        "cpu_count": 2,
        "memory_bytes": 16 * GIB,
        "disk_total_bytes": 100 * GIB,
        "disk_free_bytes": 50 * GIB,
        "boot_id": "boot-1",
        "python_version": "3.11.7",
        "agent_version": "0.1",
    }
    return HostFacts(**{**facts, **changes})


def make_beat(**changes) -> Beat:
    beat = {
        "boot_id": "boot-1",
        "sent_at_ms": int(time.time() * 1000),
        "agent_version": "0.1",
        "cpu_utilization": 0.1,
        "memory_available_bytes": 12 * GIB,
        "disk_free_bytes": 50 * GIB,
    }
    return Beat(**{**beat, **changes})


def make_microbench() -> Microbench:
    cpu = DeviceMeasurement(
        device="cpu",
        memory_bandwidth_bytes_per_second=12e9,
        flops_per_second={"fp32": 60e9, "bf16": 30e9, "int8": 50e9},
        op_overhead_seconds=8e-6,
        runtime_memory_bytes=350_000_000,
        training_memory_bytes=60_000_000,
    )
    return Microbench(
        measured_at_ms=1_700_000_000_000,
        duration_seconds=4.0,
        torch_version="2.13.0",
        num_threads=2,
        devices=(cpu,),
        disk_write_bytes_per_second=400e6,
    )


def enrol(team: Team, by: User | None = None, name: str = "Box") -> tuple[Host, str]:
    """Return a freshly enrolled host and its credential."""
    _, text = token_create(team=team, by=by, name=name)
    request = EnrollRequest(token=text, facts=make_facts(), sent_at_ms=int(time.time() * 1000))
    reply = host_enroll(request)
    return Host.objects.get(pk=reply.host_id), reply.credential


@pytest.fixture
def enrolled(team) -> tuple[Host, str]:
    return enrol(team)


@pytest.fixture
def host(enrolled) -> Host:
    """A host that is ready and in contact."""
    host, _ = enrolled
    host_beat(host=host, beat=make_beat(microbench=make_microbench()))
    host.refresh_from_db()
    return host


@pytest.fixture
def other_host(team) -> Host:
    """A second host of the same team, enrolled and never heard."""
    return enrol(team, name="Box 2")[0]


@pytest.fixture
def credential(enrolled) -> str:
    return enrolled[1]


# Jobs


def make_job(team: Team, owner: User, host: Host, **changes) -> Job:
    fields = {"spec": TrainSpec(), "name": "Train the demo model", "model_name": "demo"}
    return job_create(team=team, owner=owner, host=host, **{**fields, **changes})


@pytest.fixture
def draft(team, alice, host) -> Job:
    return make_job(team, alice, host)


@pytest.fixture
def job(draft) -> Job:
    """A submitted job, given to its host, not yet claimed."""
    return job_submit(job=draft, by="alice")


def new_attempt(job: Job) -> Attempt:
    """Return the job's next attempt on its host, which holds no device."""
    host = job.shown_host
    assert host is not None
    return attempts_make(job=job, gang=[(host, ())])[0]


def claim(attempt: Attempt, claim_id: str = "folder-1", **changes):
    fields = {"fence": attempt.fence, "claim_id": claim_id, "boot_id": "boot-1"}
    request = ClaimRequest(**{**fields, **changes})
    return attempt_claim(attempt_id=attempt.pk, host=attempt.host, request=request).request


@pytest.fixture
def attempt(job) -> Attempt:
    """The job's attempt, claimed by its host."""
    claim(job.current_attempt)
    return Attempt.objects.get(pk=job.current_attempt_id)


STARTED = {"pid": 7, "boot_id": "boot-1", "argv": ["python"]}
EXIT_OK = {
    "exit_code": 0,
    "signal": None,
    "reason": "ok",
    "by": "supervisor",
    "started_at_ms": 1,
    "ended_at_ms": 2,
}


def batch_of(attempt: Attempt, *events: tuple[str, dict], first: int = 1) -> EventBatch:
    """Return consecutive events, numbered from ``first``, one a second by their numbers."""
    begin = 1_700_000_000_000 + 1000 * (first - 1)
    numbered = tuple(
        RunEvent(seq=first + index, t_ms=begin + 1000 * index, kind=kind, body=body)
        for index, (kind, body) in enumerate(events)
    )
    return EventBatch(attempt_id=attempt.pk, fence=attempt.fence, events=numbered)


# A real Redis


class RedisServer:
    """A server on a unix socket with an append-only file, which tests may kill."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        binary = redis_program()
        options = ["--port", "0", "--unixsocket", str(self.socket), "--dir", str(self.folder)]
        options += ["--appendonly", "yes", "--save", "", "--logfile", str(self.folder / "log")]
        self.process = subprocess.Popen([binary, *options])
        self.wait()

    def wait(self) -> None:
        client = redis.Redis.from_url(self.url)
        for _ in range(200):
            try:
                if client.ping():
                    break
            except redis.RedisError:
                time.sleep(0.025)
        client.close()

    def kill(self) -> None:
        """End it as a crash would."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def redis_server(tmp_path, settings) -> Iterator[RedisServer]:
    """A real Redis that the settings point at."""
    server = RedisServer(tmp_path)
    server.start()
    settings.REDIS_URL = server.url
    yield server
    if server.process and server.process.poll() is None:
        server.kill()


@pytest.fixture
def redis_client(redis_server) -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(redis_server.url)
    yield client
    client.close()


# One of everything that belongs to alice, and everyone with a browser: for the tests of roles


@pytest.fixture
def things(job, team, alice, settings, tmp_path) -> dict[str, str]:
    """One of everything that belongs to alice, by the name of its URL argument."""
    settings.ARTEFACTS_DIR = tmp_path
    plan = draft_begin(team=team, owner=alice, preset="demo", model=None)
    attempt = job.current_attempt
    artefact = Artefact.objects.create(
        attempt=attempt,
        name="model",
        kind="model",
        total_bytes=2,
        files={"a": 2},
        is_complete=True,
    )
    folder_of(artefact).mkdir(parents=True)
    (folder_of(artefact) / "a").write_bytes(b"{}")
    proof = Artefact.objects.create(
        attempt=attempt, name="proof", kind="report", total_bytes=2, is_complete=True
    )
    folder_of(proof).mkdir()
    report = Report(began_at_ms=0, hostname="lab").model_dump_json()
    (folder_of(proof) / "report.json").write_text(report)
    model = TeamModel.objects.create(team=team, name="Own", source="config", config=demo_config())
    secret = secret_store(team=team, name="HF_TOKEN", value="hf_abcdefgh", by=alice)
    dataset = Dataset.objects.create(
        team=team, name="a.jsonl", sha256="0" * 64, size_bytes=2, num_records=2, format="text"
    )
    token, _ = token_create(team=team, by=None, name="Next")
    access, _ = token_make(team=team, by=alice, name="laptop", scope="read")
    asked = LaunchRequest.objects.create(team=team, plan=plan, asked_by=alice, asked_at=now())
    ended = make_job(team, alice, job.host)
    Job.objects.filter(pk=ended.pk).update(state="failed")
    workflow = Workflow.objects.create(
        team=team, owner=alice, name="Chain", document={}, state="failed"
    )
    workflow.steps.create(position=0, goal="pretrain", document={}, state="failed", job=ended)
    own = {"number": 0, "words": "As planned", "settings": {}, "pins": {}, "workload": {}}
    tuning = Tuning.objects.create(
        team=team, owner=alice, name="Tuned", options={}, document=plan.draft, trial={},
        figure="tokens_per_second", candidates=[own | {"predicted": 5.0, "peak_bytes": 1}],
        state="failed",
    )  # fmt: skip
    kept = Plan.objects.create(
        team=team, owner=alice, name="kept", draft=plan.draft, state="computed"
    )
    deployment = Deployment.objects.create(team=team, owner=alice, name="small", plan=kept)
    DeploymentDraft.objects.create(
        deployment=deployment, fields={"max_replicas": 2}, by=alice, saved_at=now()
    )
    key, _ = key_make(team=team, by=alice, options=KeyOptions(name="laptop"))
    figure = Measurement.objects.create(
        job=job,
        attempt=attempt,
        host=job.host,
        metric="step_seconds",
        predicted=1.0,
        measured=1.0,
        ratio=1.0,
        measured_at=now(),
    )
    copied = ModelCopy.objects.create(
        host=job.host, repository="acme/small", commit="a" * 40, asked_by="olga",
        files=[{"path": "config.json", "size_bytes": 2, "etag": "b" * 40}],
    )  # fmt: skip
    code = code_allow(team=team, name=f"acme/own@{'a' * 40}", reason="", by="olga")
    server = ObservedServer.objects.create(
        team=team, owner=alice, name="theirs", url="http://127.0.0.1:1"
    )
    observed = ObservedJob.objects.create(team=team, owner=alice, host=job.host, job_id="17")
    known = {
        "team": team.pk,
        "<slug:observed_id>": observed.pk,
        "<slug:code_id>": code.pk,
        "<code_id>": code.pk,
        "<slug:server_id>": server.pk,
        "<slug:copy_id>": copied.pk,
        "<copy_id>": copied.pk,
        "<org>": "acme",
        "<commit>": "a" * 40,
        "<slug:form>": "csv",
        "<slug:job_id>": job.pk,
        "<job_id>": job.pk,
        "<str:plan_id>": plan.pk,
        "<plan_id>": plan.pk,
        "<key>": "torchrun",
        "<slug:key>": "torchrun",
        "<question>": "longest_sequence",
        "<attempt_id>": attempt.pk,
        "<slug:slug>": job.host.slug,
        "<slug:name>": "llamacpp",
        "<slug:token_id>": token.pk,
        "<slug:pool_id>": job.pool_id,
        "<slug:device_id>": job.host.devices.get().pk,
        "<slug:secret_id>": secret.pk,
        "<slug:access_id>": access.pk,
        "<access_id>": access.pk,
        "<slug:dataset_id>": dataset.pk,
        "<dataset_id>": dataset.pk,
        "<path:model_id>": model.pk,
        "<slug:model_id>": model.pk,
        "<str:name>": "model",
        "<name>": "model",
        "<path:path>": "a",
        "<str:key>": next(iter(TECHNIQUES)),
        "<path:page>": "index",
        "<int:measurement_id>": str(figure.pk),
        "<slug:tab>": "summary",
        "<slug:step>": "goal",
        "<slug:uid>": "MQ",
        "<slug:token>": "a-b",
        "<number>": "0",
        "<action>": "recheck",
        "<slug:request_id>": asked.pk,
        "<slug:workflow_id>": workflow.pk,
        "<slug:tuning_id>": tuning.pk,
        "<slug:deployment_id>": deployment.pk,
        "<deployment_id>": deployment.pk,
        "<slug:serving_key_id>": key.pk,
        "<key_id>": key.pk,
    }
    plain = {f"<{name.strip('<>').rpartition(':')[2]}>": value for name, value in known.items()}
    return plain | known


@pytest.fixture
def people(alice, bob, charlie, olga, vera) -> dict[str, Client]:
    """Everyone with a browser; charlie is an admin, but of another team."""
    charlie.memberships.update(role="admin")
    members = {user.username: client_of(user) for user in (charlie, vera, bob, alice, olga)}
    return {"nobody": Client(), **members}
