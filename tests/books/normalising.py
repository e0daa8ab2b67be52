"""Placeholders for what differs between two runs: ids, tokens, folders and programs."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

import planner

ROOT = str(Path(planner.__file__).resolve().parents[1])
ULID = re.compile(r"\b[0-9A-HJKMNP-TV-Z]{26}\b")
HEXADECIMAL = re.compile(r"\b[0-9a-f]{32,64}\b")


def with_placeholders(text: str, places: Mapping[str, str]) -> str:
    """Return a text in which ids have numbers by their first place, and folders their names.

    ``places`` are further texts and their placeholders; a longer one goes first.
    """
    known = {**places, sys.executable: "PYTHON", ROOT: "REPOSITORY"}
    for place in sorted(known, key=len, reverse=True):
        text = text.replace(place, known[place])
    numbers: dict[str, str] = {}
    text = ULID.sub(lambda found: numbers.setdefault(found[0], f"ID-{len(numbers) + 1}"), text)
    return HEXADECIMAL.sub(lambda found: f"HEX-{len(found[0])}", text)
