"""Abandon a job on a person's order: the devices of its silent hosts count as free again.

Nothing else frees a silent host's devices: its part may still run there, and is stopped when
the host is back in contact. Parts on hosts in contact are stopped as usual.
"""

from collections.abc import Sequence
from typing import Any

from django.db import transaction

from runners.reasons import Reason
from webapp.core.clock import now
from webapp.core.problems import ConflictProblem, InvalidProblem
from webapp.core.wording import listed
from webapp.hosts.contact import Contact, contact_of
from webapp.hosts.models import Device
from webapp.jobs.gangs import members_of, order_stop, release_unstarted
from webapp.jobs.holding import devices_release
from webapp.jobs.models import LIVE_STATES, Attempt, Event, Job, JobState
from webapp.jobs.transitions import transition

GIVEN_UP = Reason.LOST_AND_ABANDONED_BY_USER


def open_parts(job: Job) -> list[Attempt]:
    """Return the parts of a job that have not ended and were not abandoned."""
    rows = Attempt.objects.filter(job=job, ended_at=None).exclude(stop_reason=GIVEN_UP)
    return list(rows.select_related("host", "job").order_by("number", "node_rank"))


def silent_parts(job: Job) -> list[Attempt]:
    """Return open parts on unreachable hosts; for an ended job, those that hold devices."""
    parts = [each for each in open_parts(job) if contact_of(each.host) is Contact.UNREACHABLE]
    return parts if job.state in LIVE_STATES else [each for each in parts if devices_of(each)]


def devices_of(part: Attempt) -> list[Device]:
    """Return the devices that a part holds."""
    devices = Device.objects.filter(allocations__attempt=part, allocations__released_at=None)
    return list(devices.order_by("index"))


def names_of(parts: Sequence[Attempt]) -> list[str]:
    """Return the distinct host names of the parts."""
    return list(dict.fromkeys(each.host.name for each in parts))


def job_abandon(*, job: Job, by: str, typed_host_name: str) -> Job:
    """Abandon a job with a silent host; the person confirms by typing the host's name.

    Names of several silent hosts are separated by commas. For a job that has already ended, only
    the devices of its silent hosts are freed.

    Raises:
        ConflictProblem: none of its hosts is silent, or the job has ended.
        InvalidProblem: the typed name is not the host's.
    """
    silent = silent_parts(job)
    if not silent:
        raise ConflictProblem("host_in_contact", "The host answers; stop the job instead.")
    _check_typed(typed_host_name, names_of(silent))
    with transaction.atomic():
        if job.state in LIVE_STATES:
            _end(job, silent, by)
        else:
            _record_freed(job, silent, by)
        for each in silent:
            Attempt.objects.filter(pk=each.pk).update(
                stop_reason=GIVEN_UP, stop_requested_at=now()
            )
            devices_release(each)
    return job


def _check_typed(typed: str, names: Sequence[str]) -> None:
    if {name.strip() for name in typed.split(",")} == set(names):
        return
    if len(names) == 1:
        raise InvalidProblem("wrong_name", f"Type the host's name, {names[0]}, to confirm.")
    raise InvalidProblem(
        "wrong_name", f"Type the names of all silent hosts to confirm: {', '.join(names)}."
    )


def _end(job: Job, silent: Sequence[Attempt], by: str) -> None:
    leader = job.current_attempt
    has_not_started = job.state == JobState.PREFLIGHT
    reachable = [each for each in open_parts(job) if each not in silent]
    moved = transition(
        job, JobState.STOPPED, actor=by, attempt=leader, reason=GIVEN_UP, detail=_detail(silent)
    )
    if not moved:
        raise ConflictProblem("not_stoppable", "The job has already ended.")
    if has_not_started and leader is not None and len(members_of(leader)) > 1:
        release_unstarted(leader)  # no host received the start signal
    else:
        order_stop(reachable, Reason.PEER_ENDED)


def _record_freed(job: Job, silent: Sequence[Attempt], by: str) -> None:
    Event.objects.create(
        at=now(),
        team_id=job.team_id,
        kind="job.devices_freed",
        subject=job.pk,
        attempt_id=silent[0].pk,
        reason=GIVEN_UP,
        actor=by,
        detail=_detail(silent),
    )


def _detail(silent: Sequence[Attempt]) -> dict[str, Any]:
    freed = {each.host.name: len(devices_of(each)) for each in silent}
    words = listed([f"{_count(count)} of {name}" for name, count in freed.items()])
    return {"hosts": list(freed), "freed": freed, "sentence": f"Counted as free: {words}."}


def _count(number: int) -> str:
    return "1 device" if number == 1 else f"{number} devices"
