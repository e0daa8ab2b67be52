"""Settings of a serving endpoint: limits, address, API keys, idle stop."""

import hashlib
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    model_validator,
)

from runners.addresses import IpAddress

LOOPBACK = "127.0.0.1"
KeyHash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
ServedName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,119}$")]
AnyPort = Annotated[int, Field(ge=0, le=65535)]
FIRST_OPEN_PORT = 1024
NO_ADAPTER = -1  # the adapter index of the base model
# See runners/engines.py.
EngineName = Literal["slipway", "llamacpp", "vllm", "sglang"]
ON_GPUS: tuple[EngineName, ...] = ("vllm", "sglang")


def key_hash(key: str) -> str:
    """Return the stored hash of an endpoint's API key."""
    return hashlib.sha256(key.encode()).hexdigest()


class EndpointSettings(BaseModel):
    """An OpenAI-compatible endpoint of one model.

    Memory for ``kv_cache_tokens`` is reserved at the start; ``port`` 0 selects a free port.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    served_name: ServedName = "model"  # the model name for clients
    engine: EngineName = "slipway"
    max_concurrency: PositiveInt = Field(
        default=16, le=1024
    )  # running requests; others are queued
    queue_limit: NonNegativeInt = Field(
        default=256, le=100_000
    )  # queued requests; others are rejected
    max_length: PositiveInt | None = None  # tokens of prompt and answer; None: the model's own
    kv_cache_tokens: PositiveInt | None = None  # None: max_concurrency requests of max_length
    max_batch_tokens: PositiveInt = Field(default=512, le=1_048_576)  # prompt tokens per step
    enforce_eager: bool = False  # Slipway's own engine: no CUDA graphs of decode steps
    host: IpAddress = LOOPBACK
    port: AnyPort = 0
    key_hashes: tuple[KeyHash, ...] = Field(default=(), max_length=16)
    idle_stop_seconds: PositiveFloat | None = None  # ends after this time without a request

    @model_validator(mode="after")
    def _is_safe_and_fits(self) -> Self:
        if self.host != LOOPBACK and not self.key_hashes:
            msg = (
                f"host is {self.host}, which others reach, but key_hashes is empty; "
                f"give a key's hash, or keep the endpoint on {LOOPBACK}"
            )
            raise ValueError(msg)
        if 0 < self.port < FIRST_OPEN_PORT:
            msg = f"port is {self.port}; choose {FIRST_OPEN_PORT} to 65535, or 0 for a free one"
            raise ValueError(msg)
        tokens, longest = self.kv_cache_tokens, self.max_length
        if tokens is not None and longest is not None and tokens < longest:
            msg = (
                f"kv_cache_tokens is {tokens}, less than max_length, {longest}: the longest "
                "request would never fit; give more, or shorten max_length"
            )
            raise ValueError(msg)
        return self
