"""Job specs: one typed document per job kind, never a command string.

The web side fills a spec from the chosen plan; the host renders its argv from an allow-list
(``runners/launchers/launch.py``); the job process reads it from ``spec.json``.
"""

from typing import Annotated

from pydantic import BeforeValidator, Field

from runners.jobspec.base import (
    ArtefactModel,
    ComputeDtype,
    DataParallel,
    DemoModel,
    DownloadedData,
    FileData,
    FolderModel,
    HostText,
    HubData,
    HubModel,
    JobDocument,
    MixedData,
    ModelRef,
    RandomModel,
    RunDocument,
    SampleOptions,
    SecretName,
    StoredModel,
    TrainData,
    UploadedData,
    WeightedData,
)
from runners.jobspec.compress import (
    BenchmarkSpec,
    CompressSpec,
    DrillSpec,
    EvaluateSpec,
    ProveSpec,
    PublishSpec,
)
from runners.jobspec.generate import (
    Attention,
    Batching,
    DemoPrompts,
    DraftModelSpeculation,
    FilePrompts,
    GenerateSpec,
    InlinePrompts,
    KvCache,
    PromptLookup,
    Prompts,
    Speculation,
)
from runners.jobspec.serve import NamedAdapter, ServeSpec
from runners.jobspec.train import TrainSpec

__all__ = [
    "ArtefactModel",
    "Attention",
    "Batching",
    "BenchmarkSpec",
    "CompressSpec",
    "ComputeDtype",
    "DataParallel",
    "DemoModel",
    "DemoPrompts",
    "DownloadedData",
    "DraftModelSpeculation",
    "DrillSpec",
    "EvaluateSpec",
    "FileData",
    "FilePrompts",
    "FolderModel",
    "GenerateSpec",
    "HostText",
    "HubData",
    "HubModel",
    "InlinePrompts",
    "JobDocument",
    "JobSpec",
    "KvCache",
    "MixedData",
    "ModelRef",
    "ModelSpec",
    "NamedAdapter",
    "PromptLookup",
    "Prompts",
    "ProveSpec",
    "PublishSpec",
    "RandomModel",
    "RunDocument",
    "SampleOptions",
    "SecretName",
    "ServeSpec",
    "Speculation",
    "StoredModel",
    "TrainData",
    "TrainSpec",
    "UploadedData",
    "WeightedData",
]


def upgrade_spec(document: object) -> object:
    """Return a stored spec in the present schema: kind ``quantize`` became ``compress``."""
    if not isinstance(document, dict) or document.get("kind") != "quantize":
        return document
    fields = {name: value for name, value in document.items() if name != "weight_dtype"}
    dtype = document.get("weight_dtype", "int8")
    return {**fields, "kind": "compress", "method": "nf4" if dtype == "int4" else dtype}


_AnyModelSpec = Annotated[
    TrainSpec | CompressSpec | EvaluateSpec | BenchmarkSpec | GenerateSpec | ServeSpec,
    Field(discriminator="kind"),
]
_AnyJobSpec = Annotated[
    TrainSpec
    | CompressSpec
    | EvaluateSpec
    | BenchmarkSpec
    | GenerateSpec
    | ServeSpec
    | DrillSpec
    | ProveSpec
    | PublishSpec,
    Field(discriminator="kind"),
]
ModelSpec = Annotated[_AnyModelSpec, BeforeValidator(upgrade_spec)]  # every kind with a model
JobSpec = Annotated[_AnyJobSpec, BeforeValidator(upgrade_spec)]
