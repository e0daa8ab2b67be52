"""Spec of a training job: data, method, memory options, parallel layout."""

import math
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from runners.datasets.records import COMPARED
from runners.jobspec.base import (
    ArtefactModel,
    ComputeDtype,
    DataParallel,
    DemoModel,
    FolderModel,
    HostText,
    HubModel,
    LoraOptions,
    MixedData,
    ModelRef,
    QuantizedTraining,
    ResumableDocument,
    SampleOptions,
    StoredModel,
    StoredModelRef,
    TextSamples,
    TrainData,
    sources_of,
)
from runners.jobspec.objectives import (
    OBJECTIVES,
    OWN_TRAINER,
    PREFERENCES,
    TRL,
    Objective,
    ObjectiveName,
    PreferenceLoss,
    TrainEngine,
)
from runners.jobspec.rewards import MOST_REWARDS, RewardFunction, twice_named
from runners.jobspec.trackers import TrackerOptions

# Memory options of a training: recomputation, offload, optimiser.


Recomputation = Literal["none", "selective", "full"]
Away = Literal["none", "cpu", "disk"]
OnSpike = Literal["stop", "skip"]
Optimizer = Literal[
    "adamw", "adamw_8bit", "adafactor", "lion", "lion_8bit", "sgd", "lomo", "adalomo", "qft"
]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
LengthSchedule = tuple[tuple[PositiveInt, Share], ...]
SHARE_ROUNDING = 1e-6
FUSED_OPTIMIZERS = frozenset(
    {"lomo", "adalomo", "qft"}
)  # they update weights within the backward pass
# Default learning rates, tuned on the demo model; AdamW's is also the spec's default.
USUAL_LEARNING_RATES: dict[str, float] = {
    "adamw": 3e-3,
    "adamw_8bit": 3e-3,
    "adafactor": 3e-2,
    "lion": 1e-3,
    "lion_8bit": 1e-3,
    "sgd": 0.2,
    "lomo": 0.2,
    "adalomo": 3e-2,
    "qft": 1e-3,
}


class TrainingMemory(ResumableDocument):
    """The fields of a training that trade memory for time.

    ``activation_recomputation``: "selective" keeps the outputs of matrix products and recomputes
    the rest of a layer, "full" keeps only a layer's input. ``activation_offload`` is where saved
    activations are stored, ``optimizer_offload`` where the optimiser's moments are.
    ``on_spike``: whether a step whose loss exceeds ``spike_loss_ratio`` times the recent median,
    and the loss of a uniform prediction, ends the training or is skipped.

    Source: Korthikanti et al. 2022, arXiv:2205.05198, section 5; Chen et al. 2016,
    arXiv:1604.06174; Huang et al. 2020 (SwapAdvisor), ASPLOS.
    """

    activation_recomputation: Recomputation = "none"
    activation_offload: Away = "none"
    optimizer: Optimizer = "adamw"
    optimizer_offload: Away = "none"
    on_spike: OnSpike = "stop"
    spike_loss_ratio: float = Field(default=1.5, gt=1.0, le=100.0)

    @model_validator(mode="after")
    def _a_spike_can_be_skipped(self) -> Self:
        if self.on_spike == "skip" and self.optimizer in FUSED_OPTIMIZERS:
            msg = (
                f"on_spike skip: {self.optimizer} has changed the weights by the time that a "
                "step's loss is known; choose stop, which goes back to the last checkpoint"
            )
            raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _moments_can_wait_elsewhere(self) -> Self:
        if self.optimizer_offload != "none" and self.optimizer != "adamw":
            msg = (
                f"optimizer_offload {self.optimizer_offload} moves the two moments of adamw, and "
                f"the optimizer is {self.optimizer}; choose adamw, or optimizer_offload none"
            )
            raise ValueError(msg)
        return self

    def check_fused(self, count: int, dtype: ComputeDtype) -> None:
        """Reject gradient accumulation and scaling with fused optimisers, which keep no gradients.

        Raises:
            ValueError: the optimiser is fused, and a step has several micro-batches or is in fp16.
        """
        if self.optimizer not in FUSED_OPTIMIZERS:
            return
        if dtype == "fp16":
            msg = (
                f"{self.optimizer} uses each gradient as it comes, and compute_dtype fp16 has "
                "them scaled and checked together; choose bf16 or fp32"
            )
            raise ValueError(msg)
        if count > 1:
            msg = (
                f"{self.optimizer} updates each weight as its gradient comes, so a step is one "
                f"micro-batch, and gradient_accumulation_steps is {count}; make it 1 with a "
                "larger micro_batch_size, or choose adafactor or adamw_8bit"
            )
            raise ValueError(msg)


