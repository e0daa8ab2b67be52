"""Base types of the job specs: documents, model references, data parallel options."""

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
