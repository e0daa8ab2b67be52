"""What a job is asked to do: one typed document per job kind, never a command string.

The web side fills it from the chosen plan; the host renders it to argv from its own
allow-list (``runners/attempts.py``); the job process reads it from ``spec.json``.
"""

from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    model_validator,
)

from runners.adapter_options import LoraOptions
from runners.compress_options import QUANTISED_DTYPES, CompressOptions, WeightDtype
from runners.endpoint_spec import EndpointSettings, ServedName
from runners.generate_options import Offload, Split
from runners.load_options import LoadOptions

ComputeDtype = Literal["fp32", "bf16", "fp16"]


class JobDocument(BaseModel):
    """The common ground of all job specs: frozen, and strict about unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


SecretName = Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]{1,39}$")]


class RunDocument(JobDocument):
    """What every kind of job may ask for; ``secrets`` are names: values come with the claim."""

    secrets: tuple[SecretName, ...] = Field(default=(), max_length=16)


class DemoModel(JobDocument):
    """The small Llama-shaped model that the project trains from scratch on the host's own text.

    The shape that read held-out text best after two minutes on two cores: 6.8 M parameters
    saw too few tokens (perplexity 345 against 207 after one minute), 1.8 M had too little room.
    """

    source: Literal["demo"] = "demo"
    hidden_size: PositiveInt = 192
    intermediate_size: PositiveInt = 512
    num_hidden_layers: PositiveInt = 4
    num_attention_heads: PositiveInt = 4
    num_key_value_heads: PositiveInt = 2
    vocab_size: PositiveInt = 4096
    max_position_embeddings: PositiveInt = 256


class FolderModel(JobDocument):
    """A folder on the host with config.json, safetensors and a tokenizer, below a model root."""

    source: Literal["folder"] = "folder"
    path: str


class ArtefactModel(JobDocument):
    """The model that an earlier attempt on this host left in its output folder."""

    source: Literal["artefact"] = "artefact"
    attempt_id: str
    name: str = "model"


class RandomModel(JobDocument):
    """Random weights in the shape of a config.json: speed and memory are real, text is not."""

    source: Literal["random"] = "random"
    config: dict[str, object]


ModelRef = Annotated[
    DemoModel | FolderModel | ArtefactModel | RandomModel, Field(discriminator="source")
]


START_SECONDS = 600.0  # a slow shared disk hands out torch, and then a model, in minutes


class DataParallel(JobDocument):
    """What a training does when it runs on several devices or hosts and one falls silent.

    ``stop``: the job ends. ``shrink``: it goes on from its last checkpoint with those left.
    ``rank_timeout_seconds`` is for ranks that train; starting may take each longer.
    """

    on_lost_rank: Literal["stop", "shrink"] = "stop"
    min_hosts: PositiveInt = 1  # shrink: with fewer it ends
    rank_timeout_seconds: float = Field(default=300.0, ge=5.0, le=7200.0)

    @property
    def start_timeout_seconds(self) -> float:
        """Return how long ranks wait for each other until the first step is made."""
        return max(START_SECONDS, self.rank_timeout_seconds)


class TrainSpec(RunDocument):
    """Train or continue to train a model with AdamW on the shipped text.

    One step takes ``gradient_accumulation_steps`` micro-batches, which the ranks share: however
    many they are, the step is the same. With ``lora`` the weights stay and an adapter learns.
    """

    kind: Literal["train"] = "train"
    model: ModelRef = DemoModel()
    sequence_length: PositiveInt = 256
    micro_batch_size: PositiveInt = 2  # many small steps beat few large ones in so short a run
    gradient_accumulation_steps: PositiveInt = 1
    learning_rate: PositiveFloat = 3e-3
    max_steps: PositiveInt | None = None
    time_budget_seconds: PositiveFloat | None = 120.0
    compute_dtype: ComputeDtype = "bf16"
    lora: LoraOptions | None = None
    seed: int = 17
    checkpoint_every_seconds: PositiveFloat = 30.0
    parallel: DataParallel = DataParallel()

    @model_validator(mode="after")
    def _ends_some_time(self) -> Self:
        if self.max_steps is None and self.time_budget_seconds is None:
            msg = "training needs an end: give max_steps or time_budget_seconds, or both"
            raise ValueError(msg)
        if self.lora is not None and not isinstance(self.model, FolderModel | ArtefactModel):
            msg = (
                f"lora adapts trained weights, and a '{self.model.source}' model has none; name "
                "a folder, or the model of an earlier job"
            )
            raise ValueError(msg)
        return self


class CompressSpec(CompressOptions, RunDocument):
    """Make a model's linear weights smaller; report size, perplexity and speed of both."""

    kind: Literal["compress"] = "compress"
    model: ModelRef
    prompt_tokens: PositiveInt = 128
    output_tokens: PositiveInt = 32
    seed: int = 17


