"""Fewer bits per weight, activation or cached key and value."""

from collections.abc import Callable

from planner.specs.base import Dtype
from planner.specs.strategy import Strategy
from planner.techniques.technique import (
    APPLIES,
    COMPRESSION,
    INFERENCE,
    TRAINING,
    Case,
    Technique,
    always,
)

COMPRESSIBLE = INFERENCE | COMPRESSION


def _weights_in(*dtypes: Dtype) -> Callable[[Strategy, Case], bool]:
    return lambda strategy, _case: strategy.weight_dtype in dtypes


def _method_is(*methods: str) -> Callable[[Strategy, Case], bool]:
    def used(strategy: Strategy, case: Case) -> bool:
        asked = getattr(case.workload, "method", None)
        return strategy.quantization in methods or asked in methods

    return used


def _needs_peak(dtype: Dtype) -> Callable[[Case], str]:
    def why_not(case: Case) -> str:
        if dtype in case.device.peak_flops_per_second:
            return APPLIES
        return f"needs {dtype} matrix units: {case.device.id} has none"

    return why_not


HALF_PRECISION = Technique(
    key="fp16_bf16",
    title="16-bit weights and activations",
    phases=COMPRESSIBLE | TRAINING,
    effect="weight and activation bytes / 2 against fp32, matrix products at the 16-bit peak",
    headline="memory -50 % against FP32",
    source="Micikevicius et al. 2017, arXiv:1710.03740",
    settings={"weight_dtype": "bf16", "activation_dtype": "bf16"},
    why_not=always,
    is_used=_weights_in("bf16", "fp16"),
)
INT8_WEIGHT_ONLY = Technique(
    key="int8_weight_only",
    title="8-bit weights, 16-bit products",
    phases=COMPRESSIBLE,
    effect="linear weight bytes / 2 against bf16; decode reads half the bytes",
    headline="-75 % against FP32",
    source="Dettmers et al. 2022, arXiv:2208.07339",
    settings={"weight_dtype": "int8", "activation_dtype": "bf16"},
    why_not=always,
    is_used=lambda strategy, case: (
        (strategy.weight_dtype == "int8" and strategy.activation_dtype != "int8")
        or getattr(case.workload, "method", None) == "int8_weight_only"
    ),
)
INT8_DYNAMIC = Technique(
    key="int8_dynamic",
    title="8-bit weights and activations",
    phases=INFERENCE,
    effect="linear weight bytes / 2 against bf16, matrix products at the int8 peak",
    headline="-75 % against FP32",
    source="Xiao et al. 2022 (SmoothQuant), arXiv:2211.10438",
    settings={"weight_dtype": "int8", "activation_dtype": "int8"},
    why_not=_needs_peak("int8"),
    is_used=lambda strategy, _case: (
        strategy.weight_dtype == "int8" and strategy.activation_dtype == "int8"
    ),
)
INT4_WEIGHT_ONLY = Technique(
    key="int4_weight_only",
    title="4-bit weights in groups, 16-bit products",
    phases=COMPRESSIBLE,
    effect="linear weight bytes / 4 against bf16, plus scales of each group",
    headline="-87.5 % against FP32, with visible quality loss",
    source="Dettmers & Zettlemoyer 2022, arXiv:2212.09720",
    settings={"weight_dtype": "int4", "activation_dtype": "bf16", "group_size": 128},
    why_not=always,
    is_used=lambda strategy, case: (
        strategy.weight_dtype in {"int4", "nf4"}
        or getattr(case.workload, "method", None) in {"int4_weight_only", "nf4"}
    ),
)
GPTQ = Technique(
    key="gptq",
    title="GPTQ: second-order 4-bit weights",
    phases=COMPRESSIBLE,
    effect="as 4-bit weights, with less quality loss for one calibration run",
    headline="175B in about 4 GPU hours; 3.25x (A100) to 4.5x (A6000) faster than FP16",
    source="Frantar et al. 2022, arXiv:2210.17323",
    settings={"weight_dtype": "int4", "quantization": "gptq", "group_size": 128},
    why_not=always,
    is_used=_method_is("gptq"),
)
AWQ = Technique(
    key="awq",
    title="AWQ: activation-aware 4-bit weights",
    phases=COMPRESSIBLE,
    effect="as 4-bit weights, with scales searched on calibration text",
    source="Lin et al. 2023, arXiv:2306.00978",
    settings={"weight_dtype": "int4", "quantization": "awq", "group_size": 128},
    why_not=always,
    is_used=_method_is("awq"),
)
SPARSEGPT = Technique(
    key="sparsegpt",
    title="SparseGPT: one-shot pruning",
    phases=COMPRESSION,
    effect="half of the linear weights become zero; stored size stays until a sparse format",
    headline="50-60 % sparsity, 175B in less than 4.5 h",
    source="Frantar & Alistarh 2023, arXiv:2301.00774",
    settings={},
    why_not=always,
    is_used=_method_is("sparsegpt"),
)
FP8 = Technique(
    key="fp8",
    title="8-bit floats for weights and activations",
    phases=INFERENCE,
    effect="linear weight bytes / 2 against bf16, matrix products at the fp8 peak",
    headline="-39 % memory, +75 % speed against BF16 (training GPT-175B on H100)",
    source="Peng et al. 2023 (FP8-LM), arXiv:2310.18313",
    settings={"weight_dtype": "fp8", "activation_dtype": "fp8"},
    why_not=_needs_peak("fp8"),
    is_used=_weights_in("fp8"),
)
NVFP4 = Technique(
    key="nvfp4",
    title="4-bit floats with micro-scales",
    phases=INFERENCE,
    effect="linear weight bytes / 3.6 against bf16, matrix products at the fp4 peak",
    source="Open Compute Project, MX formats 1.0, 2023; NVIDIA NVFP4",
    settings={"weight_dtype": "nvfp4", "activation_dtype": "nvfp4"},
    why_not=_needs_peak("nvfp4"),
    is_used=_weights_in("nvfp4"),
)
QUANTIZED_KV_CACHE = Technique(
    key="quantized_kv_cache",
    title="8-bit KV cache",
    phases=INFERENCE,
    effect="KV-cache bytes / 2: twice the sequences in the same memory",
    source="Hooper et al. 2024 (KVQuant), arXiv:2401.18079",
    settings={"kv_cache_dtype": "fp8"},
    why_not=always,
    is_used=lambda strategy, _case: strategy.kv_cache_dtype in {"fp8", "int8", "int4"},
)

TECHNIQUES = (
    HALF_PRECISION,
    INT8_WEIGHT_ONLY,
    INT8_DYNAMIC,
    INT4_WEIGHT_ONLY,
    GPTQ,
    AWQ,
    SPARSEGPT,
    FP8,
    NVFP4,
    QUANTIZED_KV_CACHE,
)
