"""Spec of an offline generation: prompts, batching, offload and splits."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, StringConstraints, model_validator

from runners.compress_options import QUANTISED_DTYPES, WeightDtype
from runners.generate_options import Offload, PolicyOffload, Split
from runners.jobspec.base import (
    ArtefactModel,
    DataParallel,
    FolderModel,
    JobDocument,
    ModelRef,
    RunDocument,
)
from runners.jobspec.serve import NamedAdapter, check_names


class DemoPrompts(JobDocument):
    """Prefixes of the host's held-out text; random tokens for a model without tokenizer.

    Lengths are from ``shortest`` to ``input_tokens`` tokens; without ``shortest`` all are
    ``input_tokens`` long.
    """

    source: Literal["demo"] = "demo"
    count: PositiveInt = Field(default=32, le=100_000)
    input_tokens: PositiveInt = Field(default=64, le=1_000_000)
    shortest: PositiveInt | None = None

    @model_validator(mode="after")
    def _shortest_is_not_longest(self) -> Self:
        if self.shortest is not None and self.shortest > self.input_tokens:
            msg = (
                f"shortest is {self.shortest}, but input_tokens, the longest, {self.input_tokens}"
            )
            raise ValueError(msg)
        return self


class InlinePrompts(JobDocument):
    """A short list of prompts in the spec."""

    source: Literal["inline"] = "inline"
    texts: tuple[Annotated[str, StringConstraints(min_length=1, max_length=20_000)], ...] = Field(
        min_length=1, max_length=256
    )


class FilePrompts(JobDocument):
    """A file below a model folder of the host: JSON lines with "prompt", or plain lines."""

    source: Literal["file"] = "file"
    path: Annotated[str, StringConstraints(min_length=1, max_length=1000)]


Prompts = Annotated[DemoPrompts | InlinePrompts | FilePrompts, Field(discriminator="source")]
Batching = Literal["given", "sorted", "turbo", "packed", "continuous"]
KvCache = Literal["plain", "fp8", "int4", "int2"]
Attention = Literal["flash", "eager"]  # flash: torch's fused kernel for the device


class PromptLookup(JobDocument):
    """Prompt-lookup decoding: draft tokens from an earlier match of the last tokens."""

    method: Literal["lookup"] = "lookup"
    tokens: PositiveInt = Field(default=5, le=64)


class DraftGuess(JobDocument):
    """Speculative decoding with a draft model that has the same tokenizer."""

    method: Literal["draft"] = "draft"
    model: Annotated[FolderModel | ArtefactModel, Field(discriminator="source")]
    tokens: PositiveInt = Field(default=4, le=64)


Speculation = Annotated[PromptLookup | DraftGuess, Field(discriminator="method")]


class GenerateSpec(RunDocument):
    """Generate greedy answers to a batch of prompts; finished answers survive kills and stops.

    A prompt of a file may name one of ``adapters``. Otherwise it uses the only adapter, or the
    base model if there are several.
    """

    kind: Literal["generate"] = "generate"
    model: ModelRef
    prompts: Prompts = DemoPrompts()
    weight_dtype: WeightDtype = "bf16"
    batch_size: PositiveInt = Field(default=8, le=100_000)  # maximum
    output_tokens: PositiveInt = Field(default=64, le=1_000_000)
    stop_at_end: bool = True  # False: exactly output_tokens each, as in a plan
    batching: Batching = "given"
    kv_cache: KvCache = "plain"
    attention: Attention = "flash"
    compiled_step: bool = False  # decode with kernels compiled at the job's start
    speculation: Speculation | None = None  # processes one prompt at a time
    offload: Offload | None = None
    split: Split | None = None  # None: one process
    adapters: tuple[NamedAdapter, ...] = Field(default=(), max_length=64)
    parallel: DataParallel = DataParallel()
    seed: int = 17

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.kv_cache != "plain" and (self.speculation or self.batching == "continuous"):
            msg = f"kv_cache {self.kv_cache} runs in padded or packed batches; choose plain"
            raise ValueError(msg)
        if self.attention == "eager" and self.batching in {"packed", "continuous"}:
            msg = f"batching {self.batching} attends with kernels of its own; attention is eager"
            raise ValueError(msg)
        is_quantised = self.weight_dtype in QUANTISED_DTYPES
        if isinstance(self.offload, PolicyOffload):
            self._check_policy(self.offload)
        elif self.offload and (is_quantised or self.batching == "continuous"):
            msg = (
                f"offload {self.offload.method} runs with fp32, bf16 or fp16 weights in batches; "
                f"weight_dtype is {self.weight_dtype} and batching {self.batching}"
            )
            raise ValueError(msg)
        self._check_together(is_quantised=is_quantised)
        check_names([each.name for each in self.adapters])
        return self

    def _check_policy(self, policy: PolicyOffload) -> None:
        offloaded_kv = policy.kv_cpu + policy.kv_disk
        unsupported = {
            "weight_dtype": self.weight_dtype in ("int8", "fp8") and self.weight_dtype,
            "batching": self.batching not in ("given", "sorted") and self.batching,
            "speculation": self.speculation and self.speculation.method,
            "kv_cache": self.kv_cache == "fp8" and offloaded_kv and self.kv_cache,
        }
        if conflicts := [f"{name} {value}" for name, value in unsupported.items() if value]:
            msg = (
                "offload policy runs with fp32, bf16, fp16 or int4 weights in batches, given or "
                "sorted, and a cache off the device is plain, int4 or int2; not with "
                f"{', '.join(conflicts)}"
            )
            raise ValueError(msg)
        micro = policy.micro_batch_size or 1
        if micro > self.batch_size:
            msg = f"micro_batch_size is {micro}; batch_size, its block, is {self.batch_size}"
            raise ValueError(msg)

    def _check_together(self, *, is_quantised: bool) -> None:
        options = {
            "weight_dtype": is_quantised and self.weight_dtype,
            "batching": self.batching in ("packed", "continuous") and self.batching,
            "kv_cache": self.kv_cache != "plain" and self.kv_cache,
            "attention": self.attention == "eager" and self.attention,
            "speculation": self.speculation and self.speculation.method,
            "offload": self.offload and self.offload.method,
            "split": self.split and self.split.method,
            "compiled_step": self.compiled_step and "on",
        }
        plain = "runs with fp32, bf16 or fp16 weights {}in padded batches with a plain cache"
        rules = {
            "compiled_step": (self.compiled_step, plain.format("on one device "), {"attention"}),
            f"split {options['split']}": (self.split, plain.format(""), {"compiled_step"}),
            "adapters": (
                self.adapters,
                "run in padded batches on one device",
                {"weight_dtype", "kv_cache", "attention", "speculation"},
            ),
        }
        for name, (is_requested, words, fine) in rules.items():
            allowed = {*fine, name.partition(" ")[0]}
            conflicts = [
                f"{each} {value}"
                for each, value in options.items()
                if value and each not in allowed
            ]
            if is_requested and conflicts:
                raise ValueError(f"{name} {words}, not with {', '.join(conflicts)}")
