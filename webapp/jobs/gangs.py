"""Reservations of devices, and gangs: jobs that start on several hosts at once."""

import hmac
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from django.db import connection, transaction
from django.db.models import Q

from planner.specs.units import GIB
from runners.shared.messages import ExitRecord, Gang
from runners.shared.reasons import STOPPED, Reason
from webapp.audit.models import event_record
from webapp.core.clock import now
from webapp.hosts.models import Device, Host, HostState
from webapp.hosts.services import Contact, contact_of, silent_seconds
from webapp.jobs.models import LIVE_STATES, Allocation, Attempt, Command, Job, JobState
from webapp.jobs.results import store_measurements_and_models
from webapp.jobs.transitions import final_state, transition

# ---------------------------------------------------------------------------
# Devices and rendezvous ports of jobs: hosts are checked, then all is taken or nothing.
# ---------------------------------------------------------------------------


# Rendezvous of a gang: an address per host and a reserved port on the leader's host.


LOOPBACK = "127.0.0.1"  # where all ranks run on one host
FIRST_PORT, LAST_PORT = 29400, 29499  # for hosts that report no range


def meeting_address(job: Job, host: Host) -> str:
    """Return the address at which a job's other hosts reach this one; empty if it has none."""
    if job.num_hosts == 1:
        return LOOPBACK
    addresses = [str(address) for address in host.facts.get("addresses") or []]
    return next(iter(sorted(addresses, key=lambda address: address != host.address)), "")


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
    key = ""
    if split.get("method") == "chain":  # the hosts share a key; the leader's fence stays secret
        key = hmac.digest(leader.fence.encode(), b"stage chain", "sha256").hex()
    return Gang(
        node_rank=attempt.node_rank,
        num_nodes=1 + leader.members.count(),
        num_processes=num_gpus or leader.job.processes_per_host,
        master_address=leader.address,
        master_port=leader.master_port,
        own_address=attempt.address,
        rendezvous_id=leader.pk,
        key=key,
    )


# Server-side preflight: check a host by its last heartbeat before a queued job starts.
#
# It is cheap and avoids starts that must fail; the host checks its current state again before it
# claims (``runners/host/preflight.py``).


MIN_FREE_DISK_BYTES = 1024**3


class Check(NamedTuple):
    """A preflight check of a host: result, sentence and remedy."""

    name: str
    is_ok: bool
    sentence: str
    remedy: str = ""  # what to do if the check failed

    def as_detail(self) -> dict[str, Any]:
        """Return the check as the detail of an event."""
        remedy = "" if self.is_ok else self.remedy
        return {"name": self.name, "ok": self.is_ok, "sentence": self.sentence, "remedy": remedy}


def run_checks(job: Job, host: Host, devices: Sequence[Device] = ()) -> list[Check]:
    """Return all checks of ``job`` on ``host`` and its devices, from the last heartbeat.

    Predicted memory is checked on each GPU, or on the host if the job has none.
    """
    gpus = [device for device in devices if device.kind == "gpu"]
    memory = [_gpu_memory(job, host, gpu) for gpu in gpus] or [_memory(job, host)]
    checks = [_state(host), _contact(host), _disk(host), *memory]
    return [*checks, *_rendezvous(job, host)] if job.is_shared_out else checks


def _rendezvous(job: Job, host: Host) -> list[Check]:
    """Return whether the job's other hosts can reach this one and a port is free."""
    address = meeting_address(job, host)
    address_words = (
        f"Other hosts reach this host at {address}." if address else "The host has no address."
    )
    remedy = (
        "Connect the host to the network of the others and restart its agent, or remove the host "
        "from the pool."
    )
    port = free_port(host)
    port_words = f"Rendezvous port {port} is free." if port else "Every rendezvous port is in use."
    port_remedy = (
        'Widen "first_gang_port" to "last_gang_port" in the host\'s config.json, or wait for '
        "another job to end."
    )
    return [
        Check("address", bool(address), address_words, remedy),
        Check("rendezvous port", port is not None, port_words, port_remedy),
    ]


def _state(host: Host) -> Check:
    label = host.get_state_display().lower()
    remedy = "Ask an operator to make the host ready again on its page, or choose another host."
    return Check("state", host.state == HostState.READY, f"The host is {label}.", remedy)


