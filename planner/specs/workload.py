"""The work and its layout on the hardware; absent fields take the engine's default."""

from typing import Annotated, Literal, Self, get_args

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
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
    refuse,
)
from planner.specs.on_policy import (
    DISTILLED,
    ON_POLICY,
    ON_POLICY_OBJECTIVES,
    OnPolicyFields,
    RolloutSpec,
    refuse_divided_groups,
    refuse_fields_of_another,
    refuse_inconsistent_lengths,
    refuse_off_policy_fields,
    refuse_other_lengths,
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
    """The offloaded share of each tensor class."""

    weights_cpu: Ratio = Field(default=0.0, description="Share of the weights in host memory")
    weights_disk: Ratio = Field(default=0.0, description="Share of the weights on disk")
    weights_active_ratio: Annotated[float, Field(gt=0.0, le=1.0)] | None = Field(
        default=None,
        description="Share of the offloaded dense weights that one token uses, measured or "
        "assumed: below 1 if activations are mostly zero, as after a ReLU",
    )
    kv_cpu: Ratio = Field(default=0.0, description="Share of the KV cache in host memory")
    kv_disk: Ratio = Field(default=0.0, description="Share of the KV cache on disk")
    optimizer: Literal["none", "cpu", "nvme"] = Field(
        default="none", description="Where the optimiser states are"
    )
    activations_cpu: Ratio = Field(
        default=0.0, description="Share of the activations in host memory"
    )

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

    draft_model: str = Field(description="Catalog id of the draft model")
    tokens: PositiveInt = Field(
        default=4, description="Tokens that the draft proposes for one verification"
    )
    acceptance_ratio: Ratio = Field(
        default=0.7, description="Share of the proposed tokens that are accepted"
    )


class DisaggregatedSpec(SparseSpec):
    """Prefill and decode on separate devices."""

    prefill_devices: PositiveInt = Field(description="Devices that only prefill")
    decode_devices: PositiveInt = Field(description="Devices that only decode")


class Strategy(SparseSpec):
    """One layout of the work; an estimate returns it with all fields filled."""

    weight_dtype: NamedDtype | None = Field(
        default=None,
        description="Format of the weights; 16 bits beside a quantisation: of the activations",
    )
    activation_dtype: NamedDtype | None = Field(
        default=None, description="Format of the activations"
    )
    kv_cache_dtype: NamedDtype | None = Field(default=None, description="Format of the KV cache")
    compute_dtype: NamedDtype | None = Field(
        default=None, description="Format of the matrix products"
    )
    quantization: str | None = Field(
        default=None,
        description="Quantisation of the weights, chosen by the search without it: fp8, w8a8, "
        "int8, gptq, awq, nf4, nvfp4, mxfp4, gguf:TYPE (q4_k_m, q8_0, iq4_xs), exl2:BITS, "
        "aqlm:BITS or quip:BITS",
    )
    group_size: PositiveInt | None = Field(default=None, description="Weights that share a scale")
    sparsity: Ratio | None = Field(
        default=None, description="Share of the weights that is removed"
    )
    data_parallel_size: PositiveInt | None = Field(
        default=None, description="Replicas of the model"
    )
    tensor_parallel_size: PositiveInt | None = Field(
        default=None, description="Devices that share each layer"
    )
    pipeline_parallel_size: PositiveInt | None = Field(
        default=None, description="Stages of layers, each on its own devices"
    )
    context_parallel_size: PositiveInt | None = Field(
        default=None, description="Devices that share the tokens of a sequence"
    )
    expert_parallel_size: PositiveInt | None = Field(
        default=None, description="Devices that share the experts of a layer"
    )
    attention_data_parallel_size: PositiveInt | None = Field(
        default=None, description="Replicas of the attention in a replica of the model"
    )
    sequence_parallel: bool | None = Field(
        default=None, description="Tensor ranks share the tokens of the norms too"
    )
    zero_stage: ZeroStage | None = Field(
        default=None,
        description="ZeRO stage: 1 shares optimiser states between ranks, 2 also gradients, "
        "3 also weights",
    )
    zero_shard_size: PositiveInt | None = Field(
        default=None, description="Ranks that share one copy of the states; all without it"
    )
    pipeline_schedule: NamedSchedule | None = Field(
        default=None, description="Order of the passes of a pipeline"
    )
    virtual_pipeline_size: PositiveInt | None = Field(
        default=None, description="Parts of a stage's layers in an interleaved schedule"
    )
    micro_batch_size: PositiveInt | None = Field(
        default=None, description="Sequences of one pass of a rank"
    )
    gradient_accumulation_steps: PositiveInt | None = Field(
        default=None, description="Passes before one update"
    )
    activation_recomputation: NamedRecomputation | None = Field(
        default=None, description="Which activations the backward pass computes again"
    )
    attention: NamedAttention | None = Field(default=None, description="Kernel of the attention")
    attention_kernel: Literal["flash_1", "single_operators"] | None = Field(
        default=None, description="The implementation of a kernel, if it is not the usual one"
    )
    fused_norms: bool | None = Field(default=None, description="Norms are one kernel each")
    optimizer_dtype: NamedDtype | None = Field(
        default=None, description="Format of the optimiser states"
    )
    gradient_dtype: NamedDtype | None = Field(default=None, description="Format of the gradients")
    packed: bool | None = Field(default=None, description="Short samples share a row")
    gradient_compression_ratio: Annotated[float, Field(ge=1.0)] | None = Field(
        default=None, description="How many times fewer bytes of gradients are sent"
    )
    synchronization_interval_steps: PositiveInt | None = Field(
        default=None, description="Updates of a replica between two exchanges with the others"
    )
    checkpoint_writing: Literal["background", "in_step"] | None = Field(
        default=None,
        description="Checkpoints are written in the background, from a copy in host memory, or "
        "between two steps",
    )
    offload: OffloadSpec | None = Field(
        default=None, description="What lies in host memory or on disk"
    )
    max_batch_tokens: NonNegativeInt | None = Field(
        default=None, description="Tokens of one engine step"
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] | None = Field(
        default=None,
        description="The serving engine's share of the device's memory, in its own meaning",
    )
    scheduler_recv_interval: Annotated[int, Field(ge=1, le=1000)] | None = Field(
        default=None,
        description="Decode steps between two looks of SGLang's scheduler for new requests; the "
        "engine's default is 1",
    )
    chunked_prefill: bool | None = Field(
        default=None, description="A step may have a part of a prompt"
    )
    speculative: SpeculativeSpec | None = Field(
        default=None, description="A draft model proposes tokens"
    )
    disaggregated: DisaggregatedSpec | None = Field(
        default=None, description="Prefill and decode on devices of their own"
    )
    rollout: RolloutSpec | None = Field(
        default=None, description="Where a policy in training generates its completions"
    )

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
TrainObjective = Literal["supervised", "dpo", "kto", "orpo", "reward", "grpo", "distillation"]
# Objectives that compare a chosen with a rejected answer, and those that have a frozen reference.
PAIRED_OBJECTIVES = frozenset({"dpo", "orpo", "reward"})
REFERENCE_OBJECTIVES = frozenset({"dpo", "kto"})
PREFERENCE_METHODS = ("full", "lora", "qlora")  # that train for an objective but supervised
REWARD_METHODS = ("full", "lora")  # a base in 4 bits leaves a reward model no head to train
KTO_LEAST_BATCH = 2  # the divergence is estimated from answers to other prompts of a micro-batch
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
    """Serve requests in a closed loop, an open loop, or at the concurrency that memory allows."""

    kind: Literal["serve"] = "serve"
    input_tokens: PositiveInt = Field(description="Tokens of a typical prompt")
    output_tokens: PositiveInt = Field(description="Tokens of a typical answer")
    concurrency: PositiveInt | None = Field(
        default=None,
        description="Requests in flight (closed loop); without a number as many as memory allows",
    )
    request_rate_per_second: PositiveFloat | None = Field(
        default=None, description="Requests per second (open loop)"
    )
    burst_requests: PositiveInt | None = Field(
        default=None, description="Requests that all arrive at once, without later arrivals"
    )
    prefix_share_ratio: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        default=0.0, description="Share of the prompt that requests have in common"
    )
    length_variation: Annotated[float, Field(ge=0.01, le=3.0)] | None = Field(
        default=None,
        description="Standard deviation of the lengths of prompts and answers over their mean: "
        "0.52 of random benchmarks with a range ratio of 0.9, about 1 of chats; without it "
        "lengths hardly differ",
    )
    ttft_slo_seconds: PositiveFloat | None = Field(
        default=None, description="Longest mean time to first token"
    )
    tpot_slo_seconds: PositiveFloat | None = Field(
        default=None,
        description="Longest mean time per output token after the first, which is the mean ITL of "
        "a request",
    )
    max_request_tokens: PositiveInt | None = Field(
        default=None,
        description="Tokens of the longest request that a server must accept, prompt and answer "
        "together",
    )

    @model_validator(mode="after")
    def _longest_is_no_shorter_than_typical(self) -> Self:
        typical = self.input_tokens + self.output_tokens
        if self.max_request_tokens is not None and self.max_request_tokens < typical:
            refuse(
                "max_request_tokens",
                f"max_request_tokens is {self.max_request_tokens}, less than a typical request of "
                f"{typical} tokens (input_tokens and output_tokens together)",
            )
        return self

    @model_validator(mode="after")
    def _one_kind_of_arrival(self) -> Self:
        kinds = ("concurrency", "request_rate_per_second", "burst_requests")
        given = [kind for kind in kinds if getattr(self, kind) is not None]
        if len(given) > 1:
            refuse(
                given[-1],
                "concurrency (closed loop), request_rate_per_second (open loop) and "
                "burst_requests (all at once) exclude each other: give one, or none to find the "
                "most that memory allows",
            )
        return self

    @property
    def length_variance(self) -> float:
        """Return the variance of the lengths of prompts and answers over their squared mean."""
        return (self.length_variation or 0.0) ** 2

    @property
    def decoding_context_tokens(self) -> float:
        """Return the mean cached tokens of a decoding request: longer answers decode longer."""
        return self.input_tokens + self.output_tokens * (1 + self.length_variance) / 2

    @property
    def callers(self) -> int | None:
        """Return the requests at once, of a closed loop or a burst; None in an open loop.

        A share of several kinds of replicas has columns of them.
        """
        return self.burst_requests if self.concurrency is None else self.concurrency

    @property
    def longest_tokens(self) -> int:
        """Return the tokens of the longest sequence."""
        return self.max_request_tokens or self.input_tokens + self.output_tokens


