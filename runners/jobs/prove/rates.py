"""Stage "rates": what the device achieves in copies, matrix products, attention and on disk.

Names of figures are those that ``runners.prove.expected`` compares with the datasheet. Peaks are
of dense operands; a multiply-add counts as two operations.
"""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, get_args

import torch
from torch.nn import functional

from runners.jobs.prove.recorder import Recorder, samples_of, wait_for
from runners.jobs.prove.weight_only import WeightKind, linear_with, stored_bytes

FLOPS_PER_MULTIPLY_ADD = 2
TRIAD_STREAMS = 3  # two arrays read, one written: McCalpin's STREAM
COPY_STREAMS = 2
CPU = torch.device("cpu")
FP8_CAPABILITY = (8, 9)  # of torch._scaled_mm on NVIDIA devices
STEADY_SECONDS = 2.0
STEADY_RATIO = 0.75  # of the first quarter's rate, at least, in the last quarter
LEAST_COPY_OF_TRIAD = 0.3  # a copy moves two of the triad's three streams
LEAST_PINNED_OF_PAGEABLE = 0.9


class Size(NamedTuple):
    """The sizes and seconds of each measurement."""

    product: int  # rows, columns and depth of a square matrix product
    elements: int  # fp32 elements of one array of the triad
    copy_bytes: int
    sequence: int  # of attention
    heads: int
    rows: int  # of a weight-only product's matrix, as in a layer of an 8B model
    disk_bytes: int
    seconds: float


GPU_SIZE = Size(8192, 2**28, 2**28, 4096, 32, 14336, 2**28, 0.5)
CPU_SIZE = Size(1024, 2**24, 2**26, 512, 8, 4096, 2**27, 0.6)
SMALL = Size(64, 2**16, 2**18, 32, 2, 128, 2**20, 0.01)
HEAD_DIM = 128
WIDTH = 4096  # input features of a weight-only product


def run(recorder: Recorder, folder: Path) -> None:
    """Measure every rate of the recorder's device; ``folder`` is where jobs write."""
    device = recorder.device
    size = GPU_SIZE if device.type == "cuda" else CPU_SIZE
    if recorder.is_small:
        size = SMALL
    _memory(recorder, size)
    if device.type == "cuda":
        _host_copies(recorder, size)
    for name in ("fp32", "tf32", "bf16", "fp16", "fp8", "int8"):
        with recorder.part(f"matmul {name}"):
            _product(recorder, name, size)
    _steady(recorder, size)
    _attention(recorder, size)
    _weight_only(recorder, size)
    with recorder.part("disk write", advice=f"Free some space where {folder} lies."):
        _disk(recorder, folder, size)


