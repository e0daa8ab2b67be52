"""Options of the GPU serving engines vLLM and SGLang."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from runners.jobspec.base import ArtefactModel, FolderModel

LEAST_MEMORY_RATIO, MOST_MEMORY_RATIO = 0.05, 0.98
Size = Annotated[PositiveInt, Field(le=1024)]
EngineCache = Literal["auto", "fp8"]


class Draft(BaseModel):
    """A draft model for speculative decoding, and the number of draft tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Annotated[FolderModel | ArtefactModel, Field(discriminator="source")]
    tokens: Annotated[PositiveInt, Field(le=32)] = 4


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

    ``memory_ratio`` is the share of each GPU's memory for weights, activations and cache. None
    leaves an option to the engine. ``lookup_tokens`` is the number of draft tokens of prompt
    lookup. With ``split`` the sizes apply to each engine.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensor_parallel_size: Size = 1
    pipeline_parallel_size: Size = 1
    data_parallel_size: Size = 1
    has_expert_parallel: bool = False
    memory_ratio: Annotated[float, Field(ge=LEAST_MEMORY_RATIO, le=MOST_MEMORY_RATIO)] | None = (
        None
    )
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
    def _one_guesses(self) -> Self:
        if self.draft and self.lookup_tokens:
            msg = (
                f"draft and lookup_tokens ({self.lookup_tokens}) are both given, and one of them "
                "guesses; leave one out"
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
