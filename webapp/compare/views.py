"""Two to four jobs side by side: settings that differ, predicted against measured, metrics."""

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from webapp.compare.charts import overlays
from webapp.compare.differences import settings_of
from webapp.compare.jobs import FEWEST, MOST, Side, address_of, asked_jobs, offered, sides_of
from webapp.compare.measured import answer, rows_of
from webapp.jobs.figures import KIND_WORDS, elapsed_seconds
from webapp.jobs.models import Job
from webapp.jobs.plots import draw

UNPROCESSABLE = 422


@require_GET
def compare(request: HttpRequest) -> HttpResponse:
    """Compare the jobs that the address names, or offer some to choose from."""
    jobs = asked_jobs(request)
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
    drawn = [draw(job) for job in jobs]
    rows = rows_of(sides, drawn)
    found = settings_of(jobs, request.user)
    different = [setting for setting in found if setting.differs]
    shows_all = "all" in request.GET
    address = address_of([job.pk for job in jobs])
    return {
        "sides": sides,
        "rows": rows,
        "answer": answer(sides, rows),
        "settings": found if shows_all else different,
        "num_settings": len(found),
        "num_different": len(different),
        "shows_all": shows_all,
        "address": address,
        "overlays": overlays(sides, drawn),
        "kinds": _kinds(sides),
        "durations": [elapsed_seconds(job) for job in jobs],
        "can_add": len(jobs) < MOST,
    }


def _kinds(sides: list[Side]) -> list[str]:
    """Return the kinds of the jobs where they are of several."""
    kinds = list(dict.fromkeys(KIND_WORDS.get(side.job.kind, side.job.kind) for side in sides))
    return kinds if len(kinds) > 1 else []
