"""The model catalog: published configs by Hugging Face id, case-insensitive.

Names of quantised checkpoints that the catalog lacks are read by planner/catalog/format_names.py.
"""

import json
import re
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from planner.catalog.format_names import (
    StatedFormat,
    left_alone,
    names_gguf,
    split_format,
    with_format,
)
from planner.catalog.hf_config import model_from_config
from planner.catalog.reading import data_text, data_toml, nearest_names
from planner.errors import UnknownModelError
from planner.specs.model import ModelSpec

__all__ = ["ModelEntry", "checkpoint_name", "get_model", "list_models", "model_from_config"]

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
        for shape in {key, _without_version(key)}:
            ids_by_key.setdefault(shape, set()).add(model_id)
    return {key: min(ids) for key, ids in ids_by_key.items() if len(ids) == 1}


def _without_version(key: tuple[str, ...]) -> tuple[str, ...]:
    """Return shape words without a version suffix, which is a number after ``v``.

    >>> _without_version(("mistral", "7", "b", "v", "0.3"))
    ('mistral', '7', 'b')
    """
    starts = [
        at
        for at, (word, after) in enumerate(pairwise(key))
        if at and word == "v" and after[0].isdigit()
    ]
    return key[: starts[0]] if starts else key


@cache
def _ids_without_format() -> dict[tuple[str, ...], str]:
    """Return the ids of checkpoints that name their format, by the shape words before it.

    Unquantised ones come first: every format can take the place of theirs.
    """
    split = [(split_format(name), model_id) for name, model_id in _ids_by_name().items()]
    named = [(*stated, model_id) for stated, model_id in split if stated is not None]
    named.sort(key=lambda each: not each[1].is_plain)
    ids: dict[tuple[str, ...], str] = {}
    for rest, _, model_id in named:
        ids.setdefault(shape_key(rest), model_id)
    return ids


def list_models() -> tuple[ModelEntry, ...]:
    """Return every catalog entry, largest families first as in the data file."""
    return tuple(_entries().values())


def _id_of(name: str) -> str | None:
    """Return the catalog id of a name: an id, an alias or a copy of the same shape."""
    return _ids_by_lower_name().get(name.lower()) or _ids_by_shape().get(shape_key(name))


def _read(model_id: str) -> tuple[ModelEntry, StatedFormat | None]:
    """Return the entry that a name stands for, and the format that replaces the entry's own.

    Raises:
        UnknownModelError: the catalog has no such name; the message gives the nearest ones.
    """
    name = model_id.strip()
    exact, split = _ids_by_lower_name().get(name.lower()), split_format(name)
    is_other_publishers = split is not None and split[1].is_publishers
    known = exact or (None if is_other_publishers else _ids_by_shape().get(shape_key(name)))
    if known is not None:
        return _entries()[known], None
    if split is not None and (base := _base_of(split[0])):
        return _entries()[base], split[1]
    raise _unknown(model_id)


def _base_of(rest: str) -> str | None:
    """Return the id of the model whose checkpoint a name states, None if it is unknown.

    A rest that states another quantisation contradicts the format after it.
    """
    inner = split_format(rest)
    if inner is not None and not inner[1].is_plain:
        return None
    return _id_of(rest) or _ids_without_format().get(shape_key(rest))


def _unknown(model_id: str) -> UnknownModelError:
    """Return the error for an unknown name, with the nearest ones."""
    rest = names_gguf(model_id)
    base = _base_of(rest) if rest else None
    if base is not None:
        return UnknownModelError(
            f"{model_id} holds GGUF files of several types: name the model itself, {base}, and "
            "the type of the file as strategy.quantization, such as gguf:q4_k_m",
            "model",
            nearest=(base,),
        )
    nearest = nearest_names(model_id, _ids_by_name())
    return UnknownModelError(
        f"no model {model_id!r} in the catalog; nearest: {', '.join(nearest) or 'none'}; "
        "any other model can be given as its config.json",
        "model",
        nearest=nearest,
    )


def get_entry(model_id: str) -> ModelEntry:
    """Return the catalog's entry for an id or alias, or for a checkpoint of its model.

    Raises:
        UnknownModelError: the catalog has no such name; the message gives the nearest ones.
    """
    return _read(model_id)[0]


def checkpoint_name(model_id: str) -> str:
    """Return the name under which an engine loads a model: the given checkpoint's own.

    Names that are no repository are replaced by the catalog's id, unless they state a format.

    Raises:
        UnknownModelError: the catalog has no such name; the message gives the nearest ones.
    """
    entry, stated = _read(model_id)
    name = model_id.strip()
    written = {each.lower(): each for each in (entry.id, *entry.aliases)}.get(name.lower(), name)
    return written if stated is not None or "/" in written else entry.id


def get_model(model_id: str) -> ModelSpec:
    """Return the shape of a catalog model, in the format that its name states.

    Raises:
        UnknownModelError: the catalog has no such name; the message gives the nearest ones.
    """
    entry, stated = _read(model_id)
    name, spec = model_id.strip(), _model(entry.id)
    if name.lower() in _ids_by_lower_name():
        return spec
    note = f"{name} is no id of the catalog: it is read as "
    if stated is None:
        return _noted(spec, f"{note}{entry.id}, whose shape it shares")
    spec = _stated_model(entry.id, stated)
    wider = ", ".join(module.strip("*.") for module in left_alone(spec, stated))
    detail = stated.style.detail + (f" and {wider} in 16 bits" if wider else "")
    detail = "as that is stored itself" if spec is _model(entry.id) else detail
    note += (
        f"the {stated.style.title} checkpoint of {entry.id}, {detail}, as published ones of such "
        "names usually are; give its config.json to have it exactly"
    )
    return _noted(spec, note).model_copy(update={"id": name})


def _noted(spec: ModelSpec, note: str) -> ModelSpec:
    """Return a model with a note before its own."""
    return spec.model_copy(update={"note": f"{note}; {spec.note}" if spec.note else note})


@cache
def _model(model_id: str) -> ModelSpec:
    return _spec(_entries()[model_id], _config(model_id))


@cache
def _stated_model(model_id: str, stated: StatedFormat) -> ModelSpec:
    """Return a model in a stated format; a generic name of its own format changes nothing."""
    own = _model(model_id)
    if stated.is_generic and own.weight_dtype == stated.style.dtype:
        return own
    spec = _spec(_entries()[model_id], with_format(_config(model_id), own, stated))
    return spec.model_copy(update={"source": f"{spec.source}; its format as the name states it"})


def _config(model_id: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(data_text(f"configs/{_entries()[model_id].config}.json"))
    return config


def _spec(entry: ModelEntry, config: dict[str, Any]) -> ModelSpec:
    spec = model_from_config(config, entry.id)
    return spec.model_copy(update={"source": entry.source, "as_of": entry.as_of})
