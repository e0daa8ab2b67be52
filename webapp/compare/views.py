"""The comparison page of two to four jobs: settings, predicted and measured figures, charts."""

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from webapp.compare.charts import overlays
from webapp.compare.comparison import (
    FEWEST,
    MOST,
    Side,
    address_of,
    answer,
    offered,
    requested_jobs,
    rows_of,
    settings_of,
    sides_of,
)
from webapp.jobs.measured_figures import figures_of
from webapp.jobs.models import Job
from webapp.jobs.plots import draw
from webapp.jobs.progress import KIND_WORDS

UNPROCESSABLE = 422


@require_GET
def compare(request: HttpRequest) -> HttpResponse:
    """Compare the jobs in the URL, or show a list to choose from."""
    jobs = requested_jobs(request)
    if FEWEST <= len(jobs) <= MOST and "choose" not in request.GET:
        return render(request, "compare/compare.html", _comparison(request, jobs))
    context = {
        "chosen": jobs,
        "offered": offered(request, jobs),
        "is_too_many": len(jobs) > MOST,
        "most": MOST,
        "fewest": FEWEST,
    }
    status = UNPROCESSABLE if len(jobs) > MOST else 200
    return render(request, "compare/choose.html", context, status=status)


def _comparison(request: HttpRequest, jobs: list[Job]) -> dict[str, Any]:
    sides = sides_of(jobs)
    figures = [figures_of(job) for job in jobs]
    drawn = [draw(job, each) for job, each in zip(jobs, figures, strict=True)]
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
        "overlays": overlays(sides, drawn),
        "kinds": _kinds(sides),
        "durations": [each.get("run_seconds") for each in figures],
        "can_add": len(jobs) < MOST,
    }


def _kinds(sides: list[Side]) -> list[str]:
    """Return the kinds of the jobs, if there are several."""
    kinds = list(dict.fromkeys(KIND_WORDS.get(side.job.kind, side.job.kind) for side in sides))
    return kinds if len(kinds) > 1 else []
