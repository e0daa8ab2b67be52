"""Stage "rates": what the device achieves in copies, matrix products, attention and on disk.

Bandwidths and products are measured by ``runners.jobs.bench.device_rates``. Names of figures are
those that ``runners.prove.report`` compares with the datasheet; peaks are of dense operands.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple, get_args

import torch
from torch.nn import functional

from runners.jobs.bench.device_rates import (
    CPU_DEVICE,
    FLOPS_PER_MULTIPLY_ADD,
    MATMUL_DTYPES,
    Sizes,
    UnsupportedDtypeError,
    disk_write_rate,
    matmul_rates,
    memory_copy_rates,
    operator_overhead,
    product_of,
    product_size,
    run_seconds,
    sizes_for,
    transfer_rates,
    triad_rates,
    wait_for,
)
from runners.jobs.prove.recorder import Recorder
from runners.jobs.prove.weight_only import WeightKind, linear_with, stored_bytes

STEADY_SECONDS = 2.0
STEADY_RATIO = 0.75  # of the first quarter's rate, at least, in the last quarter
LEAST_COPY_OF_TRIAD = 0.3  # a copy moves two of the triad's three streams
LEAST_PINNED_OF_PAGEABLE = 0.9
HEAD_DIM = 128
IN_FEATURES = 4096  # of a weight-only product's matrix
GPU_CACHE_BYTES, CPU_CACHE_BYTES = 2**29, 2**27  # copies of a matrix exceed it


class KernelSizes(NamedTuple):
    """The sizes of attention, and the rows of a weight-only product as in an 8B model's layer."""

    sequence: int
    heads: int
    out_features: int


GPU_KERNELS = KernelSizes(sequence=4096, heads=32, out_features=14336)
CPU_KERNELS = KernelSizes(sequence=512, heads=8, out_features=4096)
SMALL_KERNELS = KernelSizes(sequence=32, heads=2, out_features=128)


def run(recorder: Recorder, folder: Path) -> None:
    """Measure every rate of the recorder's device; ``folder`` is where jobs write."""
    device = recorder.device
    sizes = sizes_for(device, is_small=recorder.is_small)
    kernels = GPU_KERNELS if device.type == "cuda" else CPU_KERNELS
    if recorder.is_small:
        kernels = SMALL_KERNELS
    _memory(recorder, sizes)
    if device.type == "cuda":
        _host_transfers(recorder, sizes)
    for name in MATMUL_DTYPES:
        with recorder.part(f"matmul {name}"):
            _matmul(recorder, name, sizes)
    _steady(recorder, sizes)
    with recorder.part("operator overhead"):
        recorder.figure(
            "operator overhead", "s", [operator_overhead(device)], "one operator, one element"
        )
    _attention(recorder, kernels, sizes.seconds)
    _weight_only(recorder, kernels, sizes.seconds)
    with recorder.part("disk write", advice=f"Free some space where {folder} lies."):
        recorder.figure("disk write", "bytes/s", [disk_write_rate(folder, sizes)])
        wait_for(device)


def _memory(recorder: Recorder, sizes: Sizes) -> None:
    device = recorder.device
    with recorder.part("device memory"):
        triad = recorder.figure(
            "memory triad",
            "bytes/s",
            triad_rates(device, sizes),
            "a = b + 3 c over fp32 arrays, three streams",
        )
        copy = recorder.figure(
            "memory copy",
            "bytes/s",
            memory_copy_rates(device, sizes),
            "one read and one written stream",
        )
        if not recorder.is_small:
            recorder.check(
                "a copy keeps up with the triad",
                is_met=copy >= LEAST_COPY_OF_TRIAD * triad,
                expected=f"at least {LEAST_COPY_OF_TRIAD:.0%} of the triad's "
                f"{triad / 1e9:.1f} GB/s",
                found=f"{copy / 1e9:.1f} GB/s",
                advice="Look for another program on this device; on a virtual machine, for a "
                "limit of its memory bandwidth.",
            )


