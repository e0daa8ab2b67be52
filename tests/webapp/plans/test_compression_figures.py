"""A compression's three figures: the checkpoint afterwards, the scratch, the peak."""

import contextlib
import itertools

import pytest

from planner.cost.compression import RECIPES
from tests.webapp.plans.test_verdict_words import answer_of, draft_of
from webapp.plans.alternatives import comparison
from webapp.plans.compressed_speed import planned_speed
from webapp.plans.errors import DraftProblem
from webapp.plans.planning import plan_compute
from webapp.plans.verdict import estimate_figures, figure_values, verdict_of

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
    draft = draft_of("compress")
    draft["workload"]["compress"] |= {"method": method, **values}
    return draft


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
        serve_plan.draft["hardware"]["choice"] = "catalog"
        serve_plan.draft["model"] |= {"source": "catalog"}
        assert speed_of(serve_plan, method).endswith(words), method
        assert bool(speed_of(serve_plan, method)) == bool(words), method


def speed_of(plan, method):
    """Return the clause of a plan that compresses so."""
    plan.draft["goal"]["goal"] = "compress"
    plan.draft["workload"]["compress"]["method"] = method
    with contextlib.suppress(DraftProblem):  # QMoE wants a mixture
        plan_compute(plan)
    return planned_speed(plan)
