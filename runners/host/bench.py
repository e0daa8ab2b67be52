"""Benchmarks of jobs: each case is launched as a job is, and its figures are kept."""

import datetime as dt
import importlib.metadata
import json
import logging
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from runners.host.schedulers import SCHEDULERS
from runners.jobspec import (
    ArtefactModel,
    CompressSpec,
    DemoModel,
    EvaluateSpec,
    JobSpec,
    TrainSpec,
)
from runners.jobspec.compress import WeightDtype
from runners.jobspec.kinds import KINDS
from runners.jobspec.train import LayoutOptions
from runners.launchers import launch
from runners.shared.config import HostConfig
from runners.shared.facts import Microbench
from runners.shared.log_text import last_line
from runners.shared.messages import RunRequest

# ---------------------------------------------------------------------------
# Runs the micro-benchmark as a low-priority child process and parses its output.
# ---------------------------------------------------------------------------


# It runs in the host's folder, and measures the disk where jobs write.
COMMAND = (sys.executable, "-m", "runners.jobs.bench.device_rates", "--folder", ".")
TIMEOUT_SECONDS = 300.0
RETRY_SECONDS = 600.0
LOW_PRIORITY = 10

log = logging.getLogger(__name__)


def command_for(config: HostConfig) -> Sequence[str]:
    """Return the benchmark's command; with a scheduler it runs on a node, as jobs do."""
    chosen = config.scheduler
    return SCHEDULERS[chosen.KIND].on_node(chosen, COMMAND) if chosen else COMMAND


class MicrobenchRunner:
    """Runs at most one benchmark at a time; callers must not run it in parallel with jobs."""

    def __init__(self, host_dir: Path, command: Sequence[str] = COMMAND) -> None:
        self._host_dir = host_dir
        self._command = command
        self._child: subprocess.Popen[bytes] | None = None
        self._deadline = 0.0
        self._not_before = 0.0
        self.problem: str | None = None

    @property
    def is_running(self) -> bool:
        """Return whether a benchmark is running."""
        return self._child is not None

    def start(self) -> None:
        """Start a benchmark, unless one is running or failed recently."""
        if self._child or time.monotonic() < self._not_before:
            return
        self._child = subprocess.Popen(
            ["nice", "-n", str(LOW_PRIORITY), *self._command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=launch.render_env(self._host_dir, 1),
            cwd=self._host_dir,
            start_new_session=True,
        )
        self._deadline = time.monotonic() + TIMEOUT_SECONDS

    def retry(self) -> None:
        """Allow an immediate retry of a failed benchmark."""
        self._not_before = 0.0

    def cancel(self) -> None:
        """Kill a running benchmark: jobs have priority."""
        if self._child:
            self._child.kill()
            self._child.communicate()
            self._child = None

    def poll(self) -> Microbench | None:
        """Return the result once after a successful benchmark, otherwise None."""
        child = self._child
        if child is None:
            return None
        if child.poll() is None:
            if time.monotonic() > self._deadline:
                self.cancel()
                self._fail(f"it took more than {TIMEOUT_SECONDS:.0f} s")
            return None
        output, errors = child.communicate()
        self._child = None
        return self._read(output, errors, child.returncode)

    def _read(self, output: bytes, errors: bytes, returncode: int) -> Microbench | None:
        document = output.strip().rpartition(b"\n")[2]  # a library may print before it
        try:
            result = Microbench.model_validate_json(document)
        except ValidationError:
            self._fail(last_line(errors, f"exit code {returncode}, no result"))
            return None
        self.problem = None
        return result

    def _fail(self, words: str) -> None:
        self._not_before = time.monotonic() + RETRY_SECONDS
        self.problem = f"the micro-benchmark failed: {words}"
        log.warning("%s", self.problem)


# ---------------------------------------------------------------------------
# Cases, requests and results that benchmarks exchange with their job processes.
# ---------------------------------------------------------------------------


# Measured ratios of a baseline to a technique: above 1 the technique uses less.
#
# ``of`` is the quantity: processor seconds, bytes, passes. Each stored ratio includes when and
# where it was measured.


SHARED_LOAD = 0.5  # of a core: below it the machine counts as idle
LIBRARIES = ("torch", "transformers", "accelerate", "torchao", "bitsandbytes", "peft")


class Ratio(NamedTuple):
    """One comparison; ``low`` and ``high`` are its 95 % confidence interval over ``n`` samples."""

    name: str
    value: float
    low: float
    high: float
    n: int
    of: str

    @classmethod
    def exact(cls, name: str, baseline: float, technique: float, of: str) -> "Ratio":
        """Return the ratio of two deterministic amounts."""
        value = baseline / technique
        return cls(name, value, value, value, 1, of)


class StoredRatio(BaseModel):
    """A measured ratio as it is stored: with the date, machine and command of its measurement."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    value: PositiveFloat
    low: PositiveFloat
    high: PositiveFloat
    n: PositiveInt
    of: str
    date: dt.date
    versions: Mapping[str, str]
    machine: str
    command: str

    @classmethod
    def measured_now(cls, ratio: Ratio, command: str, load: float = 0.0) -> "StoredRatio":
        """Return a just measured ratio with its context; ``load`` is the load before it."""
        return cls(
            **ratio._asdict(),
            date=dt.datetime.now(dt.UTC).date(),
            versions=versions(),
            machine=machine_class(load),
            command=command,
        )


def versions() -> dict[str, str]:
    """Return the versions of Python and of the jobs' libraries."""
    installed = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def machine_class(load: float = 0.0) -> str:
    """Return an anonymous description of this machine, and whether it was shared.

    ``load`` is the load average of the preceding minute.
    """
    cores = len(os.sched_getaffinity(0))
    kind = f"{cores} cores, {platform.machine()}, {platform.system()}"
    return f"{kind}, shared (load {load:.1f} before)" if load >= SHARED_LOAD else kind


# Training cases of the memory benchmark, and its result type.


Adapter = Literal["compute", "nf4"]
LENGTH, ROWS = 256, 2
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}


