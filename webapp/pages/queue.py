"""Pages of the queue, and their actions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from webapp.accounts.models import Role, Team, team_ids_of
from webapp.accounts.services import check_role, current_role, current_team, has_role, is_at_least
from webapp.core import display
from webapp.core.clock import now
from webapp.core.parameters import choice_in_query, reads_query, whole_in_query
from webapp.core.problems import Problem
from webapp.core.queries import SEEN, mark_of
from webapp.hosts.models import Host, HostState, Pool
from webapp.hosts.pools import visible_pools
from webapp.hosts.services import Contact, contact_of
from webapp.jobs.allocation import allocate_pool
from webapp.jobs.lookup import JobCounts, counts_of
from webapp.jobs.models import Job
from webapp.jobs.pool_state import (
    Holder,
    PoolState,
    RemoteHolder,
    first_waiting,
    foreign_pids,
    pool_state_of,
)
from webapp.jobs.queue_decisions import decide
from webapp.jobs.queue_order import job_move, job_prioritise, order_digest
from webapp.jobs.quota_form import QuotaForm, quota_store, quota_values
from webapp.jobs.quotas import Rules, left_seconds, limit_sentences, quota_of, quota_usage
from webapp.jobs.waiting import FORESEEN_TURNS, Line, lines_in, waiting_line, when_words
from webapp.live.stream import live_context, page_or_regions

# Changes of a queue by operators: the order of jobs and their priority.


# Quota of the current team: visible to all members, editable by operators.


@require_http_methods(["GET", "POST"])
def queue_limits(request: HttpRequest) -> HttpResponse:
    """Show the limits of the current team; operators can change them."""
    team, role = current_team(request), current_role(request)
    if request.method == "POST":
        check_role(role, Role.OPERATOR)
    quota = quota_of(team)
    form = QuotaForm(request.POST or None, instance=quota)
    if request.method == "POST" and form.is_valid():
        try:
            quota_store(form, team, request.user.get_username(), request.POST.get(SEEN, ""))
        except Problem as problem:
            messages.warning(request, problem.detail)
        else:
            messages.success(request, f"The limits of {team.name} are changed.")
        return redirect("queue-limits")
    context = {
        "form": form,
        "team": team,
        "seen": mark_of(quota_values(quota)) if not form.is_bound else request.POST.get(SEEN, ""),
        "told": limit_sentences(team, quota_usage(team, request.user.pk)),
        "is_operator": is_at_least(role, Role.OPERATOR),
    }
    return render(request, "queue/limits.html", context, status=422 if form.errors else 200)


NUM_TURNS, MOST_TURNS = 25, FORESEEN_TURNS  # turns per page, and in total
NUM_HOSTS = 20  # per pool, unless all are requested


@dataclass(frozen=True)
class Row:
    """One line as shown to a member; another team's job has no name and no link."""

    line: Line
    is_of_own_team: bool
    start_words: str


@dataclass(frozen=True)
class DeviceRow:
    """A device with its holders; ``words`` say what else there is to it."""

    name: str
    words: str
    tone: str
    holders: Sequence["HolderRow"] = ()


@dataclass(frozen=True)
class HolderRow:
    """A job that holds a device or a part of it, None if of another team; with its release."""

    job: Job | None
    words: str


@dataclass(frozen=True)
class HostRow:
    """A host of the pool with its devices."""

    host: Host
    state: str
    devices: Sequence[DeviceRow]
    num_free: int
    is_of_own_team: bool

    @property
    def is_idle(self) -> bool:
        """Return whether no job holds a device of the host."""
        return not any(device.holders for device in self.devices)


@dataclass(frozen=True)
class Section:
    """One pool's part of the page."""

    pool: Pool
    rows: Sequence[Row]
    offset: int  # turns on earlier pages
    num_waiting: int  # can exceed the number of ``rows``
    hosts: Sequence[HostRow]  # the most informative first
    num_hosts: int  # number shown
    seal: str
    is_operator: bool
    counts: JobCounts

    @property
    def is_part(self) -> bool:
        """Return whether the page shows only a part of the queue."""
        return len(self.rows) < self.num_waiting

    @property
    def last(self) -> int:
        """Return the last turn on the page."""
        return self.offset + len(self.rows)

    @property
    def next_offset(self) -> int | None:
        """Return the offset of the next page; None on the last page."""
        return self.last if self.last < min(self.num_waiting, MOST_TURNS) else None

    @property
    def previous_offset(self) -> int | None:
        """Return the offset of the previous page; None on the first page."""
        return max(0, self.offset - NUM_TURNS) if self.offset else None

    @property
    def hosts_shown(self) -> Sequence[HostRow]:
        """Return the hosts shown on the page."""
        return self.hosts[: self.num_hosts]

    @property
    def num_devices(self) -> int:
        """Return the number of devices of the pool's hosts."""
        return sum(len(row.devices) for row in self.hosts)

    @property
    def num_free(self) -> int:
        """Return the number of allocatable devices."""
        return sum(row.num_free for row in self.hosts)

    @property
    def free_of_others(self) -> str:
        """Return the number of free devices on hosts not shown, and of how many."""
        others = self.hosts[self.num_hosts :]
        number = sum(len(row.devices) for row in others)
        return f"{sum(row.num_free for row in others)} of {number}"


