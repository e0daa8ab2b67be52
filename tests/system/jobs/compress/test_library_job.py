"""Quantised models: smaller on disk and in memory, and as good as the job says they are."""

import json

import pytest
import torch

from runners.jobs.compress.job import ReloadError, check_reload, group_size_note, source_folder
from runners.jobs.evaluation import Perplexity, evaluate
from runners.jobs.loading import load_folder, load_tokenizer
from runners.jobs.runtime import BadInputError, MissingModelError, file_sha256
from runners.jobspec import ArtefactModel, CompressSpec, RandomModel
from runners.shared.messages import ArtefactBody, ResultBody
from tests.runners.jobs.tiny import SHORT, TINY, TINY_CONFIG

CPU = torch.device("cpu")
BOTH = pytest.mark.parametrize("name", ["int8", "int4"])


@pytest.fixture
def finished(name, request):
    found = request.getfixturevalue(name)
    assert found.returncode == 0, found.stderr
    return found


@BOTH
def test_the_result_is_a_valid_message_with_every_promised_figure(finished):
    measured = ResultBody.model_validate(finished.bodies("result")[0]).measured

    pairs = ("disk_bytes", "matrices_bytes", "parameter_bytes", "peak_memory_bytes", "perplexity")
    speeds = ("prefill_tokens_per_second", "decode_tokens_per_second", "ttft_seconds")
    for figure in (*pairs, *speeds):
        assert measured[figure] > 0
        assert measured[f"original_{figure}"] > 0


@BOTH
def test_the_saved_model_loads_again_with_the_perplexity_of_the_result(finished, name, host):
    model = load_folder(finished.folder / "output" / "model", name, CPU)
    ids = _held_out(host, finished)

    again = evaluate(model, ids, SHORT["evaluation_tokens"]).value

    assert again == pytest.approx(finished.measured["perplexity"], rel=1e-5)


@BOTH
def test_it_takes_less_room_than_its_original(finished):
    measured = finished.measured

    for figure in ("disk_bytes", "parameter_bytes", "matrices_bytes"):
        assert measured[figure] < measured[f"original_{figure}"]


def test_int8_matrices_take_half_of_bf16_and_their_scales(int8):
    ratio = int8.measured["matrices_bytes"] / int8.measured["original_matrices_bytes"]

    assert 0.5 < ratio < 0.6


def test_int4_matrices_are_really_packed(int4):
    ratio = int4.measured["matrices_bytes"] / int4.measured["original_matrices_bytes"]

    assert 0.25 < ratio < 0.32


@BOTH
def test_the_ratio_of_perplexities_is_that_of_the_two_figures(finished):
    measured = finished.measured

    ratio = measured["perplexity"] / measured["original_perplexity"]

    assert measured["perplexity_ratio"] == pytest.approx(ratio, rel=1e-9)
    assert measured["perplexity_ratio_low"] <= ratio <= measured["perplexity_ratio_high"]


@BOTH
def test_quantising_hardly_hurts_the_tiny_model(finished):
    assert 0.95 < finished.measured["perplexity_ratio"] < 1.05


@BOTH
def test_the_artefact_lists_its_files_with_their_digests(finished):
    body = ArtefactBody.model_validate(finished.bodies("artefact")[0])
    folder = finished.folder / "output" / "model"

    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(body.files)
    for name, size in body.files.items():
        assert (folder / name).stat().st_size == size
        assert file_sha256(folder / name) == body.sha256[name]


@BOTH
def test_the_card_says_how_and_how_good(finished, name):
    card = (finished.folder / "output" / "model" / "README.md").read_text()

    assert {"int8": "torchao", "int4": "nf4"}[name] in card
    assert f"{finished.measured['perplexity']:.6g}" in card
    assert file_sha256(finished.folder / "output" / "model" / "model.safetensors") in card


@BOTH
def test_progress_runs_forward_to_the_end(finished):
    done = [body["done"] for body in finished.bodies("progress")]

    assert done == sorted(done)
    assert done[-1] == pytest.approx(100.0)


@BOTH
def test_the_job_is_silent_on_standard_error(finished):
    assert finished.stderr == ""


@BOTH
def test_int4_and_int8_say_what_they_are(finished, name):
    notes = finished.bodies("result")[0]["notes"]

    assert {"int8": "torchao Int8", "int4": "bitsandbytes nf4"}[name] in notes["method"]


@pytest.mark.parametrize(
    ("method", "group_size", "expected"),
    [("nf4", 64, {}), ("int8", 32, {}), ("nf4", 32, {"group_size": "nf4 has blocks of 64"})],
)
def test_a_group_size_that_nf4_lacks_is_noted(method, group_size, expected):
    model = ArtefactModel(attempt_id="a1")

    notes = group_size_note(CompressSpec(model=model, method=method, group_size=group_size))

    assert {name: text[:20] for name, text in notes.items()} == expected


@pytest.mark.parametrize("model", [TINY, RandomModel(config=TINY_CONFIG)], ids=lambda m: m.source)
def test_a_model_without_trained_weights_is_refused_with_the_way_out(make_job, model):
    job = make_job(CompressSpec(model=model))

    with pytest.raises(MissingModelError, match="run the training job first"):
        source_folder(job, job.spec)


def test_a_quantised_model_is_not_quantised_again(make_job, int8):
    job = make_job(CompressSpec(model=ArtefactModel(attempt_id="int8")))

    with pytest.raises(BadInputError, match="holds int8 weights already; choose its original"):
        source_folder(job, job.spec)


def test_a_model_that_changed_on_its_way_through_the_disk_is_an_error():
    import numpy as np

    before = Perplexity(np.array([1.0, 2.0]), tokens=2, window=2)
    after = Perplexity(np.array([1.0, 2.1]), tokens=2, window=2)

    with pytest.raises(ReloadError, match="before saving and is"):
        check_reload(after, before)
    check_reload(before, before)


def test_a_quantised_config_names_its_method(int8, int4):
    configs = [
        json.loads((each.folder / "output" / "model" / "config.json").read_text())
        for each in (int8, int4)
    ]

    methods = [each["quantization_config"]["quant_method"] for each in configs]

    assert methods == ["torchao", "bitsandbytes"]


def _held_out(host, finished):
    from runners.jobs.corpus import load_corpus, tokenize_documents

    corpus = load_corpus()
    tokenizer = load_tokenizer(finished.folder / "output" / "model")
    return tokenize_documents(
        tokenizer, corpus.held_out, f"{corpus.digest}/held-out", host.path / "cache"
    )