class Case(NamedTuple):
    """One training: ranks, ZeRO stage, recomputation, optimiser and adapter."""

    name: str
    ranks: int = 1
    zero_stage: int = 0
    recomputation: str = "none"
    optimizer: str = "adamw"
    adapter: Adapter | None = None
    rank: int = 16  # of the adapter

    @property
    def is_unsharded(self) -> bool:
        """Return whether every rank holds the whole model and its optimiser states."""
        return self.zero_stage == 0

    @property
    def compute_dtype(self) -> str:
        """Return the compute dtype: bf16 with adapters, whose base has 16-bit or 4-bit weights."""
        return "bf16" if self.adapter else "fp32"

    @property
    def training(self) -> dict[str, Any]:
        """Return the fields of the job spec."""
        layout = {"data_parallel_size": self.ranks, "zero_stage": self.zero_stage}
        return {
            "sequence_length": LENGTH,
            "micro_batch_size": ROWS,
            "gradient_accumulation_steps": self.ranks,
            "max_steps": 100,
            "time_budget_seconds": None,
            "compute_dtype": self.compute_dtype,
            "activation_recomputation": self.recomputation,
            "optimizer": self.optimizer,
            "layout": layout if self.ranks > 1 else None,
        }


ZERO = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
CASES = (
    Case("AdamW"),
    Case("selective recomputation", recomputation="selective"),
    Case("full recomputation", recomputation="full"),
    Case("AdamW 8-bit", optimizer="adamw_8bit"),
    Case("LOMO", optimizer="lomo"),
    Case("LoRA", adapter="compute"),
    Case("QLoRA", adapter="nf4"),
    *(
        Case(f"{name} on {ranks} ranks", ranks=ranks, zero_stage=stage)
        for ranks in (2, 4)
        for stage, name in enumerate(ZERO)
    ),
)


class RankMemory(BaseModel):
    """The fullest rank's bytes per planner term, and its process memory at start and peak.

    ``activations`` include communication buffers: everything that a step allocates except
    gradients.
    """

    TERMS: ClassVar = ("weights", "adapters", "gradients", "optimizer_states", "activations")
    model_config = ConfigDict(frozen=True, extra="forbid")

    case: str
    weights: NonNegativeInt
    adapters: NonNegativeInt
    gradients: NonNegativeInt
    optimizer_states: NonNegativeInt
    activations: NonNegativeInt
    process_peak: NonNegativeInt
    process_start: NonNegativeInt


# Request and results of the layout benchmark.


Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "send"]


class LayoutBenchRequest(BaseModel):
    """A training and the layouts to time it in; None is a single process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: Mapping[str, Any]
    training: Mapping[str, Any]  # fields of a TrainSpec, without model and layout
    layouts: Mapping[str, LayoutOptions | None]
    ranks: PositiveInt = 4
    rounds: PositiveInt = 5
    final_rounds: NonNegativeInt = (
        0  # additional rounds of the first choice and the fastest other layout
    )
    steps: PositiveInt = 3  # a round's time is their median
    warm_up_steps: NonNegativeInt = 1
    max_round_seconds: PositiveFloat = 2.0  # of timed steps, of which one is always timed
    first_choice: str | None = None  # the layout whose regret is measured

    @property
    def always(self) -> frozenset[str]:
        """Return the layouts that run in every round, however slow."""
        return frozenset({self.first_choice} if self.first_choice else ())

    def ranks_of(self, name: str) -> int:
        """Return the number of ranks of a layout."""
        layout = self.layouts[name]
        return 1 if layout is None else layout.world_size


class StepTime(BaseModel):
    """A layout's median step time in one round, with synchronised ranks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layout: str
    round: NonNegativeInt
    seconds: NonNegativeFloat


