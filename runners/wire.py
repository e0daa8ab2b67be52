"""The common ground of everything that goes over the wire."""

from pydantic import BaseModel, ConfigDict


class Message(BaseModel):
    """Frozen, strict about unknown fields, equal by value."""

    model_config = ConfigDict(frozen=True, extra="forbid")
