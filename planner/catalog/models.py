"""The model catalog: real published configs, by Hugging Face id, compared without case."""

import json
from dataclasses import dataclass
from functools import cache

from planner.catalog.hf_config import model_from_config
from planner.catalog.nearest import nearest_names
from planner.catalog.reading import data_text, data_toml
from planner.errors import UnknownModelError
from planner.specs.model import ModelSpec

__all__ = ["ModelEntry", "get_model", "list_models", "model_from_config"]


@dataclass(frozen=True)
class ModelEntry:
    """What the catalog knows of one model before its config is read."""

    id: str
    config: str
    aliases: tuple[str, ...]
    source: str
    as_of: str
    published_parameters: int | None


@cache
def _entries() -> dict[str, ModelEntry]:
    """Return the catalog by id, in the order of its file."""
    index = data_toml("models.toml")
    source, as_of = index["source"], index["as_of"]
    return {
        row["id"]: ModelEntry(
            id=row["id"],
            config=row.get("config", row["id"].replace("/", "--")),
            aliases=tuple(row.get("aliases", ())),
            source=row.get("source", source),
            as_of=row.get("as_of", as_of),
            published_parameters=row.get("published_parameters"),
        )
        for row in index["models"]
    }


@cache
def _ids_by_name() -> dict[str, str]:
    names = {}
    for entry in _entries().values():
        for name in (entry.id, *entry.aliases):
            names[name.lower()] = entry.id
    return names


def list_models() -> tuple[ModelEntry, ...]:
    """Return every catalog entry, largest families first as in the data file."""
    return tuple(_entries().values())


def get_entry(model_id: str) -> ModelEntry:
    """Return the catalog's entry for an id or alias.

    Raises:
        UnknownModelError: the catalog has no such name; the message gives the nearest ones.
    """
    found = _ids_by_name().get(model_id.strip().lower())
    if found is None:
        nearest = nearest_names(model_id, _ids_by_name())
        raise UnknownModelError(
            f"no model {model_id!r} in the catalog; nearest: {', '.join(nearest) or 'none'}; "
            "any other model can be given as its config.json",
            "model",
            nearest=nearest,
        )
    return _entries()[found]


def get_model(model_id: str) -> ModelSpec:
    """Return the shape of a catalog model.

    Raises:
        UnknownModelError: the catalog has no such name; the message gives the nearest ones.
    """
    return _model(get_entry(model_id).id)


@cache
def _model(model_id: str) -> ModelSpec:
    entry = _entries()[model_id]
    config = json.loads(data_text(f"configs/{entry.config}.json"))
    spec = model_from_config(config, model_id)
    return spec.model_copy(update={"source": entry.source, "as_of": entry.as_of})
