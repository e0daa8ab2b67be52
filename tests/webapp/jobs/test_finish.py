"""What a finished job leaves: measurements, factors of its host, models."""

import pytest

from planner.specs.estimate import PlanRequest
from planner.specs.workload import TrainWorkload
from runners.jobspec import ArtefactModel, BenchmarkSpec, CompressSpec, DemoModel, TrainSpec
from tests.webapp.conftest import EXIT_OK, batch_of, claim, make_job
from webapp.hosts.device import cluster_for_host
from webapp.hosts.models import Host
from webapp.jobs.calibration import questions_of, recalibrate
from webapp.jobs.ingest import events_accept
from webapp.jobs.models import Attempt, Job, Measurement
from webapp.jobs.services import job_submit
from webapp.modelhub.models import TeamModel
from webapp.modelhub.shapes import demo_config

pytestmark = pytest.mark.django_db(databases="__all__")
MEASURED = {"step_seconds": 2.0, "peak_memory_bytes": 1.5e9, "perplexity": 40.0, "parameters": 7e6}
PREDICTION = {
    "step_seconds": {"value": 1.0, "low": 0.5, "high": 2.5, "unit": "seconds"},
    "peak_memory_bytes": {"value": 1e9, "unit": "bytes"},
    "tokens_per_second": {"value": 5.0, "unit": "tokens_per_second"},
}
MODEL = {
    "name": "model",
    "kind": "model",
    "total_bytes": 2,
    "files": {"config.json": 2},
    "sha256": {"config.json": "0" * 64},
    "facts": {"perplexity": 40.0},
}


def plan_request(host: Host) -> dict:
    request = PlanRequest(
        model=demo_config(),
        cluster=cluster_for_host(host),
        workload=TrainWorkload(sequence_length=256, global_batch_size=8, method="pretrain"),
    )
    return request.model_dump(mode="json")


def finish(job: Job, measured: dict = MEASURED, reason: str = "ok") -> Attempt:
    """Run a submitted job to its end over the one door."""
    claim(job.current_attempt)
    attempt = Attempt.objects.get(pk=job.current_attempt_id)
    result = ("result", {"measured": measured})
    exited = ("exited", EXIT_OK | {"reason": reason})
    events_accept(host=job.host, batch=batch_of(attempt, result, ("artefact", MODEL), exited))
    return attempt


def submitted(team, alice, host, **changes) -> Job:
    job = make_job(team, alice, host, prediction=PREDICTION, **changes)
    Job.objects.filter(pk=job.pk).update(plan_request=plan_request(host))
    job.refresh_from_db()
    return job_submit(job=job, by="alice")


@pytest.fixture
def finished(team, alice, host, django_capture_on_commit_callbacks) -> Job:
    job = submitted(team, alice, host)
    with django_capture_on_commit_callbacks(execute=True):
        finish(job)
    return Job.objects.get(pk=job.pk)


# Measurements


def test_what_was_predicted_and_measured_stands_side_by_side(finished):
    row = Measurement.objects.get(metric="step_seconds")
    assert (row.predicted, row.measured, row.ratio) == (1.0, 2.0, 2.0)
    assert (row.predicted_low, row.predicted_high, row.unit) == (0.5, 2.5, "seconds")


def test_only_figures_with_both_sides_become_measurements(finished):
    metrics = set(Measurement.objects.values_list("metric", flat=True))
    assert metrics == {"step_seconds", "peak_memory_bytes"}


def test_a_job_that_failed_measures_nothing(team, alice, host):
    finish(submitted(team, alice, host), reason="oom_host")
    assert not Measurement.objects.exists()
    assert not TeamModel.objects.exists()


# Calibration


def test_a_slow_step_becomes_a_factor_of_the_host(finished):
    calibration = Host.objects.get().calibration
    assert calibration["host"] == "box"
    assert any(factor["factor"] > 1 for factor in calibration["factors"].values())


def test_factors_do_not_compound(finished, host):
    first = recalibrate(host)
    assert recalibrate(host) == first


def test_an_excluded_measurement_calibrates_nothing(finished, host):
    Measurement.objects.update(is_excluded=True)
    assert recalibrate(host).factors == {}


def test_a_job_that_the_planner_cannot_read_calibrates_nothing(finished, host):
    Job.objects.update(plan_request={"model": "no-such-model"})
    assert recalibrate(host).factors == {}


def test_a_quantised_model_is_asked_about_before_and_after(team, alice, host):
    spec = CompressSpec(model=DemoModel(), method="nf4")
    job = submitted(team, alice, host, spec=spec)
    asked = [(item.prefix, item.request.strategy.weight_dtype) for item in questions_of(job)]
    assert asked == [("original_", "bf16"), ("", "int4")]


def test_a_benchmark_is_asked_about_as_one_batch(team, alice, host):
    spec = BenchmarkSpec(model=DemoModel(), batch_size=3, prompt_tokens=64, output_tokens=16)
    workload = next(questions_of(submitted(team, alice, host, spec=spec))).request.workload
    assert (workload.kind, workload.batch_size, workload.input_tokens) == ("generate", 3, 64)


# Models


def test_the_trained_model_joins_the_teams_models(finished, team, host):
    model = TeamModel.objects.get()
    assert (model.team, model.host, model.source) == (team, host, "job")
    assert (model.num_parameters, model.weight_dtype) == (7_000_000, "bf16")
    assert model.facts["measured"]["perplexity"] == 40.0


def test_a_trained_model_knows_no_position_that_it_was_not_shown(finished):
    config = TeamModel.objects.get().config
    assert config["max_position_embeddings"] == TrainSpec().sequence_length


def test_a_quantised_model_keeps_the_config_of_its_source(finished, team, alice, host):
    source = TeamModel.objects.get()
    spec = CompressSpec(model=ArtefactModel(attempt_id=source.attempt_id), method="nf4")
    finish(job_submit(job=make_job(team, alice, host, spec=spec), by="alice"))
    quantised = TeamModel.objects.get(weight_dtype="int4")
    assert (quantised.config, quantised.num_parameters) == (source.config, 7_000_000)
    assert quantised.name == "demo, int4"
