"""Launches that a person of the team approves before they start, usually those of an agent."""

from collections.abc import Mapping
from typing import Any

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import QuerySet

from runners.plans.launch import Launch
from runners.plans.old_names import read_launch
from runners.plans.refusals import DraftProblem
from webapp.audit.models import event_record
from webapp.core.clock import now
from webapp.core.display import clock, counted
from webapp.core.problems import ConflictProblem, ForbiddenProblem
from webapp.jobs.budgets import cost_gpu_hours
from webapp.jobs.launching import launchable_of
from webapp.jobs.models import Job, LaunchRequest
from webapp.plans.models import Plan
from webapp.plans.planning import plan_keep

MOST_WAITING = 100  # requests of one team
LONGEST_REASON = 400


def request_make(
    *, plan: Plan, by: User, document: Mapping[str, Any], reason: str, token_name: str = ""
) -> LaunchRequest:
    """Ask the team's people to approve a launch; the same open request is made once.

    A draft is saved as a version first, and the request is for that version: what a person looks
    at is what starts, whatever becomes of the draft meanwhile.

    Raises:
        DraftProblem: the plan cannot be launched.
        ConflictProblem: too many requests of the team wait.
    """
    launchable_of(plan)
    plan = plan_keep(plan, by=by.get_username())
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


def stored_launch(request: LaunchRequest) -> Launch:
    """Return the options of the launch that a request is for.

    Raises:
        ValidationError: an earlier release wrote options that are no longer known.
    """
    return Launch.model_validate(read_launch(request.document))


def cost_words(plan: Plan, options: Launch) -> str:
    """Return the most that a launch can take, in GPU-hours and its factors; "" if it cannot start.

    An endpoint or a plan without a time limit has no known cost, which the words say.
    """
    try:
        launch = launchable_of(plan, options)
    except DraftProblem:
        return ""
    spread, attempts = launch.spread, 1 + options.max_retries
    seconds = options.max_duration_seconds or launch.max_duration_seconds
    devices = counted(spread.num_hosts * spread.devices_per_host, "device")
    if seconds is None:
        return f"It takes {devices} and has no time limit, so its GPU-hours are not known."
    job = Job(
        name=plan.name,
        num_hosts=spread.num_hosts,
        devices_per_host=spread.devices_per_host,
        max_duration_seconds=seconds,
        max_retries=options.max_retries,
    )
    return (
        f"It may take {cost_gpu_hours(job):.3g} GPU-hours: {devices} for at most "
        f"{clock(seconds)}, in {counted(attempts, 'attempt')}."
    )


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


def request_withdraw(*, request: LaunchRequest, by: User, why: str = "") -> LaunchRequest:
    """Withdraw a request that nobody has decided on; only who asked may.

    Raises:
        ForbiddenProblem: somebody else asked.
        ConflictProblem: it was decided, or withdrawn, before.
    """
    if request.asked_by_id != by.pk:
        who = request.asked_by.get_username() if request.asked_by else "a deleted account"
        raise ForbiddenProblem(
            "not_yours", f"{who} asked for this launch, and alone withdraws it. Deny it instead."
        )
    with transaction.atomic():
        rows = LaunchRequest.objects.filter(pk=request.pk, state="waiting")
        fields = {"decided_by": by, "decided_at": now(), "answer": why.strip()[:LONGEST_REASON]}
        if not rows.update(state="withdrawn", **fields):
            raise decided_before(request)
        event_record(
            request, "launch.withdrawn", by.get_username(), detail={"plan": request.plan_id}
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
