"""What a device achieves: memory bandwidth, matrix products, copies, operator overhead, disk.

The one way in which the host's micro-benchmark and the proof's stage "rates" measure. A rate is a
list of samples, one per run after a first one that is dropped; its value is their median, which is
robust against interference of other programs. A multiply-add counts as two operations.
"""

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from runners.jobs.memory import free_host_bytes

MATMUL_DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")
FLOPS_PER_MULTIPLY_ADD = 2
TRIAD_STREAMS = 3  # two arrays read, one written: McCalpin's STREAM
COPY_STREAMS = 2
TRIAD_SCALAR = 3.0
FP8_CAPABILITY = (8, 9)  # of torch._scaled_mm on NVIDIA devices
TINY_OPERATIONS = 2000
LEAST_PRODUCT = 128
MAX_SAMPLES = 200
CPU_DEVICE = torch.device("cpu")
CPU_CACHES = Path("/sys/devices/system/cpu")
CACHES_IN_ARRAY = 4  # STREAM's rule: an array has four times the last-level caches at least
ARRAYS_IN_FREE_MEMORY = 16  # an array is no larger than this part of the free memory


class UnsupportedDtypeError(Exception):
    """A device has no matrix products in a dtype; the message says why."""


class Sizes(NamedTuple):
    """The sizes and the seconds of each measurement."""

    product: int  # rows, columns and depth of a square matrix product, at most
    elements: int  # fp32 elements of one array of the triad
    copy_bytes: int
    disk_bytes: int
    seconds: float


GPU = Sizes(product=8192, elements=2**28, copy_bytes=2**28, disk_bytes=2**27, seconds=0.5)
CPU = Sizes(product=1024, elements=2**25, copy_bytes=2**26, disk_bytes=2**27, seconds=1.0)
# They prove only that it works.
SMALL = Sizes(product=64, elements=2**16, copy_bytes=2**18, disk_bytes=2**20, seconds=0.01)


