"""Spec of an offline generation: prompts, batching, offload and splits."""

from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    StringConstraints,
    model_validator,
)

from runners.jobspec.base import (
    DataParallel,
    DownloadedData,
    HubData,
    JobDocument,
    ModelRef,
    ResumableDocument,
    StoredModelRef,
)
from runners.jobspec.compress import QUANTISED_DTYPES, WeightDtype
from runners.jobspec.serve import NamedAdapter, check_names

# Offload and split options of a generation.


Share = Annotated[float, Field(ge=0.0, le=1.0)]
Source = Literal["disk", "host_memory"]
ROUNDING = 1e-9


class Option(BaseModel):
    """The base of all options: frozen; unknown fields are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class LayerStreaming(Option):
    """Keep the first layers on the device and load each other layer in every pass.

    With ``layers_from`` disk, ``layers_in_host`` of the others are kept in host memory.
    """

    method: Literal["stream"] = "stream"
    layers_resident: NonNegativeInt = 0
    layers_in_host: NonNegativeInt = 0
    layers_from: Source = "disk"
    look_ahead: bool = True  # prefetch the next layer during computation


class MappedWeights(Option):
    """Offload weights above a memory limit to disk with accelerate."""

    method: Literal["accelerate"] = "accelerate"
    memory_bytes: PositiveInt  # for the weights


class ExpertCache(Option):
    """Cache the most recently used experts per layer on the device; load others on demand.

    At most ``guessed_experts`` of the next layer are prefetched while a layer computes: those that
    its router selects for this layer's inputs. They have separate memory.
    """

    method: Literal["experts"] = "experts"
    experts_resident: PositiveInt = 2  # of each layer
    experts_from: Source = "disk"
    guessed_experts: NonNegativeInt = 2  # 0: no prefetch


class PolicyOffload(Option):
    """Offload the planned shares of weights, KV cache and activations (FlexGen).

    A batch is a block of micro-batches: a layer's weights are loaded once for all of them
    (FlexGen's zig-zag schedule). With ``weight_dtype`` int4 the layers' matrices have a scale and
    an offset per ``group_size`` values of a row; the cache has the ``kv_cache`` dtype.

    Source: Sheng et al. 2023 (FlexGen), arXiv:2303.06865, sections 4.1 and 5.
    """

    method: Literal["policy"] = "policy"
    weights_cpu: Share = 0.0
    weights_disk: Share = 0.0
    kv_cpu: Share = 0.0
    kv_disk: Share = 0.0
    activations_cpu: Share = 0.0
    micro_batch_size: PositiveInt | None = None  # None: the whole block at once
    group_size: PositiveInt = 64

    @model_validator(mode="after")
    def _shares_of_a_whole(self) -> Self:
        for host, disk in (("weights_cpu", "weights_disk"), ("kv_cpu", "kv_disk")):
            together = getattr(self, host) + getattr(self, disk)
            if together > 1.0 + ROUNDING:
                msg = f"{host} and {disk} add up to {together:g}; they can add up to 1 at most"
                raise ValueError(msg)
        return self


class TensorSplit(Option):
    """Tensor parallelism: each rank has a shard of every matrix."""

    method: Literal["tensor"] = "tensor"
    size: int = Field(default=2, ge=2, le=1024)  # ranks


class ExpertSplit(Option):
    """Expert parallelism: each rank has whole experts, and a shard of all other matrices."""

    method: Literal["expert"] = "expert"
    size: int = Field(default=2, ge=2, le=1024)  # ranks


class PipelineSplit(Option):
    """Pipeline parallelism: each rank has consecutive layers."""

    method: Literal["pipeline"] = "pipeline"
    size: int = Field(default=2, ge=2, le=1024)  # ranks


class StageChain(Option):
    """A chain of stage servers with consecutive layers each; spares replace lost servers.

    A job on one host starts and restarts all of them; of several hosts each runs one server.
    """

    model_config = ConfigDict(serialize_by_alias=True)

    method: Literal["chain"] = "chain"
    stages: int = Field(default=2, ge=1, le=1024)
    spares: int = Field(default=0, ge=0, le=64)  # standby servers, on a single host
    restarts: int = Field(default=3, ge=0, le=1000)  # total per host
    # The longest wait for a replacement server; "patience_seconds" in the job's document.
    replacement_timeout_seconds: float = Field(
        default=120.0, ge=1.0, le=7200.0, alias="patience_seconds"
    )
    silence_seconds: float = Field(
        default=120.0, ge=1.0, le=7200.0
    )  # a silent server then counts as lost


Split = Annotated[
    TensorSplit | ExpertSplit | PipelineSplit | StageChain, Field(discriminator="method")
]
Offload = Annotated[
    LayerStreaming | MappedWeights | ExpertCache | PolicyOffload, Field(discriminator="method")
]


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
                f"shortest is {self.shortest}, above input_tokens, the longest, which is "
                f"{self.input_tokens}; choose at most {self.input_tokens}"
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


# Of a data set's records the prompts: what stands before the answer.
Prompts = Annotated[
    DemoPrompts | InlinePrompts | FilePrompts | HubData | DownloadedData,
    Field(discriminator="source"),
]
Batching = Literal["given", "sorted", "turbo", "packed", "continuous"]
KvCache = Literal["plain", "fp8", "int4", "int2"]
Attention = Literal["flash", "eager"]  # flash: torch's fused kernel for the device


class PromptLookup(JobDocument):
    """Prompt-lookup decoding: draft tokens from an earlier match of the last tokens."""

    method: Literal["lookup"] = "lookup"
    tokens: PositiveInt = Field(default=5, le=64)


class DraftModelSpeculation(JobDocument):
    """Speculative decoding with a draft model that has the same tokenizer."""

    method: Literal["draft"] = "draft"
    model: StoredModelRef
    tokens: PositiveInt = Field(default=4, le=64)


Speculation = Annotated[PromptLookup | DraftModelSpeculation, Field(discriminator="method")]


class GenerateSpec(ResumableDocument):
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
            msg = (
                f"kv_cache {self.kv_cache} runs neither with speculation nor with batching "
                "continuous; choose kv_cache plain, or another batching and no speculation"
            )
            raise ValueError(msg)
        if self.attention == "eager" and self.batching in {"packed", "continuous"}:
            msg = (
                f"attention is eager, and batching {self.batching} has attention kernels of its "
                "own; choose another attention or another batching"
            )
            raise ValueError(msg)
        is_quantised = self.weight_dtype in QUANTISED_DTYPES
        if isinstance(self.offload, PolicyOffload):
            self._check_policy(self.offload)
        elif self.offload and (is_quantised or self.batching == "continuous"):
            msg = (
                f"offload {self.offload.method} runs with fp32, bf16 or fp16 weights in batches; "
                f"weight_dtype is {self.weight_dtype} and batching {self.batching}; change them, "
                "or leave offload out"
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
            msg = (
                f"micro_batch_size is {micro}, above batch_size, which is {self.batch_size}; "
                f"choose at most {self.batch_size}"
            )
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
