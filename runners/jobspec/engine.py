"""What an engine of its own on GPUs is told beside an endpoint's limits: vLLM, SGLang."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from runners.jobspec.base import ArtefactModel, FolderModel

LEAST_MEMORY_RATIO, MOST_MEMORY_RATIO = 0.05, 0.98
Size = Annotated[PositiveInt, Field(le=1024)]
EngineCache = Literal["auto", "fp8"]


class Draft(BaseModel):
    """A smaller model on the host that guesses ahead, and how many tokens at a time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Annotated[FolderModel | ArtefactModel, Field(discriminator="source")]
    tokens: Annotated[PositiveInt, Field(le=32)] = 4


class EngineOptions(BaseModel):
    """How the model is divided over the host's GPUs, and what the plan decided besides.

    ``memory_ratio`` is of each GPU's memory: weights, activations and cache together; None
    leaves it to the engine, as None does of the other fields.
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

    @property
    def num_devices(self) -> int:
        """Return on how many GPUs it runs."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size
