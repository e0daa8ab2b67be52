"""A quantisation named by its method stores and computes in that method's formats."""

import pytest

from planner.errors import NotCoveredError
from tests.planner.asking import TRAIN, ask


def test_a_named_quantisation_fills_in_its_formats():
    for name, weight, activation in (
        ("gptq", "int4", "bf16"),
        ("awq", "int4", "bf16"),
        ("w4a8", "int4", "int8"),
        ("w8a8", "int8", "int8"),
        ("fp8", "fp8", "fp8"),
    ):
        strategy = ask(strategy={"quantization": name}, engine="vllm").strategy
        assert (strategy.weight_dtype, strategy.activation_dtype) == (weight, activation)


def test_a_given_format_wins_over_the_name():
    strategy = ask(strategy={"quantization": "gptq", "weight_dtype": "int8"}).strategy
    assert strategy.weight_dtype == "int8"


def test_the_quality_is_that_of_the_method():
    quality = ask(strategy={"quantization": "gptq"}, engine="vllm").quality
    assert "GPTQ" in quality.evidence[0]


def test_a_method_without_a_format_is_refused_with_the_known_ones():
    with pytest.raises(NotCoveredError, match="gptq") as caught:
        ask(strategy={"quantization": "hqq"})
    assert caught.value.field == "strategy.quantization"


def test_qlora_pays_for_unpacking_its_base():
    plain = ask(workload={**TRAIN, "method": "lora"}, engine="megatron")
    packed = ask(workload={**TRAIN, "method": "qlora"}, engine="megatron")
    assert packed.memory.breakdown_bytes["weights"] < 0.5 * plain.memory.breakdown_bytes["weights"]
    assert packed.performance.step_seconds > plain.performance.step_seconds