def check_lengths(
    schedule: LengthSchedule, longest: int, tokens: int, max_steps: int | None
) -> None:
    """Check that lengths increase to the longest one and divide a micro-batch's tokens.

    Raises:
        ValueError: a stage is invalid; the text gives the remedy.
    """
    if max_steps is None:
        raise ValueError(
            "length_schedule divides a number of steps, which a time budget alone does not give; "
            "set max_steps"
        )
    lengths = [length for length, _ in schedule]
    if lengths != sorted(set(lengths)) or lengths[-1:] != [longest]:
        raise ValueError(
            f"length_schedule goes {lengths}; each length must be above the one before, and the "
            f"last one sequence_length, {longest}"
        )
    total = sum(share for _, share in schedule)
    if abs(total - 1.0) > SHARE_ROUNDING:
        raise ValueError(
            f"length_schedule: the shares of the tokens add up to {total:g}; they must add up to 1"
        )
    for length in lengths:
        if tokens % length:
            raise ValueError(
                f"length_schedule: a micro-batch has {tokens} tokens, which is not a multiple of "
                f"the length {length}; choose lengths that divide it"
            )


# The parallel layout of a training over its ranks, in the planner's names.
#
# Every size is in ranks. Rank order, from neighbouring to farthest: tensor parallel, context
# parallel, copies that shard their states (ZeRO), whole copies, pipeline stages.


PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
GradientCompression = Literal["fp16", "bf16", "int8", "powersgd"]
ContextMethod = Literal["gathered", "ring"]
WOVEN = frozenset({"interleaved", "zero_bubble"})
SHARDED_GRADIENTS, SHARDED_WEIGHTS = 2, 3  # the lowest ZeRO stages that shard them
SIZES = (
    "data_parallel_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
)


class LayoutOptions(BaseModel):
    """Parallel sizes and methods of a training; experts are divided among data ranks.

    ``zero_shard_size``: the number of copies that shard their states, by default all; several
    such groups are replicas (hybrid sharding). ``pipeline_layers``: the layers of each stage, from
    the first; by default even.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    data_parallel_size: PositiveInt = 1
    zero_stage: int = Field(default=0, ge=0, le=3)
    zero_shard_size: PositiveInt | None = None
    tensor_parallel_size: PositiveInt = 1
    sequence_parallel: bool = False
    context_parallel_size: PositiveInt = 1
    context_method: ContextMethod = "gathered"
    pipeline_parallel_size: PositiveInt = 1
    pipeline_schedule: PipelineSchedule = "1f1b"
    virtual_pipeline_size: PositiveInt = 1
    pipeline_layers: tuple[PositiveInt, ...] | None = None
    expert_parallel_size: PositiveInt = 1
    gradient_compression: GradientCompression | None = None
    powersgd_rank: PositiveInt = 4
    synchronization_interval_steps: PositiveInt = 1

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the layout."""
        return math.prod(getattr(self, name) for name in SIZES)

    @property
    def shard_copies(self) -> int:
        """Return the number of copies that shard their states."""
        if not self.zero_stage:
            return 1
        return self.zero_shard_size or self.data_parallel_size

    @property
    def num_stages(self) -> int:
        """Return the total number of (virtual) pipeline stages."""
        return self.pipeline_parallel_size * self.virtual_pipeline_size

    @property
    def is_unsharded(self) -> bool:
        """Return whether every rank holds the whole model and all its states."""
        return not (self.divides_the_model or self.zero_stage)

    @property
    def is_single(self) -> bool:
        """Return whether there is one rank, which has no states to shard."""
        return self.world_size == 1 and not self.zero_stage

    @property
    def divides_the_model(self) -> bool:
        """Return whether layers, sequences or experts are divided; ZeRO does not divide them."""
        return self.world_size != self.data_parallel_size or self.expert_parallel_size > 1

    @property
    def is_undivided(self) -> bool:
        """Return whether no layers, sequences or experts are divided; ZeRO may shard states."""
        return not self.divides_the_model

    @property
    def is_pipeline_alone(self) -> bool:
        """Return whether the layout is a pipeline only, with one stage per rank."""
        return self.world_size == self.pipeline_parallel_size == self.num_stages > 1

    def with_pipeline_ranks(self, count: int) -> "LayoutOptions":
        """Return the same pipeline over ``count`` ranks, with its layers divided evenly.

        Source: Ryabinin et al. 2023 (SWARM), arXiv:2301.11913, section 3.2.
        """
        if count == self.world_size or not self.is_pipeline_alone:
            return self
        return self.model_copy(update={"pipeline_parallel_size": count, "pipeline_layers": None})

    def on_ranks(self, count: int) -> "LayoutOptions | None":
        """Return the layout for another number of ranks, with as many copies as they hold.

        None is a single process, which has no layout.

        Raises:
            ValueError: they hold no whole number of copies, or the layout's options forbid it.
        """
        if self.is_pipeline_alone:
            return self.with_pipeline_ranks(count) if count > 1 else None
        per_copy = self.world_size // self.data_parallel_size
        if count % per_copy:
            msg = (
                f"a copy of the model takes {per_copy} ranks in its layout (tensor_parallel_size "
                f"x pipeline_parallel_size x context_parallel_size), and there are {count}: "
                f"choose hosts with a multiple of {per_copy}"
            )
            raise ValueError(msg)
        if count == 1:
            return None
        copies = count // per_copy
        shards = self.zero_shard_size
        fitting = shards if shards is not None and copies % shards == 0 else None
        changed = {"data_parallel_size": copies, "zero_shard_size": fitting}
        return LayoutOptions.model_validate({**self.model_dump(), **changed})

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        for why in chain(_copies(self), _divisions(self), _exchanges(self)):
            raise ValueError(why)
        return self


