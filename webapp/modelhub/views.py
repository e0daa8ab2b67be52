"""Pages of models: the catalog, the team's own, their memory needs, registration."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from django import forms
from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_GET, require_http_methods

from planner.catalog.hf_config import model_from_config
from planner.catalog.models import ModelEntry, checkpoint_name, get_entry, get_model, list_models
from planner.errors import PlannerError
from planner.specs.estimate import Estimate
from planner.specs.model import ModelSpec
from runners.jobspec.compress import QUANTISED_DTYPES
from webapp.accounts.models import Role
from webapp.accounts.roles import current_team, has_role, require_role
from webapp.core.display import Figure
from webapp.core.problems import Problem
from webapp.core.wording import sentence
from webapp.figures.registry import REGISTRY
from webapp.hosts.device import cluster_for_host
from webapp.hosts.models import Host, HostState
from webapp.jobs.evaluating import left_model
from webapp.modelhub.models import TeamModel
from webapp.modelhub.shapes import kv_bytes_per_token, num_parameters, parameter_parts, shape_of
from webapp.plans.planning import fits_on
from webapp.wizard.forms import ConfigJson, read_upload

# The form that registers a model from its config.json.


class ModelNewForm(forms.Form):
    """A name and a ``config.json``, pasted or uploaded."""

    use_required_attribute = False

    name = forms.CharField(
        label="Name",
        max_length=120,
        error_messages={"required": "Give the model a name that your team will recognise."},
    )
    config = ConfigJson("config.json", "Paste the file as Hugging Face publishes it.")
    config_file = forms.FileField(
        label="Or upload the file",
        required=False,
        widget=forms.FileInput(attrs={"accept": ".json,application/json"}),
    )

    def clean(self) -> dict[str, Any]:
        """Parse the config; reject one that describes no model, with the missing field."""
        values = super().clean() or self.cleaned_data
        if "config" in self.errors:
            return values
        try:
            values["config"] = read_upload(values.get("config_file")) or values.get("config")
        except forms.ValidationError as error:
            self.add_error("config_file", error)
            return values
        if not values["config"]:
            self.add_error("config", "Paste the config.json, or upload it.")
            return values
        try:
            values["shape"] = model_from_config(values["config"])
        except PlannerError as error:
            self.add_error("config", sentence(error.message))
        return values


CONVERSATION_TOKENS = 2048
FIT_DTYPES = ("bf16", "int8", "int4")
UNPROCESSABLE = 422


class Listed(NamedTuple):
    """One catalog model in the list of models."""

    entry: ModelEntry
    shape: ModelSpec
    parameters: int


class Fit(NamedTuple):
    """Whether a model fits on one host, by weight dtype."""

    host: Host
    cells: tuple[tuple[str, bool | None, int], ...]  # dtype, fits, bytes needed


@require_GET
def model_list(request: HttpRequest) -> HttpResponse:
    """List the team's models, then the catalog; ``q`` filters by name."""
    query = request.GET.get("q", "").strip()
    team = TeamModel.objects.visible_to(request.user).select_related("host")
    if query:
        team = team.filter(name__icontains=query)
    words = query.lower().split()
    listed = [
        Listed(entry, shape, num_parameters(shape))
        for entry in list_models()
        if all(word in entry.id.lower() for word in words)
        for shape in (get_model(entry.id),)
    ]
    context = {"team_models": team, "listed": listed, "filter": query}
    return render(request, "modelhub/list.html", context)


@require_GET
def model_detail(request: HttpRequest, model_id: str) -> HttpResponse:
    """Show one model: shape, parameters by kind of block, and the hosts on which it fits."""
    own = TeamModel.objects.visible_to(request.user).select_related("host")
    team_model = own.filter(pk=model_id).first()
    if team_model is not None:
        shape = shape_of(team_model.config)
        planner_model: str | dict[str, Any] = team_model.config
        name, entry = team_model.name, None
    else:
        entry = _entry_or_404(model_id)
        shape = get_model(model_id)
        planner_model = name = checkpoint_name(model_id)
    context: dict[str, Any] = {
        "team_model": team_model,
        "evaluation": _evaluation(request, team_model),
        "entry": entry,
        "name": name,
        "shape": shape,
        "narrow_dtypes": QUANTISED_DTYPES,
        "figures": figures_of(team_model.facts) if team_model else (),
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


@require_http_methods(["GET", "POST"])
@require_role(Role.PRACTITIONER)
def model_new(request: HttpRequest) -> HttpResponse:
    """Register a model by its config.json, or show the form with its errors."""
    form = ModelNewForm(request.POST or None, request.FILES or None, label_suffix="")
    if request.method == "POST" and form.is_valid():
        model = TeamModel.objects.create(
            team=current_team(request),
            name=form.cleaned_data["name"],
            source="config",
            config=form.cleaned_data["config"],
            num_parameters=num_parameters(form.cleaned_data["shape"]),
        )
        messages.success(request, f"{model.name} is registered; plans can use it.")
        return redirect("model-detail", model.pk)
    status = UNPROCESSABLE if form.errors else 200
    return render(request, "modelhub/new.html", {"form": form}, status=status)
