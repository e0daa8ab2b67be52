"""What a compression writes and takes, and what an evaluation is predicted to take."""

import contextlib
import itertools

import pytest

from planner.cost.weights import RECIPES
from runners.jobspec import ArtefactModel, CompressSpec, EvaluateSpec, TrainSpec
from runners.plans.refusals import DraftProblem
from tests.webapp.conftest import make_job
from tests.webapp.plans.test_verdict_words import answer_of, document_of
from webapp.jobs.evaluating import evaluation_submit
from webapp.jobs.measured_figures import predictions
from webapp.jobs.models import Job
from webapp.modelhub.models import TeamModel, demo_config
from webapp.plans.alternatives import comparison
from webapp.plans.planning import plan_compute
from webapp.plans.predicting import evaluation_prediction, planned_speed
from webapp.plans.verdict import estimate_figures, figure_values, verdict_of
from webapp.wizard.drafts import goal_change

# A compression's three figures: the checkpoint afterwards, the scratch, the peak


LLAMA = "meta-llama/Llama-2-7b-hf"
CPU = {
    "id": "this-host",
    "kind": "cpu",
    "memory_bytes": 2 * 1024**4,
    "memory_bandwidth_bytes_per_second": 20e9,
    "peak_flops_per_second": {"fp32": 1.0e11, "bf16": 1.5e11},
    "provenance": "measured",
}
DEVICES = {"a card": {"device": "b300-sxm"}, "a processor": {"device": CPU}}
BF16 = {"weight_dtype": "bf16"}
DENSE = sorted(set(RECIPES) - {"qmoe"})


def compressed(method, device, **more):
    work = {"kind": "compress", "method": method, **more}
    return answer_of(LLAMA, DEVICES[device], work, pins=BF16)


def draft_with(method, **values):
    return document_of("compress", method=method, **values)


def test_a_compressed_checkpoint_is_never_larger_than_the_original():
    original, wrong = 2 * 6_738_415_616, []
    for method, device in itertools.product(DENSE, DEVICES):
        best = compressed(method, device).plans[0]
        size, _, _ = figure_values(best, "written_weights_bytes")
        written = best.memory.disk_bytes - size
        if not 0 < size <= original * 1.001 or written != pytest.approx(original, rel=0.001):
            wrong.append((method, device, size, written))
    assert not wrong, wrong


def test_checkpoint_scratch_and_peak_are_three_figures_alike_on_every_device():
    sizes = {
        figure_values(compressed("awq", device, bits=4, group_size=64).plans[0],
                      "written_weights_bytes")[0]
        for device in DEVICES
    }  # fmt: skip
    assert len(sizes) == 1
    assert 3.5 < sizes.pop() / 1024**3 < 4.0

    answer = compressed("awq", "a card", bits=4, group_size=64)
    shown = {one.label: one.value for one in estimate_figures(answer.plans[0], draft_with("awq"))}
    memory = answer.plans[0].memory
    assert shown["Checkpoint afterwards"] == memory.checkpoint_bytes
    assert shown["Scratch in host memory"] == memory.host_bytes
    assert shown["Peak on the device"] == memory.per_device_peak_bytes


def test_a_row_names_the_format_that_is_written():
    for method, values, words in [
        ("awq", {"bits": 4, "group_size": 64}, "AWQ, 4-bit weights in groups of 64"),
        ("gptq", {"bits": 3, "group_size": 128}, "GPTQ, 3-bit weights in groups of 128"),
        ("nf4", {}, "NormalFloat 4"),
        ("sparsegpt", {}, "SparseGPT, weights in BF16"),
    ]:
        answer, draft = compressed(method, "a card"), draft_with(method, **values)
        assert comparison(answer, draft)[0].words == words, method
        assert verdict_of(answer, draft).detail.startswith(f"{words}, from BF16 weights"), method


def test_the_headline_says_what_is_won():
    answer = compressed("awq", "a card", bits=4, group_size=64)

    sentence = verdict_of(
        answer, draft_with("awq"), speed="2.1\N{MULTIPLICATION SIGN} slower here"
    ).sentence

    assert ": 69" in sentence
    assert "smaller (3.88" in sentence
    assert "instead of 12.6" in sentence
    assert "% higher perplexity" in sentence
    assert sentence.endswith(", 2.1\N{MULTIPLICATION SIGN} slower here")


def test_a_host_and_vllm_on_the_catalog_say_how_fast_they_answer(serve_plan):
    plan_compute(serve_plan)
    assert planned_speed(serve_plan) == ""

    for method, words in [
        ("int8_weight_only", "slower here"),  # each weight is widened before it is used
        ("awq", "as fast here"),  # its codes are unpacked once, as the model loads
        ("sheared_llama", ""),  # of fewer heads: not foreseen
        ("int8_dynamic", ""),
    ]:
        assert speed_of(serve_plan, method).endswith(words), method
        assert bool(speed_of(serve_plan, method)) == bool(words), method

    for method, words in [
        ("awq", "faster in vLLM"),
        ("sparsegpt", "as fast in vLLM"),
        ("gguf", ""),
        ("qmoe", ""),
    ]:
        serve_plan.draft["hardware"]["host"] = None
        serve_plan.draft["model"] |= {"source": "catalog"}
        assert speed_of(serve_plan, method).endswith(words), method
        assert bool(speed_of(serve_plan, method)) == bool(words), method


def speed_of(plan, method):
    """Return the clause of a plan that compresses so."""
    goal_change(plan, "compress")
    plan.draft["workload"]["method"] = method
    with contextlib.suppress(DraftProblem):  # QMoE wants a mixture
        plan_compute(plan)
    return planned_speed(plan)


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


def test_the_button_stores_the_prediction_also_of_a_model_trained_from_nothing(
    model, alice, team, host
):
    evaluation_submit(model=model, by=alice)
    said = predictions(Job.objects.get(kind="evaluate"))
    assert set(said) == {"duration_seconds", "peak_memory_bytes"}

    maker = make_job(team, alice, host, spec=TrainSpec())
    model.facts, model.weight_dtype = {"job": maker.pk}, "bf16"
    model.save()
    job = evaluation_submit(model=model, by=alice)
    assert job.spec["original"] is None
    assert job.prediction["duration_seconds"]["value"] > 0
