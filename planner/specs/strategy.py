"""The layout of the work on the hardware; absent fields take the engine's default."""

from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from planner.specs.base import (
    ATTENTION,
    DTYPES,
    RECOMPUTATION,
    SCHEDULES,
    Dtype,
    Ratio,
    SparseSpec,
    read_formats,
    read_memory_share,
    spelled,
)

ZeroStage = Annotated[int, Field(ge=0, le=3)]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
Recomputation = Literal["none", "selective", "full"]
Attention = Literal["eager", "flash", "flex"]
NamedDtype = Annotated[Dtype, BeforeValidator(spelled(get_args(Dtype), DTYPES))]
NamedSchedule = Annotated[
    PipelineSchedule, BeforeValidator(spelled(get_args(PipelineSchedule), SCHEDULES))
]
NamedRecomputation = Annotated[
    Recomputation, BeforeValidator(spelled(get_args(Recomputation), RECOMPUTATION))
]
NamedAttention = Annotated[Attention, BeforeValidator(spelled(get_args(Attention), ATTENTION))]

AWAY_TITLES = {
    "weights_cpu": "weights in host memory",
    "weights_disk": "weights on disk",
    "kv_cpu": "cache in host memory",
    "kv_disk": "cache on disk",
    "activations_cpu": "activations in host memory",
}


class OffloadSpec(SparseSpec):
    """The offloaded share of each tensor class.

    ``weights_active_ratio`` is the share of the offloaded dense weights that one token uses: below
    1 if activations are mostly zero, as after a ReLU. It is measured or assumed.
    """

    weights_cpu: Ratio = 0.0
    weights_disk: Ratio = 0.0
    weights_active_ratio: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    kv_cpu: Ratio = 0.0
    kv_disk: Ratio = 0.0
    optimizer: Literal["none", "cpu", "nvme"] = "none"
    activations_cpu: Ratio = 0.0

    @property
    def places(self) -> tuple[str, ...]:
        """Return the offloaded tensor classes and their places, as text."""
        states = () if self.optimizer == "none" else (f"optimiser states on {self.optimizer}",)
        shares = (title for name, title in AWAY_TITLES.items() if getattr(self, name) > 0)
        return (*states, *shares)


class SpeculativeSpec(SparseSpec):
    """Speculative decoding: the draft proposes ``tokens`` tokens per verification."""

    draft_model: str
    tokens: PositiveInt = 4
    acceptance_ratio: Ratio = 0.7


class DisaggregatedSpec(SparseSpec):
    """Prefill and decode on separate devices."""

    prefill_devices: PositiveInt
    decode_devices: PositiveInt


class Strategy(SparseSpec):
    """One layout of the work; an estimate returns it with all fields filled."""

    weight_dtype: NamedDtype | None = None
    activation_dtype: NamedDtype | None = None
    kv_cache_dtype: NamedDtype | None = None
    compute_dtype: NamedDtype | None = None
    quantization: str | None = None
    group_size: PositiveInt | None = None
    sparsity: Ratio | None = None
    data_parallel_size: PositiveInt | None = None
    tensor_parallel_size: PositiveInt | None = None
    pipeline_parallel_size: PositiveInt | None = None
    context_parallel_size: PositiveInt | None = None
    expert_parallel_size: PositiveInt | None = None
    attention_data_parallel_size: PositiveInt | None = None
    sequence_parallel: bool | None = None
    zero_stage: ZeroStage | None = None
    zero_shard_size: PositiveInt | None = None
    pipeline_schedule: NamedSchedule | None = None
    virtual_pipeline_size: PositiveInt | None = None
    micro_batch_size: PositiveInt | None = None
    gradient_accumulation_steps: PositiveInt | None = None
    activation_recomputation: NamedRecomputation | None = None
    attention: NamedAttention | None = None
    attention_kernel: Literal["flash_1", "single_operators"] | None = None
    fused_norms: bool | None = None
    optimizer_dtype: NamedDtype | None = None
    gradient_dtype: NamedDtype | None = None
    packed: bool | None = Field(default=None, description="short samples share a row")
    gradient_compression_ratio: Annotated[float, Field(ge=1.0)] | None = None
    synchronization_interval_steps: PositiveInt | None = None
    checkpoint_writing: Literal["background", "in_step"] | None = Field(
        default=None, description="in the background, from a copy in host memory, or synchronously"
    )
    offload: OffloadSpec | None = None
    max_batch_tokens: NonNegativeInt | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] | None = Field(
        default=None, description="the serving engine's share of memory, in its own meaning"
    )
    chunked_prefill: bool | None = None
    speculative: SpeculativeSpec | None = None
    disaggregated: DisaggregatedSpec | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_the_names_of_formats(cls, data: object) -> object:
        return read_formats(read_memory_share(data))

    @property
    def offload_places(self) -> tuple[str, ...]:
        """Return the offloaded tensor classes and their places, as text."""
        return self.offload.places if self.offload else ()
