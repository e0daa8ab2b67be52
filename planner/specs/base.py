"""The ground of every spec: frozen, strict about unknown fields, JSON names as in the code."""

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
    """A document that crosses a border: immutable, and it refuses fields that it does not know."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", ser_json_inf_nan="constants", defer_build=True
    )


class SparseSpec(Spec):
    """A spec whose absent fields are left out of its JSON, never written as null or zero."""

    @model_serializer(mode="wrap")
    def _drop_absent(self, handler: SerializerFunctionWrapHandler) -> JsonObject:
        return {key: value for key, value in handler(self).items() if value is not None}
