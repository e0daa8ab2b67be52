"""The factors that published times give methods of compression, read from the fitted file."""

from functools import cache
from typing import Any

from planner.catalog.reading import data_json

FILE = "compression_factors.json"
# Methods without a published time are arithmetic alone: what others of them are off by, widened.
UNTRIED_SPREAD = 0.8


@cache
def _fitted() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = data_json(FILE)["methods"]
    return found


def published_times(alike: str) -> int:
    """Return how many published times speak for methods of a kind."""
    return int(_fitted().get(alike, {}).get("n", 0))


def factor_of(alike: str) -> float:
    """Return what published times multiply the seconds of a kind of method with."""
    return float(_fitted().get(alike, {}).get("factor", 1.0))


def spread_of(alike: str) -> float:
    """Return the log spread of a duration: what sources left out of the fit were missed by."""
    return float(_fitted().get(alike, {}).get("spread", UNTRIED_SPREAD))
