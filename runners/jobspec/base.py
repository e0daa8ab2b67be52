"""What the specs of all kinds of job are built of: documents, models by name, lost ranks."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, StringConstraints

ComputeDtype = Literal["fp32", "bf16", "fp16", "fp8"]


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
    ``restart``: all ranks start again from the last checkpoint, ``max_restarts`` times at most; a
    host that is out of reach is waited for as long as at the start.
    ``rank_timeout_seconds`` is for ranks that train; starting may take each longer.
    ``processes_per_host`` ranks share the processor of a host that has no GPU for each.
    """

    on_lost_rank: Literal["stop", "restart", "shrink"] = "stop"
    max_restarts: int = Field(default=3, ge=1, le=100)  # restart: after so many it ends
    min_hosts: PositiveInt = 1  # shrink: with fewer it ends
    processes_per_host: int = Field(default=1, ge=1, le=64)
    rank_timeout_seconds: float = Field(default=300.0, ge=5.0, le=7200.0)

    @property
    def start_timeout_seconds(self) -> float:
        """Return how long ranks wait for each other until the first step is made."""
        return max(START_SECONDS, self.rank_timeout_seconds)
