"""The tabs of a job's page, and planning it again."""

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from django.contrib import messages
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_GET, require_POST

from runners.jobspec.compress import QUANTISED_DTYPES
from runners.plans.refusals import DraftProblem
from runners.shared.reasons import Reason
from webapp.accounts.models import Membership, Role
from webapp.accounts.services import has_role, membership_of, signed_in
from webapp.audit.models import Event
from webapp.core.clock import now, now_ms
from webapp.core.display import clock
from webapp.core.figures import STEP_SERIES
from webapp.core.middleware import uncompressed
from webapp.core.parameters import page_number, reads_query, whole_in_query
from webapp.core.problems import Problem
from webapp.hosts.pools import facts_for
from webapp.jobs.artefacts import artefacts_of
from webapp.jobs.benchmark_reports import operators_of, under_load
from webapp.jobs.busy_hosts import busy_note
from webapp.jobs.calibration import as_read
from webapp.jobs.calibration_effect import calibration_effect_of
from webapp.jobs.compression_effect import before_after, significance_note, won_words
from webapp.jobs.endpoints import command_run, endpoint_of, key_shown_once, planned_command
from webapp.jobs.evaluating import models_of
from webapp.jobs.gangs import deciding_part
from webapp.jobs.generated_texts import samples_of
from webapp.jobs.job_charts import Drawn, draw, sections_of, steps_among
from webapp.jobs.logs import Line, is_full, log_lines
from webapp.jobs.lookup import load_job
from webapp.jobs.measured_figures import (
    cards_of,
    figures_of,
    outcome_words,
    task_rows,
    why_energy_unmeasured,
)
from webapp.jobs.measured_targets import targets_of
from webapp.jobs.memory_comparison import shortage_of
from webapp.jobs.mixtures import mixture_of
from webapp.jobs.models import FINAL_STATES, Attempt, Job, JobState
from webapp.jobs.parts import PARAMETER, parts_for
from webapp.jobs.permissions import allowed, job_for
from webapp.jobs.points import points_since
from webapp.jobs.postmortem import fitting_changes, has_postmortem, postmortem_of, replan_words
from webapp.jobs.preflight_checks import ChecklistLine, checks_of, preflight_of
from webapp.jobs.progress import (
    KIND_WORDS,
    elapsed_seconds,
    is_serving,
    leftover_of,
    progress,
    remaining_seconds,
    silence_of,
    timeline,
)
from webapp.jobs.replanning import NO_SHORTAGE, change_at, limit_words, replan
from webapp.jobs.services import is_resumable, names_of, resumed_job, silent_parts, words_of
from webapp.jobs.spreads import draw_spreads, fresh_rows
from webapp.jobs.startup import startup_of
from webapp.jobs.stored_files import stored_of_job
from webapp.jobs.tracking import tracked_run
from webapp.jobs.waiting import scheduler_words, waiting_sentence
from webapp.live.stream import live_context, page_or_regions
from webapp.metrics.store import FOREVER_MS
from webapp.pages.shown_part import shown_part
from webapp.plans.models import Plan
from webapp.plans.planning import plan_compute
from webapp.wizard.documents import job_document_of, schema_address, yaml_of
from webapp.wizard.drafts import suggestion_apply

ARRIVAL_TIME = timedelta(hours=1)
OVERVIEW_LOG_LINES = 200
LOG_PAGE_LINES = 2000
FILES_PER_PAGE = 200
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


# While a busy host can be left to itself, at the cost of a start.
BEFORE_THE_FIRST_STEP = (JobState.PREFLIGHT, JobState.STARTING)


@require_GET
@reads_query("since")
def job_detail(request: HttpRequest, job_id: str) -> HttpResponse:
    """Show a running job, or its results."""
    job = load_job(request, job_id)
    context = job_context(request, job, "job-detail") | overview_context(job)
    context["may_decide"] = job.host is not None and has_role(
        request.user, job.host.team, Role.OPERATOR
    )
    context["points"] = fresh_points(request, job.current_attempt, context["charts"])
    context["preflight"] = preflight_of(job, context["events"])
    context["busy"] = busy_note(job.host) if job.state in BEFORE_THE_FIRST_STEP else None
    if "HX-Request" not in request.headers:
        context["endpoint_key"] = key_shown_once(request, job)
    response = page_or_regions(request, "jobs/overview.html", "jobs/_overview.html", context)
    return uncompressed(response) if context.get("endpoint_key") else response


