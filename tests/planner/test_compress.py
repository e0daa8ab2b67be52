"""Compression jobs: what each method writes, takes and is refused for."""

from typing import get_args

import pytest

from planner.catalog.models import get_model
from planner.catalog.quality import NAMED_METHODS
from planner.cost.parameters import count_parameters
from planner.cost.weights import RECIPES, matrices, written_bytes
from planner.specs.base import BadRequestError, NotPossibleError
from planner.specs.workload import CompressMethod
from tests.planner.asking import CPU, LLAMA_8B, LLAMA_70B, MIXTRAL, TINY, ask, search


def compressing(method, model=TINY, device=CPU, **fields):
    return ask(
        model=model, device=device, workload={"kind": "compress", "method": method, **fields}
    )


def test_a_calibrated_method_works_longer_with_more_text_than_rounding():
    # Rounding is over in the time of reading and writing.
    found = compressing("int8_weight_only")
    assert found.performance.duration_seconds < 1
    assert "compute" not in found.time_breakdown_seconds["compress"]
    # GPTQ works much longer than rounding.
    rounding = compressing("int4_weight_only").performance.duration_seconds
    assert compressing("gptq").performance.duration_seconds > 100 * rounding
    # More calibration text takes longer.
    short = compressing("gptq", calibration_tokens=10_000).performance.duration_seconds
    assert compressing("gptq", calibration_tokens=100_000).performance.duration_seconds > short
    # GPTQ of a 70B model takes GPU hours, not days: The paper quantises 175B in about 4 GPU hours
    # on an A100.
    device = "a100-sxm4-80gb"
    found = compressing("gptq", model=LLAMA_70B, device=device)
    assert 0.02 * 3600 < found.performance.duration_seconds < 4 * 3600


def on_devices(method, devices, **strategy):
    return ask(
        model=LLAMA_70B,
        cluster={"device": "a100-sxm4-80gb", "devices_per_node": devices},
        workload={"kind": "compress", "method": method},
        strategy=strategy,
    )


def test_devices_share_calibration_text_and_the_rest_stays_unused():
    # A job on one device of four pays for one.
    one, four = on_devices("gptq", 1), on_devices("gptq", 4)
    assert four.strategy.data_parallel_size == 1
    assert four.run_energy_joules == one.run_energy_joules
    assert four.performance.duration_seconds == one.performance.duration_seconds
    assert any("3 of 4 devices stay unused" in warning for warning in four.warnings)

    # Devices share calibration text and not the disk.
    one, four = (on_devices("gptq", 4, data_parallel_size=n) for n in (1, 4))
    disk = next(term.value for term in four.terms if term.key == "disk")
    stream = next(term.value for term in four.terms if term.key == "stream")
    times = [found.performance.duration_seconds - disk - stream for found in (one, four)]
    assert times[0] == pytest.approx(4 * times[1])


def test_what_no_job_can_do_is_refused_by_name():
    # Groups of ranks are refused by name.
    for name in ["tensor_parallel_size", "pipeline_parallel_size"]:
        with pytest.raises(
            NotPossibleError, match=rf"{name} is 4: .* one layer at a time"
        ) as caught:
            on_devices("gptq", 4, **{name: 4})
        assert caught.value.field == f"strategy.{name}"

    with pytest.raises(NotPossibleError, match="uses no calibration data"):
        on_devices("int8_weight_only", 4, data_parallel_size=4)
    with pytest.raises(BadRequestError, match="bits is 5"):
        compressing("gptq", bits=5)


def test_a_search_offers_as_many_devices_as_help():
    request = {
        "model": LLAMA_70B,
        "cluster": {"device": "a100-sxm4-80gb", "devices_per_node": 4},
        "objective": "latency",
    }
    shared, alone = (
        search(**request, workload={"kind": "compress", "method": method})
        for method in ("gptq", "int8_weight_only")
    )
    assert shared.plans[0].strategy.data_parallel_size == 4
    assert shared.searched.strategies == 3
    assert alone.plans == () or alone.plans[0].strategy.data_parallel_size == 1


def test_calibrated_methods_hold_one_layer_on_a_card_and_the_rest_on_its_host():
    """llm-compressor quantises 8 billion parameters in 5.8 GB of device memory."""
    found = ask(workload={"kind": "compress", "method": "gptq"}, device="a100-sxm4-80gb").memory
    assert found.per_device_peak_bytes == pytest.approx(5.8e9, rel=0.1)
    assert found.host_bytes > 16e9


def test_a_method_that_nobody_timed_says_so_and_is_less_sure():
    timed, untimed = (
        ask(workload={"kind": "compress", "method": method}, device="a100-sxm4-80gb")
        for method in ("gptq", "fptq")
    )
    widths = [
        found.interval["duration_seconds"][1] / found.performance.duration_seconds
        for found in (timed, untimed)
    ]
    assert not any("no published time" in warning for warning in timed.warnings)
    assert any("no published time of method fptq" in warning for warning in untimed.warnings)
    assert widths[1] > 1.5 * widths[0]


