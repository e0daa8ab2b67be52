"""Pages of hosts, and their actions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from csp.constants import NONE, UNSAFE_INLINE
from csp.decorators import csp
from django.contrib import messages
from django.contrib.auth.models import User
from django.db.models import Q
from django.db.models.fields.json import KeyTransform
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_GET, require_POST
from pydantic import ValidationError

from runners.prove import report as proof_reports
from webapp.accounts.models import Role, team_ids_of
from webapp.accounts.services import has_role, membership_of, visible_or_404
from webapp.agents.environments import environment_order, environments_of
from webapp.audit.models import Event
from webapp.core.display import OPERATOR_WORDS, clock, memory
from webapp.core.problems import ConflictProblem, Problem
from webapp.core.queries import SEEN
from webapp.hosts.addresses import address_choose
from webapp.hosts.health import clock_words, health_of, machine_words, open_checks
from webapp.hosts.labels import LabelsForm, labels_set, labels_text
from webapp.hosts.machines import hosts_mark_distinct, hosts_on_same_machine, planned_words
from webapp.hosts.microbenchmark import bench_of
from webapp.hosts.models import Device, EnrolmentToken, Host, HostState, Pool
from webapp.hosts.permissions import any_operator, host_for_operator
from webapp.hosts.services import (
    Contact,
    contact_of,
    credential_revoke,
    device_cordon,
    device_uncordon,
    device_words,
    host_set_state,
    host_take_out,
    recheck_request,
    rotation_request,
    silent_seconds,
)
from webapp.jobs.allocation import allocate_pool
from webapp.jobs.artefacts import folder_of
from webapp.jobs.calibration import PROOF_REPORT
from webapp.jobs.calibration_effect import rows_of
from webapp.jobs.host_accuracy import accuracy_of, jobs_together
from webapp.jobs.listing import latest_at
from webapp.jobs.lookup import JobCounts, counts_by_host, counts_of, devices_of, load_job
from webapp.jobs.models import Artefact, Job, Measurement
from webapp.jobs.permissions import refusal
from webapp.jobs.proofs import latest_proof, prove_host
from webapp.jobs.stored_files import kept_on_host, stored_on_host
from webapp.live.stream import live_context, page_or_regions
from webapp.pages.host_models import models_context
from webapp.pages.observed_jobs import observed_context

NUM_JOBS, NUM_EVENTS, NUM_REFUSED, NUM_LEFT_OUT = 10, 12, 20, 10
NUM_KEPT = 20  # jobs whose files are listed, the largest first
BANDWIDTH = "memory_bandwidth_bytes_per_second"
MODEL_WORDS = {  # of events: the model, and what the cache keeps
    "host.model_pinned": "Pinned {0}",
    "host.model_unpinned": "Unpinned {0}",
    "host.model_deleted": "Deletion of {0} requested",
    "host.model_pruned": "{0} deleted by the rule for models",
    "host.models_rule": "Keeps {1}",
    "host.copy_begun": "Copy of {0} begun",
    "host.copy_done": "{0} copied",
    "host.copy_failed": "Copy of {0} failed",
    "host.copy_stopped": "Copy of {0} stopped",
}
UNLISTED = ("labels", "microbench", "calibration", "last_beat", "checks")  # wide documents


@dataclass(frozen=True)
class Reach:
    """The contact status of a host as a chip: its state and its text."""

    state: str
    words: str


def reach_of(host: Host) -> Reach:
    """Return the contact status of a host with the time since its last heartbeat."""
    contact, silent = contact_of(host), silent_seconds(host)
    if silent is None:
        return Reach("never", "No heartbeat yet")
    if contact is Contact.LIVE:
        return Reach("live", "In contact")
    if contact is Contact.UNREACHABLE:
        return Reach("lost", f"Unreachable for {clock(silent)}")
    return Reach("stale", f"No heartbeat for {clock(silent)}")


@dataclass(frozen=True)
class Row:
    """One line of the host list."""

    host: Host
    reach: Reach
    machine: str
    bandwidth: float | None
    counts: JobCounts


@require_GET
def host_list(request: HttpRequest) -> HttpResponse:
    """List the hosts of the user's teams."""
    visible = Host.objects.visible_to(request.user).exclude(state=HostState.RETIRED)
    measured = KeyTransform(BANDWIDTH, KeyTransform(0, KeyTransform("devices", "microbench")))
    hosts = list(visible.defer(*UNLISTED).prefetch_related("pool"))
    bandwidths = dict(visible.order_by().values_list("pk", measured))
    counts = counts_by_host(hosts)
    rows = [_row(host, bandwidths.get(host.pk), counts[host.pk]) for host in hosts]
    jobs = Job.objects.visible_to(request.user)
    context = {
        "rows": rows,
        "num_reachable": sum(1 for row in rows if row.reach.state == "live"),
        "counts": counts_of(jobs),
        "can_add": any_operator(request),
    }
    context |= live_context(request, ["hosts", "jobs"])
    return page_or_regions(request, "hosts/list.html", "hosts/_list.html", context)


