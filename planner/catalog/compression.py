"""Factors of compression methods fitted to published times, read from the factor file."""

from functools import cache
from typing import Any

from planner.catalog.reading import data_json

FILE = "compression_factors.json"
# Spread of methods without a published time, whose duration is uncalibrated.
UNTRIED_SPREAD = 0.8


@cache
def _fitted() -> dict[str, dict[str, Any]]:
    methods: dict[str, dict[str, Any]] = data_json(FILE)["methods"]
    return methods


def published_times(alike: str) -> int:
    """Return the number of published times for a group of methods."""
    return int(_fitted().get(alike, {}).get("n", 0))


def factor_of(alike: str) -> float:
    """Return the calibration factor for the time of a group of methods."""
    return float(_fitted().get(alike, {}).get("factor", 1.0))


def spread_of(alike: str) -> float:
    """Return the log spread of a duration, from sources left out of the fit."""
    return float(_fitted().get(alike, {}).get("spread", UNTRIED_SPREAD))
