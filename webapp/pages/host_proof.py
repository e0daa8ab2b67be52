"""Proofs of a host: a job on all its devices, and the report that it leaves."""

from dataclasses import dataclass
from typing import Any

from csp.constants import NONE, UNSAFE_INLINE
from csp.decorators import csp
from django.contrib.auth.models import User
from django.http import Http404, HttpRequest, HttpResponse
from django.views.decorators.http import require_GET
from pydantic import ValidationError

from runners.jobspec import ProveSpec
from runners.prove.report import Report, render
from webapp.agents.environments import ARTEFACT, REPORT_FILE
from webapp.hosts.models import Host
from webapp.jobs.artefacts import folder_of
from webapp.jobs.lookup import load_job
from webapp.jobs.models import Artefact, Job
from webapp.jobs.services import job_create, job_submit

MAX_REPORT_BYTES = 16 * 1024**2


@dataclass(frozen=True)
class Proof:
    """The newest proof of a host: its job, and its verdict once the report has arrived."""

    job: Job
    facts: dict[str, Any] | None


def prove_host(*, host: Host, owner: User) -> Job:
    """Queue a proof on every device of a host.

    Raises:
        Problem: the host takes no jobs, or a quota does not allow it.
    """
    job = job_create(
        team=host.team,
        owner=owner,
        host=host,
        spec=ProveSpec(),
        name=f"Proof of {host.name}",
        model_name="",
    )
    return job_submit(job=job, by=owner.get_username())


def latest_proof(host: Host) -> Proof | None:
    """Return the newest proof of a host, or None."""
    job = (
        Job.objects.filter(requested_host=host, kind="prove", deleted_at=None)
        .select_related("current_attempt")
        .order_by("-pk")
        .first()
    )
    if job is None:
        return None
    report = Artefact.objects.filter(attempt=job.current_attempt, name=ARTEFACT).first()
    return Proof(job, report.facts if report else None)


@require_GET
@csp({"default-src": [NONE], "style-src": [UNSAFE_INLINE]})  # type: ignore[arg-type]  # takes arguments of the URL, too
def proof_report(request: HttpRequest, job_id: str) -> HttpResponse:
    """Show the report of a proof, made anew from the host's data."""
    job = load_job(request, job_id)
    artefact = Artefact.objects.filter(
        attempt=job.current_attempt, name=ARTEFACT, is_complete=True
    ).first()
    path = folder_of(artefact) / REPORT_FILE if artefact else None
    if path is None or not path.is_file():
        raise Http404(
            "This job has no finished proof report; wait for its end or run the proof again."
        )
    if path.stat().st_size > MAX_REPORT_BYTES:
        raise Http404("The report of this proof is too large to show; download it.")
    try:
        report = Report.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise Http404("The report of this proof is damaged; prove the host again.") from error
    return HttpResponse(render(report))
