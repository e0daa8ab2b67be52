"""Base classes of all specs: frozen, no unknown fields, JSON names equal to field names."""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)

JsonObject = dict[str, Any]

Dtype = Literal[
    "fp32",
    "tf32",
    "bf16",
    "fp16",
    "fp8",
    "nvfp4",
    "mxfp4",
    "int8",
    "int4",
    "nf4",
    "ternary",
]
Ratio = Annotated[float, Field(ge=0.0, le=1.0)]
OperatorClass = Literal["compute", "memory_bandwidth", "communication", "overhead", "memory"]


class Spec(BaseModel):
    """An immutable model at an interface; unknown fields are rejected."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", ser_json_inf_nan="constants", defer_build=True
    )


class SparseSpec(Spec):
    """A spec whose JSON omits absent fields instead of writing null or zero."""

    @model_serializer(mode="wrap")
    def _drop_absent(self, handler: SerializerFunctionWrapHandler) -> JsonObject:
        return {key: value for key, value in handler(self).items() if value is not None}
