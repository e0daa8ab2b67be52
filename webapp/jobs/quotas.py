"""Rules of the queue: shares, quotas."""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.db.models import (
    Count,
    DurationField,
    ExpressionWrapper,
    F,
    QuerySet,
    Subquery,
    Sum,
    Value,
)
from django.db.models.functions import Coalesce, Greatest
from django.utils import timezone

from runners.shared.timing import scale_duration
from webapp.accounts.models import Quota, Team
from webapp.audit.models import Event
from webapp.core import display
from webapp.core.clock import now
from webapp.core.problems import ConflictProblem, InvalidProblem
from webapp.hosts.pools import teams_of
from webapp.jobs.models import Allocation, Attempt, Job, JobState

# ---------------------------------------------------------------------------
# Team quotas, checked at submission and at start, with forecasts of durations.
# ---------------------------------------------------------------------------


# Forecasts of job durations and ends, each with a margin.


MARGIN = 1.25
START_SECONDS = 60.0  # claim, preflight on the host, imports
STOP_SECONDS = 30.0
NUM_EARLIER = 5


Earlier = Callable[[Job], float | None]


def cached_earlier_seconds() -> Earlier:
    """Return the function ``earlier_seconds`` with a cache by pool, job kind and model."""
    cached: dict[tuple[str, str, str], float | None] = {}

    def ask(job: Job) -> float | None:
        sort = (job.pool_id, job.kind, job.model_name)
        if sort not in cached:
            cached[sort] = earlier_seconds(job)
        return cached[sort]

    return ask


def length_seconds(job: Job, earlier: Earlier | None = None) -> float | None:
    """Return a job's maximum duration with margin, or None if unknown.

    ``earlier`` replaces ``earlier_seconds``, for example with a cached version.
    """
    expected = stated_seconds(job) or (earlier or earlier_seconds)(job)
    bounds = [job.max_duration_seconds] if job.max_duration_seconds else []
    if expected is not None:
        bounds.append(expected * MARGIN + START_SECONDS)
    return min(bounds, default=None)


def stated_seconds(job: Job) -> float | None:
    """Return the duration stated by the job's spec: a budget, or steps of predicted length."""
    spec: dict[str, Any] = job.spec
    step = (job.prediction.get("step_seconds") or {}).get("high") or spec.get("step_seconds")
    steps = spec.get("max_steps") or spec.get("steps")
    bounds = [float(spec["time_budget_seconds"])] if spec.get("time_budget_seconds") else []
    if step and steps:
        bounds.append(float(step) * float(steps))
    return min(bounds, default=None)


def earlier_seconds(job: Job) -> float | None:
    """Return the longest duration of the last successful similar jobs in this pool."""
    same = Job.objects.filter(
        pool=job.pool_id,
        kind=job.kind,
        model_name=job.model_name,
        state=JobState.SUCCEEDED,
        started_at__isnull=False,
    ).order_by("-ended_at")
    times = same.values_list("started_at", "ended_at")[:NUM_EARLIER]
    lengths = [(end - start).total_seconds() for start, end in times if start and end]
    return max(lengths, default=None)


def left_seconds(
    attempt: Attempt, earlier: Earlier | None = None, *, margin: float = MARGIN
) -> float | None:
    """Return the forecast time until an attempt releases its devices.

    The time that a running job reports as left is multiplied by ``margin``: decisions of the
    queue keep one, pages show the job's own forecast, with a margin of 1. None if unknown, or if
    the attempt exceeded its forecast.
    """
    job = attempt.job
    if job.state == JobState.STOPPING:
        return STOP_SECONDS
    elapsed = (now() - (attempt.started_at or attempt.created_at)).total_seconds()
    bounds = [job.max_duration_seconds - elapsed] if job.max_duration_seconds else []
    if job.state == JobState.RUNNING and job.eta_seconds is not None:
        bounds.append(job.eta_seconds * margin)
    elif (length := length_seconds(job, earlier)) is not None and length > elapsed:
        bounds.append(length - elapsed)
    soonest = min(bounds, default=None)
    return soonest if soonest is not None and soonest > 0 else None


def quota_of(team: Team) -> Quota:
    """Return the team's quota; the default limits only the queued jobs per user."""
    return Quota.objects.filter(team=team).first() or Quota(team=team)


def month_start() -> datetime:
    """Return the start of this month in the server's time zone."""
    return timezone.localtime(now()).replace(day=1, hour=0, minute=0, second=0, microsecond=0)


def held_devices(team: Team) -> set[str]:
    """Return the devices that the team's jobs hold or share now, in all pools."""
    rows = Allocation.objects.filter(attempt__job__team=team, released_at=None)
    return set(rows.order_by().values_list("device", flat=True))


