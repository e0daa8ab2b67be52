"""Cases, requests and results that benchmarks exchange with their job processes."""

import datetime as dt
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from runners.jobspec.train import LayoutOptions

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


class KeptRatio(BaseModel):
    """A ratio with date, machine and command of its measurement."""

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
    def taken_now(cls, ratio: Ratio, command: str, load: float = 0.0) -> "KeptRatio":
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
    def is_whole(self) -> bool:
        """Return whether every rank holds the whole model and its states."""
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


class Held(BaseModel):
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
    patience_seconds: PositiveFloat = 2.0  # a slower step is timed once per round
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