class CollectiveTime(BaseModel):
    """Latency and bandwidth of one collective among the ranks of this machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    collective: Collective
    ranks: PositiveInt
    latency_seconds: NonNegativeFloat
    bytes_per_second: PositiveFloat  # bytes sent over the ring; for send, the message's bytes


# ---------------------------------------------------------------------------
# Benchmarks compression: every method on the demo model, with real jobs in one host folder.
# ---------------------------------------------------------------------------


TRAINED = "trained"
GROUP_SIZE = 32
CALIBRATION_TOKENS = 32_768
EVALUATION_TOKENS = 32_768
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "bf16": {"method": "bf16"},
    "int8": {"method": "int8"},
    "int8 dynamic": {"method": "int8_dynamic"},
    "nf4": {"method": "nf4"},
    **{
        f"{method} {bits} bit": {"method": method, "bits": bits}
        for bits in (4, 3)
        for method in ("rtn", "gptq", "quantease")
    },
    **{f"{method} 50 %": {"method": method} for method in ("magnitude", "sparsegpt")},
    **{
        f"{method} 2 bit": {"method": method, "bits": 2}
        for method in ("rtn", "gptq", "norm_tweaking", "quantease")
    },
    **{f"awq {bits} bit": {"method": "awq", "bits": bits} for bits in (4, 3)},
    "norm_tweaking 3 bit": {"method": "norm_tweaking", "bits": 3},
    "quantease 3 bit, 1 % outliers": {"method": "quantease", "bits": 3, "outlier_share": 0.01},
    "finequant 3 bit": {"method": "finequant", "bits": 3},
    "fptq 4 bit, 8 bit activations": {"method": "fptq", "bits": 4},
    "smoothquant 8 bit, 8 bit activations": {"method": "smoothquant"},
    "fp8": {"method": "fp8"},
    "wanda 50 %": {"method": "wanda"},
    **{
        f"{method} 2:4": {"method": method, "pattern": "2:4"}
        for method in ("magnitude", "wanda", "sparsegpt")
    },
    "llm_pruner 20 %": {"method": "llm_pruner", "sparsity": 0.2},
    "sheared_llama 20 %": {"method": "sheared_llama", "sparsity": 0.2},
    **{
        f"gguf {kind}": {"method": "gguf", "gguf_type": kind}
        for kind in ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0")
    },
}


class BenchFailedError(Exception):
    """A job of the benchmark failed; the message has its last line."""


class Row(NamedTuple):
    """One compression method and its job's measurements."""

    name: str
    measured: dict[str, float]


def rows(folder: Path, training: TrainSpec, names: tuple[str, ...] = ()) -> Iterator[Row]:
    """Train the demo model in ``folder`` and yield one row per setting."""
    if not (folder / "attempts" / TRAINED / "output" / "model").is_dir():
        run(folder, TRAINED, training)
    for name in names or SETTINGS:
        yield Row(name, run(folder, attempt_of(name), spec_of(name)))


def spec_of(name: str) -> CompressSpec:
    """Return the job spec of a row."""
    fields: dict[str, Any] = {
        "group_size": GROUP_SIZE,
        "calibration_tokens": CALIBRATION_TOKENS,
        "evaluation_tokens": EVALUATION_TOKENS,
        **SETTINGS[name],
    }
    return CompressSpec(model=ArtefactModel(attempt_id=TRAINED), **fields)


