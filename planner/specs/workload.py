"""The work and its layout on the hardware; absent fields take the engine's default."""

from typing import Annotated, Literal, Self, get_args

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from planner.specs.base import (
    ATTENTION,
    DTYPES,
    OPTIMIZERS,
    RECOMPUTATION,
    SCHEDULES,
    Dtype,
    JsonObject,
    Ratio,
    SparseSpec,
    alias_parser,
    read_formats,
    read_memory_share,
)

# The layout of the work on the hardware; absent fields take the engine's default.


ZeroStage = Annotated[int, Field(ge=0, le=3)]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
Recomputation = Literal["none", "selective", "full"]
Attention = Literal["eager", "flash", "flex"]
NamedDtype = Annotated[Dtype, BeforeValidator(alias_parser(get_args(Dtype), DTYPES))]
NamedSchedule = Annotated[
    PipelineSchedule, BeforeValidator(alias_parser(get_args(PipelineSchedule), SCHEDULES))
]
NamedRecomputation = Annotated[
    Recomputation, BeforeValidator(alias_parser(get_args(Recomputation), RECOMPUTATION))
]
NamedAttention = Annotated[
    Attention, BeforeValidator(alias_parser(get_args(Attention), ATTENTION))
]

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
    def weights_share(self) -> float:
        """Return the share of the weights that is in host memory or on disk."""
        return self.weights_cpu + self.weights_disk

    @property
    def kv_share(self) -> float:
        """Return the share of the KV cache that is in host memory or on disk."""
        return self.kv_cpu + self.kv_disk

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
    def stated(self) -> JsonObject:
        """Return the fields that are set."""
        return {name: value for name, value in self if value is not None}

    @property
    def offload_places(self) -> tuple[str, ...]:
        """Return the offloaded tensor classes and their places, as text."""
        return self.offload.places if self.offload else ()


SHARE_ROUNDING = 1e-6
TrainMethod = Literal["pretrain", "full", "lora", "qlora", "lomo", "adalomo", "qft", "alphatuning"]
Optimizer = Literal["adamw", "adamw_8bit", "adafactor", "lion", "sgd", "lomo", "adalomo"]
NamedOptimizer = Annotated[
    Optimizer, BeforeValidator(alias_parser(get_args(Optimizer), OPTIMIZERS))
]
CompressMethod = Literal[
    "int8_weight_only",
    "int8_dynamic",
    "fp8",
    "gguf",
    "int4_weight_only",
    "nf4",
    "gptq",
    "awq",
    "autoround",
    "sparsegpt",
    "fptq",
    "norm_tweaking",
    "finequant",
    "quantease",
    "qmoe",
    "llm_pruner",
    "sheared_llama",
]


class ServeWorkload(SparseSpec):
    """Serve requests in a closed loop, an open loop, or at the concurrency that memory allows.

    ``burst_requests`` arrive all at once, without later arrivals. ``input_tokens`` and
    ``output_tokens`` are those of a typical request. ``max_request_tokens`` is the longest request
    that a server must accept, prompt and answer together.
    """

    kind: Literal["serve"] = "serve"
    input_tokens: PositiveInt
    output_tokens: PositiveInt
    concurrency: PositiveInt | None = None
    request_rate_per_second: PositiveFloat | None = None
    burst_requests: PositiveInt | None = None
    prefix_share_ratio: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    ttft_slo_seconds: PositiveFloat | None = None
    tpot_slo_seconds: PositiveFloat | None = None
    max_request_tokens: PositiveInt | None = None

    @model_validator(mode="after")
    def _longest_is_no_shorter_than_typical(self) -> Self:
        typical = self.input_tokens + self.output_tokens
        if self.max_request_tokens is not None and self.max_request_tokens < typical:
            raise ValueError(
                f"max_request_tokens is {self.max_request_tokens}, less than a typical request of "
                f"{typical} tokens (input_tokens and output_tokens together)"
            )
        return self

    @model_validator(mode="after")
    def _one_kind_of_arrival(self) -> Self:
        kinds = (self.concurrency, self.request_rate_per_second, self.burst_requests)
        if sum(kind is not None for kind in kinds) > 1:
            raise ValueError(
                "concurrency (closed loop), request_rate_per_second (open loop) and "
                "burst_requests (all at once) exclude each other: give one, or none to find the "
                "most that memory allows"
            )
        return self

    @property
    def longest_tokens(self) -> int:
        """Return the tokens of the longest sequence."""
        return self.max_request_tokens or self.input_tokens + self.output_tokens


class GenerateWorkload(SparseSpec):
    """Generate offline in one batch of ``batch_size`` prompts.

    An engine that schedules steps queues the prompts that memory does not hold, unless the whole
    batch has to be there ``at_once``.
    """

    kind: Literal["generate"] = "generate"
    batch_size: PositiveInt
    input_tokens: PositiveInt
    output_tokens: PositiveInt
    at_once: bool | None = None

    @property
    def longest_tokens(self) -> int:
        """Return the tokens of the longest sequence."""
        return self.input_tokens + self.output_tokens


class TrainWorkload(SparseSpec):
    """Train for ``tokens`` tokens, or cost one step if ``tokens`` is absent.

    ``padding_ratio`` is the padding share of a batch. ``document_tokens`` is the token-weighted
    mean document length of a packed row: block-wise attention skips blocks between documents.
    ``length_schedule`` trains shares of the tokens at shorter sequences first, in rows of as many
    tokens. With ``time_budget_seconds`` the time is given and the tokens are the result.
    """

    kind: Literal["train"] = "train"
    sequence_length: PositiveInt
    global_batch_size: PositiveInt
    method: TrainMethod = "full"
    lora_rank: PositiveInt | None = None
    lora_targets: Literal["all", "query_value"] | None = None
    optimizer: NamedOptimizer | None = None
    tokens: PositiveInt | None = None
    padding_ratio: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    document_tokens: PositiveInt | None = None
    length_schedule: tuple[tuple[PositiveInt, Ratio], ...] | None = None
    time_budget_seconds: PositiveFloat | None = None

    @model_validator(mode="after")
    def _shares_are_a_whole(self) -> Self:
        schedule = self.length_schedule
        if schedule and abs(sum(share for _, share in schedule) - 1.0) > SHARE_ROUNDING:
            total = sum(share for _, share in schedule)
            raise ValueError(f"length_schedule: shares of the tokens add up to {total:g}, not 1")
        if schedule and max(length for length, _ in schedule) > self.sequence_length:
            longest = max(length for length, _ in schedule)
            raise ValueError(
                f"length_schedule reaches {longest} tokens, but sequence_length, the longest, is "
                f"{self.sequence_length}"
            )
        return self

    @property
    def longest_tokens(self) -> int:
        """Return the tokens of the longest sequence."""
        return self.sequence_length

    @property
    def text_ratio(self) -> float:
        """Return the non-padding share of a padded batch."""
        return 1.0 - (self.padding_ratio or 0.0)


class CompressWorkload(SparseSpec):
    """Compress the weights and write the result."""

    kind: Literal["compress"] = "compress"
    method: CompressMethod
    bits: Annotated[int, Field(ge=1, le=16)] | None = None
    group_size: PositiveInt | None = None
    calibration_tokens: NonNegativeInt | None = None

    @property
    def longest_tokens(self) -> int:
        """Return 0: calibration text is truncated to the model's maximum length."""
        return 0


Workload = Annotated[
    ServeWorkload | GenerateWorkload | TrainWorkload | CompressWorkload,
    Field(discriminator="kind"),
]