def _copies(layout: LayoutOptions) -> Iterator[str]:
    """Yield conflicts of data parallel size with ZeRO, experts and pipelines."""
    copies, experts = layout.data_parallel_size, layout.expert_parallel_size
    if copies % layout.shard_copies:
        yield (
            f"zero_shard_size is {layout.shard_copies}: it must divide data_parallel_size, which "
            f"is {copies}"
        )
    if copies % experts:
        yield (
            f"expert_parallel_size is {experts}: it must divide data_parallel_size, which is "
            f"{copies}"
        )
    if experts > 1 and layout.zero_stage:
        yield (
            f"expert_parallel_size is {experts} and zero_stage {layout.zero_stage}: experts are "
            "divided whole; choose zero_stage 0"
        )
    if experts > 1 and layout.tensor_parallel_size > 1:
        yield (
            f"expert_parallel_size is {experts} and tensor_parallel_size "
            f"{layout.tensor_parallel_size}: experts are divided whole; choose one of them"
        )
    if layout.zero_stage == SHARDED_GRADIENTS and layout.pipeline_parallel_size > 1:
        yield (
            f"zero_stage is 2 and pipeline_parallel_size {layout.pipeline_parallel_size}: a stage "
            "sums its gradients over all micro-batches first; choose zero_stage 1"
        )


def _divisions(layout: LayoutOptions) -> Iterator[str]:
    """Yield conflicts between sequence, context and pipeline options."""
    layers = layout.pipeline_layers or ()
    if layout.sequence_parallel and layout.tensor_parallel_size == 1:
        yield (
            "sequence_parallel needs tensor parallelism, and tensor_parallel_size is 1; choose a "
            "tensor_parallel_size above 1, or leave sequence_parallel out"
        )
    if layout.sequence_parallel and layout.context_parallel_size > 1:
        yield "sequence_parallel and context_parallel_size both divide the sequence; choose one"
    if layout.virtual_pipeline_size > 1 and layout.pipeline_schedule not in WOVEN:
        yield (
            f"virtual_pipeline_size is {layout.virtual_pipeline_size}, which schedule "
            f"{layout.pipeline_schedule} does not weave; choose interleaved or zero_bubble"
        )
    if layout.virtual_pipeline_size > 1 and layout.pipeline_parallel_size == 1:
        yield (
            f"virtual_pipeline_size is {layout.virtual_pipeline_size}, and pipeline_parallel_size "
            "is 1; choose a pipeline_parallel_size above 1, or leave virtual_pipeline_size out"
        )
    if layers and len(layers) != layout.num_stages:
        yield f"pipeline_layers names {len(layers)} stages, but there are {layout.num_stages}"


def _exchanges(layout: LayoutOptions) -> Iterator[str]:
    """Yield conflicts of gradient compression and local steps with the layout."""
    method, interval = layout.gradient_compression, layout.synchronization_interval_steps
    if method is not None and not layout.is_unsharded:
        yield (
            f"gradient_compression is {method}: it compresses what whole copies exchange; leave "
            "ZeRO, tensor, pipeline, context and expert parallel out"
        )
    if interval > 1 and not layout.is_unsharded:
        yield (
            f"synchronization_interval_steps is {interval}: whole copies alone may part; leave "
            "ZeRO and the other parallel sizes out"
        )
    if interval > 1 and method is not None:
        yield (
            f"synchronization_interval_steps is {interval}: weights are exchanged and no "
            f"gradients that {method} could compress; leave gradient_compression out"
        )


# The layouts that an option of a training allows, for the check of a job spec and for planning.


class LayoutLimit(NamedTuple):
    """What the trainer's layout must be, as a property of ``LayoutOptions``, and the words."""

    property_name: Literal["is_unsharded", "is_undivided", "is_single"]
    sentence: str

    def allows(self, layout: LayoutOptions) -> bool:
        """Return whether a layout is within the limit."""
        return bool(getattr(layout, self.property_name))


