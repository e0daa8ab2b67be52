"""The history of jobs, and actions on them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

from django.contrib import messages
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.core.paginator import Page
from django.db.models import Prefetch, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from runners.shared.reasons import Reason
from webapp.accounts.models import Membership, Role, team_ids_of
from webapp.accounts.services import is_at_least, membership_of, signed_in
from webapp.core.display import clock, listed, quantity
from webapp.core.problems import Problem
from webapp.core.queries import NewestFirst, page_by_key
from webapp.figures.registry import definition_of
from webapp.hosts.models import RUNS_JOBS, Device, Host, HostState
from webapp.hosts.services import Contact, contact_of, silent_seconds
from webapp.jobs import ingest
from webapp.jobs.ingest import Progress, state_label_of
from webapp.jobs.lookup import load_job, visible_jobs
from webapp.jobs.measured_figures import JobFigure, JobFigures
from webapp.jobs.models import FINAL_STATES, Attempt, Job, JobState, Measurement
from webapp.jobs.points import main_row_of
from webapp.jobs.services import (
    devices_of,
    job_abandon,
    job_clone,
    job_delete,
    job_stop,
    job_submit,
    names_of,
    open_parts,
    silent_parts,
)
from webapp.live.stream import live_context, page_or_regions
from webapp.plans.explanation import DraftProblem
from webapp.plans.launching import clone_begin

# ---------------------------------------------------------------------------
# Views for actions on a job: stop, clone, run again, delete, abandon.
# ---------------------------------------------------------------------------


@dataclass(frozen=True)
class AllowedActions:
    """The actions that a person may take on a job."""

    stop: bool = False
    clone: bool = False
    delete: bool = False
    abandon: bool = False  # if one of its hosts is silent

    def __bool__(self) -> bool:
        return self.stop or self.clone or self.delete


def allowed(membership: Membership | None, job: Job) -> AllowedActions:
    """Return the actions that a member may take on a job in its present state.

    Practitioners may act on their own jobs, operators on every job of the team.
    """
    if membership is None or not is_at_least(Role(membership.role), Role.PRACTITIONER):
        return AllowedActions()
    is_operator = is_at_least(Role(membership.role), Role.OPERATOR)
    is_theirs = is_operator or job.owner_id == membership.user_id
    is_over = job.state in FINAL_STATES
    is_stoppable = not is_over and job.state not in {JobState.DRAFT, JobState.STOPPING}
    return AllowedActions(
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


# Page to abandon a job with a silent host, and to restart it elsewhere.


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


# ---------------------------------------------------------------------------
# The list of jobs: filters in the query string, pages, live rows.
# ---------------------------------------------------------------------------


PAGE_SIZE = 50
MOST_PARTS = 100  # newest gang attempts searched for a host's jobs
FILTERS = ("state", "kind", "host", "owner", "q")
OF_JOB = (
    "team", "kind", "name", "model_name", "state", "num_hosts", "progress_done",
    "progress_total", "progress_unit", "eta_seconds", "phase", "created_at", "started_at",
    "ended_at", "current_attempt",
)  # fmt: skip
OF_HOST = ("name", "slug", "state", "kind", "contact", "last_seen_at")
SHOWN = (
    *OF_JOB, "owner__username", "pool__name",
    *(f"{host}__{field}" for host in ("host", "requested_host") for field in OF_HOST),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One line of the list."""

    job: Job
    kind: str
    progress: Progress
    seconds: float
    ratio: float | None
    allowed: AllowedActions


