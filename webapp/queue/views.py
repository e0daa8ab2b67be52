"""The queue of each pool: who is next, why the others wait, and who holds what meanwhile."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.urls import reverse
from django.views.decorators.http import require_GET, require_POST

from webapp.accounts.models import Membership, Role, Team
from webapp.accounts.roles import has_role
from webapp.core.clock import now
from webapp.core.problems import Problem
from webapp.hosts.contact import Contact, contact_of
from webapp.hosts.models import Host, HostState, Pool
from webapp.jobs.allocation import allocate_pool
from webapp.jobs.models import Job, Priority
from webapp.live.page import live_context, page_or_regions
from webapp.queue.forecast import left_seconds
from webapp.queue.picture import Picture, foreign_pids, picture_of, waiting_jobs
from webapp.queue.reorder import job_move, job_prioritise, seal_of
from webapp.queue.rules import Rules
from webapp.queue.words import Line, lines_in, when_words


@dataclass(frozen=True)
class Row:
    """One line as a member sees it: another team's job has no name and no address here."""

    line: Line
    is_own: bool
    start_words: str


@dataclass(frozen=True)
class Held:
    """A device and who holds it until when."""

    name: str
    job: Job | None
    words: str
    tone: str


@dataclass(frozen=True)
class HostRow:
    """A host of the pool with its devices."""

    host: Host
    state: str
    devices: Sequence[Held]
    num_free: int
    is_own: bool


@dataclass(frozen=True)
class Section:
    """One pool's part of the page."""

    pool: Pool
    rows: Sequence[Row]
    hosts: Sequence[HostRow]
    seal: str
    is_operator: bool

    @property
    def num_devices(self) -> int:
        """Return how many devices the pool's hosts have."""
        return sum(len(row.devices) for row in self.hosts)

    @property
    def num_free(self) -> int:
        """Return how many of them a job could have now."""
        return sum(row.num_free for row in self.hosts)


def visible_pools(request: HttpRequest) -> QuerySet[Pool]:
    """Return the pools in which one of the person's teams may launch."""
    teams = Membership.objects.filter(user=request.user.pk).values("team")
    mine = Q(team__in=teams) | Q(shared_with__in=teams)
    return Pool.objects.filter(mine).select_related("team").distinct()


@require_GET
def queue_list(request: HttpRequest) -> HttpResponse:
    """Show the queues of all pools in which the person's teams may launch."""
    return _page(request, list(visible_pools(request)), is_one=False)


@require_GET
def queue_detail(request: HttpRequest, pool_id: str) -> HttpResponse:
    """Show the queue of one pool."""
    return _page(request, [_pool(request, pool_id)], is_one=True)


def _page(request: HttpRequest, pools: Sequence[Pool], *, is_one: bool) -> HttpResponse:
    teams = set(Membership.objects.filter(user=request.user.pk).values_list("team", flat=True))
    context: dict[str, Any] = {
        "sections": [_section(request, pool, teams) for pool in pools],
        "is_one": is_one,
        "priorities": Priority.choices,
    }
    context |= live_context(request, ["jobs", "hosts"])
    return page_or_regions(request, "queue/queue.html", "queue/_sections.html", context)


def _section(request: HttpRequest, pool: Pool, teams: set[str]) -> Section:
    jobs = waiting_jobs(pool)
    picture = picture_of(pool, jobs, Rules(jobs))
    lines = lines_in(picture)
    rows = [_row(line, teams) for line in lines]
    return Section(
        pool=pool,
        rows=rows,
        hosts=[_host_row(host, picture, teams) for host in picture.hosts.values()],
        seal=seal_of([line.job.pk for line in lines]),
        is_operator=has_role(request.user, pool.team, Role.OPERATOR),
    )


def _row(line: Line, teams: set[str]) -> Row:
    start = line.start_at
    words = "not forecast" if start is None else f"≈ {when_words(start)}"
    is_now = start is not None and start <= now()
    return Row(line, line.job.team_id in teams, "now" if is_now else words)