UNSHARDED = LayoutLimit(
    "is_unsharded",
    "requires plain data parallelism, with an unsharded model on every rank; leave it or the "
    "other parallel sizes out",
)
UNDIVIDED = LayoutLimit(
    "is_undivided",
    "does not go with a layout that divides layers, sequences or experts; leave it or these sizes "
    "out",
)

SINGLE = LayoutLimit(
    "is_single",
    "trains on one device; leave it out, or make every parallel size 1",
)


class LayoutRule(NamedTuple):
    """The limit of an option, unless it has one of the ``free`` values."""

    limit: LayoutLimit
    free: tuple[object, ...]


LAYOUT_RULES: Mapping[str, LayoutRule] = {
    "engine": LayoutRule(SINGLE, (OWN_TRAINER,)),
    "activation_offload": LayoutRule(UNSHARDED, ("none",)),
    "optimizer": LayoutRule(UNSHARDED, ("adamw",)),
    "optimizer_offload": LayoutRule(UNSHARDED, ("none",)),
    "quantized": LayoutRule(UNSHARDED, (None,)),
    "lora": LayoutRule(UNSHARDED, (None,)),
    "compiled": LayoutRule(UNSHARDED, (False,)),
    "compute_dtype": LayoutRule(UNDIVIDED, ("fp32", "bf16", "fp16")),
    "attention": LayoutRule(UNDIVIDED, ("auto", "flash", "eager")),
    "objective": LayoutRule(UNDIVIDED, ("next_token", *PREFERENCES)),
}


def layout_limits(options: Mapping[str, object]) -> dict[str, LayoutLimit]:
    """Return the limits that options of a training set to its layout, by option."""
    return {
        name: rule.limit
        for name, rule in LAYOUT_RULES.items()
        if name in options and options[name] not in rule.free
    }


def layout_conflicts(options: Mapping[str, object], layout: LayoutOptions) -> Iterator[str]:
    """Yield a sentence for each option of a training that does not allow a layout."""
    for name, limit in layout_limits(options).items():
        if not limit.allows(layout):
            value = getattr(options[name], "method", options[name])
            shown = f" {value}" if isinstance(value, str) else ""
            yield f"{name}{shown} {limit.sentence}"


Generator = Literal["colocated"]  # transformers' generation, in the training's own process
CheckpointWriting = Literal["auto", "background", "in_step"]
TrainAttention = Literal["auto", "flash", "eager", "flex"]  # auto: depends on the device


