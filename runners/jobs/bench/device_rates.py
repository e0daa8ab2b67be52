"""Rates of a device as measured: memory, arithmetic, host copies, disk."""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from runners.jobs.evaluation import evaluate
from runners.jobs.loading import demo_config, fresh_model
from runners.jobs.memory import (
    PeakMeter,
    free_host_bytes,
    map_large_blocks,
    model_bytes,
    release_free_memory,
    resident_bytes,
    tensor_bytes,
)
from runners.jobs.runtime import prepare_process
from runners.jobs.train.evaluator import VALIDATION_TOKENS
from runners.jobs.train.optimizers import build_optimizer
from runners.jobspec import DemoModel
from runners.shared.facts import DeviceMeasurement, LinkMeasurement, Microbench

# ---------------------------------------------------------------------------
# What a device achieves: memory bandwidth, matrix products, copies, operator overhead, disk.
#
# The host's micro-benchmark and the validation's stage "rates" both measure with this. A rate is a
# list of samples, one per run after a first one that is dropped; its value is their median, which
# is robust against interference of other programs. A multiply-add counts as two operations.
# ---------------------------------------------------------------------------


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
    sizes: dict[tuple[int, str], int] = {}
    for cache in folder.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            level = int((cache / "level").read_text())
            shared = (cache / "shared_cpu_list").read_text().strip()
            kilobytes = (cache / "size").read_text().strip().removesuffix("K")
            sizes[level, shared] = int(kilobytes) * 1024
        except (OSError, ValueError):
            continue
    last = max((level for level, _ in sizes), default=0)
    return sum(size for (level, _), size in sizes.items() if level == last)


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


# ---------------------------------------------------------------------------
# Measure this host's achieved rates for the planner: ``python -m
# runners.jobs.bench.device_rates``.
#
# Prints one JSON line, a ``runners.shared.facts.Microbench``. Rates are those of
# ``runners.jobs.bench.device_rates``, with the threads that jobs will use, and the whole takes
# about 20 s. ``--short`` takes small buffers and proves only that it works.
# ---------------------------------------------------------------------------


TRAINING_STEPS = 4  # by then the allocator's caches are stable
TRAINING_SEQUENCES = 2
FP32_STATES = 4  # weights, gradients and two moments
SMALLEST = DemoModel(
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    vocab_size=16,
    max_position_embeddings=16,
)

TINY = DemoModel(hidden_size=64, intermediate_size=64, num_hidden_layers=1, vocab_size=256)


def measure(*, short: bool = False, folder: Path | None = None) -> Microbench:
    """Return the rates of the CPU, of every CUDA device, and of writing to ``folder``."""
    began = time.monotonic()
    # First, before anything else is loaded.
    memory = {
        "runtime_memory_bytes": runtime_memory_bytes(),
        "training_memory_bytes": training_memory_bytes(TINY if short else DemoModel()),
    }
    cpu_sizes = sizes_for(CPU_DEVICE, is_small=short)
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    devices = [measure_device(CPU_DEVICE, cpu_sizes).model_copy(update=memory)]
    devices += [measure_device(gpu, sizes_for(gpu, is_small=short)) for gpu in gpus]
    links = device_links(len(gpus), SMALL if short else GPU)
    return Microbench(
        measured_at_ms=time.time_ns() // 1_000_000,
        duration_seconds=time.monotonic() - began,
        torch_version=str(torch.__version__),
        num_threads=torch.get_num_threads(),
        devices=tuple(devices),
        disk_write_bytes_per_second=disk_write_rate(folder or Path.cwd(), cpu_sizes),
        links=tuple(links),
    )


