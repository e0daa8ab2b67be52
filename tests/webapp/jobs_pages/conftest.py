"""Jobs in every stage of their life, as pages find them."""

import pytest
from django.test import Client

from tests.webapp.conftest import EXIT_OK, STARTED, batch_of, client_of
from webapp.agents.ingest import events_accept
from webapp.jobs.models import Job

PREDICTION = {
    "tokens_per_second": {
        "value": 3000.0,
        "low": 2700.0,
        "high": 3400.0,
        "unit": "tokens_per_second",
    },
    "peak_memory_bytes": {"value": 800e6, "low": 700e6, "high": 900e6, "unit": "bytes"},
}
MEASURED = {
    "tokens_per_second": 3150.0,
    "peak_memory_bytes": 950e6,
    "perplexity": 61.5,
    "final_loss": 4.1,
}
ARTEFACT = {
    "name": "model",
    "kind": "model",
    "total_bytes": 11,
    "files": {"config.json": 2, "model.safetensors": 9},
    "sha256": {"config.json": "a" * 64, "model.safetensors": "b" * 64},
    "facts": {"config": {}, "num_parameters": 5, "weight_dtype": "bf16"},
}


@pytest.fixture
def draft(draft) -> Job:
    draft.prediction = PREDICTION
    draft.save()
    return draft


@pytest.fixture
def report(attempt):
    """Let the attempt's host report events, one call after the other."""
    sent = []

    def send(*events: tuple[str, dict]) -> None:
        events_accept(host=attempt.host, batch=batch_of(attempt, *events, first=len(sent) + 1))
        sent.extend(events)

    return send


@pytest.fixture
def running(report, attempt) -> Job:
    """A job a third of the way, with points and lines of output."""
    progress = {"done": 40.0, "total": 120.0, "unit": "steps", "eta_seconds": 66.0}
    report(
        ("started", STARTED),
        ("phase", {"name": "Training"}),
        ("progress", progress),
        ("log", {"stream": "stdout", "text": "step 1 loss 8.1\nstep 2 loss 7.9\n"}),
        ("log", {"stream": "stderr", "text": "Warning: <slow> disk\n"}),
    )
    for i in range(5):
        values = {"loss": 8.0 - i, "tokens_per_second": 3000.0 + i}
        report(("metric", {"source": "job", "values": values, "step": i}))
    return Job.objects.get(pk=attempt.job_id)


@pytest.fixture
def finished(running, report) -> Job:
    """A job that ended well and left a model."""
    report(
        ("result", {"measured": MEASURED, "notes": {"perplexity": "8192 held-out tokens"}}),
        ("artefact", ARTEFACT),
        ("exited", EXIT_OK),
    )
    running.refresh_from_db()
    return running


@pytest.fixture
def failed(running, report) -> Job:
    """A job whose program ran out of memory."""
    record = {
        **EXIT_OK,
        "exit_code": 137,
        "reason": "oom_host",
        "last_lines": ["allocating 4 GiB", "Killed <here>"],
    }
    report(("exited", record))
    running.refresh_from_db()
    return running


@pytest.fixture
def as_alice(alice) -> Client:
    return client_of(alice)
