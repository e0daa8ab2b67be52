"""How far each technique has come, with what proves it: one list for command, page and screens."""

from collections.abc import Sequence
from typing import Any

from planner.techniques.registry import TECHNIQUES
from runners.abilities import ABILITIES
from runners.ratios import KeptRatio
from webapp.core.benches.ratios import Proof, evidence, holds, level_of, stored

Row = dict[str, Any]


def all_rows() -> list[Row]:
    """Return what is said of every technique, in the registry's order."""
    kept = stored()
    return [row_of(key, kept) for key in TECHNIQUES]


def row_of(key: str, kept: dict[str, KeptRatio]) -> Row:
    """Return what is said of one technique."""
    ability, technique = ABILITIES.get(key), TECHNIQUES[key]
    return {
        "id": key,
        "title": technique.title,
        "state": level_of(key, kept),
        "headline": technique.headline,
        "job_kind": ability.job_kind if ability else "",
        "library": ability.library if ability else "",
        "version": ability.version if ability else "",
        "test": ability.test if ability else "",
        "ratios": [_ratio(proof, ratio) for proof, ratio in evidence(key, kept)],
    }


def _ratio(proof: Proof, kept: KeptRatio) -> Row:
    return {
        **kept.model_dump(mode="json"),
        "shows": proof.shows,
        "floor": proof.floor,
        "holds": holds(proof, kept),
        "test": proof.test,
    }


def state_table() -> str:
    """Return every technique's state as a table in Markdown."""
    lines = map(_state, all_rows())
    return "\n".join((*_head(*STATE_COLUMNS), *lines))


def ratio_table() -> str:
    """Return what was measured of each technique, and below when, where and with what."""
    rows = all_rows()
    lines = [_line(row["id"], each) for row in rows for each in row["ratios"]]
    return "\n".join((*_head(*RATIO_COLUMNS), *lines, "", *_taken(rows)))


STATE_COLUMNS = ("Name", "Technique", "State", "Job and library", "Published headline")
RATIO_COLUMNS = ("Name", "What it shows", "Ratio", "Of", "Measured (95 %)", "n", "Holds")


def _head(*names: str) -> tuple[str, str]:
    return _cells(*names), "|---" * len(names) + "|"


def _state(row: Row) -> str:
    through = f"{row['job_kind']}, {row['library']}" if row["job_kind"] else ""
    return _cells(f"`{row['id']}`", row["title"], row["state"], through, row["headline"])


def _line(key: str, ratio: Row) -> str:
    value = f"{ratio['value']:.3g} ({ratio['low']:.3g} to {ratio['high']:.3g})"
    held = "yes" if ratio["holds"] else f"no: not clear of {ratio['floor']:g}"
    name, kind = ratio["name"], ratio["of"]
    return _cells(f"`{key}`", ratio["shows"], name, kind, value, ratio["n"], held)


def _cells(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _taken(rows: Sequence[Row]) -> list[str]:
    return sorted(
        {
            f"- `{each['command']}` on {each['date']}: {each['machine']}; "
            + ", ".join(f"{name} {version}" for name, version in each["versions"].items())
            for row in rows
            for each in row["ratios"]
        }
    )
