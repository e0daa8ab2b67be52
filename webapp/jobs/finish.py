"""What a job leaves behind when it ends well: measurements, factors, models to go on with."""

from django.db import transaction

from runners.reasons import Reason
from webapp.hosts.models import Host
from webapp.jobs.calibrate import recalibrate
from webapp.jobs.measure import store_measurements
from webapp.jobs.models import Attempt, Job
from webapp.jobs.outputs import register_models


def job_finished(job: Job, attempt: Attempt) -> None:
    """Record what an ended job measured and made; one that did not end well leaves nothing.

    What several hosts measured together is told of the job, but says nothing of one of them.
    """
    if job.reason != Reason.OK:
        return
    host: Host = attempt.host
    job.refresh_from_db()
    store_measurements(job, attempt, host)
    register_models(job, attempt)
    if job.num_hosts == 1:
        transaction.on_commit(lambda: recalibrate(host), robust=True)