def _row(host: Host, bandwidth: float | None, counts: JobCounts) -> Row:
    return Row(
        host,
        reach_of(host),
        planned_words(host) if host.kind == "virtual" else machine_words(host.facts),
        bandwidth,
        counts,
    )


@require_GET
def host_detail(request: HttpRequest, slug: str) -> HttpResponse:
    """Show one host: its facts, measurements and jobs."""
    host = visible_or_404(Host, request.user, slug=slug)
    context = host_context(request, host)
    return page_or_regions(request, "hosts/detail.html", "hosts/_detail.html", context)


def host_context(request: HttpRequest, host: Host) -> dict[str, Any]:
    """Return the template context of a host's page."""
    is_operator = has_role(request.user, host.team, Role.OPERATOR)
    is_out = Q(is_excluded=True) | ~Q(held_back="")
    rows = Measurement.objects.filter(is_out, host=host, job__num_hosts=1, job__deleted_at=None)
    teams = team_ids_of(request.user)
    kept, kept_in_all = stored_on_host(host, teams, at_most=NUM_KEPT), kept_on_host(host, teams)
    membership = membership_of(request.user, host.team)
    context = {
        "host": host,
        "reach": reach_of(host),
        "machine": planned_words(host) if host.kind == "virtual" else machine_words(host.facts),
        "jobs": latest_at(request, host, NUM_JOBS),
        "counts": counts_by_host([host])[host.pk],
        "events": [
            {"at": event.at, "actor": event.actor, "words": event_words(event)}
            for event in Event.objects.filter(subject=host.pk).order_by("-id")[:NUM_EVENTS]
        ],
        "accuracy": accuracy_of(host),
        "factors": factors_of(host.calibration),
        "num_together": jobs_together(host),
        "left_out": rows_of(rows.select_related("job").order_by("-id")[:NUM_LEFT_OUT]),
        "bench": bench_of(host),
        "beat": host.last_beat,
        "health": health_of(host),
        "open_checks": open_checks(host),
        "clock_words": clock_words(host.clock_offset_ms or 0),
        "devices": devices_of(host, request.user),
        "beside": hosts_on_same_machine(host, request.user),
        "environments": environments_of(host),
        "kept": kept,
        "num_kept": kept_in_all.num_attempts,
        "kept_bytes": kept_in_all.num_bytes,
        "may_delete": {
            each.attempt.job_id
            for each in kept
            if not refusal(membership, each.attempt.job, "delete")
        },
        "is_operator": is_operator,
        "proof": latest_proof(host),
        "refused": host.refused_messages.all()[:NUM_REFUSED] if is_operator else (),
        "labels_form": LabelsForm.of(host.labels),
    }
    context |= models_context(request, host) | observed_context(host, is_operator=is_operator)
    return context | live_context(request, [f"host:{host.pk}", "jobs"])


def event_words(event: Event) -> str:
    """Return a host event in a few words."""
    state = event.to_state
    if event.kind == "host.state":
        return f"Now {dict(HostState.choices).get(state, state).lower()}"
    if event.kind == "host.contact":
        return {"live": "Back in contact", "degraded": "Missed heartbeats"}.get(
            state, f"Contact {state}"
        )
    if event.kind.startswith("device."):
        what = {"device.cordoned": "cordoned", "device.uncordoned": "uncordoned"}[event.kind]
        reason = f": {event.detail['reason']}" if event.detail.get("reason") else ""
        return f"{event.detail.get('device', 'A device')} {what}{reason}"
    if event.kind in {"host.told_apart", "host.told_together"}:
        verb = "Another machine than" if event.kind == "host.told_apart" else "One machine with"
        return f"{verb} {event.detail.get('other', 'another host')}"
    return _words_of_detail(event) or event.kind.partition(".")[2].replace("_", " ").capitalize()


def _words_of_detail(event: Event) -> str:
    """Return the words that come from an event's detail, or "" if its kind is enough."""
    if event.kind == "host.labels":
        return f"Labels: {labels_text(event.detail['labels']) or 'none'}"
    if event.kind in MODEL_WORDS:
        size = event.detail.get("keep_bytes")
        rule = "all models" if size is None else f"at most {memory(size)} of models"
        return MODEL_WORDS[event.kind].format(event.detail.get("model", ""), rule)
    if named := event.detail.get("environment"):
        return f"Environment {named}: {event.kind.rpartition('_')[2]} requested"
    return ""


@dataclass(frozen=True)
class Factor:
    """Calibration factor of one operator class on a host, and its number of runs."""

    name: str
    factor: float
    n: int
    spread: float


