"""Giving up a job whose host is silent: the page that asks, and what follows."""

from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods

from webapp.core.problems import Problem
from webapp.core.units import clock
from webapp.hosts.contact import Contact, contact_of, silent_seconds
from webapp.hosts.models import Host, HostState
from webapp.jobs.actions import job_for
from webapp.jobs.models import LIVE_STATES, Job
from webapp.jobs.services import job_abandon, job_clone, job_submit
from webapp.jobs.standing import standing_of
from webapp.plans.access import signed_in

UNPROCESSABLE = 422
ANYWHERE = "pool"


def may_abandon(job: Job) -> bool:
    """Return whether the job's host has been silent for so long that a person may give it up."""
    if job.host is None or job.state not in LIVE_STATES:
        return False
    return contact_of(job.host) is Contact.UNREACHABLE


@require_http_methods(["GET", "POST"])
def job_abandon_view(request: HttpRequest, job_id: str) -> HttpResponse:
    """Say what is known of a job on a silent host; a POST with the host's name gives it up."""
    job = job_for(request, job_id, "stop")
    if request.method == "GET":
        return _page(request, job)
    typed = request.POST.get("host_name", "")
    try:
        job_abandon(job=job, by=request.user.get_username(), typed_host_name=typed)
    except Problem as problem:
        return _page(request, job, typed=typed, problem=problem.detail)
    return _start_elsewhere(request, job)


def _page(request: HttpRequest, job: Job, typed: str = "", problem: str = "") -> HttpResponse:
    host = job.host
    silent = silent_seconds(host) if host else None
    context: dict[str, Any] = {
        "job": job,
        "host": host,
        "may": may_abandon(job),
        "standing": standing_of(job),
        "silent_words": clock(silent) if silent is not None else "",
        "attempt": job.current_attempt,
        "others": other_hosts(job),
        "typed": typed,
        "problem": problem,
    }
    status = UNPROCESSABLE if problem else 200
    return render(request, "jobs/abandon.html", context, status=status)


def other_hosts(job: Job) -> list[Host]:
    """Return the hosts of the job's pool that may take it now."""
    hosts = Host.objects.filter(pool=job.pool_id, team=job.team_id, state=HostState.READY)
    return [host for host in hosts.exclude(pk=job.host_id) if contact_of(host) is Contact.LIVE]


def _start_elsewhere(request: HttpRequest, job: Job) -> HttpResponse:
    """Queue a copy of an abandoned job on another host, where that was asked for."""
    wanted = request.POST.get("elsewhere", "")
    chosen = next((host for host in other_hosts(job) if host.pk == wanted), None)
    if chosen is None:
        if wanted:
            messages.warning(request, "That host cannot take it now. Clone the job to start it.")
        return redirect("job-detail", job.pk)
    owner = signed_in(request)
    copy = job_clone(job=job, owner=owner)
    copy.requested_host = chosen
    copy.save(update_fields=["requested_host"])
    job_submit(job=copy, by=owner.get_username())
    messages.success(request, f"{job.name} starts anew on {chosen.name}.")
    return redirect("job-detail", copy.pk)
