"""One page per tab of a job; the list is in ``listing.py``, the buttons in ``actions.py``."""

import json
from datetime import timedelta
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.views.decorators.http import require_GET

from runners.compress_options import QUANTISED_DTYPES
from runners.reasons import Reason
from webapp.accounts.models import Membership
from webapp.accounts.roles import membership_of
from webapp.core.clock import now
from webapp.core.units import clock
from webapp.hosts.sharing import facts_for
from webapp.jobs import figures
from webapp.jobs.actions import allowed
from webapp.jobs.as_read import as_read
from webapp.jobs.checklists import Checked, checks_of, preflight_of
from webapp.jobs.endpoints import endpoint_of, key_shown_once
from webapp.jobs.energy import unmeasured
from webapp.jobs.evaluating import LeftModel, left_model
from webapp.jobs.gangs import deciding_part
from webapp.jobs.giving_up import names_of, silent_parts
from webapp.jobs.logs import Line, log_lines
from webapp.jobs.lookup import load_job
from webapp.jobs.measured_load import operators_of, under_load
from webapp.jobs.mixture import mixture_of
from webapp.jobs.models import (
    FINAL_STATES,
    Artefact,
    Event,
    Job,
    JobState,
    Measurement,
)
from webapp.jobs.parts import parts_for, shown_part
from webapp.jobs.plots import Drawn, draw, latest_values
from webapp.jobs.postmortem import has_postmortem
from webapp.jobs.reasons import words_for
from webapp.jobs.selectors import scheduler_words, waiting_sentence
from webapp.jobs.standing import leftover_of, silence_of
from webapp.jobs.task_figures import task_rows
from webapp.jobs.text_samples import samples_of
from webapp.live.page import live_context, page_or_regions
from webapp.modelhub.models import TeamModel

ARRIVAL_TIME = timedelta(hours=1)
TAIL_LINES = 200
LOG_PAGE_LINES = 2000
TABS = (
    ("job-detail", "Overview"),
    ("job-metrics", "Metrics"),
    ("job-logs", "Logs"),
    ("job-events", "Events"),
    ("job-config", "Config"),
    ("job-artefacts", "Artefacts"),
    ("job-playground", "Playground"),
    ("job-postmortem", "Post-mortem"),
)


@require_GET
def job_detail(request: HttpRequest, job_id: str) -> HttpResponse:
    """Show a job as it runs, or what came of it."""
    job = load_job(request, job_id)
    context = job_context(request, job, "job-detail") | overview_context(job, draw(job))
    context["preflight"] = preflight_of(job, context["events"])
    if "HX-Request" not in request.headers:
        context["endpoint_key"] = key_shown_once(request, job)
    return page_or_regions(request, "jobs/overview.html", "jobs/_overview.html", context)


@require_GET
def job_metrics(request: HttpRequest, job_id: str) -> HttpResponse:
    """Show every metric of a job as a chart."""
    job = load_job(request, job_id)
    shown = shown_part(request, job)
    drawn = draw(job, is_complete=True, part=shown)
    context = job_context(request, job, "job-metrics")
    context |= {"charts": drawn, "chart_metrics": metrics_of(drawn)}
    context |= {"shown": shown, "parts": parts_for(job, shown, "job-metrics")}
    return page_or_regions(request, "jobs/metrics.html", "jobs/_status.html", context)


@require_GET
def job_logs(request: HttpRequest, job_id: str) -> HttpResponse:
    """Show what the job wrote, optionally only the lines that hold ``?q=``."""
    job = load_job(request, job_id)
    needle = request.GET.get("q", "").strip()
    shown = shown_part(request, job)
    lines = log_lines(shown, limit=LOG_PAGE_LINES, needle=needle)
    context = job_context(request, job, "job-logs")
    context |= {"shown": shown, "parts": parts_for(job, shown, "job-logs")}
    context |= {"needle": needle, "limit": LOG_PAGE_LINES, **log_context(lines)}
    return page_or_regions(request, "jobs/logs.html", "jobs/_status.html", context)


