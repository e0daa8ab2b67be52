"""Compression jobs: rounding streams the weights, second-order methods work on them."""

import pytest

from planner.errors import BadRequestError
from tests.planner.asking import CPU, LLAMA_70B, TINY, ask


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


def test_bits_without_a_format_are_refused():
    with pytest.raises(BadRequestError, match="bits is 5"):
        compressing("gptq", bits=5)


def test_the_quality_to_expect_comes_with_its_evidence():
    quality = compressing("gptq").quality

    assert quality.perplexity_ratio[0] < quality.perplexity_ratio[1] < quality.perplexity_ratio[2]
    assert "GPTQ" in quality.evidence[0]
