"""Hosts that several teams have on one machine."""

from tests.webapp.conftest import enrol, make_beat, make_facts, make_microbench
from webapp.accounts.models import Team
from webapp.agents.heartbeats import host_beat
from webapp.hosts.models import Host

MACHINE = "a" * 64
GPU = {"index": 0, "uuid": "GPU-one", "name": "NVIDIA L4", "memory_bytes": 24 * 1024**3}


def host_of(team: Team, name: str, **facts) -> Host:
    """Return a ready host in contact; it is one of the shared machine, unless facts say else."""
    host, _ = enrol(team, name=name)
    said = make_facts(**{"machine_id": MACHINE, "user_id": 1001, **facts})
    host_beat(host=host, beat=make_beat(facts=said, microbench=make_microbench()))
    host.refresh_from_db()
    return host
