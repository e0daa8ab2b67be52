"""What the site resolved of a launch's names, for the job's spec."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from planner.specs.estimate import PlannedStrategy
from planner.specs.model import ModelSpec
from runners.jobspec import ArtefactModel, FolderModel, ModelRef, NamedAdapter, UploadedData
from runners.jobspec.base import StoredModel


class DraftModel(NamedTuple):
    """A model that may draft tokens for another one."""

    id: str
    name: str
    model: ArtefactModel | FolderModel


@dataclass(frozen=True)
class LaunchCase:
    """The planned strategy, and what a launch's names stand for.

    ``model``: the job's reference to it; ``model_name`` in short; ``shape`` None where the planner
    does not know its family. ``gpu_vendors``: of the host's GPUs that jobs use. ``lacks_gguf``:
    whether the model is known to have no GGUF file. ``uploads``: the uploaded files that the
    document names, by id. ``draft_models`` and ``adapters``: those on the host that go with the
    model. ``key_hashes``: of the endpoint's keys. ``config``: of the model, as far
    as its config.json is known. ``teacher``: of a distillation.
    """

    best: PlannedStrategy
    model: ModelRef
    model_name: str
    shape: ModelSpec | None = None
    host_name: str = "the host"
    gpu_vendors: tuple[str, ...] = ()
    lacks_gguf: bool = False
    uploads: Mapping[str, UploadedData] = field(default_factory=dict)
    draft_models: tuple[DraftModel, ...] = ()
    adapters: tuple[NamedAdapter, ...] = ()
    key_hashes: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    teacher: StoredModel | None = None