def sizes_for(device: torch.device, *, is_small: bool) -> Sizes:
    """Return the sizes for a device; arrays on a CPU exceed its caches."""
    if is_small:
        return SMALL
    if device.type == "cuda":
        return GPU
    largest = (free_host_bytes() or 0) // ARRAYS_IN_FREE_MEMORY
    array_bytes = min(CACHES_IN_ARRAY * last_level_cache_bytes(), largest)
    return CPU._replace(elements=max(CPU.elements, array_bytes // torch.float32.itemsize))


def last_level_cache_bytes(folder: Path = CPU_CACHES) -> int:
    """Return the bytes of all last-level CPU caches together; 0 if they are not listed."""
    found: dict[tuple[int, str], int] = {}
    for cache in folder.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            level = int((cache / "level").read_text())
            shared = (cache / "shared_cpu_list").read_text().strip()
            kilobytes = (cache / "size").read_text().strip().removesuffix("K")
            found[level, shared] = int(kilobytes) * 1024
        except (OSError, ValueError):
            continue
    last = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == last)


def run_seconds(
    operation: Callable[[], object],
    device: torch.device,
    seconds: float,
    *,
    most: int = MAX_SAMPLES,
) -> list[float]:
    """Return the wall seconds of each run of an operation, after a first one that is dropped."""
    operation()
    wait_for(device)
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < most and (not times or time.perf_counter() < deadline):
        began = time.perf_counter()
        operation()
        wait_for(device)
        times.append(time.perf_counter() - began)
    return times


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def triad_rates(device: torch.device, sizes: Sizes) -> list[float]:
    """Return the bytes per second of ``a = b + 3 c`` over fp32 arrays, three streams."""
    left, right, out = (torch.ones(sizes.elements, device=device) for _ in range(3))
    moved = TRIAD_STREAMS * out.numel() * out.element_size()
    triad = partial(torch.add, left, right, alpha=TRIAD_SCALAR, out=out)
    return [moved / each for each in run_seconds(triad, device, sizes.seconds)]


def memory_copy_rates(device: torch.device, sizes: Sizes) -> list[float]:
    """Return the bytes per second of a copy within a device: one read and one written stream."""
    source, target = (torch.ones(sizes.elements, device=device) for _ in range(2))
    moved = COPY_STREAMS * target.numel() * target.element_size()
    copy = partial(target.copy_, source)
    return [moved / each for each in run_seconds(copy, device, sizes.seconds)]


def transfer_rates(
    source: torch.device, target: torch.device, sizes: Sizes, *, is_pinned: bool = True
) -> list[float]:
    """Return the bytes per second of a copy between two devices; host memory is pinned or not."""
    left, right = (
        torch.empty(
            sizes.copy_bytes,
            dtype=torch.uint8,
            device=device,
            pin_memory=is_pinned and device.type == "cpu" and "cuda" in (source.type, target.type),
        )
        for device in (source, target)
    )
    waiting = source if source.type == "cuda" else target
    copy = partial(right.copy_, left, non_blocking=True)
    return [sizes.copy_bytes / each for each in run_seconds(copy, waiting, sizes.seconds)]


class Product(NamedTuple):
    """A matrix product: operands as rounded, and the device's way to multiply them."""

    left: torch.Tensor
    right: torch.Tensor
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def compute(self) -> torch.Tensor:
        """Return the product of the operands; the next one may overwrite it."""
        return self.multiply(self.left, self.right)


def product_of(name: str, device: torch.device, size: int) -> Product:
    """Return a square matrix product in a dtype.

    Raises:
        UnsupportedDtypeError: the device has no products in it.
    """
    if name == "int8":
        codes = torch.randint(-128, 128, (size, size), dtype=torch.int8, device=device)
        return Product(codes, codes.t(), torch._int_mm)  # noqa: SLF001 - torch's only int8 product
    _check_support(name, device)
    left, right = torch.randn(2, size, size, device=device).unbind()
    if name == "tf32":
        return Product(left, right, _multiply_in_tf32)
    if name == "fp8":
        dtype = torch.float8_e4m3fnuz if _is_cdna3(device) else torch.float8_e4m3fn
        return Product(left.to(dtype), right.to(dtype).t(), _multiply_fp8)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    out = torch.empty(size, size, device=device, dtype=dtype)
    return Product(left.to(dtype), right.to(dtype), partial(torch.mm, out=out))


def product_size(name: str, device: torch.device, sizes: Sizes) -> int:
    """Return the rows of a square product in a dtype of which one run fits into the seconds.

    A CPU without units for a dtype takes seconds for the largest: then it is halved, with the same
    rate. The time is estimated from a product of an eighth.

    Raises:
        UnsupportedDtypeError: the device has no products in it.
    """
    size = sizes.product
    trial = min(size, max(LEAST_PRODUCT, size // 8))
    seconds = min(run_seconds(product_of(name, device, trial).compute, device, 0.0))
    while size > trial and seconds * (size / trial) ** 3 > sizes.seconds:
        size //= 2
    return size


class MatmulRates(NamedTuple):
    """Operations per second of square products of ``size`` rows, one per run."""

    size: int
    samples: list[float]


def matmul_rates(name: str, device: torch.device, sizes: Sizes) -> MatmulRates:
    """Return the rates of a square matrix product in a dtype.

    Raises:
        UnsupportedDtypeError: the device has no products in it.
    """
    size = product_size(name, device, sizes)
    product = product_of(name, device, size)
    work = FLOPS_PER_MULTIPLY_ADD * size**3
    times = run_seconds(product.compute, device, sizes.seconds)
    return MatmulRates(size, [work / each for each in times])


def _check_support(name: str, device: torch.device) -> None:
    is_nvidia = device.type == "cuda" and not torch.version.hip
    if name == "tf32" and not is_nvidia:
        msg = "only NVIDIA devices compute in TF32"
        raise UnsupportedDtypeError(msg)
    if name == "fp8" and device.type != "cuda":
        msg = "a CPU has no units for FP8"
        raise UnsupportedDtypeError(msg)
    if name == "fp8" and is_nvidia and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        msg = "FP8 needs compute capability 8.9 or newer"
        raise UnsupportedDtypeError(msg)


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


def operator_overhead(device: torch.device) -> float:
    """Return the wall seconds of one operator on a tensor of one element."""
    tiny = torch.zeros(1, device=device)
    for _ in range(TINY_OPERATIONS // 10):
        tiny.add_(1.0)
    wait_for(device)
    began = time.perf_counter()
    for _ in range(TINY_OPERATIONS):
        tiny.add_(1.0)
    wait_for(device)
    return (time.perf_counter() - began) / TINY_OPERATIONS


def disk_write_rate(folder: Path, sizes: Sizes) -> float:
    """Return the bytes per second of writing one file and syncing it to the disk."""
    block = os.urandom(2**20)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        for _ in range(sizes.disk_bytes // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return sizes.disk_bytes / (time.perf_counter() - began)