def _host_transfers(recorder: Recorder, sizes: Sizes) -> None:
    """Measure copies between host and device, from pinned and from pageable memory."""
    device = recorder.device
    pairs = (("host to device", CPU_DEVICE, device), ("device to host", device, CPU_DEVICE))
    with recorder.part("host copies"):
        rates: dict[str, float] = {}
        for kind in ("pinned", "pageable"):
            for direction, source, target in pairs:
                rates[f"{direction}, {kind}"] = recorder.figure(
                    f"copy {direction}, {kind}",
                    "bytes/s",
                    transfer_rates(source, target, sizes, is_pinned=kind == "pinned"),
                )
        for direction in ("host to device", "device to host"):
            pinned, pageable = (rates[f"{direction}, {kind}"] for kind in ("pinned", "pageable"))
            recorder.check(
                f"pinned memory is no slower, {direction}",
                is_met=pinned >= LEAST_PINNED_OF_PAGEABLE * pageable,
                expected=f"at least {pageable / 1e9:.1f} GB/s, as from pageable memory",
                found=f"{pinned / 1e9:.1f} GB/s",
                advice="Check the limit of locked memory (ulimit -l) and the IOMMU's settings.",
            )


def _matmul(recorder: Recorder, name: str, sizes: Sizes) -> None:
    try:
        rates = matmul_rates(name, recorder.device, sizes)
    except UnsupportedDtypeError as error:
        recorder.missing(f"matmul {name}", str(error))
        return
    recorder.figure(
        f"matmul {name}", "op/s", rates.samples, f"square product of {rates.size} rows"
    )


def _steady(recorder: Recorder, sizes: Sizes) -> None:
    """Check that a product's rate does not fall while it runs: heat and power limits."""
    if recorder.is_small:
        return
    with recorder.part("steady rate"):
        size = product_size("bf16", recorder.device, sizes)
        product = product_of("bf16", recorder.device, size)
        times = run_seconds(product.compute, recorder.device, STEADY_SECONDS, most=10_000)
        quarter = max(1, len(times) // 4)
        first, last = median(times[:quarter]), median(times[-quarter:])
        recorder.figure("rate kept over 2 s", "ratio", [first / last])
        recorder.check(
            "the rate is steady",
            is_met=first / last >= STEADY_RATIO,
            expected=f"at least {STEADY_RATIO:.0%} of the first half second's rate after 2 s",
            found=f"{first / last:.0%}",
            advice="Look at temperature, power limit and other programs on this device.",
        )


def _attention(recorder: Recorder, kernels: KernelSizes, seconds: float) -> None:
    """Measure causal attention over one long sequence: the fused and the flexible kernel."""
    device, heads, length = recorder.device, kernels.heads, kernels.sequence
    shape = (1, heads, length, HEAD_DIM)
    # Causal: half of the pairs, a product with keys and one with values.
    work = FLOPS_PER_MULTIPLY_ADD * 2 * heads * length**2 * HEAD_DIM / 2
    with recorder.part("attention sdpa"):
        q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3))
        times = run_seconds(
            lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
            device,
            seconds,
        )
        recorder.figure("attention sdpa", "op/s", [work / each for each in times])
    if device.type != "cuda":
        recorder.missing("attention flex", "FlexAttention is used on GPUs only")
        return
    with recorder.part("attention flex", advice="A C compiler and Triton must be there."):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = create_block_mask(
            lambda _b, _h, query, key: query >= key, None, None, length, length, str(device)
        )
        compiled = torch.compile(flex_attention)
        times = run_seconds(
            lambda: compiled(q, k, v, block_mask=mask),
            device,
            seconds,
        )
        recorder.figure("attention flex", "op/s", [work / each for each in times])


def _weight_only(recorder: Recorder, kernels: KernelSizes, seconds: float) -> None:
    """Measure one token's product with a layer's matrix in bf16, int8 and int4."""
    device = recorder.device
    rows = kernels.out_features
    columns = rows if recorder.is_small else IN_FEATURES
    weight = torch.randn(rows, columns, device=device) / columns**0.5
    token = torch.randn(1, columns, device=device, dtype=torch.bfloat16)
    cache_bytes = GPU_CACHE_BYTES if device.type == "cuda" else CPU_CACHE_BYTES
    copies = 1 if recorder.is_small else max(2, cache_bytes // (weight.numel() * 2))
    for kind in get_args(WeightKind):
        with recorder.part(f"weight-only {kind}"):
            layers = [linear_with(kind, weight) for _ in range(copies)]
            stored = copies * stored_bytes(layers[0])
            times = run_seconds(partial(_multiply_each, layers, token), device, seconds)
            recorder.figure(
                f"weight-only {kind}",
                "bytes/s",
                [stored / each for each in times],
                f"one token times {copies} matrices of {rows} x {columns}",
            )
            del layers


@torch.inference_mode()
def _multiply_each(layers: Sequence[torch.nn.Module], token: torch.Tensor) -> None:
    for layer in layers:
        layer(token)
