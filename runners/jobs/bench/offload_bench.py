"""Benchmarks the planner's offload policy against accelerate's device map under a memory cap.

``python -m runners.jobs.bench.offload_bench`` prints the ratios as JSON lines, for `manage.py
bench offload`. Each method runs in its own process in a cgroup with the cap: the kernel reclaims
page cache beyond it, so that offloaded weights are really read from disk. The model has random
weights, with one copy per method, because shared page cache would count for one of them.
"""

import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from planner.api import estimate, plan
from planner.specs.base import JsonObject
from planner.specs.estimate import EstimateRequest, PlanRequest
from planner.specs.workload import OffloadSpec
from runners.host.bench import Ratio
from runners.jobs.bench.device_rates import (
    Sizes,
    matmul_rates,
    operator_overhead,
    runtime_memory_bytes,
    triad_rates,
)
from runners.jobs.generate.offload_cases import (
    CPU,
    DTYPE,
    BenchProcess,
    BenchProcessError,
    Order,
    RunMeasurements,
    forget,
    start_capped_case,
)
from runners.jobs.loading import demo_config, fresh_model
from runners.jobs.model_files import weight_files
from runners.jobs.ratios import ratio_of
from runners.jobs.runtime import prepare_process
from runners.jobspec import DemoModel
from runners.jobspec.generate import PolicyOffload

NAME = "accelerate's default map / the planner's policy, in one memory"
READ_NAME = "accelerate's default map / the planner's policy, from one disk"
SHAPE = DemoModel(  # 325 million parameters without grouped-query attention, like OPT
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=24,
    num_attention_heads=16,
    num_key_value_heads=16,
    vocab_size=8192,
    max_position_embeddings=512,
)
PROBE = Sizes(product=1024, elements=2**24, copy_bytes=0, disk_bytes=0, seconds=1.0)
BATCH_PARTS = (1, 2, 4, 8)  # accelerate's batch: all prompts, or a fraction of them
ROOM_SHARES = (
    1.0,
    0.8,
    0.6,
)  # of the memory left for accelerate's map: more may cause page thrashing
TRIAL_SECONDS = 30.0  # for one batch
SLOWDOWN = 3.0  # of all prompts relative to one batch: more indicates page thrashing
CHUNK_BYTES = 2**22
SAME = 0.9  # minimum share of equal answers; batch size may change near ties
WALL = "seconds"
READ = "bytes read from disk"
FLOAT = "bf16"
FORMATS = {"weight_dtype": FLOAT, "kv_cache_dtype": FLOAT}
SHARES = ("weights_cpu", "weights_disk", "kv_cpu", "kv_disk", "activations_cpu")


@dataclass(frozen=True)
class Effort:
    """The sizes of model, prompt batch and cap, and the number of measured rounds."""

    shape: DemoModel = SHAPE
    cap_bytes: int = 720_000_000  # a third of weights and KV cache, plus the process
    num_prompts: int = 64
    input_tokens: int = 16
    output_tokens: int = 8
    rounds: int = 4
    probe: Sizes = PROBE


def ratios(effort: Effort = Effort()) -> Iterator[Ratio]:
    """Yield the ratios of seconds and bytes read between the methods for the same prompts.

    Raises:
        NoMemoryCapError: no cgroup with a limit can be created.
        RuntimeError: the planner has no policy, a method failed, or the texts differ.
    """
    runtime_bytes = runtime_memory_bytes()
    with tempfile.TemporaryDirectory(prefix="slipway-bench-") as place:
        folders = [Path(place) / way for way in ("map", "policy")]
        _write_models(effort.shape, folders)
        request = question(effort, _machine(folders[0], runtime_bytes, effort))
        policy = policy_of(request)
        _print(f"policy: {policy.model_dump_json(exclude_defaults=True)}")
        order = _order(effort, folders[0])
        size = best_batch(effort, request, order)
        theirs = order.model_copy(update=size)
        ours = _order(effort, folders[1]).model_copy(update={"policy": policy})
        with ExitStack() as stack:
            ways = [
                stack.enter_context(start_capped_case(each, effort.cap_bytes))
                for each in (theirs, ours)
            ]
            yield from in_turns(ways, effort)


