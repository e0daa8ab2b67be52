"""Reads the planner's own data files, and finds the known names closest to an unknown one."""

import json
import tomllib
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_name("data")


def data_text(name: str) -> str:
    """Return the text of one file of the catalog."""
    return (DATA / name).read_text("utf-8")


@cache
def data_toml(name: str) -> dict[str, Any]:
    """Return one TOML file of the catalog, parsed."""
    return tomllib.loads(data_text(name))


@cache
def data_json(name: str) -> dict[str, Any]:
    """Return one JSON file of the catalog, parsed."""
    parsed: dict[str, Any] = json.loads(data_text(name))
    return parsed


# Find the closest known names to an unknown name.


MAX_NEAREST = 5
SIMILARITY_CUTOFF, FALLBACK_CUTOFF = 0.4, 0.2


def nearest_names(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return up to five known names similar to ``name``, closest first.

    Names that it begins with come before all others: Qwen3-8B of Qwen3-8B-of-mine.
    """
    by_lower = {candidate.lower(): candidate for candidate in known}
    last_part = name.lower().rsplit("/", 1)[-1]
    begun = [
        lower for lower in by_lower if f"{last_part}-".startswith(f"{lower.rsplit('/', 1)[-1]}-")
    ]
    begun.sort(key=lambda lower: -len(lower.rsplit("/", 1)[-1]))
    alike = get_close_matches(
        name.lower(), list(by_lower), n=MAX_NEAREST, cutoff=SIMILARITY_CUTOFF
    )
    close = [*begun, *(lower for lower in alike if lower not in begun)]
    containing = [
        lower for lower in by_lower if last_part and last_part in lower and lower not in close
    ]
    matches = (*close, *sorted(containing)) or get_close_matches(
        name.lower(), list(by_lower), n=MAX_NEAREST, cutoff=FALLBACK_CUTOFF
    )
    return tuple(by_lower[lower] for lower in matches)[:MAX_NEAREST]


def search_names(text: str, names: Iterable[str]) -> list[int]:
    """Return the places of the names that hold every word of a text.

    Where none does, separators do not count: "llama3.3" is found in Llama-3.3-70B.
    """
    words, lower = text.lower().split(), [name.lower() for name in names]
    found = [at for at, name in enumerate(lower) if all(word in name for word in words)]
    if found:
        return found
    words = [_squeezed(word) for word in words]
    return [at for at, name in enumerate(lower) if all(word in _squeezed(name) for word in words)]


def _squeezed(text: str) -> str:
    return text.translate({ord(each): None for each in "-_ :"})