@require_GET
def job_events(request: HttpRequest, job_id: str) -> HttpResponse:
    """Show who did what to the job, and when."""
    job = load_job(request, job_id)
    context = job_context(request, job, "job-events")
    context["event_rows"] = [_event_row(event) for event in context["events"]]
    return page_or_regions(request, "jobs/events.html", "jobs/_status.html", context)


def _event_row(event: Event) -> tuple[Event, tuple[Checked, ...], int]:
    """Return an event with its checks, and how many of them failed."""
    checks = checks_of(event)
    return event, checks, sum(not check.is_ok for check in checks)


@require_GET
def job_config(request: HttpRequest, job_id: str) -> HttpResponse:
    """Show exactly what the host was asked to run, and what the host was."""
    job = load_job(request, job_id)
    facts = job.current_attempt.facts if job.current_attempt else {}
    host_facts = job.shown_host.facts if job.shown_host else {}
    shown = facts_for(request.user, job.shown_host, facts or host_facts)
    context = job_context(request, job, "job-config")
    context |= {"spec": json.dumps(job.spec, indent=2), "facts": shown}
    return page_or_regions(request, "jobs/config.html", "jobs/_status.html", context)


@require_GET
def job_artefacts(request: HttpRequest, job_id: str) -> HttpResponse:
    """List what the job left to download."""
    job = load_job(request, job_id)
    context = job_context(request, job, "job-artefacts")
    context |= {"listings": listings_of(job), **artefact_context(job)}
    return page_or_regions(request, "jobs/artefacts.html", "jobs/_artefact_regions.html", context)


# What the pages show


def job_context(request: HttpRequest, job: Job, tab: str) -> dict[str, Any]:
    """Return what every tab of a job shows: head, buttons, status line, timeline, tabs."""
    events = list(Event.objects.filter(subject=job.pk))
    membership = membership_of(request.user, job.team)
    context = {
        "job": job,
        "kind": figures.KIND_WORDS.get(job.kind, job.kind),
        "is_over": job.state in FINAL_STATES,
        "events": events,
        "timeline": figures.timeline(job, [e for e in events if e.kind == "job.state"]),
        "progress": figures.progress(job),
        "seconds": figures.elapsed_seconds(job),
        "expected_ms": expected_ms(job),
        "waiting": waiting_sentence(job),
        "waits_for": scheduler_words(job),
        "allowed": allowed(membership, job),
        **silence_context(job),
        "holding": names_of(silent_parts(job)) if job.state in FINAL_STATES else [],
        "abandon_url": _abandon_url(job, membership),
        "leftover": leftover_of(job),
        "outcome": outcome_of(job),
        "tabs": [
            {"url": reverse(name, args=[job.pk]), "name": word, "is_current": name == tab}
            for name, word in TABS
            if _has_tab(job, name)
        ],
    }
    return context | live_context(request, [f"job:{job.pk}"])


def _has_tab(job: Job, name: str) -> bool:
    if name == "job-playground":
        return job.kind == "serve"
    return name != "job-postmortem" or has_postmortem(job)


def _abandon_url(job: Job, membership: Membership | None) -> str:
    """Return where a member may give the job up, while a host of it is silent; else nothing."""
    may = allowed(membership, job).abandon and silent_parts(job)
    return reverse("job-abandon", args=[job.pk]) if may else ""


