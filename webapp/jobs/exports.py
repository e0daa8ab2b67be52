"""Export a job's figures as files: the same values as its page and the API, not rounded."""

import csv
from collections.abc import Callable

from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.http import require_GET

from webapp.audit.views import cell
from webapp.core.clock import now
from webapp.jobs.artefacts import file_name
from webapp.jobs.lookup import load_job
from webapp.jobs.measured_figures import as_json, figures_of
from webapp.jobs.models import Job
from webapp.jobs.targets import target_json, targets_of


@require_GET
def job_figures(request: HttpRequest, job_id: str, form: str) -> HttpResponse:
    """Send a job's figures as ``csv`` or ``json``, in base units."""
    job = load_job(request, job_id)
    if form not in FORMS:
        raise Http404(f"Figures are exported as {' or '.join(FORMS)}, not as {form[:20]}.")
    response = FORMS[form](job)
    name = f"{file_name(job.name)}-figures.{form}"
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    return response


def _csv(job: Job) -> HttpResponse:
    response = HttpResponse(content_type="text/csv; charset=utf-8")
    rows = [as_json(each) for each in figures_of(job).values()]
    if rows:
        writer = csv.DictWriter(response, list(rows[0]))
        writer.writeheader()
        writer.writerows({key: _plain(value) for key, value in row.items()} for row in rows)
    return response


def _plain(value: object) -> object:
    """Return a value that spreadsheets do not interpret as a formula: names come from hosts."""
    return cell(value) if isinstance(value, str) else value


def _json(job: Job) -> HttpResponse:
    job_figures_by_name = figures_of(job)
    figures = [as_json(each) for each in job_figures_by_name.values()]
    targets = [target_json(each) for each in targets_of(job, job_figures_by_name)]
    head = {"job": job.pk, "state": job.state, "as_of": now().isoformat()}
    return JsonResponse({**head, "figures": figures, "targets": targets})


FORMS: dict[str, Callable[[Job], HttpResponse]] = {"csv": _csv, "json": _json}
