"""Pages of models and techniques."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from django.contrib import messages
from django.core.paginator import Paginator
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse, QueryDict
from django.shortcuts import redirect, render
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from planner.catalog.models import (
    ModelEntry,
    checkpoint_name,
    find_model,
    get_entry,
    get_model,
)
from planner.specs.base import PlannerError, UnknownTechniqueError
from planner.specs.estimate import Estimate
from planner.specs.model import ModelSpec
from planner.techniques.registry import TECHNIQUES, get
from runners.jobspec.compress import QUANTISED_DTYPES
from webapp.accounts.models import Role, memberships_of
from webapp.accounts.services import (
    chosen_of,
    current_team,
    has_role,
    membership_of,
    require_role,
)
from webapp.bench.ratios import level_of, stored
from webapp.bench.technique_states import row_of
from webapp.core.bodies import takes_file
from webapp.core.display import Figure
from webapp.core.figures import REGISTRY
from webapp.core.names import checked_name
from webapp.core.parameters import choice_in_query, page_number, reads_query
from webapp.core.problems import Problem
from webapp.core.search import folded
from webapp.hosts.machines import cluster_for_host
from webapp.hosts.models import Host, HostState
from webapp.jobs.evaluating import left_model
from webapp.jobs.lookup import visible_jobs
from webapp.jobs.models import Job
from webapp.jobs.permissions import refusal
from webapp.jobs.publishing import may_publish
from webapp.jobs.stored_files import model_delete, model_rename, model_to_change, stored_of_model
from webapp.modelhub.catalog import FACETS, SORTS, listed_models, makers
from webapp.modelhub.models import (
    TeamModel,
    kv_bytes_per_token,
    num_parameters,
    parameter_parts,
)
from webapp.plans.planning import fits_on
from webapp.wizard.choosing import (
    CONVERSATION_TOKENS,
    device_notes,
    fitting_dtype,
    model_notes,
    usual_place,
)
from webapp.wizard.forms import MAX_CONFIG_BYTES
from webapp.wizard.model_form import ModelNewForm
from webapp.wizard.technique_drafts import is_carried

FIT_DTYPES = ("bf16", "int8", "int4")
UNPROCESSABLE = 422


class Fit(NamedTuple):
    """Whether a model fits on one host, by weight dtype."""

    host: Host
    cells: tuple[tuple[str, bool | None, int], ...]  # dtype, fits, bytes needed


PAGE_SIZE = 40


@require_GET
@reads_query("q", "maker", *FACETS, "sort", "page")
def model_list(request: HttpRequest) -> HttpResponse:
    """List the team's models, then pages of the catalog by name, facets and order."""
    query = request.GET.get("q", "").strip()
    team = TeamModel.objects.visible_to(request.user).select_related("host")
    if query:
        team = team.filter(name__folded_contains=query)
    maker = choice_in_query(request, "maker", makers())
    facets = {name: choice_in_query(request, name, values) for name, values in FACETS.items()}
    sort = choice_in_query(request, "sort", [sign + name for name in SORTS for sign in ("", "-")])
    found = listed_models(query, maker, facets, sort)
    page = Paginator(found, PAGE_SIZE).get_page(page_number(request))
    is_of_catalog = bool(maker or any(facets.values()))  # which a team's models do not have
    membership = chosen_of(request, memberships_of(request.user))
    place = usual_place(membership.team if membership else None)
    kept = request.GET.copy()
    kept.pop("page", None)
    context = {
        "team_models": () if is_of_catalog or page.number > 1 else team,
        "sort": sort,
        "page": page,
        "rows": [(row, fitting_dtype(row.entry.id, place)) for row in page],
        "host": place.host if place else None,
        "num_listed": len(found),
        "filter": query,
        "maker": maker,
        "makers": makers(),
        "facets": [
            (name, FACET_WORDS[name], [(value, words) for value, (words, _) in values.items()])
            for name, values in FACETS.items()
        ],
        "chosen": facets,
        "is_filtered": bool(query) or is_of_catalog,
        "heads": {name: _head(kept, name, sort) for name in SORTS},
        "query": kept.urlencode(),
    }
    return render(request, "modelhub/list.html", context)


