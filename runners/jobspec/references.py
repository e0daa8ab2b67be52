"""The models, and the data sets and files, that a job's spec names, wherever it names them."""

from collections.abc import Callable, Iterator
from typing import TypeVar

from pydantic import BaseModel

from runners.jobspec.base import (
    ArtefactModel,
    DemoModel,
    FileData,
    FolderModel,
    HubData,
    HubModel,
    ModelRef,
    RandomModel,
    is_store_url,
)

REFERENCES = (DemoModel, FolderModel, ArtefactModel, HubModel, RandomModel, HubData, FileData)
Reference = ModelRef | HubData | FileData
Spec = TypeVar("Spec", bound=BaseModel)


def references_of(part: BaseModel) -> Iterator[Reference]:
    """Yield what a spec names: its model, an original's, a draft's, an adapter's, its data."""
    for _, value in part:
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, REFERENCES):
                yield each
            elif isinstance(each, BaseModel):
                yield from references_of(each)


def hub_references(part: BaseModel) -> list[HubModel | HubData]:
    """Return the repositories that a spec names, each once."""
    found = [each for each in references_of(part) if isinstance(each, HubModel | HubData)]
    return list(dict.fromkeys(found))


def store_references(part: BaseModel) -> list[FolderModel | FileData]:
    """Return what a spec names by the address of an object store, each once."""
    found = [
        each
        for each in references_of(part)
        if isinstance(each, FolderModel | FileData) and is_store_url(each.path)
    ]
    return list(dict.fromkeys(found))


def with_references(part: Spec, change: Callable[[Reference], BaseModel]) -> Spec:
    """Return a spec with everything that it names replaced by what ``change`` returns."""
    changed = {}
    for name, value in part:
        new = _changed(value, change)
        if new is not value:
            changed[name] = new
    return part.model_copy(update=changed) if changed else part


def _changed(value: object, change: Callable[[Reference], BaseModel]) -> object:
    if isinstance(value, REFERENCES):
        return change(value)
    if isinstance(value, BaseModel):
        return with_references(value, change)
    if isinstance(value, tuple):
        members = tuple(_changed(each, change) for each in value)
        return members if any(a is not b for a, b in zip(members, value, strict=True)) else value
    return value
