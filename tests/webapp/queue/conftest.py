"""Hosts with GPUs, and jobs that wait for them."""

import pytest

from tests.webapp.conftest import GIB, enrol, make_beat, make_facts, make_job, make_microbench
from webapp.accounts.models import Team
from webapp.agents.heartbeats import host_beat
from webapp.hosts.models import Host
from webapp.jobs.models import Job
from webapp.jobs.services import job_submit


def gpu_host(team: Team, name: str, count: int, gib: int = 24) -> Host:
    """Return a ready host with GPUs, in contact."""
    host, _ = enrol(team, name=name)
    gpus = [
        {"index": i, "uuid": f"{name}-{i}", "name": "NVIDIA L4", "memory_bytes": gib * GIB}
        for i in range(count)
    ]
    beat = make_beat(
        facts=make_facts(gpus=gpus, addresses=["10.0.0.1"]), microbench=make_microbench()
    )
    host_beat(host=host, beat=beat)
    return host


@pytest.fixture
def node_a(team) -> Host:
    return gpu_host(team, "node-a", 4)


@pytest.fixture
def node_b(team) -> Host:
    return gpu_host(team, "node-b", 4)


@pytest.fixture
def submit(team, alice):
    """Return a function that queues a job for the pool of a host."""

    def submit_job(host: Host, *, is_pinned: bool = False, **changes) -> Job:
        place = {} if is_pinned else {"pool": host.pool}
        fields = {"devices_per_host": 1, **place, **changes}
        job = make_job(team, alice, host if is_pinned else None, **fields)
        return job_submit(job=job, by="alice")

    return submit_job
