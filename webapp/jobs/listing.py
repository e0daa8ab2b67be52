"""Lists of jobs: filters, columns and lines."""

from collections.abc import Mapping
from dataclasses import dataclass

from django.contrib.auth.models import User
from django.core.paginator import Page
from django.db.models import Prefetch, Q, QuerySet
from django.http import HttpRequest

from webapp.accounts.models import Membership
from webapp.hosts.models import Host
from webapp.jobs.lookup import visible_jobs
from webapp.jobs.models import Attempt, Job, Measurement
from webapp.jobs.permissions import AllowedActions, allowed
from webapp.jobs.progress import (
    KIND_WORDS,
    AgainstPrediction,
    Progress,
    against_prediction,
    elapsed_seconds,
    progress,
)

MOST_PARTS = 100  # newest gang attempts searched for a host's jobs
OF_JOB = (
    "team", "kind", "name", "model_name", "state", "num_hosts", "progress_done",
    "progress_total", "progress_unit", "progress_at", "eta_seconds", "phase", "created_at",
    "started_at", "ended_at", "current_attempt",
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
    against: AgainstPrediction | None
    allowed: AllowedActions


def filter_jobs(jobs: QuerySet[Job], filters: Mapping[str, str]) -> QuerySet[Job]:
    """Return the jobs that match filters by name; an empty one matches every job.

    ``state`` may name several, separated by commas; ``host`` is a slug, ``owner`` a user name,
    ``q`` a part of the name of the job or of its model.
    """
    if states := filters.get("state"):
        jobs = jobs.filter(state__in=[name.strip() for name in states.split(",")])
    for field in ("kind", "plan"):
        if value := filters.get(field):
            jobs = jobs.filter(**{field: value})
    if name := filters.get("owner"):  # by key: the list's index contains it
        owner = User.objects.filter(username=name).values_list("pk", flat=True).first()
        jobs = jobs.filter(owner_id=owner) if owner else jobs.none()
    if slug := filters.get("host"):
        host = Host.objects.filter(slug=slug).values_list("pk", flat=True).first()
        here = Q(host_id=host) | Q(host_id=None, requested_host_id=host)
        jobs = jobs.filter(here) if host else jobs.none()
    if text := filters.get("q"):
        jobs = jobs.filter(Q(name__folded_contains=text) | Q(model_name__folded_contains=text))
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
    rows = list_rows().in_bulk(list(candidates[:number]))
    return sorted(rows.values(), key=lambda job: (job.created_at, job.pk), reverse=True)


def list_rows() -> QuerySet[Job]:
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
            KIND_WORDS.get(job.kind, job.kind),
            progress(job),
            elapsed_seconds(job),
            against_prediction(job.measurements.all()),
            allowed(members.get(job.team_id), job),
        )
        for job in page
    ]
