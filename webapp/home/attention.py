"""What needs a person, most urgent first: failed jobs, silent hosts, queues that do not move."""

from datetime import timedelta
from typing import NamedTuple

from django.contrib.auth.models import AnonymousUser, User
from django.urls import reverse

from webapp.core.clock import now
from webapp.core.units import clock
from webapp.hosts.contact import Contact, contact_of, silent_seconds
from webapp.hosts.epoch import RESTORED, is_restored
from webapp.hosts.models import RUNS_JOBS, Host, HostState
from webapp.jobs.models import Job, JobState
from webapp.jobs.reasons import words_for

FAILED_FOR = timedelta(days=3)  # a failure older than this has been seen
QUEUED_TOO_LONG = timedelta(minutes=10)
MOST = 6


class Attention(NamedTuple):
    """One thing that needs a person, with the one press that helps."""

    tone: str
    icon: str
    title: str
    text: str
    url: str
    action: str


def attention_for(user: User | AnonymousUser) -> list[Attention]:
    """Return what needs a person in the user's teams, failures first."""
    found = [*_backup(), *_failed_jobs(user), *_silent_hosts(user), *_stuck_jobs(user)]
    return found[:MOST]


def _backup() -> list[Attention]:
    if not is_restored():
        return []
    where = reverse("docs", args=["postgres"])
    title = "Restored from a backup: nothing starts"
    return [Attention("bad", "cross", title, RESTORED, where, "See how to go on")]


def _failed_jobs(user: User | AnonymousUser) -> list[Attention]:
    jobs = Job.objects.visible_to(user).filter(
        state__in=[JobState.FAILED, JobState.ERROR],
        deleted_at=None,
        ended_at__gte=now() - FAILED_FOR,
    )
    return [
        Attention(
            "bad",
            "cross",
            f"{job.name} {'failed' if job.state == JobState.FAILED else 'ended with an error'}",
            words_for(job.reason).sentence if job.reason else "",
            reverse("job-detail", args=[job.pk]),
            "See what happened",
        )
        for job in jobs.order_by("-ended_at")[:MOST]
    ]


def _silent_hosts(user: User | AnonymousUser) -> list[Attention]:
    hosts = Host.objects.visible_to(user).filter(kind__in=RUNS_JOBS, state=HostState.READY)
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
    return [
        Attention(
            "warn",
            "triangle",
            f"{job.name} has waited for {clock((now() - job.queued_at).total_seconds())}",
            f"It waits for {job.place}.",
            reverse("job-detail", args=[job.pk]),
            "See why",
        )
        for job in late.select_related("host", "requested_host", "pool")[:MOST]
        if job.queued_at
    ]
