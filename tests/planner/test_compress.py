"""Compression jobs: rounding streams the weights, second-order methods work on them."""

import pytest

from planner.errors import BadRequestError, NotPossibleError
from tests.planner.asking import CPU, LLAMA_70B, TINY, ask, search


def compressing(method, model=TINY, device=CPU, **fields):
    return ask(
        model=model, device=device, workload={"kind": "compress", "method": method, **fields}
    )


def test_rounding_is_over_in_the_time_of_reading_and_writing():
    found = compressing("int8_weight_only")

    assert found.performance.duration_seconds < 1
    assert "compute" not in found.time_breakdown_seconds["compress"]


def test_gptq_works_much_longer_than_rounding():
    rounding = compressing("int4_weight_only").performance.duration_seconds

    assert compressing("gptq").performance.duration_seconds > 100 * rounding


def on_devices(method, devices, **strategy):
    return ask(
        model=LLAMA_70B,
        cluster={"device": "a100-sxm4-80gb", "devices_per_node": devices},
        workload={"kind": "compress", "method": method},
        strategy=strategy,
    )


def test_a_job_on_one_device_of_four_pays_for_one():
    one, four = on_devices("gptq", 1), on_devices("gptq", 4)

    assert four.strategy.data_parallel_size == 1
    assert four.run_energy_joules == one.run_energy_joules
    assert four.performance.duration_seconds == one.performance.duration_seconds
    assert any("3 of 4 devices stay unused" in warning for warning in four.warnings)


def test_devices_share_calibration_text_and_not_the_disk():
    one, four = (on_devices("gptq", 4, data_parallel_size=n) for n in (1, 4))
    disk = next(term.value for term in four.terms if term.key == "disk")
    stream = next(term.value for term in four.terms if term.key == "stream")
    times = [found.performance.duration_seconds - disk - stream for found in (one, four)]

    assert times[0] == pytest.approx(4 * times[1])


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_groups_of_ranks_are_refused_by_name(name):
    with pytest.raises(NotPossibleError, match=rf"{name} is 4: .* one layer at a time") as caught:
        on_devices("gptq", 4, **{name: 4})

    assert caught.value.field == f"strategy.{name}"


def test_rounding_has_nothing_to_share():
    with pytest.raises(NotPossibleError, match="looks at no calibration text"):
        on_devices("int8_weight_only", 4, data_parallel_size=4)


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


def test_gptq_of_a_70b_model_takes_gpu_hours_not_days():
    """The paper quantises 175B in about 4 GPU hours on an A100."""
    device = "a100-sxm4-80gb"
    found = compressing("gptq", model=LLAMA_70B, device=device)

    assert 0.02 * 3600 < found.performance.duration_seconds < 4 * 3600


def test_more_calibration_text_takes_longer():
    short = compressing("gptq", calibration_tokens=10_000).performance.duration_seconds

    assert compressing("gptq", calibration_tokens=100_000).performance.duration_seconds > short


def test_disk_holds_both_copies():
    found = compressing("int8_weight_only").memory

    assert found.disk_bytes > 1.3 * found.breakdown_bytes["weights"]


def test_fewer_bits_leave_a_smaller_result():
    four, eight = (compressing("gptq", bits=bits).memory.disk_bytes for bits in (4, 8))

    assert four < eight


@pytest.mark.parametrize(("bits", "each"), [(2, 0.25), (3, 0.375), (4, 0.5)])
def test_narrow_bits_keep_the_scales_of_four(bits, each):
    found = compressing("gptq", model=LLAMA_70B, device="h100-sxm-80gb", bits=bits, group_size=128)
    written = next(term for term in found.terms if term.key == "written_bytes")
    inputs = {one.symbol: one.value for one in written.inputs}

    assert inputs["B"] == pytest.approx(each + 32 / 128 / 8)


def test_three_bits_have_a_quality_of_their_own():
    three, four = (
        compressing("gptq", model=LLAMA_70B, device="h100-sxm-80gb", bits=bits).quality
        for bits in (3, 4)
    )

    assert three.loss_ratio > four.loss_ratio > 0
    assert compressing("gptq", bits=2).quality.loss_ratio is None


def test_bits_without_a_format_are_refused():
    with pytest.raises(BadRequestError, match="bits is 5"):
        compressing("gptq", bits=5)


def test_the_quality_to_expect_comes_with_its_evidence():
    quality = compressing("gptq").quality

    assert quality.perplexity_ratio[0] < quality.perplexity_ratio[1] < quality.perplexity_ratio[2]
    assert "GPTQ" in quality.evidence[0]
