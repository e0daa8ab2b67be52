"""Spec of a serving job: model, endpoint and the options of engines with parallel sizes."""

import hashlib
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    model_validator,
)

from runners.jobspec.base import (
    ArtefactModel,
    FolderModel,
    IpAddress,
    JobDocument,
    ModelRef,
    RunDocument,
    StoredModelRef,
)
from runners.jobspec.compress import WeightDtype
from runners.jobspec.engine_args import MOST_WORDS, Word
from runners.jobspec.engines import OWN, EngineName, Feature, has_feature, refusal

# What a plan decides for an engine that takes parallel sizes.


LEAST_MEMORY_RATIO, MOST_MEMORY_RATIO = 0.05, 0.98
Size = Annotated[PositiveInt, Field(le=1024)]
EngineCache = Literal["auto", "fp8"]
EngineDevice = Literal["gpu", "cpu"]
MOST_DRAFT_TOKENS = 32


class Draft(BaseModel):
    """A draft model for speculative decoding, and the number of draft tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: StoredModelRef
    tokens: Annotated[PositiveInt, Field(le=MOST_DRAFT_TOKENS)] = 4


class PhaseSplit(BaseModel):
    """Numbers of prefill and decode engines in a disaggregated setup, each on its own GPUs.

    A prompt's KV cache is transferred between them. Source: Zhong et al. 2024 (DistServe),
    arXiv:2401.09670; Patel et al. 2023 (Splitwise), arXiv:2311.18677.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefill_engines: Annotated[PositiveInt, Field(le=64)] = 1
    decode_engines: Annotated[PositiveInt, Field(le=64)] = 1

    @property
    def num_engines(self) -> int:
        """Return the total number of engines."""
        return self.prefill_engines + self.decode_engines


class EngineOptions(BaseModel):
    """Parallel sizes and other engine options that the plan decided.

    ``memory_ratio`` is the share of each GPU's memory for weights, activations and cache;
    ``kv_cache_bytes`` states the cache alone instead, in bytes of each device. None leaves an
    option to the engine. ``lookup_tokens`` is the number of draft tokens of prompt
    lookup. With ``split`` the sizes apply to each engine.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: EngineDevice = "gpu"
    tensor_parallel_size: Size = 1
    pipeline_parallel_size: Size = 1
    data_parallel_size: Size = 1
    has_expert_parallel: bool = False
    memory_ratio: Annotated[float, Field(ge=LEAST_MEMORY_RATIO, le=MOST_MEMORY_RATIO)] | None = (
        None
    )
    kv_cache_bytes: PositiveInt | None = None
    kv_cache_dtype: EngineCache = "auto"  # auto: the compute dtype
    has_chunked_prefill: bool | None = None
    has_prefix_cache: bool | None = None
    draft: Draft | None = None
    lookup_tokens: Annotated[PositiveInt, Field(le=32)] | None = None
    split: PhaseSplit | None = None

    @property
    def devices_each(self) -> int:
        """Return the number of GPUs per engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def num_devices(self) -> int:
        """Return the total number of GPUs."""
        return self.devices_each * (self.split.num_engines if self.split else 1)

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        if self.memory_ratio is not None and self.kv_cache_bytes is not None:
            msg = (
                f"memory_ratio ({self.memory_ratio}) and kv_cache_bytes ({self.kv_cache_bytes}) "
                "are both given, and each decides the size of the KV cache; leave one out"
            )
            raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _one_draft_source(self) -> Self:
        if self.draft and self.lookup_tokens:
            msg = (
                f"draft and lookup_tokens ({self.lookup_tokens}) are both given, and only one "
                "can draft tokens; leave one out"
            )
            raise ValueError(msg)
        if self.draft and self.split:
            msg = (
                "draft and split are both given: the draft's own cache does not travel from the "
                "engine that reads to the one that writes; leave one out, or give lookup_tokens, "
                "which needs no cache"
            )
            raise ValueError(msg)
        return self


# Settings of a serving endpoint: limits, address, API keys, idle stop.


LOOPBACK = "127.0.0.1"
KeyHash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
ServedName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,119}$")]
AnyPort = Annotated[int, Field(ge=0, le=65535)]
FIRST_OPEN_PORT = 1024
NO_ADAPTER = -1  # the adapter index of the base model


def key_hash(key: str) -> str:
    """Return the stored hash of an endpoint's API key."""
    return hashlib.sha256(key.encode()).hexdigest()