def test_the_result_takes_the_bits_and_scales_that_were_asked_for():
    # Disk holds both copies.
    found = compressing("int8_weight_only").memory
    assert found.disk_bytes > 1.3 * found.breakdown_bytes["weights"]
    # Fewer bits leave a smaller result.
    four, eight = (compressing("gptq", bits=bits).memory.disk_bytes for bits in (4, 8))
    assert four < eight

    # Narrow bits keep the scales of four.
    for bits, each in [(2, 0.25), (3, 0.375), (4, 0.5)]:
        found = compressing(
            "gptq", model=LLAMA_70B, device="h100-sxm-80gb", bits=bits, group_size=128
        )
        written = next(term for term in found.terms if term.key == "written_bytes")
        inputs = {one.symbol: one.value for one in written.inputs}
        assert inputs["B"] == pytest.approx(each + 32 / 128 / 8)


def test_the_quality_to_expect_comes_with_its_evidence():
    # Three bits have a quality of their own.
    three, four = (
        compressing("gptq", model=LLAMA_70B, device="h100-sxm-80gb", bits=bits).quality
        for bits in (3, 4)
    )
    assert three.loss_ratio > four.loss_ratio > 0
    assert compressing("gptq", bits=2).quality.loss_ratio is None
    quality = compressing("gptq").quality
    assert quality.perplexity_ratio[0] < quality.perplexity_ratio[1] < quality.perplexity_ratio[2]
    assert "GPTQ" in quality.evidence[0]


DENSE = sorted(set(RECIPES) - {"qmoe"})


def compressed(method, model=LLAMA_8B, **workload):
    workload = {"kind": "compress", "method": method, **workload}
    return ask(model=model, workload=workload, device="b300-sxm")


def term(found, key):
    return sum(one.value for one in found.terms if one.key == key)


def test_no_method_writes_more_than_it_read_and_calibration_takes_longer_than_rounding():
    source = 2 * count_parameters(get_model(LLAMA_8B)).total
    rounding = compressed("int8_weight_only").performance.duration_seconds
    wrong = []
    for method in DENSE:
        found = compressed(method)
        written, seconds = term(found, "written_bytes"), found.performance.duration_seconds
        on_disk = found.memory.disk_bytes
        calibrated = RECIPES[method].is_calibrated
        if not 0 < written <= source or on_disk != pytest.approx(source + written, abs=2):
            wrong.append((method, written, source, on_disk))
        if not (seconds > rounding if calibrated else seconds <= 1.01 * rounding):
            wrong.append((method, seconds, rounding))
    assert not wrong, wrong


def test_each_method_writes_and_multiplies_what_its_paper_says():
    # Second order methods hold the hessians of a layer: Six matrices read 4,096 columns, one reads
    # 14,336; three more of the widest to solve it.
    for method in ["gptq", "sparsegpt", "norm_tweaking", "quantease"]:
        held = compressed(method).memory.breakdown_bytes["buffers"]
        hessians = 6 * 4096**2 + 14336**2 + 3 * 14336**2
        assert held == pytest.approx(4 * (hessians + 4096 * 14336), abs=2)

    # Structural pruning leaves four fifths of the linear weights.
    counts = count_parameters(get_model(LLAMA_8B))
    whole, pruned = (
        term(compressed(name), "written_bytes") for name in ("sparsegpt", "llm_pruner")
    )
    assert whole - pruned == pytest.approx(2 * 0.2 * counts.layer_linear)

    # Coordinate descent repeats the column updates.
    once, quantease = (
        term(compressed(name), "second_order_flops") for name in ("gptq", "quantease")
    )
    assert once < quantease < 25 * once

    # The matrices of a model are all its linear weights.
    for name in [LLAMA_8B, MIXTRAL, "Qwen/Qwen3-30B-A3B", "facebook/opt-13b"]:
        model = get_model(name)
        whole = sum(inputs * outputs * count for inputs, outputs, count in matrices(model))
        assert whole == count_parameters(model).layer_linear

    # Written bytes are plain ones and packed ones.
    assert float(written_bytes(plain_bytes=10, parameters=100, bytes_per_element=0.5)) == 60.0


def test_qmoe_packs_experts_alone():
    counts = count_parameters(get_model(MIXTRAL))
    found = compressed("qmoe", model=MIXTRAL)
    rest = counts.total - counts.experts
    assert term(found, "written_bytes") == pytest.approx(2 * rest + counts.experts * 0.1)

    # QMoE needs experts.
    with pytest.raises(NotPossibleError, match="is dense"):
        compressed("qmoe")


def test_no_method_borrows_the_quality_of_another_unawares():
    formats = {"int8_weight_only", "int4_weight_only", "fp8"}  # rounding of the dtype itself
    assert set(get_args(CompressMethod)) - NAMED_METHODS == formats


def test_a_method_has_the_quality_of_its_own_table_or_none():
    # A method without a table of its own borrows no other methods.
    for method in ["norm_tweaking", "quantease", "finequant", "autoround"]:
        quality = compressed(method).quality
        assert quality.loss_ratio is None
        assert "no published table" in quality.evidence[0]

    # Pruned columns cost what LLM-Pruner's table says.
    low, middle, high = compressed(
        "llm_pruner", model="huggyllama/llama-7b"
    ).quality.perplexity_ratio
    assert low < middle < high
    assert 1.3 < middle < 2.5