class TrainSpec(TrainingMemory):
    """Train or fine-tune a model on the host's own text or on ``data``.

    A step has ``gradient_accumulation_steps`` micro-batches, divided among the ranks: the step is
    the same for any number of ranks. With ``lora`` the weights are frozen and an adapter is
    trained. With ``quantized`` the resulting weights lie on an integer grid.
    ``length_schedule`` trains shares of the steps at shorter lengths first, in more rows.
    ``attention``: fused, eager, or flex (block-sparse over packed rows, GPUs only); ``compiled``:
    layers run as compiled kernels.
    With ``compute_dtype`` fp8 the layers' matrix products round their operands; the rest is bf16.
    ``layout``: the parallel layout; without one each rank holds a whole copy. A pipeline that may
    shrink redistributes its layers over the remaining ranks. ``checkpoint_writing``:
    in the background from a copy in host memory, or within the step; ``auto`` is background for
    states on a GPU, since on a CPU the copy would need memory that is not planned for it.
    The newest ``keep_checkpoints`` are kept; ``early_stop_validations`` in a row without a better
    loss end the training. With ``keep_best`` the result has the weights with the lowest held-out
    loss, if it was measured during training. ``text_samples`` generates samples periodically.
    The objective ``classification`` trains an encoder on labelled texts, one per row; the host's
    own are code passages labelled with their package. With the engine ``trl`` Hugging Face's TRL
    trains in its environment, on one device: supervised, or on comparisons of answers. There a
    record is a row, the learning rate falls linearly, and without ``max_steps`` the training reads
    its data once. ``beta``: how strongly answers are held to the reference model, of ORPO the
    weight of the odds ratio; ``preference_loss``: DPO's;
    ``precompute_reference``: the reference reads the records of the run before the first step,
    and its weights are freed.
    With the objective ``grpo`` the model answers each prompt ``num_generations`` times, with at
    most ``max_completion_length`` tokens drawn at ``temperature``, and learns from the rewards
    that ``reward_functions`` give; micro-batches count answers. Prompts longer than
    ``max_prompt_length``, by default what ``sequence_length`` leaves, are left out. A batch of
    answers is scored within ``reward_timeout_seconds`` by a process of ``reward_memory_gib``.
    ``text_samples`` then shows answers of the training itself.
    With the objective ``distillation`` it answers each prompt once, and learns the probabilities
    that ``teacher``, a model with the same tokenizer, gives each token of the answer: ``beta`` is
    from 0 (forward KL divergence) to 1 (reverse), at ``temperature``.
    ``tracker``: where metrics are written besides the site.
    Without ``keeps_model`` it measures speed and memory alone: it neither evaluates nor saves.
    """

    kind: Literal["train"] = "train"
    model: ModelRef = DemoModel()
    engine: TrainEngine = OWN_TRAINER
    objective: ObjectiveName = "next_token"
    beta: NonNegativeFloat = Field(default=0.1, le=100.0)
    preference_loss: PreferenceLoss = "sigmoid"
    precompute_reference: bool = False
    num_generations: int = Field(default=8, ge=2, le=1024)
    max_completion_length: PositiveInt = 256
    max_prompt_length: PositiveInt | None = None
    num_iterations: int = Field(default=1, ge=1, le=64)
    temperature: float = Field(default=1.0, gt=0.0, le=5.0)
    generator: Generator = "colocated"
    teacher: StoredModelRef | None = None
    reward_functions: tuple[RewardFunction, ...] = Field(default=(), max_length=MOST_REWARDS)
    reward_timeout_seconds: float = Field(default=60.0, ge=1.0, le=86_400.0)
    reward_memory_gib: float = Field(default=4.0, ge=0.25, le=1024.0)
    sequence_length: PositiveInt = 256
    length_schedule: LengthSchedule | None = Field(default=None, max_length=16)
    micro_batch_size: PositiveInt = 2  # in a short run many small steps beat few large ones
    gradient_accumulation_steps: PositiveInt = 1
    learning_rate: PositiveFloat = 3e-3
    max_steps: PositiveInt | None = None
    time_budget_seconds: PositiveFloat | None = 120.0
    compute_dtype: ComputeDtype = "bf16"
    attention: TrainAttention = "auto"
    compiled: bool = False
    lora: LoraOptions | None = None
    quantized: QuantizedTraining | None = None
    data: TrainData = HostText()
    samples: SampleOptions = (
        SampleOptions()
    )  # for files only: the host's own text is cut into windows
    seed: int = 17
    checkpoint_every_seconds: PositiveFloat = 30.0
    checkpoint_writing: CheckpointWriting = "auto"
    keep_checkpoints: int = Field(default=1, ge=1, le=100)
    early_stop_validations: PositiveInt | None = None
    keep_best: bool = True
    text_samples: TextSamples | None = None
    keeps_model: bool = True
    tracker: TrackerOptions | None = None
    parallel: DataParallel = DataParallel()
    layout: LayoutOptions | None = None

    def writes_checkpoints_in_background(self, device_type: str) -> bool:
        """Return whether checkpoints are written in the background on ``cuda`` or ``cpu``.

        States offloaded to disk have no memory for the copy.
        """
        on_gpu = "background" if device_type == "cuda" else "in_step"
        chosen = on_gpu if self.checkpoint_writing == "auto" else self.checkpoint_writing
        return chosen == "background" and self.optimizer_offload != "disk"

    @model_validator(mode="before")
    @classmethod
    def _fill_in_what_trl_does(cls, fields: object) -> object:
        """State what TRL does where a spec leaves it open: beta, the last weights, one a row."""
        if not isinstance(fields, dict) or fields.get("engine") != TRL:
            return fields
        samples = fields.get("samples", {})
        if isinstance(samples, dict):
            is_packed = samples.get("packing_strategy") is not None
            samples = {"rows": "packed" if is_packed else "padded", **samples}
        stated = OBJECTIVES.get(fields.get("objective", "next_token"))
        usual = {"beta": stated.beta} if stated is not None and stated.generates else {}
        return {"keep_best": False, **usual, **fields, "samples": samples}

    @model_validator(mode="after")
    def _has_a_trainer(self) -> Self:
        if self.objective in PREFERENCES and self.engine != TRL:
            raise ValueError(
                f"objective {self.objective} is one of TRL's trainers, and engine is "
                f"{self.engine}; choose engine {TRL}"
            )
        for why in _against_trl(self) if self.engine == TRL else _against_own(self):
            raise ValueError(why)
        if self.tracker is not None:
            self.tracker.check_secrets(self.secrets)
        return self

    @model_validator(mode="after")
    def _ends_some_time(self) -> Self:
        is_endless = self.engine != TRL and self.max_steps is None
        if is_endless and self.time_budget_seconds is None:
            msg = "training needs an end: give max_steps or time_budget_seconds, or both"
            raise ValueError(msg)
        self.check_fused(self.gradient_accumulation_steps, self.compute_dtype)
        self._check_integers()
        if self.length_schedule:
            if not isinstance(self.data, HostText):
                raise ValueError(
                    "length_schedule splits the host's own text again at each length, but rows of "
                    "files are fixed; choose data host, or no schedule"
                )
            tokens = self.micro_batch_size * self.sequence_length
            check_lengths(self.length_schedule, self.sequence_length, tokens, self.max_steps)
        if self.lora is not None and not isinstance(self.model, StoredModel):
            msg = (
                f"lora adapts trained weights, and a '{self.model.source}' model has none; name "
                "a folder, or the model of an earlier job"
            )
            raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _classifies(self) -> Self:
        if self.objective == "classification":
            for why in _against_classification(self):
                raise ValueError(f"objective is classification, {why}")
        return self

    @model_validator(mode="after")
    def _can_be_compiled(self) -> Self:
        hindrances = {
            f"activation_offload {self.activation_offload}": self.activation_offload != "none",
            "activation_recomputation selective": self.activation_recomputation == "selective",
            "optimizer qft": self.optimizer == "qft",
            "quantized": self.quantized is not None,
            "length_schedule": self.length_schedule is not None,
        }
        if self.compiled:
            _refuse(hindrances, "compiled layers do not go", "leave compiled out, or these")
        return self

    @model_validator(mode="after")
    def _products_can_be_narrow(self) -> Self:
        hindrances = {
            "lora": self.lora is not None,
            "quantized": self.quantized is not None,
            "optimizer qft": self.optimizer == "qft",
        }
        if self.compute_dtype == "fp8":
            _refuse(hindrances, "compute_dtype fp8 does not go", "choose bf16, or leave these out")
        return self

    @model_validator(mode="after")
    def _attends_by_blocks(self) -> Self:
        hindrances = {
            "compiled": self.compiled,
            "activation_recomputation selective": self.activation_recomputation == "selective",
            "objective classification": self.objective == "classification",
        }
        if self.attention == "flex":
            _refuse(hindrances, "attention flex does not go", "choose flash, or leave these out")
        return self

    @property
    def longest_prompt(self) -> int:
        """Return how many tokens a prompt that the model answers may have."""
        return self.max_prompt_length or self.sequence_length - self.max_completion_length

    @property
    def prompts_per_step(self) -> int:
        """Return how many prompts a step answers that generates its own text."""
        answers = self.micro_batch_size * self.gradient_accumulation_steps
        return answers // self.answers_per_prompt

    @property
    def answers_per_prompt(self) -> int:
        """Return how many answers to a prompt are generated."""
        return 1 if self.objective == "distillation" else self.num_generations

    @property
    def published_dtype(self) -> Literal["fp32", "bf16", "fp16"]:
        """Return the dtype of the saved weights: fp8 training saves bf16."""
        return "bf16" if self.compute_dtype == "fp8" else self.compute_dtype

    @model_validator(mode="after")
    def _is_laid_out(self) -> Self:
        layout = self.layout
        if layout is None:
            return self
        if self.parallel.on_lost_rank == "shrink" and not layout.is_pipeline_alone:
            msg = (
                "on_lost_rank is shrink, and this layout is for a fixed number of ranks; choose "
                "stop, a pipeline of one stage a rank, or leave the layout out"
            )
            raise ValueError(msg)
        for why in layout_conflicts(dict(self), layout):
            raise ValueError(why)
        if self.gradient_accumulation_steps % layout.data_parallel_size:
            msg = (
                f"gradient_accumulation_steps is {self.gradient_accumulation_steps}, which "
                f"data_parallel_size {layout.data_parallel_size} does not divide; "
                f"choose a multiple of {layout.data_parallel_size}"
            )
            raise ValueError(msg)
        return self

    def _check_integers(self) -> None:
        if self.optimizer == "qft" and (self.lora or self.quantized):
            other = "lora" if self.lora else "quantized"
            raise ValueError(
                f"optimizer qft stores every weight as an 8-bit integer, and {other} replaces the "
                "linear layers; choose one of them"
            )
        if self.quantized is None:
            return
        method = self.quantized.method
        if self.lora is not None:
            raise ValueError(
                f"quantized.method {method} changes the layers that lora would adapt; choose one "
                "of them, or lora with base_dtype nf4"
            )
        if method == "alphatuning" and not isinstance(self.model, StoredModel):
            raise ValueError(
                f"quantized.method alphatuning trains the scales of trained weights, and a "
                f"'{self.model.source}' model has none; name a folder, or an earlier job's model"
            )


