"""Layer by layer on a really trained model: what is saved loads with plain transformers."""

import json

import psutil
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from runners.jobs.compress.job import work
from runners.jobs.corpus import load_corpus, tokenize_documents
from runners.jobs.evaluation import evaluate
from runners.jobs.loading import load_tokenizer
from runners.jobs.runtime import BadInputError, file_sha256
from runners.jobspec import BenchmarkSpec, CompressSpec
from runners.shared.messages import ArtefactBody, ResultBody
from tests.runners.jobs.tiny import SHORT
from tests.system.jobs.harness import wait_until

SETTINGS = {
    "rtn": {"bits": 4},
    "gptq": {"bits": 3, "is_act_ordered": True},
    "quantease": {"bits": 3},
    "outliers": {"method": "quantease", "bits": 3, "outlier_share": 0.01},
    "sparsegpt": {},
    "wanda": {"pattern": "2:4"},
    "awq": {"bits": 4},
    "smoothquant": {},
    "fptq": {"bits": 4},
    "norm_tweaking": {"bits": 2},
    "autoround": {"bits": 2, "rounding_steps": 20},
    "finequant": {"bits": 3, "group_size": 16, "least_gain": 0.14},
}
IN_A_PROCESS = ("gptq", "sparsegpt")  # packed and plain; the others spare a process's imports


@pytest.fixture(scope="module")
def finished_of(host, trained_model):
    done = {}

    def run(name):
        if name not in done:
            fields = {"method": name, "group_size": 32, "calibration_tokens": 2048, **SHORT}
            fields |= SETTINGS[name]
            spec = CompressSpec(model=trained_model, **fields)
            attempt = f"compress-{name}"
            is_alone = name in IN_A_PROCESS
            done[name] = (
                host.run(attempt, spec) if is_alone else host.run_here(attempt, spec, work)
            )
            assert done[name].returncode == 0, done[name].stderr
        return done[name]

    return run


@pytest.fixture(params=list(SETTINGS))
def finished(request, finished_of):
    return finished_of(request.param)


def test_plain_transformers_reads_the_folder_with_the_perplexity_of_the_result(finished, host):
    folder = finished.folder / "output" / "model"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    corpus = load_corpus()
    key = f"{corpus.digest}/held-out"
    ids = tokenize_documents(load_tokenizer(folder), corpus.held_out, key, host.path / "cache")

    again = evaluate(model, ids, SHORT["evaluation_tokens"]).value

    assert again == pytest.approx(finished.measured["perplexity"], rel=1e-4)


def test_the_result_names_what_it_took_and_what_it_saved(finished):
    measured = ResultBody.model_validate(finished.bodies("result")[0]).measured

    assert measured["compressed_bytes"] < 0.7 * measured["original_matrix_bytes"]
    for name in ("compress_seconds", "compress_peak_memory_bytes", "weight_error"):
        assert measured[name] > 0
    assert measured["calibration_tokens"] == 2048


def test_compressing_the_tiny_model_does_not_break_it(finished):
    assert 0.9 < finished.measured["perplexity_ratio"] < 1.5


def test_each_layer_reports_its_seconds_and_its_error(finished):
    steps = [
        body["step"] for body in finished.bodies("metric") if "weight_error" in body["values"]
    ]

    assert steps == [1, 2]
    assert len(finished.metric("layer_seconds")) == 2


def test_the_card_has_settings_evaluation_and_digests(finished):
    body = ArtefactBody.model_validate(finished.bodies("artefact")[0])
    folder = finished.folder / "output" / "model"
    card = (folder / "README.md").read_text()

    assert "| calibration_tokens | 2048 |" in card
    assert f"{finished.measured['perplexity']:.6g}" in card
    for name in body.files:
        assert file_sha256(folder / name) == body.sha256[name]
        assert name == "README.md" or body.sha256[name] in card


def test_nothing_is_left_beside_the_model(finished):
    left = {path.name for path in (finished.folder / "checkpoint").glob("*")}

    assert left == set()
    assert finished.stderr == ""


@pytest.mark.parametrize(("name", "bits"), [("rtn", 4), ("gptq", 3), ("quantease", 3)])
def test_codes_are_packed_as_compressed_tensors_has_them(name, bits, finished_of):
    folder = finished_of(name).folder / "output" / "model"
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    layer = load_file(folder / "model-00002-of-00003.safetensors")

    packed = layer["model.layers.0.mlp.down_proj.weight_packed"]

    assert config["quant_method"] == "compressed-tensors"
    assert config["config_groups"]["group_0"]["weights"]["num_bits"] == bits
    assert packed.shape == (64, 128 * bits // 32)
    assert packed.dtype == torch.int32


def test_two_of_four_is_what_the_folder_holds(finished_of):
    folder = finished_of("wanda").folder / "output" / "model"
    layer = load_file(folder / "model-00002-of-00003.safetensors")
    weights = [each for name, each in layer.items() if "proj" in name]

    kept = [each.view(len(each), -1, 4).count_nonzero(dim=2).max().item() for each in weights]

    assert kept == [2] * 7


def test_outliers_in_16_bit_leave_a_smaller_error_and_take_more_bytes(finished_of):
    plain, kept = finished_of("quantease").measured, finished_of("outliers").measured

    assert kept["weight_error"] < plain["weight_error"]
    assert kept["compressed_bytes"] > plain["compressed_bytes"]


def test_a_killed_job_goes_on_at_the_layer_where_it_was(host, finished_of):
    spec = spec_of(finished_of("gptq"))
    folder = host.attempt("compress-killed", spec)
    process = host.start(folder)
    wait_until(folder / "checkpoint", "layer-00000.safetensors", process)
    parts = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for each in parts:  # a supervisor leaves none either
        each.kill()
    process.wait()
    psutil.wait_procs(parts)
    process.stderr.close()
    with safe_open(folder / "checkpoint" / "layer-00000.safetensors", framework="pt") as file:
        before = json.loads(file.metadata()["figures"])

    again = host.run_here("compress-killed", spec, work)

    assert before["layer_seconds"] in again.metric("layer_seconds")  # read back, not done again
    assert again.measured["perplexity"] == pytest.approx(
        finished_of("gptq").measured["perplexity"], rel=1e-6
    )


def spec_of(finished):
    document = json.loads((finished.folder / "spec.json").read_text())
    return CompressSpec.model_validate(document["spec"])


def test_the_job_refuses_another_kind(trained_model, make_job):
    with pytest.raises(BadInputError, match="kind 'benchmark' is not 'compress'"):
        work(make_job(BenchmarkSpec(model=trained_model)))
