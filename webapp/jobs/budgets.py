"""The budget of an access token: how many GPU-hours the jobs that it starts may take."""

from datetime import timedelta

from django.db.models import DurationField, ExpressionWrapper, F, Sum
from django.db.models.functions import Coalesce

from planner.specs.units import HOUR
from webapp.accounts.models import AccessToken
from webapp.accounts.tokens import acting_token
from webapp.audit.models import event_record
from webapp.core.clock import now
from webapp.core.problems import ConflictProblem, InvalidProblem
from webapp.jobs.gangs import pool_lock
from webapp.jobs.models import FINAL_STATES, Allocation, Job, TokenLaunch


def cost_gpu_hours(job: Job) -> float:
    """Return the most GPU-hours that a job can take: its devices times its time limit.

    The limit is of one attempt, so each retry that it may have counts as much again. A host
    without a GPU counts as one.

    Raises:
        InvalidProblem: the job has no time limit.
    """
    if job.max_duration_seconds is None:
        raise InvalidProblem(
            "max_duration_seconds",
            f"{job.name} has no time limit, so its GPU-hours are not known, and a token with a "
            "budget starts only what has a limit. Give max_duration_seconds, "
            f"or let a person start it.",
        )
    per_host = job.devices_per_host or most_devices(job)
    attempts = 1 + job.max_retries
    return job.num_hosts * per_host * job.max_duration_seconds * attempts / HOUR


def most_devices(job: Job) -> int:
    """Return the devices of the largest host that a job can run on; at least 1."""
    hosts = job.pool.hosts.filter(devices__is_present=True)
    if job.requested_host_id is not None:
        hosts = hosts.filter(pk=job.requested_host_id)
    return max(
        (host.devices.filter(is_present=True).count() for host in hosts.distinct()), default=1
    )


def spent_gpu_hours(token: AccessToken) -> float:
    """Return the GPU-hours of a token's jobs: of an ended one those for which it held devices.

    A job that has not ended counts with all that it can take.
    """
    launches = TokenLaunch.objects.filter(token=token)
    reserved = launches.exclude(job__state__in=FINAL_STATES).aggregate(sum=Sum("gpu_hours"))["sum"]
    held = ExpressionWrapper(
        Coalesce(F("released_at"), now()) - F("taken_at"), output_field=DurationField()
    )
    rows = Allocation.objects.filter(
        attempt__job__token_launch__token=token, attempt__job__state__in=FINAL_STATES
    )
    used = rows.aggregate(sum=Sum(held))["sum"] or timedelta()
    return (reserved or 0.0) + used / timedelta(hours=1)


def budget_spend(job: Job) -> None:
    """Charge a job to the budget of the token whose request is served, if it has one.

    Call it in a transaction, before the job is queued: it locks the token, so that two jobs do
    not spend the same rest.

    Raises:
        ConflictProblem: the rest of the budget does not suffice.
        InvalidProblem: the job has no time limit.
    """
    token = acting_token()
    if token is None or token.budget_gpu_hours is None:
        return
    pool_lock(f"token {token.pk}")
    needed, budget = cost_gpu_hours(job), token.budget_gpu_hours
    rest = max(0.0, budget - spent_gpu_hours(token))
    if needed > rest:
        way = "approve it (operation request_launch)" if job.plan_id else "start it"
        raise ConflictProblem(
            "over_budget",
            f"{job.name} may take {needed:.3g} GPU-hours, and of the {budget:.3g} of the token "
            f"“{token.name}” {rest:.3g} are left. Shorten its time limit, or ask a person "
            f"to {way}.",
            needed_gpu_hours=needed,
            rest_gpu_hours=rest,
        )
    TokenLaunch.objects.create(token=token, job=job, gpu_hours=needed)
    event_record(
        token,
        "token.launched",
        token.user.get_username(),
        detail={"job": job.pk, "name": token.name, "gpu_hours": needed},
    )