def upgraded(document: object) -> object:
    """Return a stored spec in today's words: the kind ``quantize`` is a ``compress`` now."""
    if not isinstance(document, dict) or document.get("kind") != "quantize":
        return document
    fields = {name: value for name, value in document.items() if name != "weight_dtype"}
    dtype = document.get("weight_dtype", "int8")
    return {**fields, "kind": "compress", "method": "nf4" if dtype == "int4" else dtype}


class BenchmarkSpec(RunDocument):
    """Measure prefill and decode speed, peak memory and perplexity of a model as planned."""

    kind: Literal["benchmark"] = "benchmark"
    model: ModelRef
    weight_dtype: WeightDtype = "bf16"
    batch_size: PositiveInt = 1
    prompt_tokens: PositiveInt = 128
    output_tokens: PositiveInt = 64
    repetitions: PositiveInt = 5
    evaluation_tokens: PositiveInt = 8192
    seed: int = 17
    load: LoadOptions | None = None  # measured from outside, as an endpoint's clients see it
    profile: bool = False  # which operators take the time

    @model_validator(mode="after")
    def _profiles_no_endpoint(self) -> Self:
        if self.load is not None and self.profile:
            msg = "profile is of the model alone; leave it out, or run it without load"
            raise ValueError(msg)
        return self


class DemoPrompts(JobDocument):
    """Beginnings of the host's own held-out text; random tokens for a model without tokenizer.

    They are from ``shortest`` to ``input_tokens`` tokens long; without it, all as long.
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
    """A short list that travels with the job."""

    source: Literal["inline"] = "inline"
    texts: tuple[Annotated[str, StringConstraints(min_length=1, max_length=20_000)], ...] = Field(
        min_length=1, max_length=256
    )


class FilePrompts(JobDocument):
    """A file below one of the host's model folders: JSON lines with "prompt", or plain lines."""

    source: Literal["file"] = "file"
    path: Annotated[str, StringConstraints(min_length=1, max_length=1000)]


Prompts = Annotated[DemoPrompts | InlinePrompts | FilePrompts, Field(discriminator="source")]
Batching = Literal["given", "sorted", "turbo", "packed", "continuous"]
KvCache = Literal["plain", "fp8", "int4", "int2"]
Attention = Literal["flash", "eager"]  # flash: the fused kernel that torch has for the device


class PromptLookup(JobDocument):
    """Guess the next tokens from where the last ones stood before in the same text."""

    method: Literal["lookup"] = "lookup"
    tokens: PositiveInt = Field(default=5, le=64)


class DraftGuess(JobDocument):
    """Let a smaller model with the same tokenizer guess the next tokens."""

    method: Literal["draft"] = "draft"
    model: Annotated[FolderModel | ArtefactModel, Field(discriminator="source")]
    tokens: PositiveInt = Field(default=4, le=64)


Speculation = Annotated[PromptLookup | DraftGuess, Field(discriminator="method")]