def _refuse(hindrances: Mapping[str, bool], sentence: str, way_out: str) -> None:
    """Raise ValueError if any of the hindrances applies."""
    if present := [what for what, is_there in hindrances.items() if is_there]:
        raise ValueError(f"{sentence} with {', '.join(present)}; {way_out}")


def _against_classification(spec: TrainSpec) -> Iterator[str]:
    """Yield the options that are incompatible with classification."""
    if isinstance(spec.model, DemoModel):
        yield "and the demo model predicts text; name an encoder's folder, or its config"
    for name in ("lora", "quantized", "length_schedule", "text_samples"):
        if getattr(spec, name) is not None:
            yield f"and {name} is for models that predict text; leave it out"
    if isinstance(spec.data, MixedData):
        yield "and its classes come from one file; leave the other sources out"


# Options of our own trainer, by the value that leaves them out.
_OWN_OPTIONS: Mapping[str, object] = {
    "length_schedule": None,
    "activation_offload": "none",
    "optimizer": "adamw",
    "optimizer_offload": "none",
    "on_spike": "stop",
    "attention": "auto",
    "compiled": False,
    "quantized": None,
    "early_stop_validations": None,
    "text_samples": None,
    "keep_best": False,
}
# Options of one objective or another, by the value that leaves them out.
_OBJECTIVE_OPTIONS: Mapping[str, object] = {
    "beta": 0.1,
    "preference_loss": "sigmoid",
    "precompute_reference": False,
    "num_generations": 8,
    "max_completion_length": 256,
    "max_prompt_length": None,
    "num_iterations": 1,
    "temperature": 1.0,
    "teacher": None,
    "reward_functions": (),
    "reward_timeout_seconds": 60.0,
    "reward_memory_gib": 4.0,
}


