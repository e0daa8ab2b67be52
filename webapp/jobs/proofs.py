"""Validations of a host: their launch, and the verdict of the newest one."""

from dataclasses import dataclass

from django.contrib.auth.models import User
from pydantic import BaseModel, Field, ValidationError

from runners.jobspec import ProveSpec
from runners.jobspec.base import Sentence
from runners.prove import report as proof_reports
from webapp.hosts.models import Host
from webapp.jobs.calibration import PROOF_REPORT
from webapp.jobs.launching import max_duration_of
from webapp.jobs.models import Artefact, Job
from webapp.jobs.services import job_create, job_submit


class ProofSummary(BaseModel):
    """The verdict of a validation's report and what is wrong; its other keys are ignored."""

    verdict: proof_reports.Verdict
    problems: tuple[Sentence, ...] = Field(default=(), max_length=100, fail_fast=True)


@dataclass(frozen=True)
class Proof:
    """The newest validation of a host: its job, and its verdict once the report has arrived."""

    job: Job
    summary: ProofSummary | None
    is_damaged: bool = False  # a report has arrived, but its summary is none


def prove_host(*, host: Host, owner: User) -> Job:
    """Queue a validation on every device of a host.

    Raises:
        Problem: the host takes no jobs, or a quota does not allow it.
    """
    spec = ProveSpec()
    job = job_create(
        team=host.team,
        owner=owner,
        host=host,
        spec=spec,
        name=f"Validation of {host.name}",
        model_name="",
        max_duration_seconds=max_duration_of(spec),
    )
    return job_submit(job=job, by=owner.get_username())


def latest_proof(host: Host) -> Proof | None:
    """Return the newest validation of a host, or None."""
    job = (
        Job.objects.filter(requested_host=host, kind="prove", deleted_at=None)
        .select_related("current_attempt")
        .order_by("-pk")
        .first()
    )
    if job is None:
        return None
    report = Artefact.objects.filter(attempt=job.current_attempt, name=PROOF_REPORT).first()
    if report is None:
        return Proof(job, None)
    try:
        return Proof(job, ProofSummary.model_validate(report.facts))
    except ValidationError:
        return Proof(job, None, is_damaged=True)
