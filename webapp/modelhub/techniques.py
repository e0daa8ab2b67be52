"""Pages of the planner's techniques: effect, phases and source."""

import json

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from planner.errors import UnknownTechniqueError
from planner.techniques.registry import TECHNIQUES, get
from webapp.core.benches.ratios import level_of, stored
from webapp.modelhub.states import row_of

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