@require_GET
@reads_query("offset", "hosts")
def queue_list(request: HttpRequest) -> HttpResponse:
    """Show the queues of all pools in which the person's teams may launch."""
    return _page(request, list(visible_pools(request.user)), is_one=False)


@require_GET
@reads_query("job", "offset", "hosts")
def queue_detail(request: HttpRequest, pool_id: str) -> HttpResponse:
    """Show the queue of one pool; with ``job``, redirect to the page with its turn."""
    pool = _pool(request, pool_id)
    if job_id := request.GET.get("job"):
        return redirect(_address_of(pool, job_id))
    return _page(request, [pool], is_one=True)


def _address_of(pool: Pool, job_id: str) -> str:
    """Return the URL of a queued job in its pool's queue."""
    job = Job.objects.filter(pool=pool, pk=job_id[:26]).first()
    line = waiting_line(job) if job else None
    offset = ((line.position or 1) - 1) // NUM_TURNS * NUM_TURNS if line else 0
    address = reverse("queue-detail", args=[pool.pk])
    return f"{address}{f'?offset={offset}' if offset else ''}{f'#job-{job.pk}' if job else ''}"


def _page(request: HttpRequest, pools: Sequence[Pool], *, is_one: bool) -> HttpResponse:
    teams = set(team_ids_of(request.user))
    context: dict[str, Any] = {
        "sections": [_section(request, pool, teams) for pool in pools],
        "is_one": is_one,
    }
    context |= live_context(request, ["jobs", "hosts"])
    return page_or_regions(request, "queue/queue.html", "queue/_sections.html", context)