def measure_device(device: torch.device, sizes: Sizes) -> DeviceMeasurement:
    """Return bandwidth, matrix product rates by dtype and operator overhead of one device."""
    products: dict[str, float] = {}
    for name in MATMUL_DTYPES:
        with contextlib.suppress(UnsupportedDtypeError):
            products[name] = statistics.median(matmul_rates(name, device, sizes).samples)
    copies: dict[str, float] = {}
    if device.type != "cpu":
        copies = {
            "host_to_device_bytes_per_second": statistics.median(
                transfer_rates(CPU_DEVICE, device, sizes)
            ),
            "device_to_host_bytes_per_second": statistics.median(
                transfer_rates(device, CPU_DEVICE, sizes)
            ),
        }
    return DeviceMeasurement(
        device=str(device),
        memory_bandwidth_bytes_per_second=statistics.median(triad_rates(device, sizes)),
        flops_per_second=products,
        op_overhead_seconds=operator_overhead(device),
        **copies,
    )


def runtime_memory_bytes() -> int:
    """Return a job process's memory without model tensors: interpreter and libraries.

    Runs forward and backward of a tiny model once, so that everything loaded on first use is
    included.
    """
    model = fresh_model(demo_config(SMALLEST), torch.float32)
    logits = model(input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=False).logits
    torch.autograd.backward(logits.sum())
    del model, logits
    release_free_memory()
    return resident_bytes()


def training_memory_bytes(shape: DemoModel) -> int:
    """Return training's memory overhead: kernel scratch and allocator fragmentation.

    Runs a few real steps and a validation of a small model on the CPU, and subtracts weights,
    gradients, moments, saved activations and the gradient of the logits from the peak.
    """
    map_large_blocks()  # as in training
    meter = PeakMeter(CPU_DEVICE)
    model = fresh_model(demo_config(shape), torch.float32)
    model.set_attn_implementation("eager")  # as the trainer does on a CPU
    optimizer = build_optimizer(model, 1e-4)
    activation_bytes = logits_bytes = 0
    for _ in range(TRAINING_STEPS):
        with _saved_tensors() as saved:
            logits_bytes = _train_step(model, shape)
        optimizer.step()
        optimizer.zero_grad()
        activation_bytes = max(activation_bytes, sum(saved.values()) - model_bytes(model))
    text = np.random.default_rng(0).integers(0, shape.vocab_size, VALIDATION_TOKENS)
    evaluate(model, text.astype(np.int32), VALIDATION_TOKENS)
    states = FP32_STATES * model_bytes(model)
    peak = meter.read()
    del model, optimizer
    release_free_memory()
    return max(0, peak.bytes - peak.start_bytes - states - activation_bytes - logits_bytes)


def _train_step(model: PreTrainedModel, shape: DemoModel) -> int:
    """Run forward and backward over random tokens and return the bytes of its fp32 logits."""
    length = shape.max_position_embeddings
    ids = torch.randint(0, shape.vocab_size, (TRAINING_SEQUENCES, length))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits
    wide = logits.float()
    loss = torch.nn.functional.cross_entropy(wide.flatten(0, 1), ids.flatten())
    torch.autograd.backward(loss)
    return tensor_bytes(wide)


@contextlib.contextmanager
def _saved_tensors() -> Iterator[dict[int, int]]:
    """Collect autograd's saved tensors: the bytes of each storage by its address."""
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield saved


def device_links(num_devices: int, sizes: Sizes) -> Iterator[LinkMeasurement]:
    """Yield the bandwidth from each GPU to the next one, along the ring of collectives."""
    for index in range(num_devices if num_devices > 1 else 0):
        source = torch.device("cuda", index)
        target = torch.device("cuda", (index + 1) % num_devices)
        yield LinkMeasurement(
            source=str(source),
            target=str(target),
            bytes_per_second=statistics.median(transfer_rates(source, target, sizes)),
        )


def main() -> None:
    """Print the measurements as one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m runners.jobs.bench.device_rates")
    parser.add_argument("--short", action="store_true", help="prove that it works, in a second")
    parser.add_argument("--folder", type=Path, help="where to measure the disk; default: here")
    options = parser.parse_args()
    prepare_process()
    result = measure(short=options.short, folder=options.folder)
    sys.stdout.write(result.model_dump_json() + "\n")


if __name__ == "__main__":
    main()
