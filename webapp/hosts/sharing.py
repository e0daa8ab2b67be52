"""What people see of hosts that another team shares with theirs: enough to run jobs there.

The name stands wherever a job ran, so that one can be asked about; the host's page, its addresses
and its disks are its own team's.
"""

from collections.abc import Mapping
from typing import Any

from django.contrib.auth.models import AnonymousUser, User

from webapp.accounts.roles import membership_of
from webapp.hosts.models import Host

SHARED_FACTS = frozenset(
    {
        "agent_version",
        "architecture",
        "cpu_count",
        "cpu_model",
        "cuda_version",
        "driver_version",
        "gpus",
        "job_memory_bytes",
        "kernel",
        "memory_bytes",
        "os",
        "packages",
        "python_version",
        "torch_cuda_version",
    }
)


def is_own(user: User | AnonymousUser, host: Host) -> bool:
    """Return whether a host belongs to one of the user's teams."""
    return membership_of(user, host.team) is not None


def facts_for(
    user: User | AnonymousUser, host: Host | None, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a host's facts as the user may see them: of a shared one, what results depend on."""
    if host is None or is_own(user, host):
        return dict(facts)
    return {name: value for name, value in facts.items() if name in SHARED_FACTS}