def used_gpu_hours(team: Team) -> float:
    """Return the GPU-hours that the team's jobs have used this month."""
    rows = Allocation.objects.filter(attempt__job__team=team, device__kind="gpu")
    return sum(device_seconds(rows, month_start()).values()) / timedelta(hours=1).total_seconds()


def device_seconds(allocations: QuerySet[Allocation], since: datetime) -> dict[str, float]:
    """Return each team's device-seconds since an instant.

    Of a device that a job shared it counts the part of the memory that it asked for.
    """
    held_time = ExpressionWrapper(
        Coalesce(F("released_at"), now()) - Greatest(F("taken_at"), since),
        output_field=DurationField(),
    )
    rows = (
        allocations.exclude(released_at__lt=since)
        .values("attempt__job__team", "shared_bytes", "device__memory_bytes")
        .annotate(used=Sum(held_time))
        .order_by()
    )
    seconds: dict[str, float] = defaultdict(float)
    for row in rows:
        part, whole = row["shared_bytes"], row["device__memory_bytes"]
        ratio = 1.0 if part is None or not whole else min(1.0, part / whole)
        seconds[row["attempt__job__team"]] += ratio * row["used"].total_seconds()
    return dict(seconds)


class QuotaUsage(NamedTuple):
    """A team's quota, and the number of queued jobs of one person."""

    quota: Quota
    queued: int


def quota_usage(team: Team, owner_id: int | None, besides: Job | None = None) -> QuotaUsage:
    """Return a team's quota, and how many jobs a person has in queues, ``besides`` not counted."""
    owned = Job.objects.filter(owner=owner_id, state=JobState.QUEUED, deleted_at=None)
    counted = owned.exclude(pk=besides.pk) if besides else owned
    total = counted.order_by().annotate(of=Value(1)).values("of").annotate(n=Count("pk"))
    row = (
        Team.objects.filter(pk=team.pk)
        .select_related("quota")
        .annotate(queued=Coalesce(Subquery(total.values("n")), 0))
        .get()
    )
    return QuotaUsage(getattr(row, "quota", None) or Quota(team=team), row.queued)


def num_devices(job: Job) -> int:
    """Return the number of devices that a job requests, counting a whole host as one."""
    return job.num_hosts * (job.devices_per_host or 1)


def check_submit(job: Job, usage: QuotaUsage | None = None) -> None:
    """Refuse a job that exceeds its team's quota, in general or for this month.

    ``usage``: of the job's owner without the job, if it is known.

    Raises:
        InvalidProblem: the job requests more than the team may ever have.
        ConflictProblem: the quota of its owner or team is currently used up.
    """
    quota, queued = usage or quota_usage(job.team, job.owner_id, besides=job)
    _check_size(job, quota)
    _check_length(job, quota)
    limit = quota.max_queued_per_user
    if queued >= limit:
        raise ConflictProblem(
            "max_queued",
            f"You have {queued} jobs in queues and may have {limit}. Wait until one has started, "
            "or stop one.",
        )
    if sentence := hours_sentence(job.team, quota):
        raise ConflictProblem("gpu_hours", sentence)


def _check_size(job: Job, quota: Quota) -> None:
    requested, limit = num_devices(job), quota.max_devices
    if limit is not None and requested > limit:
        raise InvalidProblem(
            "max_devices",
            f"{job.name} asks for {display.counted(requested, 'device')} and your team may hold "
            f"{limit} at once. Plan the job for fewer devices, or ask an operator for a higher "
            "limit.",
        )


def _check_length(job: Job, quota: Quota) -> None:
    stated, limit = stated_seconds(job), quota.max_duration_seconds
    if limit is not None and stated is not None and stated > limit:
        raise InvalidProblem(
            "max_duration",
            f"{job.name} is to run for {display.clock(stated)} and a job of your team may run for "
            f"{display.clock(limit)}. Set a shorter time limit or fewer steps, or ask an operator "
            "for a higher limit.",
        )


def hours_sentence(team: Team, quota: Quota) -> str:
    """Return that the month's GPU-hours are used up; empty otherwise."""
    limit = quota.max_gpu_hours_per_month
    if limit is None or (used := used_gpu_hours(team)) < limit:
        return ""
    following = (month_start() + timedelta(days=32)).replace(day=1)
    return (
        f"Your team has used {used:.1f} of {limit:g} GPU-hours this month; the count starts again "
        f"on {following:%d %B}, or an operator can raise the limit."
    )


def devices_sentence(job: Job, quota: Quota, held: int) -> str:
    """Return that the job must wait for devices of its team; empty if the quota has room."""
    requested, limit = num_devices(job), quota.max_devices
    if limit is None or held + requested <= limit:
        return ""
    return (
        f"Your team uses {held} of the {limit} devices that it may use at once, and this job "
        f"needs {requested}; it starts when enough of them are released"
        + (
            f", or {display.memory(job.shared_bytes)} of one that its jobs share."
            if job.shared_bytes is not None
            else "."
        )
    )