FACET_WORDS = {"size": "Any size", "context": "Any context", "kind": "Any architecture"}


def _head(query: QueryDict, name: str, sort: str) -> dict[str, str]:
    """Return the direction of a column's order, and the query that turns or begins it."""
    is_current = sort.removeprefix("-") == name
    turned = query.copy()
    turned["sort"] = name if (is_current and sort.startswith("-")) else f"-{name}"
    if name == "name" and not is_current:
        turned["sort"] = name
    direction = ("descending" if sort.startswith("-") else "ascending") if is_current else ""
    return {"direction": direction, "query": turned.urlencode()}


@require_GET
def model_choices(request: HttpRequest) -> HttpResponse:
    """Return what a combobox says of models: those recent, those on hosts, and what fits."""
    membership = chosen_of(request, memberships_of(request.user))
    return JsonResponse(model_notes(request.user, membership.team if membership else None))


@require_GET
def device_choices(request: HttpRequest) -> HttpResponse:
    """Return what a combobox says of devices: those recent."""
    return JsonResponse(device_notes(request.user))


@require_GET
def model_detail(request: HttpRequest, model_id: str) -> HttpResponse:
    """Show one model: shape, parameters by kind of block, and the hosts on which it fits."""
    own = TeamModel.objects.visible_to(request.user).select_related("host")
    team_model = own.filter(pk=model_id).first()
    if team_model is not None:
        shape = find_model(team_model.config)
        planner_model: str | dict[str, Any] = team_model.config
        name, entry = team_model.name, None
    else:
        entry = _entry_or_404(model_id)
        shape = get_model(model_id)
        planner_model = name = checkpoint_name(model_id)
    context: dict[str, Any] = {
        "team_model": team_model,
        "evaluation": _evaluation(request, team_model),
        "may_publish": _may_publish(request, team_model),
        "entry": entry,
        "name": name,
        "plan_model": team_model.pk if team_model else name,
        "shape": shape,
        "narrow_dtypes": QUANTISED_DTYPES,
        "figures": figures_of(team_model.facts) if team_model else (),
        "job": _job_of(request, team_model) if team_model else None,
        **_changing(request, team_model),
    }
    if shape is not None:
        hosts = Host.objects.visible_to(request.user).exclude(state=HostState.RETIRED)
        context |= {
            "parameters": num_parameters(shape),
            "parts": parameter_parts(shape),
            "kv": kv_bytes_per_token(shape),
            "tokens": min(CONVERSATION_TOKENS, shape.max_position_embeddings),
            "fits": _fits(planner_model, shape, hosts),
            "dtypes": FIT_DTYPES,
        }
    return render(request, "modelhub/detail.html", context)


def _evaluation(request: HttpRequest, model: TeamModel | None) -> str:
    """Return the label of the evaluate button, or "" if the user may not evaluate."""
    if model is None or not has_role(request.user, model.team, Role.PRACTITIONER):
        return ""
    return left_model(model).evaluation


def _may_publish(request: HttpRequest, model: TeamModel | None) -> bool:
    """Return whether the user may push a model, and its files are on a host."""
    if model is None or not has_role(request.user, model.team, Role.PRACTITIONER):
        return False
    return may_publish(model)


def _changing(request: HttpRequest, model: TeamModel | None) -> dict[str, Any]:
    """Return whether the user may rename and delete a model, and what its job keeps."""
    if model is None or not has_role(request.user, model.team, Role.PRACTITIONER):
        return {}
    kept, job = stored_of_model(model)
    is_own = job is not None and not refusal(membership_of(request.user, job.team), job, "delete")
    return {"may_change": True, "kept": kept if is_own else None}


def _job_of(request: HttpRequest, team_model: TeamModel) -> Job | None:
    """Return the job that made a model; None if none did, or if it is deleted."""
    jobs = visible_jobs(request).only("id", "name")
    return jobs.filter(pk=str(team_model.facts.get("job", ""))).first()


