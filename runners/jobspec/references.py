"""The models that a job's spec names, wherever it names them."""

from collections.abc import Callable, Iterator
from typing import TypeVar

from pydantic import BaseModel

from runners.jobspec.base import (
    ArtefactModel,
    DemoModel,
    FolderModel,
    HubModel,
    ModelRef,
    RandomModel,
)

REFERENCES = (DemoModel, FolderModel, ArtefactModel, HubModel, RandomModel)
Spec = TypeVar("Spec", bound=BaseModel)


def models_of(part: BaseModel) -> Iterator[ModelRef]:
    """Yield every model that a spec names: its own, an original's, a draft's, an adapter's."""
    for _, value in part:
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, REFERENCES):
                yield each
            elif isinstance(each, BaseModel):
                yield from models_of(each)


def hub_models(part: BaseModel) -> list[HubModel]:
    """Return the repositories that a spec names, each once."""
    found = [each for each in models_of(part) if isinstance(each, HubModel)]
    return list(dict.fromkeys(found))


def with_models(part: Spec, change: Callable[[ModelRef], ModelRef]) -> Spec:
    """Return a spec with every model that it names replaced by what ``change`` returns."""
    changed = {}
    for name, value in part:
        new = _changed(value, change)
        if new is not value:
            changed[name] = new
    return part.model_copy(update=changed) if changed else part


def _changed(value: object, change: Callable[[ModelRef], ModelRef]) -> object:
    if isinstance(value, REFERENCES):
        return change(value)
    if isinstance(value, BaseModel):
        return with_models(value, change)
    if isinstance(value, tuple):
        members = tuple(_changed(each, change) for each in value)
        return members if any(a is not b for a, b in zip(members, value, strict=True)) else value
    return value
