"""Queries of pages about jobs: those visible to a person, and counts by state."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from django.contrib.auth.models import AnonymousUser, User
from django.db.models import F, QuerySet
from django.http import HttpRequest
from django.shortcuts import get_object_or_404

from webapp.core.display import listed
from webapp.hosts.models import Device, Host
from webapp.jobs.models import Allocation, Attempt, Job, JobState


def visible_jobs(request: HttpRequest) -> QuerySet[Job]:
    """Return the jobs that the person may see, without deleted ones."""
    return Job.objects.visible_to(request.user).filter(deleted_at=None)


def load_job(request: HttpRequest, job_id: str) -> Job:
    """Return a visible job with its page's relations, or answer 404."""
    jobs = visible_jobs(request).select_related(
        "host", "requested_host", "pool", "owner", "plan", "current_attempt", "team"
    )
    return get_object_or_404(jobs, pk=job_id)


# Count jobs by state, with the same names on the home, queue and host pages.


GROUPS: Mapping[str, tuple[JobState, ...]] = {
    "running": (JobState.RUNNING,),
    "starting": (JobState.PREFLIGHT, JobState.STARTING),
    "stopping": (JobState.STOPPING,),
    "queued": (JobState.QUEUED,),
}
ACTIVE = tuple(state for states in GROUPS.values() for state in states)
SPELLED = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")


class JobCounts(NamedTuple):
    """Numbers of jobs by state group; each job is in one group."""

    running: int = 0
    starting: int = 0
    stopping: int = 0
    queued: int = 0

    @property
    def total(self) -> int:
        """Return the number of jobs that have not ended."""
        return sum(self)

    @property
    def short(self) -> str:
        """Return for example ``1 running · 2 queued``; empty without jobs."""
        named = self._asdict().items()
        return " · ".join(f"{number} {name}" for name, number in named if number)

    @property
    def sentence(self) -> str:
        """Return for example ``one job is running, two are queued``; running is always stated."""
        if not self.running:
            first = "nothing is running"
        else:
            first = f"{_spelled(self.running)} job{_are(self.running, ' is', 's are')} running"
        rest = [
            f"{_spelled(number)} {_are(number, 'is', 'are')} {name}"
            for name, number in self._asdict().items()
            if number and name != "running"
        ]
        return ", ".join([first, *([listed(rest)] if rest else [])])


def _are(number: int, singular: str, plural: str) -> str:
    return singular if number == 1 else plural


def _spelled(number: int) -> str:
    return SPELLED[number] if number < len(SPELLED) else str(number)


def counts_of(jobs: QuerySet[Job], *, num_queued: int | None = None) -> JobCounts:
    """Return the numbers of some jobs by group, without deleted ones.

    ``num_queued`` is the number of queued jobs, if known already.
    """
    states = [state for state in ACTIVE if num_queued is None or state != JobState.QUEUED]
    rows = jobs.filter(deleted_at=None, state__in=states).order_by()
    # Counted in Python: GROUP BY would read all jobs.
    counts = _grouped(rows.values_list("state", flat=True))
    return counts if num_queued is None else counts._replace(queued=num_queued)


def counts_by_host(hosts: Sequence[Host]) -> dict[str, JobCounts]:
    """Return the counts per host key: jobs and gang parts that run there or are queued for it."""
    keys = [host.pk for host in hosts]
    active = Job.objects.filter(deleted_at=None, state__in=ACTIVE).order_by()
    queued = active.filter(state=JobState.QUEUED, host=None, requested_host__isnull=False)
    parts = Attempt.objects.filter(
        ended_at=None,
        leader__isnull=False,
        leader=F("job__current_attempt"),
        job__deleted_at=None,
        job__state__in=ACTIVE,
    ).order_by()
    states_by_host: dict[str, list[str]] = {key: [] for key in keys}
    for rows, host, state in (
        (active.filter(host__isnull=False), "host", "state"),
        (queued, "requested_host", "state"),
        (parts, "host", "job__state"),
    ):
        only = rows.filter(**{host: keys[0]}) if len(keys) == 1 else rows
        for key, name in only.values_list(host, state):
            states_by_host.get(key, []).append(name)
    return {key: _grouped(states) for key, states in states_by_host.items()}


def _grouped(states: Iterable[str]) -> JobCounts:
    numbers = Counter(states)
    return JobCounts(
        **{name: sum(numbers[state] for state in group) for name, group in GROUPS.items()}
    )


@dataclass(frozen=True)
class DeviceRow:
    """A device on its host's page, with those of the jobs that hold it which the user may see."""

    device: Device
    is_held: bool
    jobs: tuple[Job, ...]


def devices_of(host: Host, user: User | AnonymousUser) -> list[DeviceRow]:
    """Return a host's devices with the jobs that hold them; absent devices last."""
    active = Allocation.objects.filter(device__host=host, released_at=None)
    job_ids: dict[str, list[str]] = {}
    for device_id, job_id in active.order_by("id").values_list("device", "attempt__job"):
        job_ids.setdefault(device_id, []).append(job_id)
    jobs = Job.objects.visible_to(user).in_bulk({key for keys in job_ids.values() for key in keys})
    # The processor row of a host that has GPUs by now is not listed as missing.
    devices = host.devices.exclude(kind="cpu", is_present=False)
    return [
        DeviceRow(
            device,
            device.pk in job_ids,
            tuple(jobs[key] for key in job_ids.get(device.pk, ()) if key in jobs),
        )
        for device in devices.order_by("-is_present", "index", "pk")
    ]
