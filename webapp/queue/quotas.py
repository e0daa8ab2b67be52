"""What a team may have: asked when a job is submitted, and again when its turn comes.

Limits are counted where the devices are taken, under the same lock, so that two jobs at the
same instant cannot both have what is left of them.
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
    """Return the team's quota; without one, all but the places in queues is unlimited."""
    return Quota.objects.filter(team=team).first() or Quota(team=team)


def month_start() -> datetime:
    """Return when this month began, by the server's time zone."""
    return timezone.localtime(now()).replace(day=1, hour=0, minute=0, second=0, microsecond=0)


def held_devices(team: Team) -> int:
    """Return how many devices the team's jobs hold now, in all pools."""
    return Allocation.objects.filter(attempt__job__team=team, released_at=None).count()


def used_gpu_hours(team: Team) -> float:
    """Return how many GPU-hours the team's jobs have held this month."""
    since = month_start()
    rows = Allocation.objects.filter(attempt__job__team=team, device__kind="gpu")
    held = ExpressionWrapper(
        Coalesce(F("released_at"), now()) - Greatest(F("taken_at"), since),
        output_field=DurationField(),
    )
    used = rows.exclude(released_at__lt=since).aggregate(used=Sum(held))["used"]
    return used / timedelta(hours=1) if used else 0.0


def queued_of(job: Job) -> int:
    """Return how many other jobs of the job's owner wait."""
    mine = Job.objects.filter(owner=job.owner_id, state=JobState.QUEUED, deleted_at=None)
    return mine.exclude(pk=job.pk).count()


def num_devices(job: Job) -> int:
    """Return how many devices a job asks for, one for each host where it asks for all."""
    return job.num_hosts * (job.devices_per_host or 1)


def check_submit(job: Job) -> None:
    """Refuse a job that its team's quota can never let run, or not any more this month.

    Raises:
        InvalidProblem: it asks for more than the team may ever have.
        ConflictProblem: its owner or its team has used up what there is for now.
    """
    quota = quota_of(job.team)
    _check_size(job, quota)
    _check_length(job, quota)
    _check_places(job, quota)
    if sentence := hours_sentence(job.team, quota):
        raise ConflictProblem("gpu_hours", sentence)


def _check_size(job: Job, quota: Quota) -> None:
    wanted, limit = num_devices(job), quota.max_devices
    noun = "device" if wanted == 1 else "devices"
    if limit is not None and wanted > limit:
        raise InvalidProblem(
            "max_devices",
            f"{job.name} asks for {wanted} {noun} and your team may hold {limit} at once. Plan "
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
    """Return that the month's GPU-hours are used up, or nothing while there are some."""
    limit = quota.max_gpu_hours_per_month
    if limit is None or (used := used_gpu_hours(team)) < limit:
        return ""
    following = (month_start() + timedelta(days=32)).replace(day=1)
    return (
        f"Your team has used {used:.1f} of {limit:g} GPU-hours this month; there are new ones on "
        f"{following:%d %B}, or an operator gives more."
    )


def devices_sentence(job: Job, quota: Quota, held: int) -> str:
    """Return that the job has to wait for its team's own jobs, or nothing where it has room."""
    wanted, limit = num_devices(job), quota.max_devices
    if limit is None or held + wanted <= limit:
        return ""
    return (
        f"Your team holds {held} of the {limit} devices that it may hold at once, and this job "
        f"needs {wanted}; it starts when enough of them are released."
    )


def duration_within(job: Job, quota: Quota) -> float | None:
    """Return for how long a job may run: what it asks for, within its team's limit."""
    limits = [job.max_duration_seconds, quota.max_duration_seconds]
    return min((one for one in limits if one is not None), default=None)


def told_limits(team: Team, owner_id: int | None) -> list[str]:
    """Return what is left of the team's quota, one sentence a limit, for the launch form."""
    quota, told = quota_of(team), []
    if quota.max_devices is not None:
        told.append(f"{held_devices(team)} of {quota.max_devices} devices held now")
    if quota.max_gpu_hours_per_month is not None:
        used, limit = used_gpu_hours(team), quota.max_gpu_hours_per_month
        told.append(f"{used:.1f} of {limit:g} GPU-hours used this month")
    if quota.max_duration_seconds is not None:
        told.append(f"a job ends after {units.clock(quota.max_duration_seconds)} at the latest")
    mine = Job.objects.filter(owner=owner_id, state=JobState.QUEUED, deleted_at=None)
    told.append(f"{mine.count()} of your {quota.max_queued_per_user} places in queues taken")
    return told
