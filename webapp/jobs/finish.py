"""Results of a successful job: measurements, calibration and registered models."""

from django.db import transaction

from runners.reasons import Reason
from webapp.hosts.models import Host
from webapp.hosts.stored_rates import store_proof_rates
from webapp.jobs.calibrate import PROOF, PROOF_REPORT, recalibrate
from webapp.jobs.measure import store_measurements
from webapp.jobs.models import Artefact, Attempt, Job
from webapp.jobs.outputs import register_models


def job_finished(job: Job, attempt: Attempt) -> None:
    """Store the measurements and models of a successful job; other jobs store nothing.

    Measurements over several hosts are stored with the job, but calibrate none of the hosts.
    """
    if job.reason != Reason.OK:
        return
    host: Host = attempt.host
    job.refresh_from_db()
    store_measurements(job, attempt, host)
    register_models(job, attempt)
    if job.num_hosts == 1:
        transaction.on_commit(lambda: _learn(host, job, attempt), robust=True)


def _learn(host: Host, job: Job, attempt: Attempt) -> None:
    """Store the rates of a proof, by which the planner predicts, then calibrate the host."""
    if job.kind == PROOF:
        report = Artefact.objects.filter(attempt=attempt, name=PROOF_REPORT).first()
        if report is not None:
            store_proof_rates(host, job.pk, report.facts)
    recalibrate(host, job=job, cause="run")
