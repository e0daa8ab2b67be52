"""The catalog of published models as a list: facets, order, pages."""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

from planner.catalog.models import ModelEntry, get_model, list_models
from planner.specs.model import ModelSpec
from webapp.core.search import folded
from webapp.modelhub.models import num_parameters

BILLION = 1e9


class CatalogRow(NamedTuple):
    """One catalog model in the list of models."""

    entry: ModelEntry
    shape: ModelSpec
    parameters: int

    @property
    def maker(self) -> str:
        """Return the owner of the repository."""
        owner, slash, _ = self.entry.id.partition("/")
        return owner if slash else ""

    @property
    def name(self) -> str:
        """Return the id without its owner."""
        return self.entry.id.rpartition("/")[2]


Condition = Callable[[CatalogRow], bool]


def _sized(least: float, most: float) -> Condition:
    return lambda row: least * BILLION <= row.parameters < most * BILLION


def _reads(tokens: int) -> Condition:
    return lambda row: row.shape.max_position_embeddings >= tokens


FACETS: Mapping[
    str, Mapping[str, tuple[str, Condition]]
] = {  # parameter -> value -> words, condition
    "size": {
        "1": ("below 1 B parameters", _sized(0, 1)),
        "4": ("1 to 4 B", _sized(1, 4)),
        "15": ("4 to 15 B", _sized(4, 15)),
        "80": ("15 to 80 B", _sized(15, 80)),
        "more": ("80 B and more", _sized(80, 1e9)),
    },
    "context": {
        "32k": ("32 k tokens and more", _reads(32_000)),
        "128k": ("128 k tokens and more", _reads(128_000)),
        "1m": ("a million tokens", _reads(1_000_000)),
    },
    "kind": {
        "dense": ("dense", lambda row: not row.shape.is_moe),
        "moe": ("mixture of experts", lambda row: row.shape.is_moe),
    },
}
SORTS: Mapping[str, Callable[[CatalogRow], Any]] = {
    "name": lambda row: folded(row.entry.id),
    "parameters": lambda row: row.parameters,
    "context": lambda row: row.shape.max_position_embeddings,
}


@cache
def catalog_rows() -> tuple[CatalogRow, ...]:
    """Return every published model with its shape and number of parameters."""
    shapes = ((entry, get_model(entry.id)) for entry in list_models())
    return tuple(CatalogRow(entry, shape, num_parameters(shape)) for entry, shape in shapes)


@cache
def makers() -> tuple[str, ...]:
    """Return the owners of the catalog's repositories, by name."""
    return tuple(sorted({row.maker for row in catalog_rows() if row.maker}, key=str.casefold))


def listed_models(
    query: str = "", maker: str = "", facets: Mapping[str, str] | None = None, sort: str = ""
) -> list[CatalogRow]:
    """Return the models that have every word of a query in their id and match all facets.

    ``sort`` is a name of ``SORTS``, after a "-" from the largest on; else the catalog's order.
    """
    words = folded(query).split()
    chosen = [FACETS[name][value][1] for name, value in (facets or {}).items() if value]
    rows: Iterable[CatalogRow] = (
        row
        for row in catalog_rows()
        if all(word in folded(row.entry.id) for word in words)
        and (not maker or row.maker == maker)
        and all(holds(row) for holds in chosen)
    )
    if key := SORTS.get(sort.removeprefix("-")):
        return sorted(rows, key=key, reverse=sort.startswith("-"))
    return list(rows)