def _section(request: HttpRequest, pool: Pool, teams: set[str]) -> Section:
    number = whole_in_query(request, "offset", least=0, default=0)
    offset = min(number, MOST_TURNS - NUM_TURNS)
    turns = offset + NUM_TURNS
    jobs, num_waiting = first_waiting(pool, turns)
    offset = min(offset, max(0, num_waiting - 1) // NUM_TURNS * NUM_TURNS)  # if it has shrunk
    picture = pool_state_of(pool, jobs, Rules(jobs))
    decision = decide(picture.snapshot, lambda turn, _job: turn >= turns)
    rows = [_row(line, teams) for line in lines_in(picture, decision, slice(offset, turns))]
    devices: dict[str, list[str]] = {}  # the present ones per host
    for pk, device in picture.devices.items():
        if device.is_present:
            devices.setdefault(device.host_id, []).append(pk)
    hosts = [
        _host_row(host, devices.get(host.pk, []), picture, teams)
        for host in picture.hosts.values()
    ]
    return Section(
        pool=pool,
        counts=counts_of(Job.objects.filter(pool=pool), num_queued=num_waiting),
        rows=rows,
        offset=offset,
        num_waiting=num_waiting,
        hosts=sorted(hosts, key=lambda row: row.is_idle),
        num_hosts=len(hosts) if choice_in_query(request, "hosts", ["all"]) else NUM_HOSTS,
        seal=order_digest(decision.order[:turns]),
        is_operator=has_role(request.user, pool.team, Role.OPERATOR),
    )


def _row(line: Line, teams: set[str]) -> Row:
    start = line.start_at
    words = "not forecast" if start is None else f"≈ {when_words(start)}"
    is_now = start is not None and start <= now()
    return Row(line, line.job.team_id in teams, "now" if is_now else words)


def _host_row(
    host: Host, device_ids: Sequence[str], picture: PoolState, teams: set[str]
) -> HostRow:
    is_open = host.state == HostState.READY and contact_of(host) is not Contact.UNREACHABLE
    devices = [_device_row(pk, picture, teams) for pk in device_ids]
    if not is_open:  # what is free there takes no job now
        devices = [
            replace(each, words="no job starts", tone="shut") if each.tone == "free" else each
            for each in devices
        ]
    free = [device for device in devices if device.tone == "free"]
    return HostRow(host, _state(host), devices, len(free), host.team_id in teams)


def _state(host: Host) -> str:
    contact = contact_of(host)
    if host.state == HostState.READY and contact is not Contact.LIVE:
        return "lost" if contact is Contact.UNREACHABLE else "stale"
    return host.state


def _device_row(device_id: str, picture: PoolState, teams: set[str]) -> DeviceRow:
    device = picture.devices[device_id]
    name = "Processor" if device.kind == "cpu" else f"{device.get_kind_display()} {device.index}"
    holders = picture.holders.get(device_id)
    if not holders:
        if device.cordoned_at:
            return DeviceRow(name, f"cordoned: {device.cordon_reason}", "shut")
        if pids := foreign_pids(picture.hosts[device.host_id], device):
            listed = ", ".join(map(str, pids[:3]))
            return DeviceRow(name, f"used by process {listed}, which is not a Slipway job", "shut")
        return DeviceRow(name, "free", "free")
    rows = [_holder_row(each, picture.elsewhere.get(device_id), teams) for each in holders]
    is_alone = any(each.num_bytes is None for each in holders)
    words = "" if is_alone else f"{display.memory(picture.bytes_left(device_id))} left to share"
    if not is_alone and foreign_pids(picture.hosts[device.host_id], device):
        words = "used by another process too, so that nobody joins"
    return DeviceRow(name, words, "held", rows)


def _holder_row(holder: Holder, through: RemoteHolder | None, teams: set[str]) -> HolderRow:
    attempt = holder.attempt
    remaining = left_seconds(attempt, margin=1.0)  # as on the job's page
    words = f"until ≈ {_clock(remaining)}" if remaining is not None else "end not forecast"
    if holder.num_bytes is not None:
        words = f"{display.memory(holder.num_bytes)}, {words}"
    if through and through.attempt.pk == attempt.pk:
        other = through.host.name if through.host.team_id in teams else "another team's host"
        words = f"as {other} on the same machine, {words}"
    return HolderRow(attempt.job if attempt.job.team_id in teams else None, words)


def _clock(seconds: float) -> str:
    at: datetime = now() + timedelta(seconds=seconds)
    return when_words(at)


# Operator actions


def _pool(request: HttpRequest, pool_id: str) -> Pool:
    return get_object_or_404(visible_pools(request.user), pk=pool_id)


def _operator_action(
    request: HttpRequest, pool_id: str, act: Callable[[Pool, Mapping[str, str], str], str]
) -> HttpResponse:
    """Run an operator's action on a queue, allocate, and redirect to the job."""
    pool = _pool(request, pool_id)
    team: Team = pool.team
    if not has_role(request.user, team, Role.OPERATOR):
        raise PermissionDenied(
            f"Only operators of {team.name} change this queue. An admin of that team can give you "
            "the role."
        )
    posted = {name: str(request.POST.get(name, "")) for name in ("job", "seen", "priority")}
    try:
        messages.success(request, act(pool, posted, request.user.get_username()))
        allocate_pool(pool)
    except Problem as problem:
        messages.warning(request, problem.detail)
    return redirect(_address_of(pool, posted["job"]))


def _move(request: HttpRequest, pool_id: str, *, is_up: bool) -> HttpResponse:
    def act(pool: Pool, posted: Mapping[str, str], by: str) -> str:
        seen, job_id = posted["seen"], posted["job"]
        job = job_move(pool=pool, job_id=job_id, is_up=is_up, seen=seen, by=by)
        return f"{job.name} moved {'up' if is_up else 'down'}."

    return _operator_action(request, pool_id, act)


@require_POST
def queue_up(request: HttpRequest, pool_id: str) -> HttpResponse:
    """Move a job before the previous one."""
    return _move(request, pool_id, is_up=True)


@require_POST
def queue_down(request: HttpRequest, pool_id: str) -> HttpResponse:
    """Move a job behind the next one."""
    return _move(request, pool_id, is_up=False)


@require_POST
def queue_priority(request: HttpRequest, pool_id: str) -> HttpResponse:
    """Change the priority of a queued job."""

    def act(pool: Pool, posted: Mapping[str, str], by: str) -> str:
        priority, job_id = posted["priority"], posted["job"]
        seen = posted["seen"]
        job = job_prioritise(pool=pool, job_id=job_id, priority=priority, by=by, seen=seen)
        return f"{job.name} now has {job.get_priority_display().lower()} priority."

    return _operator_action(request, pool_id, act)