def _contact(host: Host) -> Check:
    silent = silent_seconds(host)
    words = (
        "has never reported" if silent is None else f"sent its last heartbeat {silent:.0f} s ago"
    )
    remedy = "Check that the host is on and its agent runs; the job starts when the host is back."
    is_heard = contact_of(host) in {Contact.LIVE, Contact.DEGRADED}
    return Check("contact", is_heard, f"The host {words}.", remedy)


def _disk(host: Host) -> Check:
    free = int(host.last_beat.get("disk_free_bytes") or 0)
    is_ok = free >= MIN_FREE_DISK_BYTES
    sentence = (
        f"{free / GIB:.1f} GiB of disk are free; a job needs {MIN_FREE_DISK_BYTES / GIB:.0f}."
    )
    return Check("disk", is_ok, sentence, "Free some space on the host.")


def gpu_load(host: Host, device: Device) -> dict[str, Any]:
    """Return the GPU's load from the host's last heartbeat; empty if it has none."""
    loads = host.last_beat.get("gpus") or ()
    return next((load for load in loads if load.get("uuid") == device.uuid), {})


def _gpu_memory(job: Job, host: Host, gpu: Device) -> Check:
    name, required = f"memory of GPU {gpu.index}", _required_bytes(job)
    if required is None:
        return Check(name, is_ok=True, sentence="No peak memory was predicted for this job.")
    free = gpu.memory_bytes - int(gpu_load(host, gpu).get("memory_used_bytes") or 0)
    sentence = (
        f"{free / GIB:.2f} GiB of GPU {gpu.index} are free; "
        f"the job is predicted to need at least {required / GIB:.2f} of it."
    )
    remedy = "See on the host's page what else uses the GPU, or cordon it until that has ended."
    is_enough = free >= required or _is_freed(host, gpu)
    return Check(name, is_enough, sentence, remedy)


def _required_bytes(job: Job) -> float | None:
    peak = job.prediction.get("peak_memory_bytes") or {}
    return peak.get("low") or peak.get("value")


def _memory(job: Job, host: Host) -> Check:
    if host.has_scheduler:
        words = f"{host.get_kind_display()} gives the job memory of its own node."
        return Check("memory", is_ok=True, sentence=words)
    available = int(host.last_beat.get("memory_available_bytes") or 0)
    required = _required_bytes(job)
    if required is None:
        return Check("memory", is_ok=True, sentence="No peak memory was predicted for this job.")
    sentence = (
        f"{available / GIB:.2f} GiB of memory are available; "
        f"the job is predicted to need at least {required / GIB:.2f}."
    )
    remedy = "Free memory there, or plan again with a smaller batch or a narrower weight dtype."
    is_enough = available >= required or _is_freed(host)
    return Check("memory", is_enough, sentence, remedy)


def _is_freed(host: Host, device: Device | None = None) -> bool:
    """Return whether a job left a device of a host since its last heartbeat.

    What that says of memory is of before; the host looks itself before it starts the job.
    """
    rows = Allocation.objects.filter(device__host=host, released_at__gt=host.last_seen_at or now())
    return (rows.filter(device=device) if device is not None else rows).exists()


# Take and release devices: a whole gang or nothing, one writer per pool.
#
# On SQLite every transaction begins as a writer, so that there is one at a time. On PostgreSQL an
# advisory lock on the pool serialises taking and releasing.


NUM_HARDWARE_LOCKS = 16  # few, so that thousands of devices do not fill the lock table


def pool_lock(pool_id: str) -> None:
    """Lock a pool's devices until the transaction ends.

    Any other id, such as a team's, is a separate lock.
    """
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [pool_id])


def hardware_lock(devices: Iterable[Device]) -> None:
    """Lock hardware that other hosts, possibly of other pools, may allocate too.

    These are the last locks of a transaction, always taken in the same order.
    """
    names = {device.hardware for device in devices} - {""}
    for number in sorted({zlib.crc32(name.encode()) % NUM_HARDWARE_LOCKS for name in names}):
        pool_lock(f"hardware {number}")


def devices_take(*, attempt: Attempt, devices: Iterable[Device]) -> None:
    """Allocate devices of its host to an attempt, or the part of their memory that its job asks.

    Raises:
        IntegrityError: another attempt holds one of the devices alone.
    """
    instant, shared_bytes = now(), attempt.job.shared_bytes
    Allocation.objects.bulk_create(
        Allocation(device=device, attempt=attempt, taken_at=instant, shared_bytes=shared_bytes)
        for device in devices
    )


