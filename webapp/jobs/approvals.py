"""Launches that need more than a token: a budget in GPU-hours, or a person's approval."""

from collections.abc import Mapping
from typing import Any

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import QuerySet

from webapp.accounts.models import AccessToken
from webapp.audit.models import event_record
from webapp.core.clock import now
from webapp.core.problems import ConflictProblem, InvalidProblem
from webapp.jobs.gangs import pool_lock
from webapp.jobs.launching import Launch, LaunchOptions, launch_of
from webapp.jobs.models import Job, LaunchRequest, TokenLaunch
from webapp.plans.models import Plan

HOUR = 3600.0
MOST_WAITING = 100  # requests of one team
LONGEST_REASON = 400


def cost_gpu_hours(launch: Launch, options: LaunchOptions) -> float:
    """Return the GPU-hours that a launch may take: its devices times its time limit.

    Raises:
        InvalidProblem: the job has no time limit, so that it may take any number.
    """
    seconds = options.max_duration_seconds or launch.max_duration_seconds
    if seconds is None:
        raise InvalidProblem(
            "hours",
            "This job has no time limit, so its GPU-hours are not known. Give hours: a token with "
            "a budget launches only what has a limit.",
        )
    per_host = (
        launch.spread.devices_per_host or launch.host.devices.filter(is_present=True).count()
    )
    return launch.spread.num_hosts * max(1, per_host) * seconds / HOUR


def spent_gpu_hours(token: AccessToken) -> float:
    """Return the GPU-hours of a token's launches: of an ended job the time that it ran.

    A job that has not ended counts with its whole limit.
    """
    total = 0.0
    for each in TokenLaunch.objects.filter(token=token).select_related("job"):
        job, share = each.job, 1.0
        if job.ended_at is not None and job.max_duration_seconds:
            ran = (job.ended_at - job.started_at).total_seconds() if job.started_at else 0.0
            share = min(1.0, ran / job.max_duration_seconds)
        total += each.gpu_hours * share
    return total


def budget_check(token: AccessToken, plan: Plan, options: LaunchOptions) -> float:
    """Return the GPU-hours of a launch by a token with a budget.

    Call it in a transaction: it locks the token, so that two launches do not spend the same rest.

    Raises:
        ConflictProblem: the rest of the budget does not suffice.
        InvalidProblem: the job has no time limit.
        DraftProblem: there is nothing to launch.
    """
    pool_lock(f"token {token.pk}")
    launch = launch_of(plan, options.endpoint, options.measuring, options.adapter, options.draft)
    needed, budget = cost_gpu_hours(launch, options), token.budget_gpu_hours or 0.0
    rest = budget - spent_gpu_hours(token)
    if needed > rest:
        raise ConflictProblem(
            "over_budget",
            f"This launch may take {needed:.3g} GPU-hours, and of the {budget:.3g} of the token "
            f"“{token.name}” {max(0.0, rest):.3g} are left. Shorten its time limit, or ask a "
            "person to approve it: POST /api/v1/plans/{plan_id}/launch-requests.",
            needed_gpu_hours=needed,
            rest_gpu_hours=max(0.0, rest),
        )
    return needed


def budget_spend(token: AccessToken, job: Job, gpu_hours: float) -> None:
    """Record what a token launched; a repeated launch is recorded once."""
    _, is_new = TokenLaunch.objects.get_or_create(
        job=job, defaults={"token": token, "gpu_hours": gpu_hours}
    )
    if is_new:
        event_record(
            token,
            "token.launched",
            token.user.get_username(),
            detail={"job": job.pk, "name": token.name, "gpu_hours": gpu_hours},
        )


def request_make(
    *, plan: Plan, by: User, document: Mapping[str, Any], reason: str, token_name: str = ""
) -> LaunchRequest:
    """Ask the team's people to approve a launch; the same open request is made once.

    Raises:
        DraftProblem: the plan cannot be launched.
        ConflictProblem: too many requests of the team wait.
    """
    launch_of(plan)
    waiting = LaunchRequest.objects.filter(team=plan.team, state="waiting")
    same = waiting.filter(plan=plan, asked_by=by, document=dict(document)).first()
    if same is not None:
        return same
    if waiting.count() >= MOST_WAITING:
        raise ConflictProblem(
            "too_many_requests",
            f"{MOST_WAITING} launches of {plan.team.name} wait for an approval, the most. Let a "
            "person decide on some first.",
        )
    with transaction.atomic():
        made = LaunchRequest.objects.create(
            team=plan.team,
            plan=plan,
            document=dict(document),
            reason=reason.strip()[:LONGEST_REASON],
            asked_by=by,
            token_name=token_name,
            asked_at=now(),
        )
        event_record(made, "launch.requested", by.get_username(), detail={"plan": plan.pk})
    return made


def request_decide(
    *, request: LaunchRequest, by: User, job: Job | None, answer: str = ""
) -> LaunchRequest:
    """Approve a request with the job that was launched for it, or deny it without one.

    Raises:
        ConflictProblem: somebody decided before.
    """
    state = "approved" if job is not None else "denied"
    with transaction.atomic():
        rows = LaunchRequest.objects.filter(pk=request.pk, state="waiting")
        fields = {"decided_by": by, "decided_at": now(), "answer": answer[:LONGEST_REASON]}
        if not rows.update(state=state, job=job, **fields):
            raise decided_before(request)
        event_record(
            request,
            f"launch.{state}",
            by.get_username(),
            detail={"plan": request.plan_id, "job": job.pk if job else None},
        )
    request.refresh_from_db()
    return request


def decided_before(request: LaunchRequest) -> ConflictProblem:
    """Return the problem of a request that is no longer open."""
    current = LaunchRequest.objects.select_related("decided_by").get(pk=request.pk)
    who = current.decided_by.get_username() if current.decided_by else "somebody"
    return ConflictProblem("decided", f"This launch was {current.state} by {who} meanwhile.")


def open_requests(team_ids: list[str]) -> QuerySet[LaunchRequest]:
    """Return the requests of teams that wait for a decision, the oldest first."""
    rows = LaunchRequest.objects.filter(team__in=team_ids, state="waiting")
    return rows.select_related("plan", "asked_by", "team").order_by("asked_at", "id")
