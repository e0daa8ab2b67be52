"""The list of hosts and the page of one host."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db.models import Count, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_GET, require_POST

from webapp.accounts.models import Role
from webapp.accounts.roles import has_role, visible_or_404
from webapp.core.units import clock
from webapp.hosts.beside import hosts_beside
from webapp.hosts.checks import clock_words, machine_words, open_checks
from webapp.hosts.contact import Contact, contact_of, silent_seconds
from webapp.hosts.cordons import devices_of
from webapp.hosts.environments import environments_of
from webapp.hosts.findings import recheck_ask
from webapp.hosts.forms import LabelsForm, written
from webapp.hosts.health import health_of
from webapp.hosts.models import EnrolmentToken, Host, HostState
from webapp.hosts.services import credential_revoke, host_set_state, rotation_ask
from webapp.hosts.virtual import planned_words
from webapp.jobs.models import FINAL_STATES, Attempt, Event, Job, JobState, Measurement
from webapp.live.page import live_context, page_or_regions

IS_LIVE = ~Q(jobs__state__in=[*FINAL_STATES, "draft"]) & Q(jobs__deleted_at=None)
IS_AWAITED = Q(requested_jobs__state=JobState.QUEUED, requested_jobs__deleted_at=None)
NUM_JOBS, NUM_EVENTS, NUM_MEASUREMENTS = 10, 12, 200
OPERATOR_WORDS = {
    "compute": "Arithmetic",
    "memory_bandwidth": "Memory traffic",
    "communication": "Communication",
    "overhead": "Overhead per step",
    "memory": "Memory use",
}


@dataclass(frozen=True)
class Reach:
    """How good the contact with a host is, as a chip: a state and its words."""

    state: str
    words: str


def reach_of(host: Host) -> Reach:
    """Return the contact with a host in words; silence is said in seconds."""
    contact, silent = contact_of(host), silent_seconds(host)
    if silent is None:
        return Reach("never", "Not heard yet")
    if contact is Contact.LIVE:
        return Reach("live", "In contact")
    state = "lost" if contact is Contact.UNREACHABLE else "stale"
    return Reach(state, f"Silent {clock(silent)}")


@dataclass(frozen=True)
class Row:
    """One line of the list."""

    host: Host
    reach: Reach
    machine: str
    bandwidth: float | None
    num_live: int


@require_GET
def host_list(request: HttpRequest) -> HttpResponse:
    """List the hosts of the person's teams."""
    visible = Host.objects.visible_to(request.user).exclude(state=HostState.RETIRED)
    hosts: QuerySet[Host] = visible.select_related("pool").annotate(
        num_live=Count("jobs", filter=IS_LIVE, distinct=True)
        + Count("requested_jobs", filter=IS_AWAITED, distinct=True)
    )
    rows = [_row(host) for host in hosts]
    context = {
        "rows": rows,
        "num_reachable": sum(1 for row in rows if row.reach.state == "live"),
        "num_live": sum(row.num_live for row in rows),
        "can_add": any_operator(request),
    }
    context |= live_context(request, ["hosts", "jobs"])
    return page_or_regions(request, "hosts/list.html", "hosts/_list.html", context)


def _row(host: Host) -> Row:
    devices = host.microbench.get("devices") or [{}]
    return Row(
        host,
        reach_of(host),
        planned_words(host) if host.kind == "virtual" else machine_words(host.facts),
        devices[0].get("memory_bandwidth_bytes_per_second"),
        getattr(host, "num_live", 0),
    )


def any_operator(request: HttpRequest) -> bool:
    """Return whether the person may add hosts in any of their teams."""
    if not request.user.is_authenticated:
        return False
    roles = request.user.memberships.values_list("role", flat=True)
    return bool({Role.OPERATOR, Role.ADMIN} & {Role(role) for role in roles})


@require_GET
def host_detail(request: HttpRequest, slug: str) -> HttpResponse:
    """Show one host: what it is, what was measured on it, what runs there."""
    host = visible_or_404(Host, request.user, slug=slug)
    context = host_context(request, host)
    return page_or_regions(request, "hosts/detail.html", "hosts/_detail.html", context)


