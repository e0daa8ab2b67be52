"""Actions on a job: stop, clone, run again, delete, abandon, each for those who may."""

import json
from dataclasses import dataclass
from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods, require_POST

from runners.plans.refusals import DraftProblem
from runners.shared.reasons import Reason
from webapp.accounts.services import membership_of, signed_in, visible_or_404
from webapp.core.display import clock, listed
from webapp.core.problems import InvalidProblem, Problem
from webapp.hosts.models import Device, Host
from webapp.hosts.services import silent_seconds
from webapp.jobs.launching import clone_begin
from webapp.jobs.models import FINAL_STATES, Attempt, Job
from webapp.jobs.permissions import job_for, refusal
from webapp.jobs.progress import state_label_of
from webapp.jobs.restarting import ANYWHERE, is_enough, other_hosts, start_elsewhere
from webapp.jobs.services import (
    devices_of,
    job_abandon,
    job_clone,
    job_delete,
    job_resume,
    job_stop,
    job_submit,
    names_of,
    open_parts,
    silent_parts,
)
from webapp.jobs.stored_files import files_delete


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


MOST_DIGITS = 6  # of a number of hosts, in a form


@require_POST
def job_resume_view(request: HttpRequest, job_id: str) -> HttpResponse:
    """Queue a job that goes on from what an ended one left, owned by this person."""
    job, user = job_for(request, job_id, "resume"), signed_in(request)
    posted = request.POST.get("num_hosts", "")
    try:
        if posted and not (posted.isascii() and posted.isdigit() and len(posted) <= MOST_DIGITS):
            detail = f"num_hosts is {posted[:20]!r}: choose a whole number from 1."
            raise InvalidProblem("bad_num_hosts", detail)
        draft = job_resume(job=job, owner=user, num_hosts=int(posted) if posted else None)
        resumed = job_submit(job=draft, by=user.get_username())
    except Problem as problem:
        messages.warning(request, problem.detail)
        return redirect("job-detail", job.pk)
    return redirect("job-detail", resumed.pk)


@require_POST
def job_delete_view(request: HttpRequest, job_id: str) -> HttpResponse:
    """Delete a job from the history; its measurements still calibrate its host."""
    job = job_for(request, job_id, "delete")
    try:
        job_delete(job=job, by=request.user.get_username())
    except Problem as problem:
        messages.warning(request, problem.detail)
        return redirect("job-detail", job.pk)
    messages.success(request, f"{job.name} is deleted. Its measurements still count for its host.")
    return redirect("job-list")


@require_POST
def job_files_delete_view(request: HttpRequest, job_id: str) -> HttpResponse:
    """Order the hosts of an ended job to delete its checkpoints, or all that it keeps there."""
    job = visible_or_404(Job, request.user, pk=job_id)  # also a deleted one: its files may be left
    if why := refusal(membership_of(request.user, job.team), job, "delete"):
        raise PermissionDenied(why)
    hosts = Host.objects.visible_to(request.user).filter(slug=request.POST.get("host", ""))
    host = hosts.first()
    page = redirect("host-detail", host.slug) if host else redirect("job-artefacts", job.pk)
    try:
        files_delete(job=job, part=request.POST.get("part", ""), by=request.user.get_username())
    except Problem as problem:
        messages.warning(request, problem.detail)
    else:
        messages.success(request, "Its files are deleted after the next heartbeat of their host.")
    return page


# Page to abandon a job with an unreachable host, and to restart it elsewhere.


UNPROCESSABLE = 422


@dataclass(frozen=True)
class SilentPart:
    """A part of the job on an unreachable host, with the devices to be freed."""

    attempt: Attempt
    devices: list[Device]

    @property
    def silent_words(self) -> str:
        """Return how long the host has been unreachable."""
        seconds = silent_seconds(self.attempt.host)
        return clock(seconds) if seconds is not None else ""

    @property
    def device_words(self) -> str:
        """Return the part's devices, for example ``GPU 0, 1 and 2``."""
        if not self.devices:
            return "nothing"
        if self.devices[0].kind == "cpu":
            return "its processor"
        kind = self.devices[0].get_kind_display()
        return f"{kind} {listed([str(device.index) for device in self.devices])}"


@require_http_methods(["GET", "POST"])
def job_abandon_view(request: HttpRequest, job_id: str) -> HttpResponse:
    """Show a job with an unreachable host; a POST with the host's name abandons it."""
    job = job_for(request, job_id, "abandon")
    if request.method == "GET":
        return _page(request, job)
    typed = request.POST.get("host_name", "")
    was_over = job.state in FINAL_STATES
    names = names_of(silent_parts(job))
    try:
        job_abandon(job=job, by=request.user.get_username(), typed_host_name=typed)
    except Problem as problem:
        return _page(request, job, typed=typed, problem=problem.detail)
    if was_over:
        messages.success(request, f"What {listed(names)} held counts as free.")
        return redirect("job-detail", job.pk)
    return _start_elsewhere(request, job)


def _page(request: HttpRequest, job: Job, typed: str = "", problem: str = "") -> HttpResponse:
    silent = silent_parts(job)
    silent_ids = {each.pk for each in silent}
    context: dict[str, Any] = {
        "job": job,
        "host": job.host,
        "is_over": job.state in FINAL_STATES,
        "may": bool(silent),
        "silent": [SilentPart(each, devices_of(each)) for each in silent],
        "heard": [each for each in open_parts(job) if each.pk not in silent_ids],
        "names": names_of(silent),
        "named": listed(names_of(silent)),
        "standing": state_label_of(job),
        "others": other_hosts(job),
        "is_enough": is_enough(job),
        "anywhere": ANYWHERE,
        "typed": typed,
        "problem": problem,
    }
    status = UNPROCESSABLE if problem else 200
    return render(request, "jobs/abandon.html", context, status=status)


def _start_elsewhere(request: HttpRequest, job: Job) -> HttpResponse:
    """Queue a copy of an abandoned job on other hosts, if requested."""
    requested = request.POST.get("elsewhere", "")
    copy = start_elsewhere(job, requested, signed_in(request)) if requested else None
    if copy is None:
        if requested:
            messages.warning(
                request,
                "The host cannot take the job now. Clone the job to start it on another host.",
            )
        return redirect("job-detail", job.pk)
    chosen = copy.requested_host
    where = chosen.name if chosen else f"other hosts of pool {job.pool.name}"
    messages.success(request, f"{job.name} starts again on {where}.")
    return redirect("job-detail", copy.pk)
