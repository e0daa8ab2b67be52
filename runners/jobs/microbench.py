"""Measure this host's achieved rates for the planner: ``python -m runners.jobs.microbench``.

Prints one JSON line, a ``runners.messages.Microbench``. Rates are the median of repeated
runs on buffers far larger than the caches, with the threads that jobs will use, and the
whole takes less than 20 s. ``--short`` takes small buffers and proves only that it works.
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from runners.facts import DeviceMeasurement, LinkMeasurement, Microbench
from runners.jobs.evaluation import evaluate
from runners.jobs.loading import demo_config, fresh_model
from runners.jobs.memory import (
    PeakMeter,
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

GEMM_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FLOPS_PER_MULTIPLY_ADD = 2
TRIAD_STREAMS = 3  # two arrays read, one written
TINY_OPERATIONS = 2000
CPU_DEVICE = torch.device("cpu")
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


@dataclass(frozen=True)
class Effort:
    """The size and duration of each measurement."""

    gemm_size: int
    triad_elements: int
    seconds_each: float
    disk_bytes: int
    copy_bytes: int = 2**28


CPU = Effort(gemm_size=1024, triad_elements=2**25, seconds_each=1.2, disk_bytes=2**27)
CUDA = Effort(gemm_size=8192, triad_elements=2**28, seconds_each=0.5, disk_bytes=2**27)
SHORT = Effort(
    gemm_size=64, triad_elements=2**16, seconds_each=0.02, disk_bytes=2**20, copy_bytes=2**16
)


def measure(*, short: bool = False, folder: Path | None = None) -> Microbench:
    """Return the rates of the CPU, of every CUDA device, and of writing to ``folder``."""
    began = time.monotonic()
    # First, before anything else is loaded.
    memory = {
        "runtime_memory_bytes": runtime_memory_bytes(),
        "training_memory_bytes": training_memory_bytes(TINY if short else DemoModel()),
    }
    cpu = measure_device(torch.device("cpu"), SHORT if short else CPU)
    devices = [cpu.model_copy(update=memory)]
    devices += [
        measure_device(torch.device("cuda", index), SHORT if short else CUDA)
        for index in range(torch.cuda.device_count())
    ]
    links = tuple(device_links(torch.cuda.device_count(), SHORT if short else CUDA))
    disk = disk_write_rate(folder or Path(tempfile.gettempdir()), SHORT if short else CPU)
    return Microbench(
        measured_at_ms=time.time_ns() // 1_000_000,
        duration_seconds=time.monotonic() - began,
        torch_version=str(torch.__version__),
        num_threads=torch.get_num_threads(),
        devices=tuple(devices),
        disk_write_bytes_per_second=disk,
        links=links,
    )


def measure_device(device: torch.device, effort: Effort) -> DeviceMeasurement:
    """Return bandwidth, matrix product rates by dtype and operator overhead of one device."""
    rates = {name: gemm_rate(device, dtype, effort) for name, dtype in GEMM_DTYPES.items()}
    rates["int8"] = int8_gemm_rate(device, effort)
    in_host = torch.device("cpu")
    is_apart = device.type != "cpu"
    return DeviceMeasurement(
        host_to_device_bytes_per_second=copy_rate(in_host, device, effort) if is_apart else None,
        device_to_host_bytes_per_second=copy_rate(device, in_host, effort) if is_apart else None,
        device=str(device),
        memory_bandwidth_bytes_per_second=triad_bandwidth(device, effort),
        flops_per_second=rates,
        op_overhead_seconds=op_overhead(device),
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


def gemm_rate(device: torch.device, dtype: torch.dtype, effort: Effort) -> float:
    """Return the FLOP/s of a square matrix product in ``dtype``."""
    size = effort.gemm_size
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty(size, size, device=device, dtype=dtype)
    seconds = _median_seconds(lambda: torch.mm(left, right, out=out), device, effort)
    return FLOPS_PER_MULTIPLY_ADD * size**3 / seconds


def int8_gemm_rate(device: torch.device, effort: Effort) -> float:
    """Return the operations per second of an int8 product that accumulates in int32."""
    size = effort.gemm_size
    left = torch.randint(-128, 127, (size, size), dtype=torch.int8, device=device)
    right = torch.randint(-128, 127, (size, size), dtype=torch.int8, device=device)
    seconds = _median_seconds(lambda: torch._int_mm(left, right.t()), device, effort)  # noqa: SLF001 - torch's only int8 product
    return FLOPS_PER_MULTIPLY_ADD * size**3 / seconds


def triad_bandwidth(device: torch.device, effort: Effort) -> float:
    """Return the bytes per second of ``a = b + s * c`` over large fp32 arrays.

    Source: McCalpin's STREAM triad counts the same three streams.
    """
    left = torch.ones(effort.triad_elements, device=device)
    right = torch.ones(effort.triad_elements, device=device)
    out = torch.zeros(effort.triad_elements, device=device)
    moved = TRIAD_STREAMS * out.numel() * out.element_size()
    return moved / _median_seconds(
        lambda: torch.add(left, right, alpha=3.0, out=out), device, effort
    )


def copy_rate(source: torch.device, target: torch.device, effort: Effort) -> float:
    """Return the bytes per second of copying one large buffer; host memory is pinned."""
    left, right = (_buffer(device, source, target, effort) for device in (source, target))
    waiting = source if source.type == "cuda" else target
    seconds = _median_seconds(lambda: right.copy_(left, non_blocking=True), waiting, effort)
    return effort.copy_bytes / seconds


def _buffer(
    device: torch.device, source: torch.device, target: torch.device, effort: Effort
) -> torch.Tensor:
    is_pinned = device.type == "cpu" and "cuda" in (source.type, target.type)
    return torch.empty(effort.copy_bytes, dtype=torch.uint8, device=device, pin_memory=is_pinned)


def device_links(num_devices: int, effort: Effort) -> Iterator[LinkMeasurement]:
    """Yield the bandwidth from each GPU to the next one, along the ring of collectives."""
    for index in range(num_devices if num_devices > 1 else 0):
        source = torch.device("cuda", index)
        target = torch.device("cuda", (index + 1) % num_devices)
        yield LinkMeasurement(
            source=str(source),
            target=str(target),
            bytes_per_second=copy_rate(source, target, effort),
        )


def op_overhead(device: torch.device) -> float:
    """Return the wall seconds of one operator on a tensor of one element."""
    tiny = torch.zeros(1, device=device)
    for _ in range(TINY_OPERATIONS // 10):
        tiny.add_(1.0)
    _wait(device)
    began = time.perf_counter()
    for _ in range(TINY_OPERATIONS):
        tiny.add_(1.0)
    _wait(device)
    return (time.perf_counter() - began) / TINY_OPERATIONS


def disk_write_rate(folder: Path, effort: Effort) -> float:
    """Return the bytes per second of writing one file and syncing it to the disk."""
    block = os.urandom(2**20)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        for _ in range(effort.disk_bytes // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return effort.disk_bytes / (time.perf_counter() - began)


def _median_seconds(
    operation: Callable[[], object], device: torch.device, effort: Effort
) -> float:
    """Return the median time, which is robust against interference of other programs."""
    operation()
    _wait(device)
    times: list[float] = []
    deadline = time.perf_counter() + effort.seconds_each
    while not times or time.perf_counter() < deadline:
        began = time.perf_counter()
        operation()
        _wait(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Print the measurements as one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m runners.jobs.microbench")
    parser.add_argument("--short", action="store_true", help="prove that it works, in a second")
    parser.add_argument("--folder", type=Path, help="where to measure the disk")
    options = parser.parse_args()
    prepare_process()
    result = measure(short=options.short, folder=options.folder)
    sys.stdout.write(result.model_dump_json() + "\n")


if __name__ == "__main__":
    main()