def figures_of(facts: Mapping[str, Any]) -> list[Figure]:
    """Return the measured figures of a model's job."""
    values = {**facts, **facts.get("measured", {})}
    return [
        Figure(each.label, float(values[each.name]), each.unit, provenance="measured")
        for each in REGISTRY.values()
        if isinstance(values.get(each.name), int | float)
    ]


def _entry_or_404(model_id: str) -> ModelEntry:
    try:
        return get_entry(model_id)
    except PlannerError as error:
        raise Http404(model_id) from error


def _fits(model: str | dict[str, Any], shape: ModelSpec, hosts: Iterable[Host]) -> list[Fit]:
    """Return for each host of known speed whether the model fits, by weight dtype."""
    tokens = min(CONVERSATION_TOKENS, shape.max_position_embeddings)
    rows = []
    for host in hosts:
        try:
            cluster = cluster_for_host(host)
        except Problem:
            continue
        estimates = [(dtype, fits_on(model, cluster, dtype, tokens)) for dtype in FIT_DTYPES]
        rows.append(Fit(host, tuple(_cell(dtype, estimate) for dtype, estimate in estimates)))
    return rows


def _cell(dtype: str, estimate: Estimate | None) -> tuple[str, bool | None, int]:
    if estimate is None:
        return dtype, None, 0
    return dtype, estimate.fits, estimate.memory.per_device_peak_bytes


@require_POST
def model_rename_view(request: HttpRequest, model_id: str) -> HttpResponse:
    """Give a model of the team another name."""
    model = model_to_change(request, model_id)
    try:
        name = checked_name(request.POST.get("name", ""), "name")
        model_rename(model=model, name=name, by=request.user.get_username())
    except Problem as problem:
        messages.error(request, problem.detail)
    else:
        messages.success(request, f"The model is called {model.name} now.")
    return redirect("model-detail", model.pk)


@require_POST
def model_delete_view(request: HttpRequest, model_id: str) -> HttpResponse:
    """Delete a model of the team, with what its job keeps on a host if that is chosen."""
    with_files = bool(request.POST.get("files"))
    model = model_to_change(request, model_id, with_files=with_files)
    name = model.name
    try:
        rest = model_delete(model=model, by=request.user.get_username(), with_files=with_files)
    except Problem as problem:
        messages.warning(request, problem.detail)
        return redirect("model-detail", model.pk)
    messages.success(request, f"{name} is deleted. {rest}".rstrip())
    return redirect("model-list")


@require_http_methods(["GET", "POST"])
@require_role(Role.PRACTITIONER)
@takes_file(MAX_CONFIG_BYTES)
def model_new(request: HttpRequest) -> HttpResponse:
    """Register a model by its repository or config.json, or show the form with its errors."""
    team = current_team(request)
    form = ModelNewForm(request.POST or None, request.FILES or None, label_suffix="", team=team)
    if request.method == "POST" and form.is_valid():
        chosen = form.cleaned_data["chosen"]
        model = TeamModel.objects.create(
            team=team,
            name=form.cleaned_data["name"],
            source=chosen.source or "config",
            repository=chosen.repository or "",
            revision=chosen.revision or "",
            config=form.cleaned_data["config"],
            num_parameters=num_parameters(form.cleaned_data["shape"]),
        )
        messages.success(request, f"{model.name} is registered; plans can use it.")
        return redirect("model-detail", model.pk)
    status = UNPROCESSABLE if form.errors else 200
    return render(request, "modelhub/new.html", {"form": form}, status=status)


PHASES = (
    ("compression", "Compression"),
    ("inference", "Inference and serving"),
    ("training", "Training"),
)


@require_GET
@reads_query("q")
def technique_list(request: HttpRequest) -> HttpResponse:
    """List every technique by phase."""
    query = request.GET.get("q", "").strip()
    words = folded(query).split()
    techniques = [
        technique
        for technique in TECHNIQUES.values()
        if all(word in folded(f"{technique.key} {technique.title}") for word in words)
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
        "is_carried": is_carried(technique),
        "row": row_of(key, stored()),
    }
    return render(request, "techniques/detail.html", context)