@require_GET
@reads_query("since", PARAMETER)
def job_metrics(request: HttpRequest, job_id: str) -> HttpResponse:
    """Show every metric of a job as a chart."""
    job = load_job(request, job_id)
    shown = shown_part(request, job)
    context = job_context(request, job, "job-metrics")
    drawn, step = steps_among(draw(job, is_complete=True, part=shown))
    is_live = job.state not in FINAL_STATES
    points = fresh_points(request, shown, drawn)
    if points is not None:
        points |= fresh_rows(job, since_of(request))
    drawn = [*draw_spreads(job, drawn), *drawn]
    context |= {"charts": drawn, "sections": sections_of(drawn, is_live=is_live)}
    context |= {"points": points}
    context["steps"] = [*zip(step.t_ms, step.values, strict=True)]
    context |= {"shown": shown, "parts": parts_for(job, shown, "job-metrics")}
    return page_or_regions(request, "jobs/metrics.html", "jobs/_metrics_regions.html", context)


@require_GET
@reads_query("q", "since", PARAMETER)
def job_logs(request: HttpRequest, job_id: str) -> HttpResponse:
    """Show the job's output, optionally only lines that contain ``?q=``."""
    job = load_job(request, job_id)
    needle = request.GET.get("q", "").strip()
    shown = shown_part(request, job)
    lines = log_lines(shown, limit=LOG_PAGE_LINES, needle=needle)
    context = job_context(request, job, "job-logs")
    context |= {"shown": shown, "parts": parts_for(job, shown, "job-logs")}
    is_cut = is_full(lines, LOG_PAGE_LINES)
    context |= {"needle": needle, "is_cut": is_cut, **log_context(lines)}
    return page_or_regions(request, "jobs/logs.html", "jobs/_status.html", context)


@require_GET
def job_events(request: HttpRequest, job_id: str) -> HttpResponse:
    """Show the job's events: who did what, and when."""
    job = load_job(request, job_id)
    context = job_context(request, job, "job-events")
    context["event_rows"] = [_event_row(event) for event in context["events"]]
    return page_or_regions(request, "jobs/events.html", "jobs/_status.html", context)


def _event_row(event: Event) -> tuple[Event, tuple[ChecklistLine, ...], int, bool]:
    """Return an event with its checks, the number of failed ones, and whether any has advice."""
    checks = checks_of(event)
    num_failed = sum(not check.is_ok for check in checks)
    return event, checks, num_failed, any(check.remedy for check in checks)


@require_GET
def job_config(request: HttpRequest, job_id: str) -> HttpResponse:
    """Show the job's spec and its host's facts."""
    job = load_job(request, job_id)
    facts = job.current_attempt.facts if job.current_attempt else {}
    host_facts = job.shown_host.facts if job.shown_host else {}
    shown = facts_for(request.user, job.shown_host, facts or host_facts)
    context = job_context(request, job, "job-config")
    document = job_document_of(job)
    context |= {"spec": json.dumps(job.spec, indent=2), "facts": shown}
    context["file"] = yaml_of(document, schema_address(request)) if document else ""
    context["command"] = command_run(job)
    context["planned_command"] = planned_command(job)
    return page_or_regions(request, "jobs/config.html", "jobs/_status.html", context)


@require_GET
@reads_query("page", "since")
def job_artefacts(request: HttpRequest, job_id: str) -> HttpResponse:
    """List the job's artefacts for download, and their files by pages."""
    job = load_job(request, job_id)
    context = job_context(request, job, "job-artefacts")
    files = [(item, path) for item in artefacts_of(job) for path in item.files]
    page = Paginator(files, FILES_PER_PAGE).get_page(page_number(request))
    listings: dict[str, list[tuple[str, int, str]]] = {}
    for item, path in page:
        row = (path, item.files[path], item.sha256.get(path, ""))
        listings.setdefault(item.name, []).append(row)
    context |= {
        "listings": listings.items(),
        "page": page,
        **artefact_context(job),
        "kept": stored_of_job(job),
        "may_delete_files": {job.pk} if context["allowed"].delete else set(),
    }
    return page_or_regions(request, "jobs/artefacts.html", "jobs/_artefact_regions.html", context)


