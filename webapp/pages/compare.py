"""Jobs side by side: their settings, figures and charts."""

from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from webapp.core.parameters import choice_in_query, reads_query
from webapp.jobs.comparing import (
    MAX_JOBS,
    MIN_JOBS,
    PARAMETER,
    Side,
    address_of,
    answer,
    rows_of,
    settings_of,
    sides_of,
)
from webapp.jobs.job_charts import draw, steps_among
from webapp.jobs.lookup import visible_jobs
from webapp.jobs.measured_figures import figures_of
from webapp.jobs.models import Job, JobState
from webapp.jobs.overlay_charts import axis_of, overlays
from webapp.jobs.progress import KIND_WORDS

NUM_OFFERED = 30
AXES = ("step", "time")
UNPROCESSABLE = 422


def requested_jobs(request: HttpRequest) -> list[Job]:
    """Return the jobs in the URL, in order.

    Raises:
        Http404: a job does not exist or is not visible to the user.
    """
    ids = list(dict.fromkeys(each for each in request.GET.getlist(PARAMETER) if each))
    rows = visible_jobs(request).filter(pk__in=ids[: MAX_JOBS * 10])
    by_id = {
        job.pk: job
        for job in rows.select_related(
            "host__team", "requested_host", "pool", "owner", "plan", "current_attempt__host"
        )
    }
    if missing := [each for each in ids if each not in by_id]:
        raise Http404(missing[0])
    return [by_id[each] for each in ids]


def jobs_to_offer(request: HttpRequest, chosen: list[Job]) -> list[Job]:
    """Return the latest jobs to choose from, those similar to the first chosen one first."""
    latest = visible_jobs(request).exclude(pk__in=[job.pk for job in chosen])
    latest = latest.exclude(state=JobState.DRAFT)
    rows = latest.select_related("host", "requested_host", "pool", "owner", "current_attempt")
    latest_jobs = list(rows[:NUM_OFFERED])
    if not chosen:
        return latest_jobs
    reference = chosen[0]
    return sorted(
        latest_jobs,
        key=lambda job: (
            job.kind != reference.kind,
            not job.plan_id or job.plan_id != reference.plan_id,
        ),
    )


@require_GET
@reads_query("choose", "all", "axis", repeated=(PARAMETER,))
def compare(request: HttpRequest) -> HttpResponse:
    """Compare the jobs in the URL, or show a list to choose from."""
    jobs = requested_jobs(request)
    if MIN_JOBS <= len(jobs) <= MAX_JOBS and "choose" not in request.GET:
        return render(request, "compare/compare.html", _comparison(request, jobs))
    context = {
        "chosen": jobs,
        "offered": jobs_to_offer(request, jobs),
        "is_too_many": len(jobs) > MAX_JOBS,
        "most": MAX_JOBS,
        "fewest": MIN_JOBS,
    }
    status = UNPROCESSABLE if len(jobs) > MAX_JOBS else 200
    return render(request, "compare/choose.html", context, status=status)


def _comparison(request: HttpRequest, jobs: list[Job]) -> dict[str, Any]:
    sides = sides_of(jobs)
    figures = [figures_of(job) for job in jobs]
    drawn = [draw(job, each, has_step=True) for job, each in zip(jobs, figures, strict=True)]
    axis = axis_of([steps_among(each)[1] for each in drawn], "")
    rows = rows_of(sides, figures)
    each = settings_of(jobs, request.user)
    different = [setting for setting in each if setting.differs]
    shows_all = "all" in request.GET
    address = address_of([job.pk for job in jobs])
    return {
        "sides": sides,
        "rows": rows,
        "answer": answer(sides, rows),
        "settings": each if shows_all else different,
        "num_settings": len(each),
        "num_different": len(different),
        "shows_all": shows_all,
        "address": address,
        "overlays": overlays(sides, drawn, choice_in_query(request, "axis", AXES)),
        "axes": AXES if axis == "step" else (),
        "kinds": _kinds(sides),
        "durations": [each.get("run_seconds") for each in figures],
        "can_add": len(jobs) < MAX_JOBS,
    }


def _kinds(sides: list[Side]) -> list[str]:
    """Return the kinds of the jobs, if there are several."""
    kinds = list(dict.fromkeys(KIND_WORDS.get(side.job.kind, side.job.kind) for side in sides))
    return kinds if len(kinds) > 1 else []
