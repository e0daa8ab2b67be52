"""Views for actions on a job: stop, clone, run again, delete."""

import json
from dataclasses import dataclass

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods, require_POST

from runners.reasons import Reason
from webapp.accounts.models import Membership, Role
from webapp.accounts.roles import is_at_least, membership_of
from webapp.core.problems import Problem
from webapp.jobs.lookup import load_job
from webapp.jobs.models import FINAL_STATES, Job, JobState
from webapp.jobs.services import job_clone, job_delete, job_stop, job_submit
from webapp.plans.access import signed_in
from webapp.plans.cloning import clone_begin
from webapp.plans.errors import DraftProblem


@dataclass(frozen=True)
class Allowed:
    """The actions that a person may take on a job."""

    stop: bool = False
    clone: bool = False
    delete: bool = False
    abandon: bool = False  # if one of its hosts is silent

    def __bool__(self) -> bool:
        return self.stop or self.clone or self.delete


def allowed(membership: Membership | None, job: Job) -> Allowed:
    """Return the actions that a member may take on a job in its present state.

    Practitioners may act on their own jobs, operators on every job of the team.
    """
    if membership is None or not is_at_least(Role(membership.role), Role.PRACTITIONER):
        return Allowed()
    is_operator = is_at_least(Role(membership.role), Role.OPERATOR)
    is_theirs = is_operator or job.owner_id == membership.user_id
    is_over = job.state in FINAL_STATES
    is_stoppable = not is_over and job.state not in {JobState.DRAFT, JobState.STOPPING}
    return Allowed(
        stop=is_theirs and is_stoppable,
        clone=True,
        delete=is_theirs and (is_over or job.state == JobState.DRAFT),
        abandon=is_theirs,
    )


def job_for(request: HttpRequest, job_id: str, action: str) -> Job:
    """Return the job if the person may take ``action`` on it.

    Raises:
        PermissionDenied: the role is too low, or the job is someone else's.
    """
    job = load_job(request, job_id)
    membership = membership_of(request.user, job.team)
    if membership is None or not is_at_least(Role(membership.role), Role.PRACTITIONER):
        raise PermissionDenied(f"To {action} a job you need the role Practitioner or higher.")
    is_operator = is_at_least(Role(membership.role), Role.OPERATOR)
    if action != "clone" and not is_operator and job.owner_id != request.user.pk:
        raise PermissionDenied(f"Only its owner or an operator can {action} this job.")
    return job


@require_POST
def job_stop_view(request: HttpRequest, job_id: str) -> HttpResponse:
    """Stop a job; its supervisor lets it save its results first."""
    job = job_for(request, job_id, "stop")
    is_own = job.owner_id == request.user.pk
    reason = Reason.STOPPED_BY_USER if is_own else Reason.STOPPED_BY_OPERATOR
    try:
        job_stop(job=job, by=request.user.get_username(), reason=reason)
    except Problem as problem:
        messages.warning(request, problem.detail)
    return redirect("job-detail", job.pk)


@require_POST
def job_clone_view(request: HttpRequest, job_id: str) -> HttpResponse:
    """Open the wizard with the job's plan filled in; nothing is launched.

    A job without a plan is shown on the rerun page instead.
    """
    job = job_for(request, job_id, "clone")
    try:
        plan = clone_begin(job=job, owner=signed_in(request))
    except DraftProblem:
        return redirect("job-rerun", job.pk)
    return redirect("plan-step", plan.pk, "review")


@require_http_methods(["GET", "POST"])
def job_rerun(request: HttpRequest, job_id: str) -> HttpResponse:
    """Show the spec of a rerun; a POST queues it, owned by this person."""
    job = job_for(request, job_id, "clone")
    user = signed_in(request)
    if request.method == "GET":
        context = {"job": job, "spec": json.dumps(job.spec, indent=2)}
        return render(request, "jobs/rerun.html", context)
    try:
        copy = job_submit(job=job_clone(job=job, owner=user), by=user.get_username())
    except Problem as problem:
        messages.warning(request, problem.detail)
        return redirect("job-detail", job.pk)
    return redirect("job-detail", copy.pk)


@require_POST
def job_delete_view(request: HttpRequest, job_id: str) -> HttpResponse:
    """Delete a job from the history; its measurements still calibrate its host."""
    job = job_for(request, job_id, "delete")
    try:
        job_delete(job=job)
    except Problem as problem:
        messages.warning(request, problem.detail)
        return redirect("job-detail", job.pk)
    messages.success(request, f"{job.name} is deleted. What it measured stays with its host.")
    return redirect("job-list")
