"""Items that need attention: restored database, failed jobs, silent hosts, stuck jobs."""

from datetime import timedelta
from typing import NamedTuple

from django.contrib.auth.models import AnonymousUser, User
from django.urls import reverse

from webapp.core.clock import now
from webapp.core.units import clock
from webapp.hosts.contact import Contact, contact_of, silent_seconds
from webapp.hosts.epoch import RESTORED, is_restored
from webapp.hosts.models import RUNS_JOBS, Host, HostState, Pool
from webapp.jobs.models import Job, JobState
from webapp.jobs.reasons import words_for

FAILED_FOR = timedelta(days=3)  # older failures are not shown
QUEUED_TOO_LONG = timedelta(minutes=10)
MOST = 6
OF_WAITING = ("name", "queued_at", "host__name", "requested_host__name", "pool__name")


class Attention(NamedTuple):
    """One item that needs attention, with a link to act on it."""

    tone: str
    icon: str
    title: str
    text: str
    url: str
    action: str


def attention_for(user: User | AnonymousUser) -> list[Attention]:
    """Return the items that need attention in the user's teams, most urgent first."""
    items = [*_backup(), *_failed_jobs(user), *_silent_hosts(user), *_stuck_jobs(user)]
    return items[:MOST]


def _backup() -> list[Attention]:
    if not is_restored():
        return []
    where = reverse("docs", args=["postgres"])
    title = "Restored from a backup: nothing starts"
    return [Attention("bad", "cross", title, RESTORED, where, "See how to go on")]


def _failed_jobs(user: User | AnonymousUser) -> list[Attention]:
    recent = Job.objects.visible_to(user).filter(deleted_at=None, ended_at__gte=now() - FAILED_FOR)
    shown = recent.order_by().values_list("ended_at", "pk")
    failed, error = (shown.filter(state=state) for state in (JobState.FAILED, JobState.ERROR))
    latest = failed.union(error, all=True).order_by("-ended_at")[:MOST]  # of each from its index
    jobs = Job.objects.only("name", "state", "reason").in_bulk([pk for _, pk in latest])
    return [
        Attention(
            "bad",
            "cross",
            f"{job.name} {'failed' if job.state == JobState.FAILED else 'ended with an error'}",
            words_for(job.reason).sentence if job.reason else "",
            reverse("job-detail", args=[job.pk]),
            "See what happened",
        )
        for job in (jobs[pk] for _, pk in latest if pk in jobs)
    ]


def _silent_hosts(user: User | AnonymousUser) -> list[Attention]:
    hosts = Host.objects.visible_to(user).filter(kind__in=RUNS_JOBS, state=HostState.READY)
    hosts = hosts.only("name", "slug", "last_seen_at")
    silent = [host for host in hosts if contact_of(host) is Contact.UNREACHABLE]
    return [
        Attention(
            "warn",
            "triangle",
            f"{host.name} has been silent for {clock(silent_seconds(host) or 0)}",
            "Its jobs go on there; they report again when it is back.",
            reverse("host-detail", args=[host.slug]),
            "Open the host",
        )
        for host in silent
    ]


def _stuck_jobs(user: User | AnonymousUser) -> list[Attention]:
    late = Job.objects.visible_to(user).filter(
        state=JobState.QUEUED, deleted_at=None, queued_at__lt=now() - QUEUED_TOO_LONG
    )
    # With the pool in the condition, the queue index covers the query.
    late = late.filter(pool__in=Pool.objects.order_by().values("pk"))
    longest = late.order_by("queued_at", "pk").values_list("pk", flat=True)[:MOST]
    jobs = Job.objects.select_related("host", "requested_host", "pool").only(*OF_WAITING)
    by_id = jobs.in_bulk(list(longest))
    return [
        Attention(
            "warn",
            "triangle",
            f"{job.name} has waited for {clock((now() - job.queued_at).total_seconds())}",
            f"It waits for {job.place}.",
            reverse("job-detail", args=[job.pk]),
            "See why",
        )
        for job in (by_id[pk] for pk in longest if pk in by_id)
        if job.queued_at
    ]
