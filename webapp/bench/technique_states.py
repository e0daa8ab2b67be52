"""The state of each technique with its proofs, for command, docs pages, site and API."""

from typing import Any

from planner.techniques.registry import TECHNIQUES
from runners.host.abilities import ABILITIES
from runners.host.bench import StoredRatio
from webapp.bench.ratios import Proof, evidence, holds, level_of, stored

Row = dict[str, Any]


def all_rows() -> list[Row]:
    """Return the row of every technique, in registry order."""
    ratios = stored()
    return [row_of(key, ratios) for key in TECHNIQUES]


def row_of(key: str, stored_ratios: dict[str, StoredRatio]) -> Row:
    """Return the row of one technique: state, job, library and proofs."""
    ability, technique = ABILITIES.get(key), TECHNIQUES[key]
    return {
        "id": key,
        "title": technique.title,
        "state": level_of(key, stored_ratios),
        "headline": technique.headline,
        "job_kind": ability.job_kind if ability else "",
        "library": ability.library if ability else "",
        "version": ability.version if ability else "",
        "test": ability.test if ability else "",
        "ratios": [_ratio(proof, ratio) for proof, ratio in evidence(key, stored_ratios)],
    }


def _ratio(proof: Proof, ratio: StoredRatio) -> Row:
    return {
        **ratio.model_dump(mode="json"),
        "shows": proof.shows,
        "floor": proof.floor,
        "holds": holds(proof, ratio),
        "test": proof.test,
    }


def state_table() -> str:
    """Return the states of all techniques as a Markdown table."""
    lines = map(_state, all_rows())
    return "\n".join((*_head(*STATE_COLUMNS), *lines))


def ratio_table() -> str:
    """Return the measured ratios as a Markdown table, with dates, machines and versions."""
    rows = all_rows()
    lines = [_line(row["id"], each) for row in rows for each in row["ratios"]]
    provenance = {
        f"- `{each['command']}` on {each['date']}: {each['machine']}; "
        + ", ".join(f"{name} {version}" for name, version in each["versions"].items())
        for row in rows
        for each in row["ratios"]
    }
    return "\n".join((*_head(*RATIO_COLUMNS), *lines, "", *sorted(provenance)))


STATE_COLUMNS = ("Name", "Technique", "State", "Job and library", "Published headline")
RATIO_COLUMNS = ("Name", "What it shows", "Ratio", "Of", "Measured (95 %)", "n", "Holds")


def _head(*names: str) -> tuple[str, str]:
    return _cells(*names), "|---" * len(names) + "|"


def _state(row: Row) -> str:
    through = f"{row['job_kind']}, {row['library']}" if row["job_kind"] else ""
    return _cells(f"`{row['id']}`", row["title"], row["state"], through, row["headline"])


def _line(key: str, ratio: Row) -> str:
    value = f"{ratio['value']:.3g} ({ratio['low']:.3g} to {ratio['high']:.3g})"
    verdict = "yes" if ratio["holds"] else f"no: not clear of {ratio['floor']:g}"
    name, kind = ratio["name"], ratio["of"]
    return _cells(f"`{key}`", ratio["shows"], name, kind, value, ratio["n"], verdict)


def _cells(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"