def question(effort: Effort, device: JsonObject) -> EstimateRequest:
    """Return the planner request for the prompts on this machine, with the cap as its memory."""
    disk = device.pop("disk_bandwidth_bytes_per_second")
    return EstimateRequest.model_validate(
        {
            "model": demo_config(effort.shape),
            "cluster": {
                "device": {"kind": "gpu", "memory_bytes": effort.cap_bytes, **device},
                "host_memory_bytes": 1,  # no memory besides the cap
                "host_memory_bandwidth_bytes_per_second": (
                    device["memory_bandwidth_bytes_per_second"]
                ),
                "disk_bandwidth_bytes_per_second": disk,
                "disk_capacity_bytes": 10**12,
            },
            "workload": {
                "kind": "generate",
                "batch_size": effort.num_prompts,
                "input_tokens": effort.input_tokens,
                "output_tokens": effort.output_tokens,
            },
            "strategy": FORMATS,
            "engine": "torch",
        }
    )


def policy_of(request: EstimateRequest) -> PolicyOffload:
    """Return the shares and micro-batch of the planner's linear programme.

    Raises:
        RuntimeError: no policy fits.
    """
    fields = {name: getattr(request, name) for name in ("model", "cluster", "workload", "engine")}
    answer = plan(PlanRequest(**fields, pins=FORMATS, objective="throughput"))
    if not answer.plans:
        msg = "the planner has no policy for this cap; give it more"
        raise RuntimeError(msg)
    best = answer.plans[0].strategy
    offload = best.offload or OffloadSpec()
    shares = {name: getattr(offload, name) for name in SHARES}
    return PolicyOffload(**shares, micro_batch_size=best.micro_batch_size)


def rooms(effort: Effort, request: EstimateRequest) -> dict[int, int]:
    """Return for each batch size of accelerate the memory that the cap leaves for weights.

    Cache, activations and process memory are the planner's estimates for that batch.
    """
    free_bytes = {}
    for parts in BATCH_PARTS:
        size = effort.num_prompts // parts
        workload = request.workload.model_copy(update={"batch_size": size})
        batch_request = request.model_copy(update={"workload": workload})
        breakdown = estimate(batch_request).memory.breakdown_bytes
        free_bytes[size] = int(effort.cap_bytes - sum(breakdown.values()) + breakdown["weights"])
    return free_bytes


def best_batch(effort: Effort, request: EstimateRequest, order: Order) -> dict[str, int]:
    """Return accelerate's fastest batch size and map memory.

    Each is tried with one batch; the fastest that keeps its pace over all prompts is selected.

    Raises:
        RuntimeError: under this cap no batch completes.
    """
    taken: dict[float, dict[str, int]] = {}
    for size, room in rooms(effort, request).items():
        for share in ROOM_SHARES:
            candidate = {"batch_size": size, "memory_bytes": int(share * room)}
            if candidate["memory_bytes"] < _smallest(effort.shape):
                break
            tried = order.model_copy(update={**candidate, "num_prompts": size})
            seconds = _tried(tried, effort, TRIAL_SECONDS)
            if seconds is not None:
                taken[seconds * effort.num_prompts / size] = candidate
    for seconds in sorted(taken):
        whole = order.model_copy(update=taken[seconds])
        if _tried(whole, effort, SLOWDOWN * seconds) is not None:
            return taken[seconds]
    msg = f"accelerate's map answers nothing in {effort.cap_bytes} bytes; raise cap_bytes"
    raise RuntimeError(msg)


def _tried(order: Order, effort: Effort, timeout_seconds: float) -> float | None:
    """Return the seconds of an order's prompts, or None if it is killed or too slow.

    The better of two runs: the first also loads the resident weights.
    """
    label = f"{order.num_prompts} prompts, map of {order.memory_bytes}, {order.batch_size} a batch"
    try:
        with start_capped_case(order, effort.cap_bytes) as way:
            seconds = min(way.run(timeout_seconds)["seconds"] for _ in range(2))
    except BenchProcessError as error:
        _print(f"{label}: {error}")
        return None
    _print(f"{label}: {seconds:.1f} s")
    return seconds


