"""Types that job specs share: models, data parallelism, adapters, text samples."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, StringConstraints

ComputeDtype = Literal["fp32", "bf16", "fp16", "fp8"]


class JobDocument(BaseModel):
    """The base of all job specs: frozen; unknown fields are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid")


SecretName = Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]{1,39}$")]


class RunDocument(JobDocument):
    """Fields of every job kind; ``secrets`` are names, the values arrive with the claim."""

    secrets: tuple[SecretName, ...] = Field(default=(), max_length=16)


class DemoModel(JobDocument):
    """The small Llama-shaped model that is trained from scratch on the host's own text.

    The shape with the best perplexity after two minutes on two cores: 6.8 M parameters saw too
    few tokens (perplexity 345 against 207 after one minute), 1.8 M had too little capacity.
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


START_SECONDS = 600.0  # loading torch and a model from a slow shared disk takes minutes


class DataParallel(JobDocument):
    """Failure policy of a training on several devices or hosts when a rank is lost.

    ``stop``: the job ends. ``shrink``: it resumes from its last checkpoint with the remaining
    ranks. ``restart``: all ranks restart from the last checkpoint, at most ``max_restarts`` times;
    an unreachable host has the start timeout to return.
    ``rank_timeout_seconds`` applies to training ranks; starting may take longer.
    ``processes_per_host`` ranks share the CPU of a host without a GPU for each.
    """

    on_lost_rank: Literal["stop", "restart", "shrink"] = "stop"
    max_restarts: int = Field(default=3, ge=1, le=100)  # for restart
    min_hosts: PositiveInt = 1  # for shrink: with fewer the job ends
    processes_per_host: int = Field(default=1, ge=1, le=64)
    rank_timeout_seconds: float = Field(default=300.0, ge=5.0, le=7200.0)

    @property
    def start_timeout_seconds(self) -> float:
        """Return the timeout of ranks for each other until the first step."""
        return max(START_SECONDS, self.rank_timeout_seconds)


# Encoders, demo model and demo classes of text classification, shared by web and jobs.


ENCODERS = ("distilbert",)  # architectures with a trainable classification head
# Classes of the host's own text: the standard library package that a passage comes from.
PACKAGES = ("asyncio", "email", "multiprocessing", "unittest")
MAX_CLASSES = 1000
# DistilBERT at a size that two CPU ranks train in minutes. No dropout, as everywhere in this
# trainer: a step is then the same on any number of ranks.
DEMO_ENCODER: Mapping[str, object] = {
    "model_type": "distilbert",
    "architectures": ["DistilBertForSequenceClassification"],
    "dim": 192,
    "hidden_dim": 768,
    "n_layers": 4,
    "n_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 256,
    "num_labels": len(PACKAGES),
}


# Adapter options: LoRA as in peft, merging, and quantised training.


LoraTargets = Literal["all", "query_value"]
BaseDtype = Literal["compute", "nf4"]


class LoraOptions(BaseModel):
    """Train low-rank matrices on top of frozen weights: W + (alpha / rank) * B A.

    ``targets`` "all" are all linear layers except the output, "query_value" those of the paper.
    With ``is_merged`` the job also saves the whole model with the merged adapter. ``base_dtype``
    "nf4" stores the frozen weights in 4 bits (QLoRA); the adapter is merged into the full-width
    weights. ``is_dora`` also trains the magnitude of each weight row (DoRA).

    Source: Hu et al. 2021, arXiv:2106.09685, section 4; Dettmers et al. 2023, arXiv:2305.14314;
    Liu et al. 2024, arXiv:2402.09353.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: PositiveInt = Field(default=8, le=1024)
    alpha: PositiveInt = Field(default=16, le=65_536)
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    targets: LoraTargets = "all"
    is_merged: bool = True
    base_dtype: BaseDtype = "compute"
    is_dora: bool = False


class QuantizedTraining(BaseModel):
    """Train with quantised weights: "alphatuning" only the scales, "qat" the rounded weights.

    ``group_size`` weights of a row share one scale.

    Source: Kwon et al. 2022, arXiv:2210.03858; Jacob et al. 2017, arXiv:1712.05877.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Literal["alphatuning", "qat"]
    bits: Literal[4, 8] = 4
    group_size: PositiveInt = Field(default=32, multiple_of=2, le=4096)


# Options of text samples that a training generates to show its progress.


MOST_PROMPTS = 3
LONGEST_PROMPT = 500  # characters
Prompt = Annotated[str, StringConstraints(min_length=1, max_length=LONGEST_PROMPT, pattern=r"\S")]


class TextSamples(JobDocument):
    """Prompts, interval and length of the samples; default prompt: the held-out text's beginning.

    ``temperature`` 0 is greedy; otherwise tokens are sampled with ``seed``.
    """

    every_steps: PositiveInt = 100
    prompts: tuple[Prompt, ...] = Field(default=(), max_length=MOST_PROMPTS)
    max_tokens: int = Field(default=48, ge=1, le=256)
    temperature: float = Field(default=0.0, ge=0.0, le=5.0)
    seed: int = Field(default=17, ge=0, lt=2**63)