def attempt_of(name: str) -> str:
    """Return the attempt id of a row."""
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def run(folder: Path, attempt_id: str, spec: JobSpec) -> dict[str, float]:
    """Run one job to its end and return its measurements.

    Raises:
        BenchFailedError: the job failed.
    """
    attempt = folder / "attempts" / attempt_id
    attempt.mkdir(parents=True, exist_ok=True)
    request = RunRequest(attempt_id=attempt_id, job_id="bench", number=1, fence="f", spec=spec)
    (attempt / "spec.json").write_text(request.model_dump_json())
    events = attempt / "events.jsonl"
    with events.open("wb") as sink:
        ended = subprocess.run(
            [sys.executable, "-m", KINDS[spec.kind].module, str(attempt)],
            env=os.environ
            | {"SLIPWAY_HOST_DIR": str(folder), "SLIPWAY_EVENT_FD": str(sink.fileno())},
            pass_fds=[sink.fileno()],
            stderr=subprocess.PIPE,
            check=False,
        )
    if ended.returncode:
        last = last_line(ended.stderr, f"exit code {ended.returncode}")
        raise BenchFailedError(f"{attempt_id}: {last}")
    results = [json.loads(line) for line in events.read_text().splitlines()]
    measured: dict[str, float] = [
        each["body"]["measured"] for each in results if each["kind"] == "result"
    ][-1]
    return measured


# Benchmarks compression: the demo model in fp32, and compressed by real jobs.
#
# Bytes are exact. Perplexity ratios are paired over the same held-out windows: against the
# original, or between two methods.


NAMES = (
    "bf16", "int8", "int8 dynamic", "nf4", "gptq 4 bit", "rtn 2 bit", "gptq 2 bit",
    "magnitude 50 %", "sparsegpt 50 %",
)  # fmt: skip
STORED = {
    "int8": "int8",
    "int8 dynamic": "int8 dynamic",
    "nf4": "nf4",
    "gptq 4 bit": "GPTQ 4-bit",
    "sparsegpt 50 %": "SparseGPT",
}
BETTER = {  # ratio -> the methods expected to be worse and better
    "round-to-nearest / GPTQ perplexity, 2 bit": ("rtn 2 bit", "gptq 2 bit"),
    "magnitude / SparseGPT perplexity, half of the weights": ("magnitude 50 %", "sparsegpt 50 %"),
    "bf16 / int8 dynamic perplexity": ("bf16", "int8 dynamic"),
}
PERPLEXITY = "perplexity"
WINDOWS = EVALUATION_TOKENS // (DemoModel().max_position_embeddings // 2)


TRAINING = TrainSpec(max_steps=2700, time_budget_seconds=None, compute_dtype="fp32")


def ratios(folder: Path, training: TrainSpec = TRAINING) -> Iterator[Ratio]:
    """Train the demo model, compress it with each method, and yield the ratios.

    Training is limited by steps, not seconds, so that a busy machine yields the same model.
    """
    measured = {row.name: row.measured for row in rows(folder, training, NAMES)}
    yield perplexity_ratio_of(
        "fp32 / bf16 perplexity", _paired_evaluation(folder, TRAINED, TRAINED, "fp32")
    )
    stored = (folder / "attempts" / TRAINED / "output/model/model.safetensors").stat().st_size
    yield Ratio.exact("fp32 / bf16 weights", stored, measured["bf16"]["disk_bytes"], "bytes")
    yield from size_ratios(measured)
    yield from method_perplexity_ratios(folder)


def method_perplexity_ratios(folder: Path) -> Iterator[Ratio]:
    """Yield the perplexity ratios between two methods, from jobs that evaluate both.

    Paired per window: two separate intervals against the original would hide the difference.
    """
    for title, (worse, better) in BETTER.items():
        dtype = spec_of(worse).weight_dtype
        measured = _paired_evaluation(folder, attempt_of(worse), attempt_of(better), dtype)
        yield perplexity_ratio_of(title, measured)


def _paired_evaluation(
    folder: Path, attempt_id: str, other_id: str, weight_dtype: WeightDtype
) -> dict[str, float]:
    spec = EvaluateSpec(
        model=ArtefactModel(attempt_id=attempt_id),
        original=ArtefactModel(attempt_id=other_id),
        weight_dtype=weight_dtype,
        evaluation_tokens=EVALUATION_TOKENS,
    )
    return run(folder, f"{attempt_id}-against-{other_id}", spec)


def size_ratios(measured: Mapping[str, Mapping[str, float]]) -> Iterator[Ratio]:
    """Yield the size ratios of the methods' rows."""
    for name, title in STORED.items():
        row = measured[name]
        small = row.get("compressed_bytes", row["matrices_bytes"])
        yield Ratio.exact(
            f"bf16 / {title} matrices", row["original_matrices_bytes"], small, "bytes"
        )


def perplexity_ratio_of(title: str, figures: Mapping[str, float]) -> Ratio:
    """Return the perplexity ratio of a paired evaluation, with its 95 % interval."""
    value, low, high = (figures[f"perplexity_ratio{end}"] for end in ("", "_low", "_high"))
    return Ratio(title, value, low, high, WINDOWS, PERPLEXITY)