def devices_release(attempt: Attempt) -> int:
    """Release the devices of an ended attempt; return their number."""
    allocations = Allocation.objects.filter(attempt=attempt, released_at=None)
    with transaction.atomic():
        pool_lock(attempt.job.pool_id)
        return allocations.update(released_at=now())


# ---------------------------------------------------------------------------
# Gangs (jobs on several hosts): claim, start and end together.
#
# No host starts before all have claimed. The job's policy decides what a member's exit does:
# ``stop`` stops the others, ``shrink`` lets them continue while enough are left. A silent host
# changes nothing by itself: its member keeps its devices and its last known state, and the job
# ends by the reports of the other members.
# ---------------------------------------------------------------------------


ACTOR = "system:gang"
# Reasons of ranks that only lost their peers: the cause is on another rank.
CONSEQUENCES = frozenset({Reason.RANK_LOST, Reason.NCCL_TIMEOUT, Reason.NCCL_ERROR})
_REPORTED = frozenset(ExitRecord.model_fields)


class EndedMember(NamedTuple):
    """A member that ended, with its exit record."""

    member: Attempt
    record: ExitRecord


def members_of(leader: Attempt) -> list[Attempt]:
    """Return every attempt of a gang, the leader first; a single attempt is a gang of one."""
    rows = Attempt.objects.filter(Q(pk=leader.pk) | Q(leader=leader))
    return list(rows.select_related("host", "job").order_by("node_rank"))


# Starting together


def all_claimed(leader: Attempt) -> bool:
    """Return whether every host of the gang has claimed its part."""
    return all(member.claimed_at for member in members_of(leader))


def all_started(leader: Attempt) -> bool:
    """Return whether every host of the gang has started its part."""
    return all(member.started_at for member in members_of(leader))


def release_unstarted(leader: Attempt) -> None:
    """End a gang that has not started: no host received the start signal."""
    for member in members_of(leader):
        Attempt.objects.filter(pk=member.pk).update(ended_at=now())
        Command.objects.filter(attempt=member).exclude(state="acked").update(state="dead")
        devices_release(member)


def missing_words(leader: Attempt) -> str:
    """Return the sentence that names the hosts which did not claim in time."""
    names = [member.host.name for member in members_of(leader) if member.claimed_at is None]
    verb = "did not claim its part" if len(names) == 1 else "did not claim their parts"
    return f"{' and '.join(names)} {verb} of the job in time; nothing was started."


# Ending together


def order_stop(members: Sequence[Attempt], reason: Reason) -> None:
    """Request the hosts of running members to stop them."""
    for member in members:
        if member.ended_at is None and not member.stop_reason:
            Attempt.objects.filter(pk=member.pk).update(
                stop_reason=reason, stop_requested_at=now()
            )
            Command.objects.create(host=member.host, kind="stop", attempt=member, next_at=now())


def member_ended(member: Attempt, record: ExitRecord) -> None:
    """Apply the job's policy to a member's exit, and end the job once all members ended."""
    leader, job = member.head, member.job
    if job.current_attempt_id != leader.pk or job.state not in LIVE_STATES:
        return
    gang = members_of(leader)
    failed = record.reason is not Reason.OK and record.reason not in STOPPED
    if failed and _shrinks(job, gang, member):
        event_record(
            job,
            "job.rank_lost",
            f"host:{member.host.slug}",
            attempt_id=member.pk,
            reason=record.reason,
            detail={"host": member.host.name, "node_rank": member.node_rank},
        )
        return
    if failed and not leader.stop_reason:
        cause = _exit_detail(EndedMember(member, record), len(gang))
        detail = {"sentence": cause["sentence"]}
        transition(
            job,
            JobState.STOPPING,
            actor=ACTOR,
            attempt=leader,
            reason=record.reason,
            detail=detail,
        )
        order_stop(gang, Reason.PEER_ENDED)
    settle(leader)


def _shrinks(job: Job, gang: Sequence[Attempt], failed: Attempt) -> bool:
    """Return whether the job shrinks: the policy allows it and enough members are left."""
    policy = job.spec.get("parallel") or {}
    remaining = [each for each in gang if each.ended_at is None and not each.stop_reason]
    return (
        policy.get("on_lost_rank") == "shrink"
        and failed.leader_id is not None
        and any(each.leader_id is None for each in remaining)
        and len(remaining) >= int(policy.get("min_hosts") or 1)
    )


