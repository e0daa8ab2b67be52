"""Read the planner's own data files, once per process."""

import json
import tomllib
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