class EndpointSettings(BaseModel):
    """An OpenAI-compatible endpoint of one model.

    Memory for ``kv_cache_tokens`` is reserved at the start; ``port`` 0 selects a free port.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    served_name: ServedName = "model"  # the model name for clients
    engine: EngineName = OWN
    max_concurrency: PositiveInt = Field(
        default=16, le=1024
    )  # running requests; others are queued
    queue_limit: NonNegativeInt = Field(
        default=256, le=100_000
    )  # queued requests; others are rejected
    max_length: PositiveInt | None = None  # tokens of prompt and answer; None: the model's own
    kv_cache_tokens: PositiveInt | None = None  # None: max_concurrency requests of max_length
    max_batch_tokens: PositiveInt = Field(default=512, le=1_048_576)  # prompt tokens per step
    enforce_eager: bool = False  # Slipway's own engine: no CUDA graphs of decode steps
    host: IpAddress = LOOPBACK
    port: AnyPort = 0
    key_hashes: tuple[KeyHash, ...] = Field(default=(), max_length=16)
    idle_stop_seconds: PositiveFloat | None = None  # ends after this time without a request

    @model_validator(mode="after")
    def _is_safe_and_fits(self) -> Self:
        if self.host != LOOPBACK and not self.key_hashes:
            msg = (
                f"host is {self.host}, which others reach, but key_hashes is empty; "
                f"give a key's hash, or keep the endpoint on {LOOPBACK}"
            )
            raise ValueError(msg)
        if 0 < self.port < FIRST_OPEN_PORT:
            msg = f"port is {self.port}; choose {FIRST_OPEN_PORT} to 65535, or 0 for a free one"
            raise ValueError(msg)
        tokens, longest = self.kv_cache_tokens, self.max_length
        if tokens is not None and longest is not None and tokens < longest:
            msg = (
                f"kv_cache_tokens is {tokens}, less than max_length, {longest}: the longest "
                "request would never fit; give more, or shorten max_length"
            )
            raise ValueError(msg)
        return self


class NamedAdapter(JobDocument):
    """An adapter in peft's format on the host, and its model name for clients."""

    name: ServedName
    adapter: Annotated[FolderModel | ArtefactModel, Field(discriminator="source")]


def check_names(names: list[str]) -> None:
    """Check that names are unique.

    Raises:
        ValueError: a name is given twice.
    """
    if twice := next((each for each in names if names.count(each) > 1), None):
        msg = f"adapters: the name {twice} is given twice; each name must be unique"
        raise ValueError(msg)


# Fields of a spec, by their path, that only engines with a feature have.
FIELD_FEATURES: Mapping[str, Feature] = {
    "enforce_eager": "eager_steps",
    "adapters": "adapters",
    "engine_options": "parallel_sizes",
    "engine_options.has_prefix_cache": "prefix_caching",
    "engine_options.draft": "draft_model",
    "engine_options.lookup_tokens": "prompt_lookup",
    "engine_options.split": "disaggregation",
}


class ServeSpec(RunDocument, EndpointSettings):
    """Serve an OpenAI-compatible HTTP endpoint until it is stopped or idle.

    Each request names the model or one of its ``adapters``; one batch may mix them.
    """

    kind: Literal["serve"] = "serve"
    model: ModelRef
    weight_dtype: WeightDtype = "bf16"
    adapters: tuple[NamedAdapter, ...] = Field(default=(), max_length=64)
    seed: int = 17
    engine_options: EngineOptions | None = None
    # Further arguments of the engine, as a shell gives them; checked at the launch and by the
    # host, against the engine's release, not here: a spec stays readable in later releases.
    engine_args: tuple[Word, ...] = Field(default=(), max_length=MOST_WORDS)

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        check_names([self.served_name, *(each.name for each in self.adapters)])
        return self

    @model_validator(mode="after")
    def _engine_has_the_options(self) -> Self:
        for path, feature in FIELD_FEATURES.items():
            if _is_set(self, path) and not has_feature(self.engine, feature):
                raise ValueError(refusal(path, self.engine, feature))
        return self


def _is_set(spec: BaseModel, path: str) -> bool:
    """Return whether a field, named by its path, has another value than its default."""
    name, _, rest = path.partition(".")
    value = getattr(spec, name)
    if rest and value is not None:
        return _is_set(value, rest)
    return bool(value != type(spec).model_fields[name].default)