@require_GET
def job_list(request: HttpRequest) -> HttpResponse:
    """List the teams' jobs, newest first, filtered by the query string."""
    keys = NewestFirst(filtered(request), "created_at", team_ids_of(request.user))
    page = page_by_key(keys, _rows(), request.GET.get("page"), PAGE_SIZE)
    memberships = Membership.objects.filter(user__username=request.user.get_username())
    members = {row.team_id: row for row in memberships}
    is_filtered = any(request.GET.get(name) for name in FILTERS)
    context = {
        "page": page,
        "rows": rows_of(page, members),
        "is_filtered": is_filtered,
        "is_empty": not is_filtered and not page.paginator.count,
        "asked": request.GET,
        "without_page": _without_page(request),
        "states": JobState.choices,
        "kinds": ingest.KIND_WORDS.items(),
        "hosts": _hosts(request).values_list("slug", "name"),
        "owners": _owners(request),
    }
    context |= live_context(request, ["jobs"])
    return page_or_regions(request, "jobs/list.html", "jobs/_list.html", context)


def filtered(request: HttpRequest) -> QuerySet[Job]:
    """Return the visible jobs that match the query string's filters."""
    filters = {name: request.GET.get(name, "").strip() for name in FILTERS}
    jobs = visible_jobs(request)
    exact = {"state": filters["state"], "kind": filters["kind"]}
    jobs = jobs.filter(**{field: value for field, value in exact.items() if value})
    if name := filters["owner"]:  # by key: the list's index contains it
        owner = User.objects.filter(username=name).values_list("pk", flat=True).first()
        jobs = jobs.filter(owner_id=owner) if owner else jobs.none()
    if slug := filters["host"]:
        host = Host.objects.filter(slug=slug).values_list("pk", flat=True).first()
        here = Q(host_id=host) | Q(host_id=None, requested_host_id=host)
        jobs = jobs.filter(here) if host else jobs.none()
    if text := filters["q"]:
        jobs = jobs.filter(Q(name__icontains=text) | Q(model_name__icontains=text))
    return jobs


def latest_at(request: HttpRequest, host: Host, number: int) -> list[Job]:
    """Return a host's newest visible jobs, running, ended or queued, including gang parts."""
    jobs = visible_jobs(request)
    newest = jobs.order_by("-created_at", "-id").values_list("pk", flat=True)
    own = newest.filter(host_id=host.pk)[:number]
    queued = newest.filter(host_id=None, requested_host_id=host.pk)[:number]
    parts = Attempt.objects.filter(host=host, leader__isnull=False).order_by("-id")
    keys = {*own, *queued, *parts.values_list("job_id", flat=True)[:MOST_PARTS]}
    candidates = (
        jobs.filter(pk__in=keys).order_by("-created_at", "-id").values_list("pk", flat=True)
    )
    rows = _rows().in_bulk(list(candidates[:number]))
    return sorted(rows.values(), key=lambda job: (job.created_at, job.pk), reverse=True)


def _rows() -> QuerySet[Job]:
    """Return jobs with the columns of a list row, without large documents."""
    measured = Prefetch(
        "measurements", queryset=Measurement.objects.only("job", "metric", "ratio")
    )
    jobs = Job.objects.select_related("host", "requested_host", "pool", "owner")
    return jobs.only(*SHOWN).prefetch_related(measured)


def rows_of(page: Page[Job], members: dict[str, Membership]) -> list[Row]:
    """Return the lines of one page."""
    return [
        Row(
            job,
            ingest.KIND_WORDS.get(job.kind, job.kind),
            ingest.progress(job),
            ingest.elapsed_seconds(job),
            ingest.main_ratio(job.measurements.all()),
            allowed(members.get(job.team_id), job),
        )
        for job in page
    ]


def _hosts(request: HttpRequest) -> QuerySet[Host]:
    return Host.objects.visible_to(request.user).filter(kind__in=RUNS_JOBS)


def _owners(request: HttpRequest) -> list[str]:
    """Return possible job owners: the members of the person's teams."""
    teams = team_ids_of(request.user)
    members = Membership.objects.filter(team__in=teams).order_by("user__username")
    return list(members.values_list("user__username", flat=True).distinct())


def _without_page(request: HttpRequest) -> str:
    query = request.GET.copy()
    query.pop("page", None)
    return query.urlencode()