def host_context(request: HttpRequest, host: Host) -> dict[str, Any]:
    """Return what the page of a host shows."""
    takes_part = Attempt.objects.filter(host=host, leader__isnull=False).values("job")
    is_here = Q(host=host) | Q(host=None, requested_host=host) | Q(pk__in=takes_part)
    jobs = Job.objects.visible_to(request.user).filter(is_here, deleted_at=None)
    context = {
        "host": host,
        "reach": reach_of(host),
        "machine": planned_words(host) if host.kind == "virtual" else machine_words(host.facts),
        "jobs": jobs.select_related("owner", "host")[:NUM_JOBS],
        "num_live": jobs.exclude(state__in=[*FINAL_STATES, "draft"]).count(),
        "events": [
            {"at": event.at, "actor": event.actor, "words": event_words(event)}
            for event in Event.objects.filter(subject=host.pk).order_by("-id")[:NUM_EVENTS]
        ],
        "accuracy": accuracy_of(host),
        "factors": factors_of(host.calibration),
        "num_together": jobs_together(host),
        "bench": bench_of(host),
        "beat": host.last_beat,
        "health": health_of(host),
        "open_checks": open_checks(host),
        "clock_words": clock_words(host.clock_offset_ms or 0),
        "devices": devices_of(host, request.user),
        "beside": hosts_beside(host, request.user),
        "environments": environments_of(host),
        "is_operator": has_role(request.user, host.team, Role.OPERATOR),
        "labels_form": LabelsForm(initial={"labels": written(host.labels)}),
    }
    return context | live_context(request, [f"host:{host.pk}", "jobs"])


def event_words(event: Event) -> str:
    """Return what happened to a host in a few words."""
    state = event.to_state
    if event.kind == "host.state":
        return f"Now {dict(HostState.choices).get(state, state).lower()}"
    if event.kind == "host.contact":
        return {"live": "Heard again", "degraded": "Fell silent"}.get(state, f"Contact {state}")
    if event.kind.startswith("device."):
        what = {"device.cordoned": "cordoned", "device.uncordoned": "given free"}[event.kind]
        reason = f": {event.detail['reason']}" if event.detail.get("reason") else ""
        return f"{event.detail.get('device', 'A device')} {what}{reason}"
    if event.kind in {"host.told_apart", "host.told_together"}:
        verb = "Another machine than" if event.kind == "host.told_apart" else "One machine with"
        return f"{verb} {event.detail.get('other', 'another host')}"
    return _words_of_detail(event) or event.kind.partition(".")[2].replace("_", " ").capitalize()


def _words_of_detail(event: Event) -> str:
    """Return what an event's detail alone says, nothing where its kind says it."""
    if event.kind == "host.labels":
        return f"Labels: {written(event.detail['labels']) or 'none'}"
    if named := event.detail.get("environment"):
        return f"Environment {named}: {event.kind.rpartition('_')[2]} asked for"
    return ""


@dataclass(frozen=True)
class Bench:
    """One run of the micro-benchmark: when, with what, and what each device reached."""

    at: datetime
    torch_version: str
    num_threads: int
    duration_seconds: float
    disk_write_bytes_per_second: float
    devices: list[dict[str, Any]]
    links: list[dict[str, Any]]
    network: dict[str, Any] | None


def bench_of(host: Host) -> Bench | None:
    """Return the host's micro-benchmark, or None before it ran."""
    found = host.microbench
    if not found:
        return None
    return Bench(
        datetime.fromtimestamp(found["measured_at_ms"] / 1000, tz=UTC),
        found["torch_version"],
        found["num_threads"],
        found["duration_seconds"],
        found["disk_write_bytes_per_second"],
        [_device(device) for device in found["devices"]],
        found.get("links") or [],
        found.get("network"),
    )


def _device(measured: Mapping[str, Any]) -> dict[str, Any]:
    overhead_us = measured["op_overhead_seconds"] * 1e6
    return {**measured, "op_overhead_microseconds": f"{overhead_us:.1f}"}


