"""Measure this host's achieved rates for the planner: ``python -m runners.jobs.microbench``.

Prints one JSON line, a ``runners.facts.Microbench``. Rates are those of
``runners.jobs.device_rates``, with the threads that jobs will use, and the whole takes about 20 s.
``--short`` takes small buffers and proves only that it works.
"""

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from runners.facts import DeviceMeasurement, LinkMeasurement, Microbench
from runners.jobs.device_rates import (
    CPU_DEVICE,
    GPU,
    MATMUL_DTYPES,
    SMALL,
    Sizes,
    UnsupportedDtypeError,
    disk_write_rate,
    matmul_rates,
    operator_overhead,
    sizes_for,
    transfer_rates,
    triad_rates,
)
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
    parser = argparse.ArgumentParser(prog="python -m runners.jobs.microbench")
    parser.add_argument("--short", action="store_true", help="prove that it works, in a second")
    parser.add_argument("--folder", type=Path, help="where to measure the disk; default: here")
    options = parser.parse_args()
    prepare_process()
    result = measure(short=options.short, folder=options.folder)
    sys.stdout.write(result.model_dump_json() + "\n")


if __name__ == "__main__":
    main()
