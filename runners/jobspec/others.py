"""Specs of the smaller job kinds: compress, evaluate, benchmark, drill, prove."""

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from runners.compress_options import CompressOptions, WeightDtype
from runners.evaluate_options import EvaluationTasks
from runners.jobspec.base import ModelRef, RunDocument
from runners.load_options import LoadOptions
from runners.prove.stages import STAGES, StageName


class CompressSpec(CompressOptions, RunDocument):
    """Compress a model's linear weights; report size, perplexity and speed before and after."""

    kind: Literal["compress"] = "compress"
    model: ModelRef
    prompt_tokens: PositiveInt = 128
    output_tokens: PositiveInt = 32
    seed: int = 17


class BenchmarkSpec(RunDocument):
    """Measure prefill and decode speed, peak memory and perplexity of a model as planned."""

    kind: Literal["benchmark"] = "benchmark"
    model: ModelRef
    weight_dtype: WeightDtype = "bf16"
    batch_size: PositiveInt = 1
    prompt_tokens: PositiveInt = 128
    output_tokens: PositiveInt = 64
    repetitions: PositiveInt = 5
    evaluation_tokens: PositiveInt = 8192
    seed: int = 17
    load: LoadOptions | None = None  # measured from the clients of an endpoint
    profile: bool = False  # report the time per operator

    @model_validator(mode="after")
    def _profiles_no_endpoint(self) -> Self:
        if self.load is not None and self.profile:
            msg = "profile is of the model alone; leave it out, or run it without load"
            raise ValueError(msg)
        return self


class EvaluateSpec(RunDocument):
    """Evaluate a model on held-out text and ``tasks``, optionally compared with ``original``."""

    kind: Literal["evaluate"] = "evaluate"
    model: ModelRef
    weight_dtype: WeightDtype = "bf16"
    original: ModelRef | None = None
    evaluation_tokens: PositiveInt = 8192
    tasks: EvaluationTasks | None = None
    seed: int = 17


class DrillSpec(RunDocument):
    """Simulate a job without a model: short steps, some figures, and a chosen ending.

    A server runs drills only if its operator allowed them.
    """

    kind: Literal["drill"] = "drill"
    steps: PositiveInt = Field(default=20, le=100_000)
    step_seconds: NonNegativeFloat = Field(default=0.1, le=60.0)
    log_bytes_per_step: NonNegativeInt = Field(default=0, le=64 * 1024**2)
    memory_bytes: NonNegativeInt = Field(default=0, le=1024**4)  # allocated before the first step
    ending: Literal["well", "exit_code", "signal", "oom_gpu", "missing_model"] = "well"
    exit_code: int = Field(default=7, ge=1, le=255)
    signal_number: int = Field(default=11, ge=1, le=31)
    ignores_stop: bool = False
    daemons: NonNegativeInt = Field(default=0, le=64)  # left running; they ignore SIGTERM
    forks_per_second: NonNegativeInt = Field(default=0, le=1000)  # after a stop request


class ProveSpec(RunDocument):
    """Prove on a host that every path is real; the report is the job's artefact.

    ``minutes`` limits the whole run; ``is_small`` takes the smallest sizes, which prove only the
    code.
    """

    kind: Literal["prove"] = "prove"
    stages: tuple[StageName, ...] = Field(default=STAGES, min_length=1, max_length=len(STAGES))
    minutes: float = Field(default=10.0, gt=0, le=120.0)
    is_small: bool = False
