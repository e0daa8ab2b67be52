"""What a result card says of one model: names, sums, and what is left out."""

import pytest

from runners.jobs.evaluation import Sampling, assess
from runners.jobs.events import Stages, read_events
from runners.jobs.loading import LoadedModel, load_folder, load_tokenizer
from runners.jobs.memory import PeakMeter, model_bytes
from tests.runners.jobs.test_evaluation import (  # noqa: F401 -- some are fixtures
    CPU,
    LOAD,
    job,
    random_model,
)


@pytest.fixture
def stages(emitter):
    made = Stages(emitter, {"measuring": 1.0})
    made.begin("measuring")
    return made


def test_random_weights_are_assessed_without_text(job, stages, random_model):
    found = assess(job, random_model, Sampling(LOAD, 2, 512), PeakMeter(CPU), stages)

    assert found.perplexity is None
    assert found.parameter_bytes == model_bytes(random_model.model)
    assert found.matrices_bytes < found.parameter_bytes


def test_a_trained_model_is_assessed_on_held_out_text(job, stages, trained):
    folder = trained.folder / "output" / "model"
    loaded = LoadedModel(load_folder(folder, "bf16", CPU), load_tokenizer(folder), CPU)

    found = assess(job, loaded, Sampling(LOAD, 1, 512), PeakMeter(CPU), stages)

    assert found.perplexity is not None
    assert found.perplexity.tokens == 512
    assert found.perplexity.value < 512


def test_an_assessment_fills_its_part_of_the_progress(job, stages, random_model, events_path):
    assess(job, random_model, Sampling(LOAD, 2, 512), PeakMeter(CPU), stages)
    job.emitter.close()

    events = read_events(events_path)

    done = [each["body"]["done"] for each in events if each["kind"] == "progress"]
    assert done == pytest.approx([0.0, 25.0, 50.0])


def test_the_points_of_an_original_have_names_of_their_own(job, stages, random_model, events_path):
    assess(job, random_model, Sampling(LOAD, 2, 512), PeakMeter(CPU), stages, "original_")
    job.emitter.close()

    points = [each["body"] for each in read_events(events_path) if each["kind"] == "metric"]
    names = {name for each in points for name in each["values"]}

    assert {"original_peak_memory_bytes", "original_prefill_tokens_per_second"} <= names
    assert all(name.startswith("original_") for name in names)


def test_the_peak_is_told_while_it_is_measured_and_ends_as_the_results(
    job, stages, random_model, events_path
):
    found = assess(job, random_model, Sampling(LOAD, 2, 512), PeakMeter(CPU), stages)
    job.emitter.close()

    points = [
        each["body"]["values"] for each in read_events(events_path) if each["kind"] == "metric"
    ]
    told = [each["peak_memory_bytes"] for each in points if "peak_memory_bytes" in each]

    assert len(told) == 2
    assert told[-1] == pytest.approx(found.peak.bytes, rel=0.01)
