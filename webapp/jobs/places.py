"""Rendezvous of a gang: an address per host and a reserved port on the leader's host."""

import hmac
from collections.abc import Sequence

from runners.messages import Gang
from webapp.hosts.models import Host
from webapp.jobs.models import Attempt, Job

LOOPBACK = "127.0.0.1"  # where all ranks run on one host
FIRST_PORT, LAST_PORT = 29400, 29499  # for hosts that report no range


def addresses_of(host: Host) -> list[str]:
    """Return the addresses of a host, the configured one first."""
    addresses = [str(address) for address in host.facts.get("addresses") or []]
    return sorted(addresses, key=lambda address: address != host.address)


def meeting_address(job: Job, host: Host) -> str:
    """Return the address at which a job's other hosts reach this one; empty if it has none."""
    if job.num_hosts == 1:
        return LOOPBACK
    return next(iter(addresses_of(host)), "")


def free_port(host: Host, *, refused: Sequence[int] = ()) -> int | None:
    """Return a port of the host's range that no live gang uses, or None."""
    reserved = Attempt.objects.filter(host=host, master_port__isnull=False, ended_at=None)
    unavailable = {*reserved.values_list("master_port", flat=True), *refused}
    first = int(host.facts.get("first_gang_port") or FIRST_PORT)
    last = int(host.facts.get("last_gang_port") or LAST_PORT)
    return next((port for port in range(first, last + 1) if port not in unavailable), None)


def places_reserve(*, job: Job, members: Sequence[Attempt]) -> None:
    """Assign every gang member its address, and the leader a port of its host."""
    if not job.is_shared_out:
        return
    for member in members:
        member.address = meeting_address(job, member.host)
        if member.leader_id is None:
            member.master_port = free_port(member.host)
        member.save(update_fields=["address", "master_port"])


def place_move(*, leader: Attempt) -> bool:
    """Reserve another port for a gang that has not started; return False if none is left."""
    refused = [*leader.taken_ports, leader.master_port]
    port = free_port(leader.host, refused=refused)
    if port is None:
        return False
    rows = Attempt.objects.filter(pk=leader.pk, claimed_at=None, ended_at=None)
    return bool(rows.update(master_port=port, taken_ports=refused))


def gang_of(attempt: Attempt) -> Gang | None:
    """Return an attempt's rank and rendezvous in its gang; None for a single process."""
    leader = attempt.head
    if leader.master_port is None:
        return None
    split = leader.job.spec.get("split") or {}
    num_gpus = attempt.allocations.filter(device__kind="gpu").count()
    return Gang(
        node_rank=attempt.node_rank,
        num_nodes=1 + leader.members.count(),
        num_processes=num_gpus or leader.job.processes_per_host,
        master_address=leader.address,
        master_port=leader.master_port,
        own_address=attempt.address,
        rendezvous_id=leader.pk,
        key=_chain_key(leader) if split.get("method") == "chain" else "",
    )


def _chain_key(leader: Attempt) -> str:
    """Return the shared key of a gang's hosts; the leader's fence stays secret."""
    return hmac.digest(leader.fence.encode(), b"stage chain", "sha256").hex()