# What the pages show


def job_context(request: HttpRequest, job: Job, tab: str) -> dict[str, Any]:
    """Return the context shared by all tabs: head, buttons, status line, timeline, tabs."""
    events = list(Event.objects.filter(subject=job.pk))
    membership = membership_of(request.user, job.team)
    held = allowed(membership, job)
    context = {
        "as_of_ms": now_ms(),  # before any read: the shown data is at least this recent
        "job": job,
        "kind": KIND_WORDS.get(job.kind, job.kind),
        "is_over": job.state in FINAL_STATES,
        "events": events,
        "timeline": timeline(job, [e for e in events if e.kind == "job.state"]),
        "progress": progress(job),
        "seconds": elapsed_seconds(job),
        "expected_ms": expected_ms(job),
        "startup": startup_of(job),
        "is_serving": is_serving(job),
        "waiting": waiting_sentence(job),
        "waits_for": scheduler_words(job),
        "allowed": held,
        "may_resume": held.clone and is_resumable(job),
        "resumed": resumed_job(job),
        "step": job.workflow_steps.select_related("workflow").first(),
        "trial": job.tuning_trials.select_related("tuning").first(),
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
    """Return the URL to abandon the job if a host of it is unreachable; else nothing."""
    may = allowed(membership, job).abandon and silent_parts(job)
    return reverse("job-abandon", args=[job.pk]) if may else ""


def overview_context(job: Job) -> dict[str, Any]:
    """Return the overview's context: figures, charts, the outcome and the end of the log."""
    attempt = job.current_attempt
    job_figures = figures_of(job)
    drawn = draw(job, job_figures)
    taught = calibration_effect_of(job)
    said = outcome_words(job_figures, taught.why_not if taught else None)
    artefacts = artefact_context(job)
    return {
        "outcome_words": said if job.ended_at else "",
        "charts": drawn,
        "figures": cards_of(job_figures),
        "targets": targets_of(job, job_figures),
        "won": won_words(job, job_figures),
        "endpoint": endpoint_of(job),
        "as_read": as_read(job),
        "no_energy": why_energy_unmeasured(job),
        "changes": before_after(job_figures),
        "load": under_load(job),
        "operators": operators_of(job),
        "chance": significance_note(job),
        "tasks": task_rows(job),
        "samples": samples_of(job),
        "mixture": mixture_of(job),
        "tracked": tracked_run(artefacts["artefacts"]),
        "harness": job.result.get("notes", {}).get("tasks", ""),
        "weight_dtype": job.spec.get("weight_dtype") or job.spec.get("method"),
        "narrow_dtypes": QUANTISED_DTYPES,
        **artefacts,
        "models": models_of(job),
        "taught": taught,
        **log_context(log_lines(attempt, limit=OVERVIEW_LOG_LINES)),
    }


def fresh_points(
    request: HttpRequest, part: Attempt | None, drawn: list[Drawn]
) -> dict[str, Sequence[tuple[float, ...]]] | None:
    """Return the drawn metrics' points since the instant in ``?since=``, in ms.

    A refresh returns them with its regions, so that charts and figures change together; None
    if none are requested.
    """
    since = since_of(request)
    if part is None or since < 0:
        return None
    return {**points_since(part, [STEP_SERIES, *(each.chart.metric for each in drawn)], since)}


def since_of(request: HttpRequest) -> int:
    """Return the instant in ``?since=``, in ms; -1 without one."""
    return min(whole_in_query(request, "since", least=0, default=-1), FOREVER_MS)


def log_context(lines: list[Line]) -> dict[str, Any]:
    """Return the log's lines, and the sequence number for the next poll."""
    return {"lines": lines, "last_seq": lines[-1].seq if lines else 0}


def expected_ms(job: Job) -> int | str:
    """Return the expected total duration of a running job in ms, if it reports an ETA."""
    left = remaining_seconds(job)
    return "" if left is None else int(1000 * (elapsed_seconds(job) + left))


def silence_context(job: Job) -> dict[str, Any]:
    """Return the hosts of a live job without a recent heartbeat, and since when, if any."""
    silence = silence_of(job)
    if silence is None:
        return {"silent": None}
    return {
        "silent": silence.seconds,
        "silent_words": clock(silence.seconds),
        "silent_names": silence.names,
    }


def outcome_of(job: Job) -> dict[str, Any] | None:
    """Return why a job ended and the next step; None if it ended well."""
    if job.state not in FINAL_STATES or job.reason in {"", Reason.OK}:
        return None
    part = deciding_part(job)
    record = part.exit_record if part else {}
    words = words_of(job)
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
    """Return the job's artefacts, and a URL to poll while some are incomplete.

    An upload begins after the attempt's end; artefacts missing an hour later were refused or too
    large for the host's limit.
    """
    artefacts = artefacts_of(job)
    is_missing = any(not artefact.is_complete for artefact in artefacts)
    is_recent = job.ended_at is None or now() - job.ended_at < ARRIVAL_TIME
    url = reverse("job-artefacts", args=[job.pk]) if is_missing and is_recent else ""
    return {"artefacts": artefacts, "arriving_url": url}


# The post-mortem tab and its actions.


TAB = "job-postmortem"


@require_GET
@reads_query("changes", "since")
def job_postmortem(request: HttpRequest, job_id: str) -> HttpResponse:
    """Explain why a job failed, with its measurements and changes that would fit."""
    job = load_job(request, job_id)
    context = job_context(request, job, TAB) | {"outcome": None}  # the tab itself shows it
    if has_postmortem(job):
        post_mortem = postmortem_of(job)
        context["postmortem"] = post_mortem
        shortage = shortage_of(job)
        context["is_short"] = shortage is not None
        if shortage and job.plan_id:
            context["replan_words"] = replan_words(shortage)
    context["changes"] = fitting_changes(job) if "changes" in request.GET else None
    return page_or_regions(request, "jobs/postmortem.html", "jobs/_status.html", context)


@require_GET
def job_changes(request: HttpRequest, job_id: str) -> HttpResponse:
    """Return the smallest changes that would fit; loaded separately because it searches."""
    job = load_job(request, job_id)
    context = {
        "job": job,
        "changes": fitting_changes(job),
        "allowed": job_context(request, job, TAB)["allowed"],
    }
    return render(request, "jobs/_changes.html", context)


@require_POST
def job_replan(request: HttpRequest, job_id: str) -> HttpResponse:
    """Create a plan from a failed job's: for editing, with its need as a limit, or changed."""
    job = job_for(request, job_id, "clone")
    how = request.POST.get("how", "")
    story = shortage_of(job) if how != "edit" else None
    if how != "edit" and story is None:
        messages.warning(request, NO_SHORTAGE)
        return redirect(TAB, job.pk)
    try:
        plan = replan(job=job, owner=signed_in(request), story=story)
    except DraftProblem as problem:
        messages.warning(request, problem.sentence)
        return redirect(TAB, job.pk)
    if how == "edit":
        return redirect("plan-step", plan.pk, "workload")
    if story is not None:
        messages.info(request, limit_words(story))
        _apply(request, job, plan)
    return redirect("plan-detail", plan.pk)


def _apply(request: HttpRequest, job: Job, plan: Plan) -> None:
    """Apply the chosen change to the draft and plan it."""
    chosen = change_at(fitting_changes(job), request.POST.get("change", ""))
    if chosen and (ignored := suggestion_apply(plan, chosen.changes)):
        messages.warning(
            request, f"Not changed, because this draft lacks the field: {', '.join(ignored)}."
        )
    try:
        plan_compute(plan)
    except (DraftProblem, Problem) as problem:
        messages.error(request, str(problem))