def _memory(recorder: Recorder, size: Size) -> None:
    device, count = recorder.device, size.elements
    with recorder.part("device memory"):
        left, right = torch.ones(2, count, device=device).unbind()
        out = torch.empty(count, device=device)
        moved = TRIAD_STREAMS * count * out.element_size()
        triad = recorder.figure(
            "memory triad",
            "bytes/s",
            [
                moved / each
                for each in samples_of(
                    lambda: torch.add(left, right, alpha=3.0, out=out), device, size.seconds
                )
            ],
            "a = b + 3 c over fp32 arrays, three streams",
        )
        copied = COPY_STREAMS * count * out.element_size()
        copy = recorder.figure(
            "memory copy",
            "bytes/s",
            [copied / each for each in samples_of(lambda: out.copy_(left), device, size.seconds)],
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


def _host_copies(recorder: Recorder, size: Size) -> None:
    """Measure copies between host and device, from pinned and from pageable memory."""
    device = recorder.device
    with recorder.part("host copies"):
        there = torch.empty(size.copy_bytes, dtype=torch.uint8, device=device)
        rates: dict[str, float] = {}
        for kind in ("pinned", "pageable"):
            here = torch.empty(size.copy_bytes, dtype=torch.uint8, pin_memory=kind == "pinned")
            pairs = (("host to device", there, here), ("device to host", here, there))
            for direction, target, source in pairs:
                copy = partial(target.copy_, source, non_blocking=True)
                times = samples_of(copy, device, size.seconds)
                rates[f"{direction}, {kind}"] = recorder.figure(
                    f"copy {direction}, {kind}",
                    "bytes/s",
                    [size.copy_bytes / each for each in times],
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


class Product(NamedTuple):
    """A matrix product: operands as rounded, and the device's way to multiply them."""

    left: torch.Tensor
    right: torch.Tensor
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def compute(self) -> torch.Tensor:
        """Return the product of the operands."""
        return self.multiply(self.left, self.right)


def _product(recorder: Recorder, name: str, size: Size) -> None:
    product = product_of(name, recorder.device, size.product)
    if isinstance(product, str):
        recorder.missing(f"matmul {name}", product)
        return
    work = FLOPS_PER_MULTIPLY_ADD * size.product**3
    times = samples_of(product.compute, recorder.device, size.seconds)
    recorder.figure(
        f"matmul {name}",
        "op/s",
        [work / each for each in times],
        f"square product of {size.product}",
    )


def product_of(name: str, device: torch.device, size: int) -> Product | str:
    """Return a square matrix product in a dtype, or why this device has none."""
    if name == "int8":
        codes = torch.randint(-128, 127, (size, size), dtype=torch.int8, device=device)
        return Product(codes, codes.t(), torch._int_mm)  # noqa: SLF001 - torch's only int8 product
    left, right = torch.randn(2, size, size, device=device).unbind()
    if name == "tf32":
        if device.type != "cuda" or torch.version.hip:
            return "only NVIDIA devices compute in TF32"
        return Product(left, right, _multiply_in_tf32)
    if name == "fp8":
        if why := _no_fp8(device):
            return why
        dtype = torch.float8_e4m3fnuz if _is_cdna3(device) else torch.float8_e4m3fn
        return Product(left.to(dtype), right.to(dtype).t(), _multiply_fp8)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    return Product(left.to(dtype), right.to(dtype), torch.mm)


def _no_fp8(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "a CPU has no units for FP8"
    if not torch.version.hip and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        return "FP8 needs compute capability 8.9 or newer"
    return None


def _multiply_fp8(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    one = torch.ones((), device=left.device)
    return torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16)  # noqa: SLF001 - torch's only fp8 product


def _multiply_in_tf32(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return left @ right
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _is_cdna3(device: torch.device) -> bool:
    """Return whether the device has AMD's first FP8 format, without infinities."""
    if not torch.version.hip:
        return False
    return str(torch.cuda.get_device_properties(device).gcnArchName).startswith("gfx94")


def _steady(recorder: Recorder, size: Size) -> None:
    """Check that a product's rate does not fall while it runs: heat and power limits."""
    if recorder.is_small:
        return
    with recorder.part("steady rate"):
        product = product_of("bf16", recorder.device, size.product)
        if isinstance(product, str):
            return
        times = samples_of(product.compute, recorder.device, STEADY_SECONDS, most=10_000)
        first, last = quarters(times)
        recorder.figure("rate kept over 2 s", "ratio", [first / last])
        recorder.check(
            "the rate is steady",
            is_met=first / last >= STEADY_RATIO,
            expected=f"at least {STEADY_RATIO:.0%} of the first half second's rate after 2 s",
            found=f"{first / last:.0%}",
            advice="Look at temperature, power limit and other programs on this device.",
        )


def quarters(times: Sequence[float]) -> tuple[float, float]:
    """Return the median seconds of the first and of the last quarter of the runs."""
    count = max(1, len(times) // 4)
    return _median(times[:count]), _median(times[-count:])


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _attention(recorder: Recorder, size: Size) -> None:
    """Measure causal attention over one long sequence: the fused and the flexible kernel."""
    device, heads, length = recorder.device, size.heads, size.sequence
    shape = (1, heads, length, HEAD_DIM)
    # Causal: half of the pairs, a product with keys and one with values.
    work = FLOPS_PER_MULTIPLY_ADD * 2 * heads * length**2 * HEAD_DIM / 2
    with recorder.part("attention sdpa"):
        q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3))
        times = samples_of(
            lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
            device,
            size.seconds,
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
        times = samples_of(
            lambda: compiled(q, k, v, block_mask=mask),
            device,
            size.seconds,
        )
        recorder.figure("attention flex", "op/s", [work / each for each in times])


def _weight_only(recorder: Recorder, size: Size) -> None:
    """Measure one token's product with a layer's matrix in bf16, int8 and int4."""
    device = recorder.device
    width = size.rows if recorder.is_small else WIDTH
    weight = torch.randn(size.rows, width, device=device) / width**0.5
    token = torch.randn(1, width, device=device, dtype=torch.bfloat16)
    # Enough copies that no cache holds them all.
    cached = 2**29 if device.type == "cuda" else 2**27
    copies = 1 if recorder.is_small else max(2, cached // (weight.numel() * 2))
    for kind in get_args(WeightKind):
        with recorder.part(f"weight-only {kind}"):
            layers = [linear_with(kind, weight) for _ in range(copies)]
            stored = copies * stored_bytes(layers[0])
            times = samples_of(partial(_pass, layers, token), device, size.seconds)
            recorder.figure(
                f"weight-only {kind}",
                "bytes/s",
                [stored / each for each in times],
                f"one token times {copies} matrices of {size.rows} x {width}",
            )
            del layers


@torch.inference_mode()
def _pass(layers: Sequence[torch.nn.Module], token: torch.Tensor) -> None:
    for layer in layers:
        layer(token)


def _disk(recorder: Recorder, folder: Path, size: Size) -> None:
    block = os.urandom(2**20)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        for _ in range(size.disk_bytes // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        seconds = time.perf_counter() - began
    recorder.figure("disk write", "bytes/s", [size.disk_bytes / seconds])
    wait_for(recorder.device)