def _host_row(host: Host, picture: Picture, teams: set[str]) -> HostRow:
    is_open = host.state == HostState.READY and contact_of(host) is not Contact.UNREACHABLE
    devices = [
        _held(pk, picture, teams)
        for pk, device in picture.devices.items()
        if device.host_id == host.pk and device.is_present
    ]
    free = [one for one in devices if one.tone == "free"]
    return HostRow(host, _state(host), devices, len(free) if is_open else 0, host.team_id in teams)


def _state(host: Host) -> str:
    contact = contact_of(host)
    if host.state == HostState.READY and contact is not Contact.LIVE:
        return "lost" if contact is Contact.UNREACHABLE else "stale"
    return host.state


def _held(device_id: str, picture: Picture, teams: set[str]) -> Held:
    device = picture.devices[device_id]
    name = "Processor" if device.kind == "cpu" else f"{device.get_kind_display()} {device.index}"
    holder = picture.holders.get(device_id)
    if holder is None:
        if device.cordoned_at:
            return Held(name, None, f"cordoned: {device.cordon_reason}", "shut")
        if pids := foreign_pids(picture.hosts[device.host_id], device):
            listed = ", ".join(map(str, pids[:3]))
            return Held(name, None, f"used by process {listed}, which is no job of ours", "shut")
        return Held(name, None, "free", "free")
    left = left_seconds(holder)
    until = f"until ≈ {_clock(left)}" if left is not None else "end not forecast"
    job = holder.job if holder.job.team_id in teams else None
    if through := picture.elsewhere.get(device_id):
        other = through.host.name if through.host.team_id in teams else "another team's host"
        until = f"as {other} on the same machine, {until}"
    return Held(name, job, until, "held")


def _clock(seconds: float) -> str:
    at: datetime = now() + timedelta(seconds=seconds)
    return when_words(at)


# What an operator does


def _pool(request: HttpRequest, pool_id: str) -> Pool:
    return get_object_or_404(visible_pools(request), pk=pool_id)


def _act(
    request: HttpRequest, pool_id: str, act: Callable[[Pool, Mapping[str, str], str], str]
) -> HttpResponse:
    """Do something to a queue as an operator of the pool's team, and come back to the job."""
    pool = _pool(request, pool_id)
    team: Team = pool.team
    if not has_role(request.user, team, Role.OPERATOR):
        raise PermissionDenied(
            f"Only operators of {team.name} change this queue. An admin of it can make you one."
        )
    posted = {name: str(request.POST.get(name, "")) for name in ("job", "seen", "priority")}
    try:
        messages.success(request, act(pool, posted, request.user.get_username()))
        allocate_pool(pool)
    except Problem as problem:
        messages.warning(request, problem.detail)
    return redirect(f"{reverse('queue-detail', args=[pool.pk])}#job-{posted['job'][:26]}")


@require_POST
def queue_up(request: HttpRequest, pool_id: str) -> HttpResponse:
    """Let a job go before the one in front of it."""

    def act(pool: Pool, posted: Mapping[str, str], by: str) -> str:
        seen, job_id = posted["seen"], posted["job"]
        job = job_move(pool=pool, job_id=job_id, is_up=True, seen=seen, by=by)
        return f"{job.name} moved up."

    return _act(request, pool_id, act)


@require_POST
def queue_down(request: HttpRequest, pool_id: str) -> HttpResponse:
    """Let a job go behind the one after it."""

    def act(pool: Pool, posted: Mapping[str, str], by: str) -> str:
        seen, job_id = posted["seen"], posted["job"]
        job = job_move(pool=pool, job_id=job_id, is_up=False, seen=seen, by=by)
        return f"{job.name} moved down."

    return _act(request, pool_id, act)


@require_POST
def queue_priority(request: HttpRequest, pool_id: str) -> HttpResponse:
    """Give a waiting job another priority."""

    def act(pool: Pool, posted: Mapping[str, str], by: str) -> str:
        wanted, job_id = posted["priority"], posted["job"]
        job = job_prioritise(pool=pool, job_id=job_id, priority=wanted, by=by)
        return f"{job.name} now has {job.get_priority_display().lower()} priority."

    return _act(request, pool_id, act)