# ---------------------------------------------------------------------------
# The latency targets of a job's plan, evaluated by percentile: met or missed.
#
# A target is a time that most requests must meet, so the mean does not decide it.
# ---------------------------------------------------------------------------


PERCENT = 95  # of requests meet the target
NORMAL_80 = NormalDist().inv_cdf(0.9)  # half of an 80 % interval, in standard deviations
LEAST_CHANCE = 0.01  # smaller chances, and those above one minus this, are shown as bounds
WORDS = {
    "ttft": "First token within {}",
    "tpot": "Each further token within {}",
}
KINDS = ("serve", "benchmark")
State = Literal["met", "missed", "unjudged"]


@dataclass(frozen=True)
class Target:
    """One target of a job; ``limit`` and ``interval`` are in seconds.

    ``chance`` is the probability that the percentile is within the limit, for a normal
    distribution with its 80 % interval. None if there is no interval.
    """

    name: str
    limit: float
    figure: JobFigure | None
    interval: tuple[float, float] | None
    state: State
    words: str

    @property
    def title(self) -> str:
        """Return the target as text."""
        return WORDS[self.name].format(quantity(self.limit, "seconds"))

    @property
    def chance(self) -> float | None:
        """Return the probability that the percentile is within the limit."""
        value = self.figure.measured if self.figure else None
        if value is None or self.interval is None:
            return None
        low, high = self.interval
        deviation = (high - low) / 2 / NORMAL_80
        if deviation <= 0:
            return float(value <= self.limit)
        return NormalDist(value, deviation).cdf(self.limit)

    @property
    def chance_words(self) -> str:
        """Return the chance, rounded to its precision."""
        chance = self.chance
        if chance is None:
            return ""
        if chance < LEAST_CHANCE:
            return "chance below 1 %, from its 80 % interval"
        if chance > 1 - LEAST_CHANCE:
            return "chance above 99 %, from its 80 % interval"
        return f"chance {round(100 * chance)} %, from its 80 % interval"


def targets_of(job: Job, figures: JobFigures) -> list[Target]:
    """Return the targets of a serving job, each with its state."""
    workload = (job.plan_request or {}).get("workload")
    if job.kind not in KINDS or not isinstance(workload, Mapping):
        return []
    limits = {name: workload.get(f"{name}_slo_seconds") for name in WORDS}
    row = main_row_of(job)
    intervals = row.interval if row else {}
    return [
        _target(job, name, float(limit), figures, intervals)
        for name, limit in limits.items()
        if isinstance(limit, int | float) and limit > 0
    ]


def _target(
    job: Job,
    name: str,
    limit: float,
    figures: JobFigures,
    intervals: Mapping[str, tuple[float, float]],
) -> Target:
    metric = f"{name}_p{PERCENT}_seconds"
    figure = figures.get(metric)
    if figure is None or figure.measured is None:
        return Target(name, limit, None, None, "unjudged", _unmeasured_words(job, name))
    words = f"{figure.definition.label}: {figure.shown}"
    if not figure.is_comparable:
        return Target(name, limit, figure, None, "unjudged", f"{words}; {figure.state_words}")
    state: State = "met" if figure.measured <= limit else "missed"
    so_far = " so far" if figure.state == "so_far" else ""
    return Target(name, limit, figure, intervals.get(metric), state, f"{words}{so_far}")


def _unmeasured_words(job: Job, name: str) -> str:
    label = definition_of(f"{name}_p{PERCENT}_seconds").label
    if job.kind == "benchmark" and not job.spec.get("load"):
        return f"{label} needs many requests; measure the plan under load"
    return f"{label} is not measured{'' if job.ended_at else ' yet'}"


def target_json(target: Target) -> dict[str, Any]:
    """Return one target as JSON for the API and exports, times in seconds."""
    return {
        "figure": f"{target.name}_p{PERCENT}_seconds",
        "limit_seconds": target.limit,
        "percentile": PERCENT,
        "measured": target.figure.measured if target.figure else None,
        "state": target.state,
        "chance": target.chance,
    }
