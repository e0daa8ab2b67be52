"""What a person does to a job from its page or from the list: stop, clone, delete."""

from dataclasses import dataclass

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_POST

from runners.reasons import Reason
from webapp.accounts.models import Membership, Role
from webapp.accounts.roles import is_at_least, membership_of
from webapp.core.problems import Problem
from webapp.jobs.lookup import load_job
from webapp.jobs.models import FINAL_STATES, Job, JobState
from webapp.jobs.services import job_clone, job_delete, job_stop, job_submit


@dataclass(frozen=True)
class Allowed:
    """Which buttons a person gets for a job."""

    stop: bool = False
    clone: bool = False
    delete: bool = False
    abandon: bool = False  # where a host of it is silent

    def __bool__(self) -> bool:
        return self.stop or self.clone or self.delete


def allowed(membership: Membership | None, job: Job) -> Allowed:
    """Return what a member may do to a job in its present state.

    A practitioner acts on what is theirs, an operator on every job of the team.
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
    """Return the job if the person may do ``action`` to it.

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
    """Stop a job; its supervisor lets it write what it has first."""
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
    """Queue the same job once more, as the person's own."""
    job = job_for(request, job_id, "clone")
    user = request.user
    if not user.is_authenticated:
        raise PermissionDenied("Log in first.")
    try:
        copy = job_submit(job=job_clone(job=job, owner=user), by=user.get_username())
    except Problem as problem:
        messages.warning(request, problem.detail)
        return redirect("job-detail", job.pk)
    return redirect("job-detail", copy.pk)


@require_POST
def job_delete_view(request: HttpRequest, job_id: str) -> HttpResponse:
    """Take a job out of the history; what it measured keeps calibrating its host."""
    job = job_for(request, job_id, "delete")
    try:
        job_delete(job=job)
    except Problem as problem:
        messages.warning(request, problem.detail)
        return redirect("job-detail", job.pk)
    messages.success(request, f"{job.name} is deleted. What it measured stays with its host.")
    return redirect("job-list")
