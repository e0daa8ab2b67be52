"""Team quotas, checked when a job is submitted and again when it starts.

Limits are checked under the lock that also takes the devices, so that two jobs at the same
instant cannot both use the remainder.
"""

from datetime import datetime, timedelta

from django.db.models import DurationField, ExpressionWrapper, F, Sum
from django.db.models.functions import Coalesce, Greatest
from django.utils import timezone

from webapp.accounts.models import Quota, Team
from webapp.core import units
from webapp.core.clock import now
from webapp.core.problems import ConflictProblem, InvalidProblem
from webapp.jobs.models import Allocation, Job, JobState
from webapp.queue.forecast import stated_seconds

HOUR = 3600.0


def quota_of(team: Team) -> Quota:
    """Return the team's quota; the default limits only the queued jobs per user."""
    return Quota.objects.filter(team=team).first() or Quota(team=team)


def month_start() -> datetime:
    """Return the start of this month in the server's time zone."""
    return timezone.localtime(now()).replace(day=1, hour=0, minute=0, second=0, microsecond=0)


def held_devices(team: Team) -> int:
    """Return the number of devices that the team's jobs hold now, in all pools."""
    return Allocation.objects.filter(attempt__job__team=team, released_at=None).count()


def used_gpu_hours(team: Team) -> float:
    """Return the GPU-hours that the team's jobs have used this month."""
    since = month_start()
    rows = Allocation.objects.filter(attempt__job__team=team, device__kind="gpu")
    held_time = ExpressionWrapper(
        Coalesce(F("released_at"), now()) - Greatest(F("taken_at"), since),
        output_field=DurationField(),
    )
    used = rows.exclude(released_at__lt=since).aggregate(used=Sum(held_time))["used"]
    return used / timedelta(hours=1) if used else 0.0


def queued_of(job: Job) -> int:
    """Return the number of other queued jobs of the job's owner."""
    owned = Job.objects.filter(owner=job.owner_id, state=JobState.QUEUED, deleted_at=None)
    return owned.exclude(pk=job.pk).count()


def num_devices(job: Job) -> int:
    """Return the number of devices that a job requests, counting a whole host as one."""
    return job.num_hosts * (job.devices_per_host or 1)


def check_submit(job: Job) -> None:
    """Refuse a job that exceeds its team's quota, in general or for this month.

    Raises:
        InvalidProblem: it requests more than the team may ever have.
        ConflictProblem: the quota of its owner or team is currently used up.
    """
    quota = quota_of(job.team)
    _check_size(job, quota)
    _check_length(job, quota)
    _check_places(job, quota)
    if sentence := hours_sentence(job.team, quota):
        raise ConflictProblem("gpu_hours", sentence)


def _check_size(job: Job, quota: Quota) -> None:
    requested, limit = num_devices(job), quota.max_devices
    noun = "device" if requested == 1 else "devices"
    if limit is not None and requested > limit:
        raise InvalidProblem(
            "max_devices",
            f"{job.name} asks for {requested} {noun} and your team may hold {limit} at once. Plan "
            "it for fewer devices, or ask an operator for more.",
        )


def _check_length(job: Job, quota: Quota) -> None:
    stated, limit = stated_seconds(job), quota.max_duration_seconds
    if limit is not None and stated is not None and stated > limit:
        raise InvalidProblem(
            "max_duration",
            f"{job.name} is to run for {units.clock(stated)} and a job of your team may run for "
            f"{units.clock(limit)}. Give it less time or fewer steps, or ask an operator for "
            "more.",
        )


def _check_places(job: Job, quota: Quota) -> None:
    queued, limit = queued_of(job), quota.max_queued_per_user
    if queued >= limit:
        raise ConflictProblem(
            "max_queued",
            f"You have {queued} jobs in queues and may have {limit}. Wait until some have "
            "started, or stop some.",
        )


def hours_sentence(team: Team, quota: Quota) -> str:
    """Return that the month's GPU-hours are used up; empty otherwise."""
    limit = quota.max_gpu_hours_per_month
    if limit is None or (used := used_gpu_hours(team)) < limit:
        return ""
    following = (month_start() + timedelta(days=32)).replace(day=1)
    return (
        f"Your team has used {used:.1f} of {limit:g} GPU-hours this month; there are new ones on "
        f"{following:%d %B}, or an operator gives more."
    )


def devices_sentence(job: Job, quota: Quota, held: int) -> str:
    """Return that the job must wait for devices of its team; empty if the quota has room."""
    requested, limit = num_devices(job), quota.max_devices
    if limit is None or held + requested <= limit:
        return ""
    return (
        f"Your team holds {held} of the {limit} devices that it may hold at once, and this job "
        f"needs {requested}; it starts when enough of them are released."
    )


def duration_within(job: Job, quota: Quota) -> float | None:
    """Return a job's maximum duration: its own, within its team's limit."""
    limits = [job.max_duration_seconds, quota.max_duration_seconds]
    return min((limit for limit in limits if limit is not None), default=None)


def limit_sentences(team: Team, owner_id: int | None) -> list[str]:
    """Return the remaining quota, one sentence per limit, for the launch form."""
    quota, sentences = quota_of(team), []
    if quota.max_devices is not None:
        sentences.append(f"{held_devices(team)} of {quota.max_devices} devices held now")
    if quota.max_gpu_hours_per_month is not None:
        used, limit = used_gpu_hours(team), quota.max_gpu_hours_per_month
        sentences.append(f"{used:.1f} of {limit:g} GPU-hours used this month")
    if quota.max_duration_seconds is not None:
        sentences.append(
            f"a job ends after {units.clock(quota.max_duration_seconds)} at the latest"
        )
    queued = Job.objects.filter(owner=owner_id, state=JobState.QUEUED, deleted_at=None)
    sentences.append(
        f"{queued.count()} of your {quota.max_queued_per_user} places in queues taken"
    )
    return sentences