class GenerateWorkload(SparseSpec):
    """Generate offline in one batch of prompts."""

    kind: Literal["generate"] = "generate"
    batch_size: PositiveInt = Field(description="Prompts of the batch")
    input_tokens: PositiveInt = Field(description="Tokens of a typical prompt")
    output_tokens: PositiveInt = Field(description="Tokens of a typical answer")
    at_once: bool | None = Field(
        default=None,
        description="Memory has to hold the whole batch; without it, an engine that schedules "
        "steps queues the prompts that memory does not hold",
    )

    @property
    def longest_tokens(self) -> int:
        """Return the tokens of the longest sequence."""
        return self.input_tokens + self.output_tokens


class TrainWorkload(OnPolicyFields):
    """Train for a number of tokens or a time; without both, one step is costed."""

    kind: Literal["train"] = "train"
    sequence_length: PositiveInt = Field(description="Tokens of a training sequence")
    global_batch_size: PositiveInt = Field(
        description="Records of one update, over all devices: sequences, for the objectives dpo, "
        "orpo and reward pairs of them, for grpo and distillation completions"
    )
    method: TrainMethod = Field(default="full", description="What is trained, and how")
    objective: TrainObjective = Field(
        default="supervised",
        description="What the loss compares: each token with the text (supervised), a chosen with "
        "a rejected answer (dpo, orpo, or reward for a reward model), an answer with its label "
        "(kto), the rewards of the model's own completions of a prompt (grpo), or a teacher's "
        "probabilities of each token of them (distillation)",
    )
    precompute_reference: bool = Field(
        default=False,
        description="Of dpo and kto: the reference's log-probabilities are computed for all "
        "records before the first step, and its weights are let go",
    )
    lora_rank: PositiveInt | None = Field(default=None, description="Rank of the adapter")
    lora_targets: Literal["all", "query_value"] | None = Field(
        default=None, description="Matrices that have an adapter"
    )
    optimizer: NamedOptimizer | None = Field(default=None, description="Optimiser")
    tokens: PositiveInt | None = Field(
        default=None, description="Tokens of the run; without them and a time one step is costed"
    )
    padding_ratio: Annotated[float, Field(ge=0.0, lt=1.0)] | None = Field(
        default=None, description="Share of padding in a batch"
    )
    document_tokens: PositiveInt | None = Field(
        default=None,
        description="Mean tokens of a document in a packed row, weighted by tokens: block-wise "
        "attention skips blocks between documents",
    )
    length_schedule: tuple[tuple[PositiveInt, Ratio], ...] | None = Field(
        default=None,
        description="Shorter sequences that are trained first, in rows of as many tokens: the "
        "length and the share of the tokens of each",
    )
    time_budget_seconds: PositiveFloat | None = Field(
        default=None, description="Time of the run, whose tokens are the result"
    )
    checkpoint_seconds: PositiveFloat | None = Field(
        default=None,
        description="How long a checkpoint stops the steps; without it the time of its copy or "
        "its writing",
    )
    restart_seconds: PositiveFloat | None = Field(
        default=None,
        description="From a failure to the next step; without it the published median of 11 min",
    )

    @model_serializer(mode="wrap")
    def _drop_absent(self, handler: SerializerFunctionWrapHandler) -> JsonObject:
        dropped = () if self.generates else ON_POLICY
        fields = handler(self).items()
        return {name: value for name, value in fields if value is not None and name not in dropped}

    @model_validator(mode="after")
    def _shares_are_a_whole(self) -> Self:
        schedule = self.length_schedule
        if schedule and abs(sum(share for _, share in schedule) - 1.0) > SHARE_ROUNDING:
            total = sum(share for _, share in schedule)
            refuse("length_schedule", f"shares of the tokens add up to {total:g}, not 1")
        if schedule and max(length for length, _ in schedule) > self.sequence_length:
            longest = max(length for length, _ in schedule)
            refuse(
                "length_schedule",
                f"length_schedule reaches {longest} tokens, but sequence_length, the longest, is "
                f"{self.sequence_length}",
            )
        return self

    @model_validator(mode="after")
    def _objective_has_its_parts(self) -> Self:
        if self.compares and self.method not in PREFERENCE_METHODS:
            refuse(
                "objective",
                f"{self.objective} starts from a trained model, with method "
                f"{', '.join(PREFERENCE_METHODS[:-1])} or {PREFERENCE_METHODS[-1]}; it is "
                f"{self.method}",
            )
        if self.objective == "reward" and self.method not in REWARD_METHODS:
            refuse(
                "method",
                f"method {self.method} leaves a reward model no head to train; choose "
                f"{' or '.join(reversed(REWARD_METHODS))}",
            )
        if self.global_batch_size < self.least_micro_batch:
            refuse(
                "global_batch_size",
                f"global_batch_size is {self.global_batch_size}, and {self.objective} compares "
                f"the answers of a micro-batch; choose at least {self.least_micro_batch}",
            )
        if self.precompute_reference and self.objective not in REFERENCE_OBJECTIVES:
            refuse(
                "precompute_reference",
                f"only {' and '.join(sorted(REFERENCE_OBJECTIVES))} have a reference model; the "
                f"objective is {self.objective}",
            )
        if not self.generates:
            refuse_off_policy_fields(self, self.objective)
        else:
            refuse_fields_of_another(self, self.objective)
            refuse_inconsistent_lengths(self, self.sequence_length)
            if not self.is_distilled:
                refuse_divided_groups(self, self.global_batch_size)
            refuse_other_lengths(self.padding_ratio, self.document_tokens)
        if self.compares and self.length_schedule:
            refuse(
                "length_schedule",
                f"trainers of the objective {self.objective} have no schedule of lengths: leave "
                "it out",
            )
        return self

    @property
    def compares(self) -> bool:
        """Return whether the loss compares answers, rather than each token with a text."""
        return self.objective != "supervised"

    @property
    def generates(self) -> bool:
        """Return whether the model learns from completions that it generates itself."""
        return self.objective in ON_POLICY_OBJECTIVES

    @property
    def is_distilled(self) -> bool:
        """Return whether a teacher's probabilities are learnt, rather than rewards."""
        return self.objective == DISTILLED

    @property
    def completions_per_prompt(self) -> int:
        """Return how many completions of a prompt a policy generates."""
        return 1 if self.is_distilled else self.num_generations

    @property
    def longest_prompt(self) -> int:
        """Return the tokens of the longest prompt of a policy."""
        return self.max_prompt_length or self.sequence_length - self.max_completion_length

    @property
    def typical_prompt(self) -> int:
        """Return the mean tokens of a policy's prompts."""
        return self.mean_prompt_length or self.longest_prompt

    @property
    def typical_completion(self) -> int:
        """Return the mean tokens of a policy's completions."""
        return self.mean_completion_length or self.max_completion_length

    def with_sequences_of(self, tokens: int) -> Self:
        """Return the training with sequences of another length; a policy's completions follow."""
        changed: dict[str, object] = {"sequence_length": tokens}
        if self.generates:
            most = max(1, tokens - self.longest_prompt)
            mean = self.mean_completion_length
            changed |= {
                "max_completion_length": most,
                "mean_completion_length": None if mean is None else min(mean, most),
            }
        return self.model_copy(update=changed)

    @property
    def completions(self) -> int:
        """Return the completions that a policy generates at a time."""
        return self.generation_batch_size or self.global_batch_size

    @property
    def possible_methods(self) -> tuple[str, ...]:
        """Return the methods that train for the objective."""
        if self.objective == "reward":
            return REWARD_METHODS
        return PREFERENCE_METHODS if self.compares else get_args(TrainMethod)

    @property
    def least_micro_batch(self) -> int:
        """Return the records that the loss needs in a micro-batch.

        Source: huggingface/trl 1.16.0, trl/trainer/kto_trainer.py.
        """
        return KTO_LEAST_BATCH if self.objective == "kto" else 1

    @property
    def has_reference(self) -> bool:
        """Return whether a frozen reference answers beside each step of the policy."""
        if self.generates:
            return self.beta > 0 and not self.is_distilled
        return self.objective in REFERENCE_OBJECTIVES and not self.precompute_reference

    @property
    def sequences_per_record(self) -> int:
        """Return the sequences of a record: two of a pair, chosen and rejected, else one."""
        return 2 if self.objective in PAIRED_OBJECTIVES else 1

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
    method: CompressMethod = Field(description="Method of the compression")
    bits: Annotated[int, Field(ge=1, le=16)] | None = Field(
        default=None, description="Bits of a weight"
    )
    group_size: PositiveInt | None = Field(default=None, description="Weights that share a scale")
    calibration_tokens: NonNegativeInt | None = Field(
        default=None, description="Tokens of the calibration text"
    )

    @property
    def longest_tokens(self) -> int:
        """Return 0: calibration text is truncated to the model's maximum length."""
        return 0


Workload = Annotated[
    ServeWorkload | GenerateWorkload | TrainWorkload | CompressWorkload,
    Field(discriminator="kind"),
]
