"""Savings of sparse weights, which exist only for 2:4 sparsity in hardware.

With two zeros in every four weights, kernels store the other two with 2-bit indices and sparse
tensor cores skip the zeros. Serving engines store and multiply all other sparse matrices as dense.
"""

from planner.specs.cluster import DeviceSpec

SEMI_STRUCTURED_RATIO = 0.5
INDEX_BITS_PER_WEIGHT = 1.0  # two bits for each of the two nonzeros in four
# Measured, not the 2x of the datasheet: a CUTLASS 2:4 product against a dense fp8 one.
# Source: HPC-AI on llm-compressor and vLLM, ainews247.org/story/17670.
GEMM_SPEEDUP = 1.22
# vLLM and TensorRT-LLM load 2:4 checkpoints; torchao has semi-structured tensors for torch.
ENGINES = frozenset({"vllm", "tensorrt_llm", "torch"})


def has_sparse_cores(device: DeviceSpec) -> bool:
    """Return whether the device has 2:4 sparse tensor cores: NVIDIA since Ampere (bf16)."""
    of_nvidia = (device.vendor or "").upper() == "NVIDIA"
    return of_nvidia and device.kind == "gpu" and "bf16" in device.peak_flops_per_second


def runs_sparse(sparsity: float, engine: str, device: DeviceSpec) -> bool:
    """Return whether kernels exploit the sparsity: 0.5, on a supporting engine and device."""
    is_half = sparsity == SEMI_STRUCTURED_RATIO
    return is_half and engine in ENGINES and has_sparse_cores(device)


def stored_bits(element_bits: float) -> float:
    """Return the bits of one weight in the compressed 2:4 format.

    Nine of sixteen bits and five of eight, as in PyTorch's semi-structured tensors
    (torch/sparse/semi_structured.py).

    >>> stored_bits(16.0), stored_bits(8.0)
    (9.0, 5.0)
    """
    return element_bits * SEMI_STRUCTURED_RATIO + INDEX_BITS_PER_WEIGHT


def reason_against(sparsity: float, engine: str, device: DeviceSpec) -> str:
    """Return why sparsity saves nothing here, or '' if it does save."""
    if runs_sparse(sparsity, engine, device):
        return ""
    if sparsity != SEMI_STRUCTURED_RATIO:
        return "kernels skip only two zeros in every four weights (sparsity 0.5)"
    if engine not in ENGINES:
        return f"engine {engine} has no 2:4 kernels"
    return f"device {device.id} has no sparse tensor cores"