def factors_of(calibration: Mapping[str, Any]) -> list[Factor]:
    """Return the calibration of a host, one line per operator class."""
    factors = calibration.get("factors") or {}
    return [
        Factor(OPERATOR_WORDS.get(name, name), each["factor"], each["n"], each["spread"])
        for name, each in factors.items()
    ]


def _run_action(
    request: HttpRequest, slug: str, act: Callable[[Host, str], None], words: str
) -> HttpResponse:
    host = host_for_operator(request, slug)
    act(host, request.user.get_username())
    messages.success(request, words.format(host=host.name))
    return redirect("host-detail", slug)


@require_POST
def host_drain(request: HttpRequest, slug: str) -> HttpResponse:
    """Drain a host: it finishes its jobs and takes no new ones."""
    words = "{host} finishes its running jobs and accepts no new job."
    return _run_action(
        request,
        slug,
        lambda host, by: host_set_state(host=host, to=HostState.DRAINING, by=by),
        words,
    )


@require_POST
def host_undrain(request: HttpRequest, slug: str) -> HttpResponse:
    """Let a host take jobs again."""
    words = "{host} accepts jobs again."
    return _run_action(
        request, slug, lambda host, by: host_set_state(host=host, to=HostState.READY, by=by), words
    )


@require_POST
def host_recheck(request: HttpRequest, slug: str) -> HttpResponse:
    """Request new facts and checks from a host, after a repair."""
    host = host_for_operator(request, slug)
    recheck_request(host=host, by=request.user.get_username())
    token = EnrolmentToken.objects.filter(host=host, pk=request.POST.get("token", "")).first()
    return redirect("host-check", token.pk) if token else redirect("host-detail", slug)


@require_POST
def host_prove(request: HttpRequest, slug: str) -> HttpResponse:
    """Launch a validation on every device of a host, and show its job."""
    host = host_for_operator(request, slug)
    try:
        job = prove_host(host=host, owner=cast("User", request.user))
    except Problem as problem:
        messages.error(request, str(problem))
        return redirect("host-detail", slug)
    return redirect("job-detail", job.pk)


@require_POST
def host_rotation(request: HttpRequest, slug: str) -> HttpResponse:
    """Request rotation of a host's secrets."""
    words = "{host} rotates its secrets at its next heartbeat; the old ones then end."
    return _run_action(request, slug, lambda host, by: rotation_request(host=host, by=by), words)


@require_POST
def host_revoke(request: HttpRequest, slug: str) -> HttpResponse:
    """Revoke a host's credential until it is enrolled again."""
    words = "The access of {host} is revoked until it is enrolled again."
    return _run_action(request, slug, lambda host, by: credential_revoke(host=host, by=by), words)


def _try_action(
    request: HttpRequest, slug: str, act: Callable[[], object], done: str
) -> HttpResponse:
    """Run an operator's action; the host's page then says that it is done, or why it is not."""
    try:
        act()
    except Problem as problem:
        messages.warning(request, problem.detail)
    else:
        messages.success(request, done)
    return redirect("host-detail", slug)


def _chosen_device(request: HttpRequest, slug: str, device_id: str) -> Device:
    host = host_for_operator(request, slug)
    return get_object_or_404(Device.objects.select_related("host__pool"), host=host, pk=device_id)


@require_POST
def device_cordon_view(request: HttpRequest, slug: str, device_id: str) -> HttpResponse:
    """Cordon a device, with a reason: it takes no new jobs."""
    device = _chosen_device(request, slug, device_id)
    by, reason = request.user.get_username(), str(request.POST.get("reason", ""))
    act = partial(device_cordon, device=device, by=by, reason=reason)
    return _try_action(request, slug, act, f"{device_words(device)} accepts no new job.")


@require_POST
def device_uncordon_view(request: HttpRequest, slug: str, device_id: str) -> HttpResponse:
    """Uncordon a device: it takes jobs again."""
    device = _chosen_device(request, slug, device_id)
    by, seen = request.user.get_username(), request.POST.get(SEEN, "")

    def act() -> None:
        device_uncordon(device=device, by=by, seen=seen)
        allocate_pool(device.host.pool)

    return _try_action(request, slug, act, f"{device_words(device)} accepts jobs again.")


def _take_out(request: HttpRequest, slug: str, to: HostState, words: str) -> HttpResponse:
    host = host_for_operator(request, slug)
    act = partial(host_take_out, host=host, to=to, by=request.user.get_username())
    return _try_action(request, slug, act, f"{host.name} {words}.")


@require_POST
def host_maintenance(request: HttpRequest, slug: str) -> HttpResponse:
    """Put a host into maintenance."""
    return _take_out(request, slug, HostState.MAINTENANCE, "is in maintenance")


