"""Spec of a serving job."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from runners.compress_options import WeightDtype
from runners.endpoint_spec import ON_GPUS, EndpointSettings, ServedName
from runners.jobspec.base import ArtefactModel, FolderModel, JobDocument, ModelRef, RunDocument
from runners.jobspec.engine import EngineOptions


class NamedAdapter(JobDocument):
    """An adapter in peft's format on the host, and its model name for clients."""

    name: ServedName
    adapter: Annotated[FolderModel | ArtefactModel, Field(discriminator="source")]


def check_names(names: list[str]) -> None:
    """Check that names are unique.

    Raises:
        ValueError: a name is given twice.
    """
    if twice := next((each for each in names if names.count(each) > 1), None):
        msg = f"adapters: the name {twice} is given twice; each name must be unique"
        raise ValueError(msg)


class ServeSpec(RunDocument, EndpointSettings):
    """Serve an OpenAI-compatible HTTP endpoint until it is stopped or idle.

    Each request names the model or one of its ``adapters``; one batch may mix them.
    """

    kind: Literal["serve"] = "serve"
    model: ModelRef
    weight_dtype: WeightDtype = "bf16"
    adapters: tuple[NamedAdapter, ...] = Field(default=(), max_length=64)
    seed: int = 17
    engine_options: EngineOptions | None = None  # for vllm and sglang

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        check_names([self.served_name, *(each.name for each in self.adapters)])
        return self

    @model_validator(mode="after")
    def _options_are_for_the_engine(self) -> Self:
        if self.enforce_eager and self.engine != "slipway":
            msg = (
                f"enforce_eager is of slipway's own engine, and engine is {self.engine}; leave it "
                "out, or choose slipway"
            )
            raise ValueError(msg)
        if self.engine_options is not None and self.engine not in ON_GPUS:
            msg = (
                f"engine_options are of {' and '.join(ON_GPUS)}, and engine is {self.engine}; "
                "leave them out, or choose one of those"
            )
            raise ValueError(msg)
        if self.engine_options is not None and self.engine != "vllm":
            vllm_only = self.engine_options.model_dump(include={"split", "lookup_tokens"})
            if named := [name for name, value in vllm_only.items() if value is not None]:
                msg = (
                    f"engine_options.{named[0]} is vllm's, and engine is {self.engine}; leave it "
                    "out, or choose vllm"
                )
                raise ValueError(msg)
        return self