@dataclass(frozen=True)
class Factor:
    """What times of one kind of operator are multiplied with here, and from how many runs."""

    name: str
    factor: float
    n: int
    spread: float


def factors_of(calibration: Mapping[str, Any]) -> list[Factor]:
    """Return the calibration of a host, one line per kind of operator."""
    factors = calibration.get("factors") or {}
    return [
        Factor(OPERATOR_WORDS.get(name, name), each["factor"], each["n"], each["spread"])
        for name, each in factors.items()
    ]


@dataclass(frozen=True)
class Accuracy:
    """How well plans held on a host: the median distance, and how often the interval held."""

    n: int
    median_error: float
    share_inside: float


def accuracy_of(host: Host) -> Accuracy | None:
    """Return how well the last predictions for this host held, or None before the first."""
    rows = Measurement.objects.filter(host=host, job__num_hosts=1, is_excluded=False)
    rows = rows.order_by("-id")
    pairs = [
        (abs(row.ratio - 1), _is_inside(row)) for row in rows[:NUM_MEASUREMENTS] if row.ratio > 0
    ]
    if not pairs:
        return None
    errors = sorted(error for error, _ in pairs)
    inside = sum(1 for _, is_inside in pairs if is_inside)
    return Accuracy(len(pairs), errors[len(errors) // 2], inside / len(pairs))


def jobs_together(host: Host) -> int:
    """Return how many jobs that measured something ran here together with other hosts."""
    parts = Attempt.objects.filter(host=host, job__num_hosts__gt=1)
    return parts.filter(job__measurements__isnull=False).values("job").distinct().count()


def _is_inside(row: Measurement) -> bool:
    low, high = row.predicted_low, row.predicted_high
    return low is not None and high is not None and low <= row.measured <= high


# What an operator does to a host


def host_for_operator(request: HttpRequest, slug: str) -> Host:
    """Return a host for one of its team's operators.

    Raises:
        PermissionDenied: the person is none.
    """
    host = visible_or_404(Host, request.user, slug=slug)
    if not has_role(request.user, host.team, Role.OPERATOR):
        raise PermissionDenied(
            "Only operators change hosts. An admin of your team can make you one."
        )
    return host


def _act(
    request: HttpRequest, slug: str, act: Callable[[Host, str], None], words: str
) -> HttpResponse:
    host = host_for_operator(request, slug)
    act(host, request.user.get_username())
    messages.success(request, words.format(host=host.name))
    return redirect("host-detail", slug)


@require_POST
def host_drain(request: HttpRequest, slug: str) -> HttpResponse:
    """Let a host finish what it runs and take nothing new."""
    words = "{host} finishes what it runs and takes no new job."
    return _act(
        request,
        slug,
        lambda host, by: host_set_state(host=host, to=HostState.DRAINING, by=by),
        words,
    )


@require_POST
def host_undrain(request: HttpRequest, slug: str) -> HttpResponse:
    """Let a host take jobs again."""
    words = "{host} takes jobs again."
    return _act(
        request, slug, lambda host, by: host_set_state(host=host, to=HostState.READY, by=by), words
    )


@require_POST
def host_recheck(request: HttpRequest, slug: str) -> HttpResponse:
    """Have a host say anew what it is, after somebody mended something."""
    host = host_for_operator(request, slug)
    recheck_ask(host=host, by=request.user.get_username())
    token = EnrolmentToken.objects.filter(host=host, pk=request.POST.get("token", "")).first()
    return redirect("host-check", token.pk) if token else redirect("host-detail", slug)


@require_POST
def host_rotation(request: HttpRequest, slug: str) -> HttpResponse:
    """Have a host replace its secrets."""
    words = "{host} makes itself new secrets at its next beat; the old ones end then."
    return _act(request, slug, lambda host, by: rotation_ask(host=host, by=by), words)


@require_POST
def host_revoke(request: HttpRequest, slug: str) -> HttpResponse:
    """Lock a host out until it is enrolled again."""
    words = "{host} is locked out until it is enrolled again."
    return _act(request, slug, lambda host, by: credential_revoke(host=host, by=by), words)
