"""Visibility of hosts that another team shares: enough to run jobs there.

The name is shown wherever a job ran; the host's page, addresses and disks are visible to its own
team only.
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
    """Return the facts a user may see: of a shared host, those that affect results."""
    if host is None or is_own(user, host):
        return dict(facts)
    return {name: value for name, value in facts.items() if name in SHARED_FACTS}