def settle(leader: Attempt) -> bool:
    """End the job once every reachable member has ended; return whether it ended.

    If a member has reported the job's end, members on unreachable hosts do not delay it; they
    keep their devices, and are stopped when their hosts are back in contact.
    """
    gang = members_of(leader)
    leader, job = gang[0], gang[0].job
    open_members = [each for each in gang if each.ended_at is None]
    if any(contact_of(each.host) is not Contact.UNREACHABLE for each in open_members):
        return False
    if leader in open_members and job.state != JobState.STOPPING:
        return False  # a shrunk gang whose leader is only silent
    cause = _cause(leader, _ended(gang))
    if cause is None:
        return False
    reason = Reason(leader.stop_reason) if _was_stopped(leader, cause) else cause.record.reason
    with transaction.atomic():
        moved = transition(
            job,
            final_state(reason),
            actor=f"host:{cause.member.host.slug}",
            attempt=leader,
            reason=reason,
            detail=_exit_detail(cause, len(gang)),
        )
        if moved:
            order_stop(open_members, Reason.PEER_ENDED)
            store_measurements_and_models(job, leader)
    return moved


def _ended(gang: Sequence[Attempt]) -> list[EndedMember]:
    return [
        EndedMember(each, _record_of(each))
        for each in gang
        if each.ended_at is not None and each.exit_record
    ]


def _record_of(member: Attempt) -> ExitRecord:
    """Return the fields of the host's report, without those stored in addition."""
    reported = {key: value for key, value in member.exit_record.items() if key in _REPORTED}
    return ExitRecord.model_validate(reported)


def _was_stopped(leader: Attempt, cause: EndedMember) -> bool:
    is_order = leader.stop_reason not in {"", Reason.PEER_ENDED}
    return is_order and cause.record.reason is not Reason.OK


def _cause(leader: Attempt, ended: Sequence[EndedMember]) -> EndedMember | None:
    """Return the exit that decides the job's: the leader's success, else the first failure.

    A rank that only lost its peers comes after one that failed by itself, even if it reported
    earlier. Return None while the exits so far decide nothing.
    """
    lead = next((each for each in ended if each.member.pk == leader.pk), None)
    if lead is not None and lead.record.reason is Reason.OK:
        return lead
    failures = [
        each
        for each in ended
        if each.record.reason is not Reason.OK and each.record.reason not in STOPPED
    ]
    decisive = failures or ([lead] if lead else [])
    return min(decisive, key=_order, default=None)


def first_ended(leader: Attempt) -> EndedMember | None:
    """Return the reported exit that decided the job's."""
    gang = members_of(leader)
    return _cause(gang[0], _ended(gang))


def deciding_part(job: Job) -> Attempt | None:
    """Return the attempt whose exit decided the job's: for a single process, its only one."""
    if job.current_attempt is None or not job.is_shared_out:
        return job.current_attempt
    first = first_ended(job.current_attempt)
    return first.member if first else job.current_attempt


def _order(each: EndedMember) -> tuple[bool, int]:
    """Sort causes before consequences, then by time on the server's clock."""
    return each.record.reason in CONSEQUENCES, ended_at_ms(each.member, each.record)


def ended_at_ms(member: Attempt, record: ExitRecord) -> int:
    """Return when a member ended, in Unix milliseconds of the server's clock."""
    return record.ended_at_ms - (member.host.clock_offset_ms or 0)


def _exit_detail(cause: EndedMember, num_hosts: int) -> dict[str, Any]:
    """Return the detail of the end's event: the host and its exit record."""
    record, member = cause.record, cause.member
    detail: dict[str, Any] = {
        "exit_code": record.exit_code,
        "signal": record.signal,
        "by": record.by,
        "host": member.host.name,
        "node_rank": member.node_rank,
        "sentence": "",
    }
    if record.reason is not Reason.OK and num_hosts > 1:
        detail["sentence"] = (
            f"It ended first on {member.host.name}, host {member.node_rank + 1} of {num_hosts}."
        )
    return detail


def settle_all() -> list[Job]:
    """End jobs that wait only for hosts that have since become unreachable."""
    waiting = Job.objects.filter(
        Q(current_attempt__exit_record__reason__isnull=False)
        | Q(current_attempt__members__exit_record__reason__isnull=False),
        state__in=LIVE_STATES,
        num_hosts__gt=1,
    ).distinct()
    settled = []
    for job in waiting.select_related("current_attempt"):
        with transaction.atomic():
            locked = Job.objects.select_for_update().get(pk=job.pk)
            leader = locked.current_attempt
            if leader is not None and settle(leader):
                settled.append(job)
    return settled
