"""Page to abandon a job with a silent host, and to restart it elsewhere."""

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
from webapp.jobs.state_label import state_label_of
from webapp.plans.access import signed_in

UNPROCESSABLE = 422
ANYWHERE = "pool"


@dataclass(frozen=True)
class SilentPart:
    """A part of the job on a silent host, with the devices to be freed."""

    attempt: Attempt
    devices: list[Device]

    @property
    def silent_words(self) -> str:
        """Return how long the host has been silent."""
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
    """Show the state of a job with a silent host; a POST with the host's name abandons it."""
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
        "standing": state_label_of(job),
        "others": other_hosts(job),
        "is_enough": is_enough(job),
        "anywhere": ANYWHERE,
        "typed": typed,
        "problem": problem,
    }
    status = UNPROCESSABLE if problem else 200
    return render(request, "jobs/abandon.html", context, status=status)


def live_hosts(job: Job) -> list[Host]:
    """Return the hosts of the job's pool that can run it now."""
    hosts = Host.objects.filter(pool=job.pool_id, state=HostState.READY)
    return [host for host in hosts if contact_of(host) is Contact.LIVE]


def other_hosts(job: Job) -> list[Host]:
    """Return the other hosts on which a single-host job can be restarted."""
    return [] if job.num_hosts > 1 else [each for each in live_hosts(job) if each != job.host]


def is_enough(job: Job) -> bool:
    """Return whether a job on several hosts could restart without the silent ones."""
    return job.num_hosts > 1 and len(live_hosts(job)) >= job.num_hosts


def _start_elsewhere(request: HttpRequest, job: Job) -> HttpResponse:
    """Queue a copy of an abandoned job on other hosts, if requested."""
    requested = request.POST.get("elsewhere", "")
    chosen = next((host for host in other_hosts(job) if host.pk == requested), None)
    if chosen is None and not (requested == ANYWHERE and is_enough(job)):
        if requested:
            messages.warning(request, "That host cannot take it now. Clone the job to start it.")
        return redirect("job-detail", job.pk)
    owner = signed_in(request)
    copy = job_clone(job=job, owner=owner)
    copy.requested_host = chosen
    copy.save(update_fields=["requested_host"])
    job_submit(job=copy, by=owner.get_username())
    where = chosen.name if chosen else f"other hosts of pool {job.pool.name}"
    messages.success(request, f"{job.name} starts again on {where}.")
    return redirect("job-detail", copy.pk)
