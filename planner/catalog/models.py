"""The model catalog: published configs by Hugging Face id, case-insensitive."""

import json
import re
from dataclasses import dataclass
from functools import cache

from planner.catalog.hf_config import model_from_config
from planner.catalog.nearest import nearest_names
from planner.catalog.reading import data_text, data_toml
from planner.errors import UnknownModelError
from planner.specs.model import ModelSpec

__all__ = ["ModelEntry", "get_model", "list_models", "model_from_config"]

WORDS = re.compile(r"[a-z]+|\d+(?:\.\d+)*")
# Words for tuning or format in a name, which do not affect the shape.
SAME_SHAPE = frozenset({"meta", "instruct", "chat", "base", "it", "hf"})


@dataclass(frozen=True)
class ModelEntry:
    """A catalog entry before its config is read."""

    id: str
    config: str
    aliases: tuple[str, ...]
    source: str
    as_of: str
    published_parameters: int | None


@cache
def _entries() -> dict[str, ModelEntry]:
    """Return the catalog by id, in file order."""
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
    """Return the catalog ids by every name of a model."""
    entries = _entries().values()
    return {name: entry.id for entry in entries for name in (entry.id, *entry.aliases)}


@cache
def _ids_by_lower_name() -> dict[str, str]:
    return {name.lower(): model_id for name, model_id in _ids_by_name().items()}


def shape_key(name: str) -> tuple[str, ...]:
    """Return the words of a name that determine the shape, without owner and tuning.

    >>> shape_key("NousResearch/Llama-2-7b-chat-hf")
    ('llama', '2', '7', 'b')
    """
    words = WORDS.findall(name.lower().rpartition("/")[2])
    return tuple(word for word in words if word not in SAME_SHAPE)


@cache
def _ids_by_shape() -> dict[tuple[str, ...], str]:
    """Return the ids by unique shape words, with and without a version suffix.

    A name that ends in a version also matches without it.
    """
    ids_by_key: dict[tuple[str, ...], set[str]] = {}
    for name, model_id in _ids_by_name().items():
        key = shape_key(name)
        keys = {key, key[: key.index("v")]} if "v" in key[1:] else {key}
        for shape in keys:
            ids_by_key.setdefault(shape, set()).add(model_id)
    return {key: min(ids) for key, ids in ids_by_key.items() if len(ids) == 1}


def list_models() -> tuple[ModelEntry, ...]:
    """Return every catalog entry, largest families first as in the data file."""
    return tuple(_entries().values())


def get_entry(model_id: str) -> ModelEntry:
    """Return the catalog's entry for an id or alias.

    Raises:
        UnknownModelError: the catalog has no such name; the message gives the nearest ones.
    """
    name = model_id.strip()
    entry_id = _ids_by_lower_name().get(name.lower()) or _ids_by_shape().get(shape_key(name))
    if entry_id is None:
        nearest = nearest_names(model_id, _ids_by_name())
        raise UnknownModelError(
            f"no model {model_id!r} in the catalog; nearest: {', '.join(nearest) or 'none'}; "
            "any other model can be given as its config.json",
            "model",
            nearest=nearest,
        )
    return _entries()[entry_id]


def get_model(model_id: str) -> ModelSpec:
    """Return the shape of a catalog model.

    Raises:
        UnknownModelError: the catalog has no such name; the message gives the nearest ones.
    """
    entry = get_entry(model_id)
    spec = _model(entry.id)
    if model_id.strip().lower() in _ids_by_lower_name():
        return spec
    note = f"{model_id} is no id of the catalog: it is read as {entry.id}, whose shape it shares"
    return spec.model_copy(update={"note": f"{note}; {spec.note}" if spec.note else note})


@cache
def _model(model_id: str) -> ModelSpec:
    entry = _entries()[model_id]
    config = json.loads(data_text(f"configs/{entry.config}.json"))
    spec = model_from_config(config, model_id)
    return spec.model_copy(update={"source": entry.source, "as_of": entry.as_of})