def overview_context(job: Job, drawn: list[Drawn]) -> dict[str, Any]:
    """Return what the first tab adds: figures, charts, the outcome and the end of the log."""
    attempt = job.current_attempt
    measurements = list(Measurement.objects.filter(attempt=attempt)) if attempt else []
    rows = figures.compared(job, measurements, latest_values(job, drawn))
    return {
        "charts": drawn,
        "chart_metrics": metrics_of(drawn),
        "compared": rows,
        "endpoint": endpoint_of(job),
        "answer": figures.answer(rows),
        "as_read": as_read(job),
        "no_energy": unmeasured(job),
        "changes": figures.before_after(job),
        "load": under_load(job),
        "operators": operators_of(job),
        "chance": figures.beyond_chance(job),
        "tasks": task_rows(job),
        "samples": samples_of(job),
        "mixture": mixture_of(job),
        "harness": job.result.get("notes", {}).get("tasks", ""),
        "weight_dtype": job.spec.get("weight_dtype") or job.spec.get("method"),
        "narrow_dtypes": QUANTISED_DTYPES,
        **artefact_context(job),
        "models": models_of(job),
        **log_context(log_lines(attempt, limit=TAIL_LINES)),
    }


def metrics_of(drawn: list[Drawn]) -> str:
    """Return the metrics of the charts as the API's query takes them."""
    return ",".join(each.chart.metric for each in drawn)


def log_context(lines: list[Line]) -> dict[str, Any]:
    """Return the log's lines and the number after which the page asks for more."""
    return {"lines": lines, "last_seq": lines[-1].seq if lines else 0}


def expected_ms(job: Job) -> int | str:
    """Return how long a running job is expected to take in all, where it says so itself."""
    if job.state != JobState.RUNNING or job.eta_seconds is None:
        return ""
    return int(1000 * (figures.elapsed_seconds(job) + job.eta_seconds))


def silence_context(job: Job) -> dict[str, Any]:
    """Return for how long which hosts of a live job have been silent; nothing while they talk."""
    found = silence_of(job)
    if found is None:
        return {"silent": None}
    return {
        "silent": found.seconds,
        "silent_words": clock(found.seconds),
        "silent_names": found.names,
    }


def outcome_of(job: Job) -> dict[str, Any] | None:
    """Return why a job ended as it did and what to do next; None where it ended well."""
    if job.state not in FINAL_STATES or job.reason in {"", Reason.OK}:
        return None
    part = deciding_part(job)
    record = part.exit_record if part else {}
    words = words_for(job.reason)
    return {
        "host": part.host.name if part and job.num_hosts > 1 else "",
        "sentence": words.sentence,
        "next_step": words.next_step,
        "postmortem_url": reverse("job-postmortem", args=[job.pk]) if has_postmortem(job) else "",
        "exit_code": record.get("exit_code"),
        "signal": record.get("signal"),
        "last_lines": record.get("last_lines", []),
        "is_fault": job.state in {"failed", "error"},
    }


def artefact_context(job: Job) -> dict[str, Any]:
    """Return what the job left, and where the page looks again while some of it is on its way.

    An upload begins after the attempt's end; what has not arrived an hour later was too large
    for the host's limit or refused, and stays there.
    """
    found = artefacts_of(job)
    is_missing = any(not artefact.is_complete for artefact in found)
    is_recent = job.ended_at is None or now() - job.ended_at < ARRIVAL_TIME
    url = reverse("job-artefacts", args=[job.pk]) if is_missing and is_recent else ""
    return {"artefacts": found, "arriving_url": url}


def artefacts_of(job: Job) -> list[Artefact]:
    """Return what the job's current attempt left."""
    attempt = job.current_attempt
    return list(Artefact.objects.filter(attempt=attempt)) if attempt else []


def listings_of(job: Job) -> list[tuple[str, list[tuple[str, int, str]]]]:
    """Return each artefact's name with its files: path, bytes, digest."""
    return [
        (item.name, [(path, item.files[path], item.sha256.get(path, "")) for path in item.files])
        for item in artefacts_of(job)
    ]


def models_of(job: Job) -> list[LeftModel]:
    """Return the models that the job's current attempt added to the team's models."""
    attempt = job.current_attempt_id
    models = TeamModel.objects.filter(attempt_id=attempt) if attempt else []
    return [left_model(model) for model in models]
