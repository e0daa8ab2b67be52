"""Downloads of a job: an artefact as a streamed .tar, its log as text, its figures."""

import csv
from collections.abc import Callable, Iterator
from itertools import islice

from django.http import Http404, HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.views.decorators.http import require_GET

from webapp.core.clock import now
from webapp.core.display import cell
from webapp.core.parameters import reads_query
from webapp.core.streaming import in_threads
from webapp.jobs.artefact_archive import artefact_response, file_name
from webapp.jobs.logs import Line, log_of
from webapp.jobs.lookup import load_job
from webapp.jobs.measured_figures import as_json, figures_of
from webapp.jobs.measured_targets import target_json, targets_of
from webapp.jobs.models import Job
from webapp.jobs.parts import PARAMETER
from webapp.pages.shown_part import shown_part

LINES_AT_ONCE = 200


@require_GET
def job_download(request: HttpRequest, job_id: str, name: str) -> StreamingHttpResponse:
    """Stream a complete artefact of the job's current attempt as a .tar file."""
    return artefact_response(load_job(request, job_id), name)


# The log as a text file: every line in full, with its time (UTC) and its stream.


@require_GET
@reads_query(PARAMETER)
def job_log(request: HttpRequest, job_id: str) -> StreamingHttpResponse:
    """Stream the log of the job's current attempt on the host of ``?host=`` as text."""
    job = load_job(request, job_id)
    shown = shown_part(request, job)
    chunks = in_threads(_log_chunks(log_of(shown)), is_one_thread=True)
    response = StreamingHttpResponse(chunks, content_type="text/plain; charset=utf-8")
    rank = f"-host-{shown.node_rank}" if shown and shown.node_rank else ""
    name = f"{file_name(job.name)}{rank}.log"
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    return response


def _log_chunks(lines: Iterator[Line]) -> Iterator[bytes]:
    while some := list(islice(lines, LINES_AT_ONCE)):
        yield "".join(
            f"{line.at:%Y-%m-%dT%H:%M:%S}Z {line.stream}: {line.text}\n" for line in some
        ).encode(errors="replace")


# Export a job's figures as files: the same values as its page and the API, not rounded.


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