@require_POST
def host_retire(request: HttpRequest, slug: str) -> HttpResponse:
    """Retire a host permanently."""
    return _take_out(request, slug, HostState.RETIRED, "is retired; enrol it again to use it")


def _order(request: HttpRequest, slug: str, name: str, action: str, words: str) -> HttpResponse:
    host, by = host_for_operator(request, slug), request.user.get_username()
    act = partial(environment_order, host=host, name=name, action=action, by=by)
    done = f"{host.name} {words} {name} after its next heartbeat."
    return _try_action(request, slug, act, done)


@require_POST
def environment_build(request: HttpRequest, slug: str, name: str) -> HttpResponse:
    """Request that a host builds an environment before a job needs it."""
    return _order(request, slug, name, "build", "builds")


@require_POST
def environment_remove(request: HttpRequest, slug: str, name: str) -> HttpResponse:
    """Request that a host deletes an environment that no job runs in."""
    return _order(request, slug, name, "remove", "removes")


@require_POST
def host_labels(request: HttpRequest, slug: str) -> HttpResponse:
    """Change a host's labels; show the form again with the input if it is invalid."""
    host = host_for_operator(request, slug)
    form = LabelsForm(request.POST)
    if not form.is_valid():
        context = host_context(request, host) | {"labels_form": form}
        return render(request, "hosts/detail.html", context, status=400)
    labels = form.cleaned_data["labels"]
    by, seen = request.user.get_username(), request.POST.get(SEEN, "")
    try:
        is_changed = labels_set(host=host, labels=labels, by=by, seen=seen)
    except Problem as problem:
        messages.warning(
            request, f"{problem.detail} You had typed: {labels_text(labels) or 'none'}."
        )
        return redirect("host-detail", slug)
    if is_changed:
        text = labels_text(labels) or "none"
        messages.success(request, f"Labels of {host.name}: {text}. The prices apply from now on.")
    return redirect("host-detail", slug)


@require_POST
def host_address(request: HttpRequest, slug: str) -> HttpResponse:
    """Set the address at which other hosts reach this one."""
    host = host_for_operator(request, slug)
    address = str(request.POST.get("address", "")).strip()
    by, seen = request.user.get_username(), request.POST.get(SEEN, "")
    act = partial(address_choose, host=host, address=address, by=by, seen=seen)
    return _try_action(request, slug, act, f"Later jobs reach {host.name} at {address}.")


def _requested_host(request: HttpRequest, host: Host) -> Host:
    """Return the host named in the form, if it looks like the same machine.

    Raises:
        ConflictProblem: the named host does not look like the same machine (any more).
    """
    other_id = str(request.POST.get("other", ""))
    candidates = {each.host_id for each in hosts_on_same_machine(host, request.user)}
    if other_id not in candidates:
        raise ConflictProblem(
            "not_alike", f"No such host matches the machine of {host.name} now. Reload the page."
        )
    return Host.objects.select_related("pool").get(pk=other_id)


@require_POST
def host_apart(request: HttpRequest, slug: str) -> HttpResponse:
    """Mark another host as a different machine, or undo it."""
    host = host_for_operator(request, slug)
    is_apart = request.POST.get("word") != "same"
    try:
        other = _requested_host(request, host)
    except Problem as problem:
        messages.warning(request, problem.detail)
        return redirect("host-detail", slug)
    hosts_mark_distinct(host=host, other=other, by=request.user.get_username(), is_apart=is_apart)
    words = "count as different machines" if is_apart else "count as one machine again"
    messages.success(request, f"{host.name} and the other host {words}.")
    for pool in Pool.objects.filter(pk__in={host.pool_id, other.pool_id}):
        allocate_pool(pool)
    return redirect("host-detail", slug)


MAX_REPORT_BYTES = 16 * 1024**2


@require_GET
@csp({"default-src": [NONE], "style-src": [UNSAFE_INLINE]})  # type: ignore[arg-type]  # takes arguments of the URL, too
def proof_report(request: HttpRequest, job_id: str) -> HttpResponse:
    """Show the report of a validation, rendered anew from the host's data."""
    job = load_job(request, job_id)
    artefact = Artefact.objects.filter(
        attempt=job.current_attempt, name=PROOF_REPORT, is_complete=True
    ).first()
    path = folder_of(artefact) / "report.json" if artefact else None
    if path is None or not path.is_file():
        raise Http404(
            "This job has no finished validation report; wait for its end or validate the host "
            "again."
        )
    if path.stat().st_size > MAX_REPORT_BYTES:
        raise Http404("The report of this validation is too large to show; download it.")
    try:
        report = proof_reports.Report.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise Http404(
            "The report of this validation is damaged; validate the host again."
        ) from error
    return HttpResponse(proof_reports.render(report))