class GenerateSpec(RunDocument):
    """Answer a pile of prompts greedily; what is done stays done through kills and stops."""

    kind: Literal["generate"] = "generate"
    model: ModelRef
    prompts: Prompts = DemoPrompts()
    weight_dtype: WeightDtype = "bf16"
    batch_size: PositiveInt = Field(default=8, le=100_000)  # at most, worked on together
    output_tokens: PositiveInt = Field(default=64, le=1_000_000)
    stop_at_end: bool = True  # False: exactly output_tokens each, as a plan has it
    batching: Batching = "given"
    kv_cache: KvCache = "plain"
    attention: Attention = "flash"
    compiled_step: bool = False  # decode by kernels that are compiled when the job starts
    speculation: Speculation | None = None  # then one prompt at a time
    offload: Offload | None = None
    split: Split | None = None  # None: one process
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
        if self.offload and (is_quantised or self.batching == "continuous"):
            msg = (
                f"offload {self.offload.method} runs with fp32, bf16 or fp16 weights in batches; "
                f"weight_dtype is {self.weight_dtype} and batching {self.batching}"
            )
            raise ValueError(msg)
        self._check_compiled(is_quantised=is_quantised)
        self._check_split(is_quantised=is_quantised)
        return self

    def _check_compiled(self, *, is_quantised: bool) -> None:
        wrong = {
            "weight_dtype": is_quantised and self.weight_dtype,
            "batching": self.batching in ("packed", "continuous") and self.batching,
            "kv_cache": self.kv_cache != "plain" and self.kv_cache,
            "speculation": self.speculation and self.speculation.method,
            "offload": self.offload and self.offload.method,
            "split": self.split and self.split.method,
        }
        told = [f"{name} {value}" for name, value in wrong.items() if value]
        if self.compiled_step and told:
            msg = (
                "compiled_step runs with fp32, bf16 or fp16 weights on one device in padded "
                f"batches with a plain cache, not with {', '.join(told)}"
            )
            raise ValueError(msg)

    def _check_split(self, *, is_quantised: bool) -> None:
        if self.split is None:
            return
        wrong = {
            "weight_dtype": is_quantised and self.weight_dtype,
            "batching": self.batching in ("packed", "continuous") and self.batching,
            "kv_cache": self.kv_cache != "plain" and self.kv_cache,
            "attention": self.attention == "eager" and self.attention,
            "speculation": self.speculation and self.speculation.method,
            "offload": self.offload and self.offload.method,
        }
        if told := [f"{name} {value}" for name, value in wrong.items() if value]:
            msg = (
                f"split {self.split.method} runs with fp32, bf16 or fp16 weights in padded "
                f"batches with a plain cache, not with {', '.join(told)}"
            )
            raise ValueError(msg)


class NamedAdapter(JobDocument):
    """An adapter in peft's format on the host, and the name by which clients ask for it."""

    name: ServedName
    adapter: Annotated[FolderModel | ArtefactModel, Field(discriminator="source")]


class ServeSpec(RunDocument, EndpointSettings):
    """Answer requests over HTTP, in OpenAI's form, until it is stopped or nobody asks.

    Each request names the model or one of its ``adapters``; one batch holds all of them.
    """

    kind: Literal["serve"] = "serve"
    model: ModelRef
    weight_dtype: WeightDtype = "bf16"
    adapters: tuple[NamedAdapter, ...] = Field(default=(), max_length=64)
    seed: int = 17

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [self.served_name, *(each.name for each in self.adapters)]
        if twice := next((each for each in names if names.count(each) > 1), None):
            msg = f"adapters: the name {twice} is given twice; each name is asked for by itself"
            raise ValueError(msg)
        return self


class EvaluateSpec(RunDocument):
    """Judge a model on held-out text; with ``original`` also how far it is from that one."""

    kind: Literal["evaluate"] = "evaluate"
    model: ModelRef
    weight_dtype: WeightDtype = "bf16"
    original: ModelRef | None = None
    evaluation_tokens: PositiveInt = 8192
    seed: int = 17


class DrillSpec(RunDocument):
    """Rehearse a job without a model: short steps, some figures, and an ending of one's choice.

    A server runs drills only where its operator allowed them.
    """

    kind: Literal["drill"] = "drill"
    steps: PositiveInt = Field(default=20, le=100_000)
    step_seconds: NonNegativeFloat = Field(default=0.1, le=60.0)
    log_bytes_per_step: NonNegativeInt = Field(default=0, le=64 * 1024**2)
    memory_bytes: NonNegativeInt = Field(default=0, le=1024**4)  # taken before the first step
    ending: Literal["well", "exit_code", "signal", "oom_gpu", "missing_model"] = "well"
    exit_code: int = Field(default=7, ge=1, le=255)
    signal_number: int = Field(default=11, ge=1, le=31)
    ignores_stop: bool = False
    daemons: NonNegativeInt = Field(default=0, le=64)  # left behind, deaf to SIGTERM
    forks_per_second: NonNegativeInt = Field(default=0, le=1000)  # once it is told to stop


_Model = Annotated[
    TrainSpec | CompressSpec | EvaluateSpec | BenchmarkSpec | GenerateSpec | ServeSpec,
    Field(discriminator="kind"),
]
_Any = Annotated[
    TrainSpec | CompressSpec | EvaluateSpec | BenchmarkSpec | GenerateSpec | ServeSpec | DrillSpec,
    Field(discriminator="kind"),
]
ModelSpec = Annotated[_Model, BeforeValidator(upgraded)]  # what works on a model
JobSpec = Annotated[_Any, BeforeValidator(upgraded)]
