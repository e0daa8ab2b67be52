"""The techniques that the planner knows: what each does, where it applies, who says so."""

import json

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from planner.errors import UnknownTechniqueError
from planner.techniques.registry import TECHNIQUES, get

PHASES = (
    ("compression", "Compression"),
    ("inference", "Inference and serving"),
    ("training", "Training"),
)


@require_GET
def technique_list(request: HttpRequest) -> HttpResponse:
    """List every technique by the phase that it works on."""
    query = request.GET.get("q", "").strip()
    words = query.lower().split()
    found = [
        technique
        for technique in TECHNIQUES.values()
        if all(word in f"{technique.key} {technique.title}".lower() for word in words)
    ]
    groups = [(name, [one for one in found if phase in one.phases]) for phase, name in PHASES]
    context = {"groups": groups, "filter": query, "num": len(found)}
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
    }
    return render(request, "techniques/detail.html", context)