def _smallest(shape: DemoModel) -> int:
    """Return the minimum bytes of a map: two layers and everything outside of the layers."""
    around = 2 * shape.vocab_size * shape.hidden_size
    layer = shape.hidden_size * (4 * shape.hidden_size + 3 * shape.intermediate_size)
    return DTYPE.itemsize * (around + 2 * layer)


def in_turns(methods: Sequence[BenchProcess], effort: Effort) -> Iterator[Ratio]:
    """Yield the ratios of the methods' seconds and bytes per round, after a warm-up round.

    Raises:
        RuntimeError: a method failed, or the texts differ.
    """
    runs: list[list[RunMeasurements]] = [[] for _ in methods]
    order = list(range(len(methods)))
    for number in range(effort.rounds + 1):
        for at in order if number % 2 else reversed(order):
            answered = methods[at].run()
            runs[at].append(answered)
            _print(
                f"round {number}, way {at}: {answered['seconds']:.2f} s, {_figures_text(answered)}"
            )
        texts = [each[-1]["answers"] for each in runs]
        same = sum(map(str.__eq__, *texts)) / effort.num_prompts
        if same < SAME:
            msg = f"only {same:.0%} of the answers are the same; nothing is compared"
            raise RuntimeError(msg)
    seconds = [[each["seconds"] for each in method_runs[1:]] for method_runs in runs]
    yield ratio_of(NAME, seconds[0], seconds[1])._replace(of=WALL)
    read = [
        [after - before for before, after in pairwise(_read(method_runs))] for method_runs in runs
    ]
    if all(map(min, read)):  # nothing is read if everything fits below the cap
        yield ratio_of(READ_NAME, read[0], read[1])._replace(of=READ)


def _read(runs: Sequence[RunMeasurements]) -> list[int]:
    return [each["read_bytes"] for each in runs]


def _figures_text(answered: RunMeasurements) -> str:
    figures = {name: round(value, 4) for name, value in answered["figures"].items()}
    used, read = answered["processor_seconds"], answered["read_bytes"] / 1e9
    return f"{used:.2f} processor seconds, {read:.2f} GB read so far {figures or ''}"


def _machine(folder: Path, runtime_bytes: int, effort: Effort) -> JsonObject:
    """Return this machine's measured rates under the planner's field names."""
    bandwidth = statistics.median(triad_rates(CPU, effort.probe))
    rates: JsonObject = {
        "memory_bandwidth_bytes_per_second": bandwidth,
        "peak_flops_per_second": {
            FLOAT: statistics.median(matmul_rates(FLOAT, CPU, effort.probe).samples)
        },
        "host_to_device_bandwidth_bytes_per_second": bandwidth / 2,  # a copy reads and writes
        "op_overhead_seconds": operator_overhead(CPU),
        "runtime_overhead_bytes": runtime_bytes,
        "provenance": "measured",
        "disk_bandwidth_bytes_per_second": _disk_rate(folder),
    }
    _print(f"machine: {json.dumps(rates)}")
    return rates


def _disk_rate(folder: Path) -> float:
    """Return the bytes per second of reading the model's file with a cold page cache."""
    (path,) = weight_files(folder)
    forget(folder)
    data = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        began = time.perf_counter()
        while file.readinto(data):
            pass
        seconds = time.perf_counter() - began
    forget(folder)
    return path.stat().st_size / seconds


def _write_models(shape: DemoModel, folders: Sequence[Path]) -> None:
    """Write the same random model to every folder and evict it from the page cache."""
    torch.manual_seed(17)
    first, *others = folders
    fresh_model(demo_config(shape), DTYPE).save_pretrained(str(first))
    for other in others:
        shutil.copytree(first, other)
    for each in folders:
        forget(each)


def _order(effort: Effort, folder: Path) -> Order:
    scratch = folder.with_name(f"{folder.name}-scratch")
    scratch.mkdir()
    return Order(
        folder=str(folder),
        scratch=str(scratch),
        num_prompts=effort.num_prompts,
        input_tokens=effort.input_tokens,
        output_tokens=effort.output_tokens,
        vocab_size=effort.shape.vocab_size,
    )


def _print(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    prepare_process()
    for ratio in ratios():
        sys.stdout.write(json.dumps(ratio) + "\n")
        sys.stdout.flush()
