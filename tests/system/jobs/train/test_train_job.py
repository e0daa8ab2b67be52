"""The training job as a process: it learns, it stops cleanly, and a kill costs little."""

import json
import signal

import pytest
import torch

from runners.jobs.corpus import load_corpus, tokenize_documents
from runners.jobs.evaluation import evaluate
from runners.jobs.loading import load_folder, load_tokenizer
from runners.jobs.runtime import BadInputError
from runners.jobs.train import job as train
from runners.jobspec import ArtefactModel, BenchmarkSpec, FolderModel, RandomModel
from runners.shared.messages import ArtefactBody, MetricPoint, ProgressBody, ResultBody
from tests.runners.jobs.tiny import TINY, TINY_CONFIG, tiny_training
from tests.system.jobs.harness import wait_until

LONG = {"max_steps": 100_000, "checkpoint_every_seconds": 0.2}


def test_it_ends_well_and_silently(trained):
    assert (trained.returncode, trained.stderr) == (0, "")


def test_the_loss_falls_on_text_it_never_saw(trained):
    losses = trained.metric("validation_loss")

    assert losses[-1] < losses[0]


def test_its_perplexity_is_better_than_knowing_nothing(trained):
    assert trained.measured["perplexity"] < 0.7 * 512


def test_the_perplexity_lies_in_its_interval(trained):
    measured = trained.measured

    assert measured["perplexity_low"] < measured["perplexity"] < measured["perplexity_high"]


def test_the_published_model_reads_text_as_the_result_says(host, trained):
    folder = trained.folder / "output" / "model"
    corpus = load_corpus()
    key = f"{corpus.digest}/held-out"
    ids = tokenize_documents(load_tokenizer(folder), corpus.held_out, key, host.path / "cache")

    found = evaluate(load_folder(folder, "fp32", torch.device("cpu")), ids, 8192)

    assert found.value == pytest.approx(trained.measured["perplexity"], rel=1e-6)


def test_every_point_is_a_valid_message_with_its_step(trained):
    points = [MetricPoint.model_validate(body) for body in trained.bodies("metric")]

    assert all(point.source == "job" and point.step for point in points)
    first = next(point for point in points if "loss" in point.values)
    assert {"tokens_per_second", "step_seconds", "learning_rate", "grad_norm"} <= set(first.values)


def test_progress_says_how_far_and_how_long(trained):
    last = ProgressBody.model_validate(trained.bodies("progress")[-1])

    assert (last.done, last.total, last.unit) == (60, 60, "steps")
    assert last.eta_seconds == 0.0


def test_the_result_has_every_promised_figure(trained):
    measured = ResultBody.model_validate(trained.bodies("result")[0]).measured

    for name in ("tokens_per_second", "step_seconds", "peak_memory_bytes", "final_loss"):
        assert measured[name] > 0
    assert measured["tokens"] == 60 * 4 * 64
    assert measured["disk_bytes"] > 4 * measured["parameters"]


def test_the_model_is_announced_with_files_and_digests(trained):
    body = ArtefactBody.model_validate(trained.bodies("artefact")[0])

    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(body.files)
    assert body.total_bytes == sum(body.files.values())


def test_the_config_claims_no_more_positions_than_were_trained(trained):
    config = json.loads((trained.folder / "output" / "model" / "config.json").read_text())

    assert config["max_position_embeddings"] == 64


def test_no_checkpoint_is_left_after_a_good_end(trained):
    assert not (trained.folder / "checkpoint").exists()


def test_a_run_that_keeps_no_model_measures_alone(host, trained):
    changes = {"keeps_model": False, "checkpoint_every_seconds": 1e-3}

    run = host.run_here("measuring", tiny_training(**changes), train.work)

    assert run.measured.keys() >= {"tokens_per_second", "step_seconds", "peak_memory_bytes"}
    assert run.measured["final_loss"] == trained.measured["final_loss"]  # the same steps
    assert (run.metric("validation_loss"), run.bodies("artefact")) == ([], [])
    assert run.metric("checkpoint_wait_seconds") == []
    assert not (run.folder / "output").exists()


def test_the_phases_are_named_in_order(trained):
    names = [body["name"] for body in trained.bodies("phase")]

    assert names[0] == "Reading text"
    assert names.index("Training") < names.index("Saving the model")


@pytest.mark.faults
def test_after_a_kill_it_goes_on_from_its_checkpoint(host, trained):
    folder = host.attempt("killed", tiny_training(**LONG))
    process = host.start(folder)
    wait_until(folder / "checkpoint", "step-*", process)
    process.kill()
    process.wait()
    at = max(int(each.name.split("-")[1]) for each in (folder / "checkpoint").glob("step-*"))
    (folder / "events.jsonl").unlink()

    again = host.run("killed", tiny_training(max_steps=at + 20))

    steps = [body["step"] for body in again.bodies("metric")]
    assert steps[0] == at + 1
    assert again.measured["steps"] == at + 20
    assert f"step {at}" in again.bodies("result")[0]["notes"]["resumed"]


@pytest.mark.faults
def test_a_stop_saves_a_checkpoint_and_ends_by_the_signal(host, trained):
    folder = host.attempt("stopped", tiny_training(**LONG | {"checkpoint_every_seconds": 600.0}))
    process = host.start(folder)
    wait_until(folder, "events.jsonl", process)
    while "Training" not in (folder / "events.jsonl").read_text():
        assert process.poll() is None

    process.send_signal(signal.SIGTERM)
    stopped = host.finish(folder, process)

    assert stopped.returncode == -signal.SIGTERM
    assert any((folder / "checkpoint").glob("step-*"))
    assert stopped.bodies("result") == []


def test_it_continues_from_the_model_of_an_earlier_attempt(host, trained_model, trained):
    spec = tiny_training(model=trained_model, learning_rate=1e-3, max_steps=20)

    more = host.run_here("more", spec, train.work)

    assert more.measured["perplexity"] < trained.measured["perplexity"] * 1.02
    assert more.metric("loss")[0] < trained.metric("loss")[0]


@pytest.mark.parametrize("model", [RandomModel(config=TINY_CONFIG), TINY], ids=lambda m: m.source)
def test_a_spec_of_another_kind_never_trains(make_job, model):
    job = make_job(BenchmarkSpec(model=model))

    with pytest.raises(BadInputError, match="'benchmark' is not 'train'"):
        train.work(job)


def test_random_weights_without_a_tokenizer_do_not_train(make_job):
    job = make_job(tiny_training(model=RandomModel(config=TINY_CONFIG)))

    with pytest.raises(BadInputError, match="choose the demo model"):
        train.work(job)


def test_quantised_weights_do_not_train(make_job, int8):
    job = make_job(tiny_training(model=ArtefactModel(attempt_id="int8")))

    with pytest.raises(BadInputError, match="quantised weights, which do not train"):
        train.work(job)


def test_an_absent_model_ends_with_one_clear_sentence(host):
    missing = host.run("missing", tiny_training(model=FolderModel(path="nowhere")))

    assert missing.returncode == 3
    assert missing.stderr.count("\n") == 1
    assert missing.stderr.startswith("MODEL_OR_DATA_MISSING: no model folder ")
