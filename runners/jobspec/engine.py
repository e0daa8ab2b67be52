"""What an engine of its own on GPUs is told beside an endpoint's limits: vLLM, SGLang."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from runners.jobspec.base import ArtefactModel, FolderModel

LEAST_MEMORY_RATIO, MOST_MEMORY_RATIO = 0.05, 0.98
Size = Annotated[PositiveInt, Field(le=1024)]
EngineCache = Literal["auto", "fp8"]


class Draft(BaseModel):
    """A smaller model on the host that guesses ahead, and how many tokens at a time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Annotated[FolderModel | ArtefactModel, Field(discriminator="source")]
    tokens: Annotated[PositiveInt, Field(le=32)] = 4


class PhaseSplit(BaseModel):
    """How many engines read prompts and how many write answers, each on GPUs of its own.

    The cache of a prompt travels from one to the other. Source: Zhong et al. 2024 (DistServe),
    arXiv:2401.09670; Patel et al. 2023 (Splitwise), arXiv:2311.18677.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefill_engines: Annotated[PositiveInt, Field(le=64)] = 1
    decode_engines: Annotated[PositiveInt, Field(le=64)] = 1

    @property
    def num_engines(self) -> int:
        """Return how many engines there are in all."""
        return self.prefill_engines + self.decode_engines


class EngineOptions(BaseModel):
    """How the model is divided over the host's GPUs, and what the plan decided besides.

    ``memory_ratio`` is of each GPU's memory: weights, activations and cache together; None
    leaves it to the engine, as None does of the other fields. ``lookup_tokens`` are guessed at a
    time from where the last words stood before. With ``split`` the sizes are of each engine.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensor_parallel_size: Size = 1
    pipeline_parallel_size: Size = 1
    data_parallel_size: Size = 1
    has_expert_parallel: bool = False
    memory_ratio: Annotated[float, Field(ge=LEAST_MEMORY_RATIO, le=MOST_MEMORY_RATIO)] | None = (
        None
    )
    kv_cache_dtype: EngineCache = "auto"  # auto: as the weights are computed in
    has_chunked_prefill: bool | None = None
    has_prefix_cache: bool | None = None
    draft: Draft | None = None
    lookup_tokens: Annotated[PositiveInt, Field(le=32)] | None = None
    split: PhaseSplit | None = None

    @property
    def devices_each(self) -> int:
        """Return on how many GPUs one engine runs."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def num_devices(self) -> int:
        """Return on how many GPUs all of it runs."""
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
