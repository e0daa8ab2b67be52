"""What an evaluation is predicted to take, held to the laws that its passes follow."""

import pytest

from runners.jobspec import ArtefactModel, CompressSpec, EvaluateSpec, TrainSpec
from tests.webapp.conftest import make_job
from webapp.jobs.evaluating import evaluation_submit
from webapp.jobs.measured_figures import predictions
from webapp.jobs.models import Job
from webapp.modelhub.models import TeamModel
from webapp.modelhub.shapes import demo_config
from webapp.plans.evaluation_prediction import evaluation_prediction

pytestmark = pytest.mark.django_db(databases="__all__")
OURS, THEIRS = ArtefactModel(attempt_id="01OURS"), ArtefactModel(attempt_id="01THEIRS")


@pytest.fixture
def model(team, alice, host) -> TeamModel:
    job = make_job(team, alice, host, spec=CompressSpec(model=THEIRS, method="int8"))
    return TeamModel.objects.create(
        team=team,
        name="demo, int8",
        source="job",
        config=demo_config(),
        host=host,
        attempt_id="01OURS",
        artefact_name="model",
        weight_dtype="int8",
        facts={"job": job.pk},
    )


def foreseen(model, **changes) -> dict[str, dict]:
    spec = EvaluateSpec(**{"model": OURS, "weight_dtype": "int8"} | changes)
    return evaluation_prediction(spec, model, demo_config())


def test_an_evaluation_is_predicted_by_its_text_and_its_original(model):
    found = foreseen(model)
    for name, unit in (("duration_seconds", "seconds"), ("peak_memory_bytes", "bytes")):
        figure = found[name]
        assert 0 < figure["low"] <= figure["value"] <= figure["high"]
        assert figure["unit"] == unit

    once, twice = foreseen(model), foreseen(model, evaluation_tokens=16384)
    assert twice["duration_seconds"]["value"] == pytest.approx(
        2 * once["duration_seconds"]["value"]
    )
    assert twice["peak_memory_bytes"] == once["peak_memory_bytes"]

    alone, beside = foreseen(model), foreseen(model, original=THEIRS)
    assert beside["duration_seconds"]["value"] > 1.5 * alone["duration_seconds"]["value"]
    weights = 2 * 1_850_000  # of about so many parameters in bf16
    more = beside["peak_memory_bytes"]["value"] - alone["peak_memory_bytes"]["value"]
    assert more > weights


def test_nothing_is_said_of_a_host_that_nobody_measured_or_a_shape_nobody_knows(model, other_host):
    model.config = {"model_type": "unheard_of"}
    assert foreseen(model) == {}
    model.config, model.host = demo_config(), other_host
    assert foreseen(model) == {}


def test_the_button_stores_the_prediction_on_the_job(model, alice):
    evaluation_submit(model=model, by=alice)
    said = predictions(Job.objects.get(kind="evaluate"))
    assert set(said) == {"duration_seconds", "peak_memory_bytes"}


def test_a_model_trained_from_nothing_is_predicted_alone(model, team, alice, host):
    maker = make_job(team, alice, host, spec=TrainSpec())
    model.facts, model.weight_dtype = {"job": maker.pk}, "bf16"
    model.save()

    job = evaluation_submit(model=model, by=alice)

    assert job.spec["original"] is None
    assert job.prediction["duration_seconds"]["value"] > 0
