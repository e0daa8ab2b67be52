"""The page on which people approve, deny or withdraw launches that agents ask for."""

from django.contrib import messages
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_GET, require_POST
from pydantic import ValidationError

from runners.plans.launch import Launch
from runners.plans.pins import FIELD_TITLES
from runners.plans.refusals import DraftProblem
from webapp.accounts.models import Role, team_ids_of
from webapp.accounts.services import (
    check_role,
    current_role,
    is_at_least,
    membership_of,
    signed_in,
    visible_or_404,
)
from webapp.core.problems import ConflictProblem, Problem
from webapp.jobs.approvals import (
    cost_words,
    decided_before,
    open_requests,
    request_decide,
    request_withdraw,
    stored_launch,
)
from webapp.jobs.endpoints import hashes_of, keep_for_session, new_key
from webapp.jobs.launching import launch_note, plan_launch
from webapp.jobs.models import Job, LaunchRequest
from webapp.wizard.forms import to_form

NUM_DECIDED = 20


@require_GET
def approval_list(request: HttpRequest) -> HttpResponse:
    """List the launches that wait for an approval, and those decided last."""
    teams = team_ids_of(request.user)
    decided = LaunchRequest.objects.filter(team__in=teams).exclude(state="waiting")
    waiting = list(open_requests(teams))
    context = {
        "waiting": [(row, launch_note(row.plan), _options(row), _cost(row)) for row in waiting],
        "decided": decided.select_related("plan", "asked_by", "decided_by", "job").order_by(
            "-decided_at"
        )[:NUM_DECIDED],
        "may_decide": is_at_least(current_role(request), Role.PRACTITIONER),
    }
    return render(request, "jobs/approvals.html", context)


def _options(row: LaunchRequest) -> str:
    """Return a launch's options that were sent, by the labels of the launch form."""
    try:
        launch = stored_launch(row)
    except ValidationError:  # of an older release: as they were sent
        return ", ".join(f"{name} {value}" for name, value in row.document.items())
    names = [each for each in Launch.model_fields if each in launch.model_fields_set]
    return ", ".join(f"“{FIELD_TITLES[each]}” {_shown(to_form(launch, each))}" for each in names)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cost(row: LaunchRequest) -> str:
    """Return the most that a launch can take, in words."""
    try:
        return cost_words(row.plan, stored_launch(row))
    except (Problem, ValidationError):  # of an older release: it will be refused at the button
        return ""


def _request(request: HttpRequest, request_id: str) -> LaunchRequest:
    row = visible_or_404(LaunchRequest, request.user, pk=request_id)
    membership = membership_of(request.user, row.team)
    check_role(Role(membership.role) if membership else Role.VIEWER, Role.PRACTITIONER)
    return row


@require_POST
def approve(request: HttpRequest, request_id: str) -> HttpResponse:
    """Launch what was asked for; the job belongs to the one who asked."""
    row, key = _request(request, request_id), new_key()
    try:
        job = _launched(row, request, key)
    except (DraftProblem, Problem) as problem:
        messages.warning(request, str(problem))
        return redirect("approvals")
    keep_for_session(request, job, key)
    messages.success(request, f"{job.name} is launched.")
    return redirect("job-detail", job.pk)


@transaction.atomic
def _launched(row: LaunchRequest, request: HttpRequest, key: str) -> Job:
    """Launch the job of a request that is still open."""
    current = LaunchRequest.objects.select_for_update().get(pk=row.pk)
    if current.state != "waiting":
        raise decided_before(row)
    by, launch = signed_in(request), stored_launch(row)
    job = plan_launch(
        plan=row.plan,
        by=row.asked_by or by,
        launch=launch,
        key_hashes=hashes_of(key) if launch.run == "endpoint" else (),
        is_named=bool(launch.name.strip()),
    )
    request_decide(request=row, by=by, job=job)
    return job


@require_POST
def deny(request: HttpRequest, request_id: str) -> HttpResponse:
    """Refuse a launch, with an optional reason that the agent reads."""
    row = _request(request, request_id)
    try:
        request_decide(
            request=row, by=signed_in(request), job=None, answer=request.POST.get("answer", "")
        )
    except Problem as problem:
        messages.warning(request, problem.detail)
    else:
        messages.success(request, f"The launch of {row.plan} is denied.")
    return redirect("approvals")


@require_POST
def withdraw(request: HttpRequest, request_id: str) -> HttpResponse:
    """Withdraw a launch that one asked for oneself."""
    row = visible_or_404(LaunchRequest, request.user, pk=request_id)
    try:
        request_withdraw(request=row, by=signed_in(request))
    except ConflictProblem as problem:
        messages.warning(request, problem.detail)
    else:
        messages.success(request, f"The request to launch {row.plan} is withdrawn.")
    return redirect("approvals")