def duration_within(job: Job, quota: Quota) -> float | None:
    """Return a job's maximum duration: its own, within its team's limit."""
    limits = [job.max_duration_seconds, quota.max_duration_seconds]
    return min((limit for limit in limits if limit is not None), default=None)


def limit_sentences(team: Team, usage: QuotaUsage) -> list[str]:
    """Return the remaining quota, one sentence per limit, for the launch form."""
    quota, sentences = usage.quota, []
    if quota.max_devices is not None:
        sentences.append(f"{len(held_devices(team))} of {quota.max_devices} devices in use")
    if quota.max_gpu_hours_per_month is not None:
        used, limit = used_gpu_hours(team), quota.max_gpu_hours_per_month
        sentences.append(f"{used:.1f} of {limit:g} GPU-hours used this month")
    if quota.max_duration_seconds is not None:
        sentences.append(
            f"a job ends after {display.clock(quota.max_duration_seconds)} at the latest"
        )
    sentences.append(f"you have {usage.queued} of at most {quota.max_queued_per_user} queued jobs")
    return sentences


# ---------------------------------------------------------------------------
# Rules that hold a job back regardless of free devices, each with its sentence.
# ---------------------------------------------------------------------------


PREFLIGHT_RETRY = timedelta(seconds=scale_duration(30, least=1))


class Rules:
    """The rules for the jobs of one queue, loaded once for all of them."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._failed = {event.subject: event for event in failed_preflights(jobs)}
        guests = {job.pool_id: job.pool for job in jobs if job.team_id != job.pool.team_id}
        self._guests = {pk: teams_of(pool) for pk, pool in guests.items()}
        teams = {job.team_id: job.team for job in jobs}
        self._quotas = {pk: quota_of(team) for pk, team in teams.items()}
        self._held = {
            pk: held_devices(teams[pk])
            for pk, quota in self._quotas.items()
            if quota.max_devices is not None
        }
        self._hours = {pk: hours_sentence(teams[pk], quota) for pk, quota in self._quotas.items()}

    def __call__(self, job: Job) -> str:
        """Return the sentence why the job may not start now, or "" if it may start."""
        return self._held_back(job) or self._devices(job)

    def own_devices(self, job: Job) -> frozenset[str]:
        """Return the devices that a job may share although its team may hold no more of them."""
        if job.shared_bytes is None or self._held_back(job) or not self._devices(job):
            return frozenset()
        return frozenset(self._held.get(job.team_id, ()))

    def _held_back(self, job: Job) -> str:
        """Return why a job waits, whatever devices its team holds."""
        of_team = self._not_shared(job) or self._hours[job.team_id]
        return of_team or self._retry_delay(job)

    def shares(self) -> dict[str, float]:
        """Return the fair-share weight of each team, by team id; at least 0.01."""
        return {pk: max(quota.share, 0.01) for pk, quota in self._quotas.items()}

    def may_take(self, job: Job, devices: Collection[str]) -> bool:
        """Return whether the team may hold these devices too, and count them if so."""
        limit = self._quotas[job.team_id].max_devices
        held = self._held.setdefault(job.team_id, set())
        if limit is not None and not held.issuperset(devices) and len(held.union(devices)) > limit:
            return False
        held.update(devices)
        return True

    def _not_shared(self, job: Job) -> str:
        """Return why a job waits whose pool is no longer shared with its team."""
        if job.team_id in self._guests.get(job.pool_id, {job.team_id}):
            return ""
        return (
            "Its pool belongs to another team and is no longer shared with yours: stop the job, "
            "or ask an admin to share the pool again."
        )

    def _devices(self, job: Job) -> str:
        held = len(self._held.get(job.team_id, ()))
        return devices_sentence(job, self._quotas[job.team_id], held)

    def _retry_delay(self, job: Job) -> str:
        """Return why a job waits after a failed preflight."""
        failed = self._failed.get(job.pk)
        if failed is None or failed.at + PREFLIGHT_RETRY <= now():
            return ""
        checks = failed.detail.get("checks", [])
        sentences = [check["sentence"] for check in checks if not check["ok"]]
        return "The last check failed and is repeated: " + " ".join(sentences)


def failed_preflights(jobs: Sequence[Job]) -> list[Event]:
    """Return the preflight failures that requeued one of the jobs, the oldest first."""
    events = Event.objects.filter(
        kind="job.state",
        subject__in=[job.pk for job in jobs],
        from_state=JobState.PREFLIGHT,
        to_state=JobState.QUEUED,
    )
    return list(events.order_by("id"))