def _against_trl(spec: TrainSpec) -> Iterator[str]:
    """Yield what of a spec TRL's trainers cannot do, with the way out."""
    objective = OBJECTIVES.get(spec.objective)
    if objective is None:
        yield f"engine trl has no objective {spec.objective}; choose engine {OWN_TRAINER}"
        return
    for name, plain in _OWN_OPTIONS.items():
        if name == "text_samples" and objective.is_rewarded:
            continue
        if getattr(spec, name) != plain:
            yield f"{name} is an option of the engine {OWN_TRAINER}; leave it out with engine trl"
    yield from _against_trl_as_trainer(spec)
    yield from _against_loss(spec, objective)


def _against_trl_as_trainer(spec: TrainSpec) -> Iterator[str]:
    """Yield the numbers, places and sources that TRL is not run with."""
    if spec.activation_recomputation == "selective":
        yield "activation_recomputation selective is not one of engine trl's; choose full or none"
    if spec.compute_dtype == "fp8":
        yield "compute_dtype fp8 is not one of engine trl's; choose bf16"
    yield from _against_packing(spec)
    if spec.checkpoint_writing == "background":
        yield "checkpoint_writing background is not one of engine trl's; choose in_step"
    if (ranks := spec.parallel.processes_per_host) > 1:
        yield f"engine trl trains in one process, and parallel.processes_per_host is {ranks}"
    if not isinstance(spec.model, FolderModel | ArtefactModel | HubModel):
        yield (
            f"engine trl tunes trained weights, and a '{spec.model.source}' model has none; name "
            "a folder, a repository, or the model of an earlier job"
        )
    if isinstance(spec.data, HostText | MixedData):
        own = ", the host's own text" if isinstance(spec.data, HostText) else ""
        yield (
            f"engine trl reads one file or data set, and data is '{spec.data.source}'{own}; "
            "name a file, or a data set of the Hub"
        )


def _against_packing(spec: TrainSpec) -> Iterator[str]:
    """Yield what of packed rows TRL does not do, with the way out."""
    samples = spec.samples
    strategy = samples.packing_strategy
    if (samples.rows == "packed") != (strategy is not None):
        yield (
            f"samples.rows is {samples.rows} and samples.packing_strategy {strategy}: engine trl "
            "packs rows by a strategy; name bfd, bfd_split or wrapped, or choose rows padded "
            "without one"
        )
    if strategy is not None and spec.objective != "next_token":
        yield (
            f"samples.packing_strategy is {strategy}, and TRL's trainer of {spec.objective} gives "
            "each answer a row of its own; leave it out"
        )
    if strategy is not None and samples.too_long == "leave_out":
        way = "cuts what is longer" if strategy == "bfd" else "divides it between rows"
        yield (
            f"samples.too_long is leave_out, and samples.packing_strategy {strategy} {way}; "
            "choose too_long cut, or rows padded"
        )


