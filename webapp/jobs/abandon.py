"""Giving up a job of which a host is silent: the page that asks, and what follows."""

from dataclasses import dataclass
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods

from webapp.core.problems import Problem
from webapp.core.units import clock
from webapp.core.wording import listed
from webapp.hosts.contact import Contact, contact_of, silent_seconds
from webapp.hosts.models import Device, Host, HostState
from webapp.jobs.actions import job_for
from webapp.jobs.giving_up import devices_of, job_abandon, names_of, open_parts, silent_parts
from webapp.jobs.models import FINAL_STATES, Attempt, Job
from webapp.jobs.services import job_clone, job_submit
from webapp.jobs.standing import standing_of
from webapp.plans.access import signed_in

UNPROCESSABLE = 422
ANYWHERE = "pool"


@dataclass(frozen=True)
class SilentPart:
    """One silent host of the job: what is known of its part, and what would be freed."""

    attempt: Attempt
    devices: list[Device]

    @property
    def silent_words(self) -> str:
        """Return for how long nothing was heard."""
        seconds = silent_seconds(self.attempt.host)
        return clock(seconds) if seconds is not None else ""

    @property
    def device_words(self) -> str:
        """Return what it holds: ``GPU 0, 1 and 2``."""
        if not self.devices:
            return "nothing"
        if self.devices[0].kind == "cpu":
            return "its processor"
        kind = self.devices[0].get_kind_display()
        return f"{kind} {listed([str(device.index) for device in self.devices])}"


@require_http_methods(["GET", "POST"])
def job_abandon_view(request: HttpRequest, job_id: str) -> HttpResponse:
    """Say what is known of a job with a silent host; a POST with its name gives the job up."""
    job = job_for(request, job_id, "stop")
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
        "standing": standing_of(job),
        "others": other_hosts(job),
        "is_enough": is_enough(job),
        "anywhere": ANYWHERE,
        "typed": typed,
        "problem": problem,
    }
    status = UNPROCESSABLE if problem else 200
    return render(request, "jobs/abandon.html", context, status=status)


def live_hosts(job: Job) -> list[Host]:
    """Return the hosts of the job's pool that may take it now."""
    hosts = Host.objects.filter(pool=job.pool_id, state=HostState.READY)
    return [host for host in hosts if contact_of(host) is Contact.LIVE]


def other_hosts(job: Job) -> list[Host]:
    """Return the hosts that one job on a single host can be started on anew."""
    return [] if job.num_hosts > 1 else [each for each in live_hosts(job) if each != job.host]


def is_enough(job: Job) -> bool:
    """Return whether a job on several hosts could start anew without the silent ones."""
    return job.num_hosts > 1 and len(live_hosts(job)) >= job.num_hosts


def _start_elsewhere(request: HttpRequest, job: Job) -> HttpResponse:
    """Queue a copy of an abandoned job on other hosts, where that was asked for."""
    wanted = request.POST.get("elsewhere", "")
    chosen = next((host for host in other_hosts(job) if host.pk == wanted), None)
    if chosen is None and not (wanted == ANYWHERE and is_enough(job)):
        if wanted:
            messages.warning(request, "That host cannot take it now. Clone the job to start it.")
        return redirect("job-detail", job.pk)
    owner = signed_in(request)
    copy = job_clone(job=job, owner=owner)
    copy.requested_host = chosen
    copy.save(update_fields=["requested_host"])
    job_submit(job=copy, by=owner.get_username())
    where = chosen.name if chosen else f"other hosts of pool {job.pool.name}"
    messages.success(request, f"{job.name} starts anew on {where}.")
    return redirect("job-detail", copy.pk)
