"""Stage "distributed": collectives by size, and layouts against one device."""

import contextlib
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from runners.jobs.bench.device_rates import wait_for
from runners.jobs.loading import fresh_model
from runners.jobs.prove.correctness import SHAPE, TRAINING
from runners.jobs.prove.recorder import Recorder
from runners.jobs.ranks import Ranks
from runners.jobs.runtime import num_threads
from runners.jobs.train.local_ranks import RankProcesses, load_what_training_loads, on_ranks

# Training layouts against one device: the same losses, and how many tokens per second.
#
# Each layout runs in processes of its own: first a few steps of a small model, whose losses and
# gradient norms must be those of one device, then timed steps of a larger one. The larger one's
# batch is the same on any number of devices (strong scaling); its scaling efficiency is tokens/s
# divided by the number of devices times one device's tokens/s.


RANKS = 2  # of the comparison with one device
MAX_RANKS = 8  # that the sizes below can be divided by
STEPS = 3
WARM_UP_STEPS, TIMED_STEPS = 2, 5
PART_SECONDS, GPU_PART_SECONDS = 8.0, 15.0  # to have left before a layout starts
LEAST_GPU_BYTES = 15 * 2**30  # for the timed training: twice its states
TOLERANCE = 0.01  # sums in another order, of products in bf16
EXPERTS: Mapping[str, Any] = {
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
SECONDS = "seconds"  # the timed steps' keys in a rank's results
READ = "Run the stage alone, with --stages distributed."
Start = Callable[[int, Callable[[Ranks], Mapping[str, float]], str], list[dict[str, float]]]


class Layout(NamedTuple):
    """The trainer's layout fields per number of ranks; None: copies that average gradients."""

    fields: Callable[[int], Mapping[str, Any] | None]
    is_sparse: bool = False  # trains a mixture of experts


LAYOUTS: Mapping[str, Layout] = {
    "data parallel": Layout(lambda _ranks: None),
    "ZeRO 3": Layout(lambda ranks: {"data_parallel_size": ranks, "zero_stage": 3}),
    "tensor parallel": Layout(lambda ranks: {"tensor_parallel_size": ranks}),
    "pipeline parallel": Layout(lambda ranks: {"pipeline_parallel_size": ranks}),
    "expert parallel": Layout(
        lambda ranks: {"data_parallel_size": ranks, "expert_parallel_size": ranks},
        is_sparse=True,
    ),
}


class Load(NamedTuple):
    """The timed training: its dense shape and what differs with experts, and its batch."""

    shape: Mapping[str, Any]
    experts: Mapping[str, Any]
    sequence_length: int
    micro_batch_size: int
    micro_batches: int
    compute_dtype: str

    @property
    def tokens(self) -> int:
        """Return the tokens of a step."""
        return self.sequence_length * self.micro_batch_size * self.micro_batches

    def config(self, *, is_sparse: bool) -> dict[str, Any]:
        """Return the config.json of the dense model or the mixture of experts."""
        return {**self.shape, **self.experts} if is_sparse else dict(self.shape)


# Weights, gradients and moments take 16 bytes per weight: 8.1 GB of 508 M weights, and 6.6 GB
# of 411 M with experts.
ON_GPUS = Load(
    {
        **SHAPE,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    },
    {**EXPERTS, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 4},
    sequence_length=2048,
    micro_batch_size=1,
    micro_batches=8,
    compute_dtype="bf16",
)
ON_A_CPU = Load(
    {**SHAPE, "hidden_size": 256, "intermediate_size": 768},
    {**EXPERTS, "intermediate_size": 256},
    sequence_length=64,
    micro_batch_size=1,
    micro_batches=4,
    compute_dtype="fp32",
)
SMALL = Load(SHAPE, {**EXPERTS, "intermediate_size": 128}, 32, 1, 2, "fp32")


class Work(NamedTuple):
    """What the ranks of one process group do: compare, measure, or both."""

    folder: Path
    layout: Mapping[str, Any] | None
    is_sparse: bool
    is_compared: bool
    load: Load | None  # None: nothing is timed
    backend: str


class LayoutRuns:
    """Runs the layouts over this host's devices and records them against one device.

    ``start`` runs a function on a number of ranks; ``devices`` is how many there are to time:
    GPUs, or cores of the processor.
    """

    def __init__(
        self, recorder: Recorder, folder: Path, start: Start, backend: str, devices: int
    ) -> None:
        self._recorder, self._folder = recorder, folder
        self._start, self._backend = start, backend
        self._devices = devices
        self._on_cpu = recorder.device.type == "cpu"
        self._load = SMALL if recorder.is_small else ON_A_CPU if self._on_cpu else ON_GPUS
        self._seconds = PART_SECONDS if self._on_cpu else GPU_PART_SECONDS
        self._one_device: dict[bool, Mapping[str, float]] = {}

    def record(self) -> None:
        """Compare and time each layout on two ranks, and time it on all devices."""
        for name, layout in LAYOUTS.items():
            for count in self._counts():
                label = name if count == RANKS else f"{name} over {count}"
                if self._recorder.has_time(label, self._seconds):
                    with self._recorder.part(label, advice=READ):
                        self._record(name, layout, count)

    def _counts(self) -> tuple[int, ...]:
        if self._on_cpu or self._recorder.is_small or self._devices < 2 * RANKS:
            return (RANKS,)
        return RANKS, min(MAX_RANKS, 2 ** (self._devices.bit_length() - 1))

    def _record(self, name: str, layout: Layout, count: int) -> None:
        alone, lacking = self._alone(layout), self._lacking(count)
        work = self._work(layout, layout.fields(count))
        work = work._replace(is_compared=count == RANKS, load=None if lacking else self._load)
        lead, *_ = self._start(count, partial(on_rank, work), self._backend)
        if work.is_compared:
            self._compare(name, lead, alone)
        if lacking:
            self._recorder.missing(f"training, {name}", lacking)
        else:
            self._speed(f"{name} over {count}", layout, count, seconds_of(lead))

    def _lacking(self, count: int) -> str:
        """Return why no training is timed on so many devices, or ""."""
        if self._devices < count:
            kind = "cores" if self._on_cpu else "GPUs"
            return f"it needs {count} {kind}, and this host has {self._devices}"
        if self._on_cpu or self._recorder.is_small:
            return ""
        memory = torch.cuda.get_device_properties(self._recorder.device).total_memory
        if memory < LEAST_GPU_BYTES:
            return f"it needs {LEAST_GPU_BYTES} bytes on each GPU, and this one has {memory}"
        return ""

    def _alone(self, layout: Layout) -> Mapping[str, float]:
        """Return one device's results, which are measured once for each kind of model."""
        if layout.is_sparse not in self._one_device:
            work = self._work(layout, None)
            (found,) = self._start(1, partial(on_rank, work), self._backend)
            self._one_device[layout.is_sparse] = found
            if work.load is not None:
                which = ", mixture of experts" if layout.is_sparse else ""
                self._recorder.figure(
                    f"training, one device{which}",
                    "tokens/s",
                    [self._load.tokens / each for each in seconds_of(found)],
                    self._how(layout),
                )
        return self._one_device[layout.is_sparse]

    def _work(self, layout: Layout, fields: Mapping[str, Any] | None) -> Work:
        return Work(
            folder=self._folder,
            layout=fields,
            is_sparse=layout.is_sparse,
            is_compared=True,
            load=None if self._lacking(RANKS) else self._load,
            backend=self._backend,
        )

    def _compare(self, name: str, found: Mapping[str, float], alone: Mapping[str, float]) -> None:
        distances = [
            abs(found[key] / value - 1)
            for key, value in alone.items()
            if not key.startswith(SECONDS)
        ]
        apart = max(distances, key=lambda each: math.inf if math.isnan(each) else each)
        self._recorder.check(
            name,
            is_met=apart <= TOLERANCE,
            expected=f"losses and gradient norms of one device over {STEPS} steps, within "
            f"{TOLERANCE:.1%}",
            found=f"{apart:.2%} apart",
            advice="Jobs in this layout would train another model.",
        )

    def _speed(self, label: str, layout: Layout, count: int, seconds: list[float]) -> None:
        one = statistics.median(seconds_of(self._alone(layout)))
        self._recorder.figure(
            f"training, {label}",
            "tokens/s",
            [self._load.tokens / each for each in seconds],
            self._how(layout),
        )
        self._recorder.figure(
            f"scaling efficiency, {label}",
            "ratio",
            [one / (count * each) for each in seconds],
            f"tokens/s over {count} x one device's {self._load.tokens / one:.0f} tokens/s",
        )

    def _how(self, layout: Layout) -> str:
        config = self._load.config(is_sparse=layout.is_sparse)
        model = f"{config['num_hidden_layers']} layers of {config['hidden_size']}"
        step = f"{self._load.tokens} tokens a step, {self._load.compute_dtype}, {model}"
        if not self._on_cpu:
            return step
        return f"{step}; a device is one of {RANKS} shares of this processor's cores"


def seconds_of(found: Mapping[str, float]) -> list[float]:
    """Return the seconds of each timed step."""
    return [value for key, value in found.items() if key.startswith(SECONDS)]


def rank_device(backend: str, ranks: Ranks) -> torch.device:
    """Return the device of a rank: its GPU with NCCL, otherwise the CPU."""
    if "nccl" not in backend:
        return torch.device("cpu")
    torch.cuda.set_device(ranks.rank)
    return torch.device("cuda", ranks.rank)


def on_rank(work: Work, ranks: Ranks) -> dict[str, float]:
    """Return losses and gradient norms of the small model, and step seconds of the larger."""
    device = rank_device(work.backend, ranks)
    if device.type == "cpu":  # one device has as many cores as each of the ranks
        torch.set_num_threads(max(1, num_threads() // RANKS))
    with tempfile.TemporaryDirectory(dir=work.folder) as place:
        found = _losses(work, Path(place), device, ranks) if work.is_compared else {}
        if work.load is not None:
            found |= _step_seconds(work, work.load, Path(place), device, ranks)
    return found


def _losses(work: Work, place: Path, device: torch.device, ranks: Ranks) -> dict[str, float]:
    from runners.jobs.train.trainer import random_token_trainer

    fields = {**TRAINING, **({"layout": work.layout} if work.layout else {})}
    shape = SHAPE
    if work.is_sparse:  # in bf16, rounding changes which experts are chosen
        shape, fields["compute_dtype"] = {**SHAPE, **EXPERTS}, "fp32"
    trainer = random_token_trainer(fields, shape, place, ranks, device=device)
    trainer.model.train()
    trainer.layout.begin()
    found: dict[str, float] = {}
    for step in range(STEPS):
        values = trainer.make_step()
        found |= {f"{name} {step}": float(values[name]) for name in ("loss", "grad_norm")}
        trainer.state.step += 1
    return found


def _step_seconds(
    work: Work, load: Load, place: Path, device: torch.device, ranks: Ranks
) -> dict[str, float]:
    """Return the seconds of each timed step, until the last rank has ended it."""
    from runners.jobs.train.trainer import random_token_trainer

    config = load.config(is_sparse=work.is_sparse)
    torch.manual_seed(0)
    with device:
        model = fresh_model(config, torch.float32)
    if not ranks.is_alone:  # GPUs of two kinds draw other numbers
        for weight in model.parameters():
            dist.broadcast(weight.data, src=ranks.lead)
    fields = {
        "sequence_length": load.sequence_length,
        "micro_batch_size": load.micro_batch_size,
        "gradient_accumulation_steps": load.micro_batches,
        "compute_dtype": load.compute_dtype,
        "max_steps": 1000,
        "time_budget_seconds": None,
        **({"layout": work.layout} if work.layout else {}),
    }
    trainer = random_token_trainer(fields, config, place, ranks, model=model, device=device)
    trainer.model.train()
    trainer.layout.begin()
    found: dict[str, float] = {}
    for step in range(WARM_UP_STEPS + TIMED_STEPS):
        began = time.perf_counter()
        trainer.make_step()
        wait_for(device)
        ranks.total([0.0])
        if step >= WARM_UP_STEPS:
            found[f"{SECONDS} {step}"] = time.perf_counter() - began
    return found


SIZES = (2**12, 2**20, 2**28)  # bytes of an all-reduce
CPU_SIZES = (2**12, 2**20, 2**24)
REPETITIONS = 5
SUM = 3.0  # of the ranks' numbers, 1 and 2


def run(recorder: Recorder, folder: Path) -> None:
    """Measure collectives and compare layouts with one device, on two ranks or more."""
    is_gpu = recorder.device.type == "cuda"
    count = torch.cuda.device_count() if is_gpu else 0
    if is_gpu and count == 1:
        recorder.missing("NCCL", "this host has one GPU", "Run it on a host with several.")
    backend = "cpu:gloo,cuda:nccl" if count > 1 else "gloo"
    with rank_starter(has_gpu=torch.cuda.is_available()) as start:
        with recorder.part("collectives", advice=READ):
            _collectives(recorder, start, backend)
        LayoutRuns(recorder, folder, start, backend, count if is_gpu else num_threads()).record()


@contextlib.contextmanager
def rank_starter(*, has_gpu: bool) -> Iterator[Start]:
    """Yield a function that runs work on ranks of this machine.

    Without a GPU they are forks of this process, which has loaded the libraries. A process that
    has used CUDA has forks that cannot, so with a GPU they are processes of their own.
    """
    if not has_gpu:
        load_what_training_loads(SHAPE)
        yield on_ranks
        return
    with RankProcesses() as processes:
        yield processes.run


def _collectives(recorder: Recorder, start: Start, backend: str) -> None:
    sizes = SIZES if "nccl" in backend else CPU_SIZES
    lead, *_ = start(RANKS, partial(_all_reduces, sizes, backend), backend)
    for size in sizes:
        recorder.figure(f"all-reduce of {size} bytes over {backend}", "bytes/s", [lead[str(size)]])
    recorder.check(
        "sums of ranks",
        is_met=lead["sum"] == SUM,
        expected="1 + 2 = 3 on every element",
        found=f"{lead['sum']:g}",
    )


def _all_reduces(sizes: tuple[int, ...], backend: str, ranks: Ranks) -> dict[str, float]:
    device = rank_device(backend, ranks)
    found: dict[str, float] = {}
    for size in sizes:
        whole = torch.full((size // 4,), float(ranks.rank + 1), device=device)
        dist.all_reduce(whole)
        found["sum"] = float(whole.mean())
        times = []
        for _ in range(REPETITIONS):
            wait_for(device)
            began = time.perf_counter()
            dist.all_reduce(whole)
            wait_for(device)
            times.append(time.perf_counter() - began)
            whole.zero_()
        found[str(size)] = size / sorted(times)[REPETITIONS // 2]
    return found