def _against_loss(spec: TrainSpec, objective: Objective) -> Iterator[str]:
    """Yield the records and options that an objective does not have."""
    form = None if isinstance(spec.data, HostText | MixedData) else spec.data.format
    if form is not None and form not in objective.formats:
        yield (
            f"{objective.title} learns from records of {', '.join(objective.formats)}, and "
            f"data.format is {form}; choose the objective of these records"
        )
    if spec.micro_batch_size < objective.least_batch:
        yield (
            f"{objective.title} compares the answers of a micro-batch, and micro_batch_size is "
            f"{spec.micro_batch_size}; choose at least {objective.least_batch}"
        )
    for name, plain in _OBJECTIVE_OPTIONS.items():
        if name not in objective.options and getattr(spec, name) != plain:
            yield f"{name} is no option of the objective {spec.objective}; leave it out"
    if spec.beta == 0.0 and not objective.generates:
        yield f"beta is 0, with which {objective.title} learns nothing; choose 0.1 or another"
    if objective.is_rewarded:
        yield from _against_rewards(spec)
    if objective.has_teacher:
        yield from _against_teacher(spec)
    if objective.generates:
        yield from _against_lengths(spec)
    if objective.scores and spec.lora is not None and spec.lora.base_dtype == "nf4":
        yield "lora.base_dtype nf4 leaves a reward model no head to train; choose compute"
    if objective.scores and spec.lora is not None and not spec.lora.is_merged:
        yield "lora.is_merged is false, and the head of a reward model is none of an adapter's"


def _against_teacher(spec: TrainSpec) -> Iterator[str]:
    """Yield what of a distillation does not go together."""
    if spec.teacher is None:
        yield (
            "teacher is not given, and distillation learns its probabilities; name a folder, a "
            "repository, or the model of an earlier job"
        )
    elif spec.teacher == spec.model and (spec.lora is None or spec.lora.base_dtype != "nf4"):
        yield (
            "teacher is the model itself, from which nothing is learnt; name another, or train "
            "adapters on its weights in 4 bits (lora.base_dtype nf4)"
        )
    if isinstance(spec.teacher, HubModel) and spec.teacher.weights == "gguf":
        yield "teacher is a repository of GGUF files; name its original repository"
    if spec.beta > 1.0:
        yield (
            f"beta is {spec.beta:g}, and of distillation it lies between 0, the forward KL "
            "divergence, and 1, the reverse one"
        )


def _against_rewards(spec: TrainSpec) -> Iterator[str]:
    """Yield what of a reinforcement learning does not go together."""
    if not spec.reward_functions:
        yield "reward_functions is empty, and GRPO learns from rewards; name a function or a file"
    if twice := twice_named(spec.reward_functions):
        yield f"reward_functions: {twice}"
    if all(each.weight == 0.0 for each in spec.reward_functions) and spec.reward_functions:
        yield "reward_functions: every weight is 0, so no answer has a reward; give one another"
    answers = spec.micro_batch_size * spec.gradient_accumulation_steps
    if answers % spec.num_generations:
        yield (
            f"a step has {answers} answers (micro_batch_size times gradient_accumulation_steps), "
            f"which is no multiple of num_generations, {spec.num_generations}; change one of them"
        )
    if spec.text_samples is not None and spec.text_samples.prompts:
        yield "text_samples.prompts: GRPO shows answers to its own prompts; leave them out"


def _against_lengths(spec: TrainSpec) -> Iterator[str]:
    """Yield lengths of prompts and answers that do not go together."""
    if (rest := spec.sequence_length - spec.max_completion_length) < 1:
        yield (
            f"max_completion_length is {spec.max_completion_length}, and sequence_length "
            f"{spec.sequence_length} leaves no token for a prompt; raise it"
        )
    elif spec.max_prompt_length is not None and spec.max_prompt_length > rest:
        yield (
            f"max_prompt_length is {spec.max_prompt_length}, and sequence_length leaves {rest} "
            "after max_completion_length; change one of them"
        )


def _against_own(spec: TrainSpec) -> Iterator[str]:
    """Yield what of a spec our own trainer cannot do, with the way out."""
    yield from against_comparisons(spec.data)
    if spec.samples.packing_strategy is not None:
        yield (
            f"samples.packing_strategy is an option of the engine {TRL}; leave it out with "
            f"{OWN_TRAINER}, whose packed rows are filled by best fit"
        )
    for name, plain in _OBJECTIVE_OPTIONS.items():
        if getattr(spec, name) != plain:
            yield f"{name} is an option of the engine {TRL}; leave it out with {OWN_TRAINER}"


def against_comparisons(data: TrainData) -> Iterator[str]:
    """Yield which sources have comparisons, from which no next token is learnt."""
    for source in sources_of(data):
        form = None if isinstance(source, HostText) else source.format
        if form == "prompt":
            yield (
                "data.format is prompt, which has no answers to learn; choose engine trl with "
                "the objective grpo or distillation"
            )
        elif form in COMPARED:
            yield (
                f"data.format is {form}, whose answers are compared; choose engine trl with the "
                "objective dpo, kto, orpo or reward"
            )
