"""The state of each technique with its proofs, and the pages of techniques."""

import json
from collections.abc import Sequence
from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from planner.errors import UnknownTechniqueError
from planner.techniques.registry import TECHNIQUES, get
from runners.abilities import ABILITIES
from runners.bench_cases import KeptRatio
from webapp.core.benches.ratios import Proof, evidence, holds, level_of, stored

# The state of each technique with its proofs, for command, docs pages and UI.


Row = dict[str, Any]


def all_rows() -> list[Row]:
    """Return the row of every technique, in registry order."""
    ratios = stored()
    return [row_of(key, ratios) for key in TECHNIQUES]


def row_of(key: str, kept: dict[str, KeptRatio]) -> Row:
    """Return the row of one technique: state, job, library and proofs."""
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


def _ratio(proof: Proof, ratio: KeptRatio) -> Row:
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
    return "\n".join((*_head(*RATIO_COLUMNS), *lines, "", *_provenance_lines(rows)))


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


def _provenance_lines(rows: Sequence[Row]) -> list[str]:
    return sorted(
        {
            f"- `{each['command']}` on {each['date']}: {each['machine']}; "
            + ", ".join(f"{name} {version}" for name, version in each["versions"].items())
            for row in rows
            for each in row["ratios"]
        }
    )


PHASES = (
    ("compression", "Compression"),
    ("inference", "Inference and serving"),
    ("training", "Training"),
)


@require_GET
def technique_list(request: HttpRequest) -> HttpResponse:
    """List every technique by phase."""
    query = request.GET.get("q", "").strip()
    words = query.lower().split()
    techniques = [
        technique
        for technique in TECHNIQUES.values()
        if all(word in f"{technique.key} {technique.title}".lower() for word in words)
    ]
    ratios = stored()
    rows = [(each, level_of(each.key, ratios)) for each in techniques]
    groups = [(name, [row for row in rows if phase in row[0].phases]) for phase, name in PHASES]
    context = {"groups": groups, "filter": query, "num": len(techniques)}
    return render(request, "techniques/list.html", context)


@require_GET
def technique_detail(request: HttpRequest, key: str) -> HttpResponse:
    """Show one technique with its effect, its published headline and its source."""
    try:
        technique = get(key)
    except UnknownTechniqueError as error:
        raise Http404(key) from error
    context = {
        "technique": technique,
        "phases": [name for phase, name in PHASES if phase in technique.phases],
        "settings": json.dumps(technique.settings, indent=2),
        "row": row_of(key, stored()),
    }
    return render(request, "techniques/detail.html", context)
