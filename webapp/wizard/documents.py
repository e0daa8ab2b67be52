"""A plan as a document: the wizard's steps and the launch form as one JSON or YAML file.

The documents' fields are those of the forms: types, choices, limits and descriptions are read from
them, and each value is checked and stored by the form that the wizard shows. So a document and the
same clicks give the same draft, question and job.
"""

import copy
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, Union, cast

from django import forms
from django.conf import settings
from django.contrib.auth.models import User
from django.http import HttpRequest, QueryDict
from django.utils.datastructures import MultiValueDict
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model

from planner.catalog.gguf_names import read_model_name
from planner.catalog.hardware_names import read_hardware
from planner.exports.yaml_text import yaml_text
from planner.specs.base import PlannerError
from runners.launchers.launch import ENGINES
from webapp.core.display import sentence
from webapp.core.faults import in_words
from webapp.core.problems import InvalidProblem, faults_of, invalid, release_frames
from webapp.jobs.endpoints import hashes_of
from webapp.jobs.launching import LaunchOptions, launch_fields, launch_options_of, plan_launch
from webapp.jobs.models import Job, Priority
from webapp.plans.draft import PlanDraft
from webapp.plans.explanation import missing_step
from webapp.plans.models import Plan
from webapp.plans.predicting import measuring_of
from webapp.plans.questions import SLO_SECONDS, draft_shape, percentile_of
from webapp.plans.serving import endpoint_options_of, engine_choices
from webapp.plans.training import MIX_ROWS
from webapp.wizard.drafts import (
    GOALS,
    Options,
    adapt_pretraining,
    adapt_requests,
    fit_context,
    pins_form,
    step_form,
    store,
)
from webapp.wizard.forms import (
    GOAL_CHOICES,
    OBJECTIVES,
    PERCENTILES,
    SLOS,
    HardwareForm,
    PinsForm,
    StepForm,
)
from webapp.wizard.workload_forms import TRAINING_FORMS, WORKLOAD_FORMS

LONGEST_TEXT = 20_000
MOST_SECRETS = 16
SCHEMA_FILE = "schemas/job.json"  # below static/, written by manage.py client
NO_FIELD = "has no field in the wizard and is left out."
MIXTURE = ("source", "path", "weight", "reference")


class Document(BaseModel):
    """Base of the documents: a field that no form has is an error."""

    model_config = ConfigDict(extra="forbid")


def _literal(choices: object) -> Any:  # noqa: ANN401 (a type)
    keys = [key for key, _ in cast("list[tuple[Any, Any]]", choices)]
    return Literal[tuple(keys)]


def _keys(field: forms.ChoiceField) -> Iterator[Any]:
    """Yield the choices of a field, of its groups too, without the empty one."""
    for key, label in cast("list[tuple[Any, Any]]", field.choices):
        if isinstance(label, list | tuple):
            yield from (inner for inner, _ in label)
        elif key != "":
            yield field.coerce(key) if isinstance(field, forms.TypedChoiceField) else key


def _type_of(field: forms.Field) -> Any:  # noqa: ANN401 (a type)
    """Return the type of a form field's value, with its limits."""
    if isinstance(field, forms.IntegerField | forms.FloatField):
        kind = float if isinstance(field, forms.FloatField) else int
        limits: dict[str, Any] = {"ge": field.min_value, "le": field.max_value}
        return Annotated[kind, Field(**limits)]
    if isinstance(field, forms.ChoiceField):
        return Literal[tuple(_keys(field))]
    return Annotated[str, Field(max_length=field.max_length or LONGEST_TEXT)]  # type: ignore[attr-defined]


def _document_of(name: str, form: StepForm, *, without: frozenset[str] = frozenset()) -> Any:  # noqa: ANN401 (a type)
    """Return the document of a form; each field is optional and keeps its default if left out."""
    fields: dict[str, Any] = {}
    for key, field in form.fields.items():
        if key in without or key.startswith("mix_"):
            continue
        words = ": ".join(str(each) for each in (field.label, field.help_text) if each)
        kind = str if key == "dataset" else _type_of(field)
        fields[key] = (Optional[kind], Field(default=None, description=words))  # noqa: UP045 (a value)
    if "mix_weights" in form.fields:
        for key in ("mix_weights", "mix_every"):
            field = form.fields[key]
            fields[key] = (
                Optional[_type_of(field)],  # noqa: UP045 (a value)
                Field(default=None, description=str(field.label)),
            )
        rows = Annotated[list[SourceDocument], Field(max_length=len(MIX_ROWS))]
        words = "The sources of data_source “mixed”, each with its weight"
        fields["mixture"] = (Optional[rows], Field(default=None, description=words))  # noqa: UP045
    return create_model(name, __base__=Document, __doc__=type(form).__doc__, **fields)


class SourceDocument(Document):
    """One source of a data mixture: the host's own text, a file on it, or an upload's id."""

    source: str = Field(max_length=40, description="host, file, or the id of an uploaded file")
    path: str = Field(default="", max_length=1000, description="For source “file”")
    weight: float = Field(default=1.0, ge=0.001, le=1000)
    reference: float | None = Field(default=None, ge=0, le=20, description="Reference loss")


class ModelDocument(Document):
    """A model by other means than its name: a team's model, a config.json, a folder on a host."""

    catalog_id: str | None = Field(default=None, max_length=200, description="Name in the catalog")
    team_model: str | None = Field(
        default=None, max_length=120, description="Id or name of a model of the team"
    )
    config: dict[str, Any] | None = Field(
        default=None, description="A config.json as Hugging Face publishes it"
    )
    path: str | None = Field(
        default=None,
        max_length=400,
        description="A folder below the host's model folder; with its config in “config”",
    )


class HardwareDocument(Document):
    """Where it runs: a host or a pool by name, or catalog hardware to plan for."""

    host: str | None = Field(default=None, max_length=120, description="Name or id of a host")
    pool: str | None = Field(default=None, max_length=120, description="Name or id of a pool")
    device: str | None = Field(
        default=None, max_length=80, description="A device of the catalog, such as h200"
    )
    devices_per_node: int | None = Field(
        default=None, ge=1, le=1024, description="Devices in one machine"
    )
    nodes: int | None = Field(default=None, ge=1, le=10_000, description="Machines")
    engine: str | None = Field(default=None, max_length=40, description="Left out: automatic")
    memory_limit_gib: float | None = Field(
        default=None, ge=0.01, le=1_000_000, description="GiB of each device; left out: all memory"
    )
    on_lost_rank: Literal["stop", "restart", "shrink"] | None = Field(
        default=None, description="After the loss of a rank or host"
    )


class LaunchDocument(Document):
    """The launch form: what is started, for how long, and the options of the program."""

    run: Literal["job", "endpoint", "load"] = Field(
        default="job",
        description="Of a plan to serve: its benchmark, its endpoint, or a load test",
    )
    name: str = Field(default="", max_length=120, description="Name of the job and of the plan")
    save_as: Literal["next", "new"] = Field(
        default="next", description="The next version of the plan it came from, or a new plan"
    )
    hours: float | None = Field(default=None, ge=0.01, le=8784, description="Time limit")
    retries: int = Field(default=0, ge=0, le=5, description="After a failure of the host")
    priority: Literal["normal", "low"] = "normal"
    secrets: list[Annotated[str, Field(max_length=40)]] = Field(
        default=[], max_length=MOST_SECRETS, description="Names of the team's secrets"
    )
    engine: Literal[tuple(ENGINES)] = Field(  # type: ignore[valid-type]
        default="slipway", description="Of an endpoint"
    )
    idle_minutes: float | None = Field(
        default=None, ge=0, description="An endpoint stops after so long without a request"
    )
    prefix_cache: bool | None = Field(
        default=None, description="Prefix caching of vLLM and SGLang; left out: their default"
    )
    draft: str = Field(
        default="", max_length=40, description="Speculative decoding: a model's id, or “lookup”"
    )
    adapters: bool = Field(default=False, description="Serve the team's adapters of this model")
    adapter: str = Field(
        default="", max_length=200, description="Of a generation; “all”: per line"
    )
    profile: bool = Field(default=False, description="Profile the operators of a benchmark")
    arrivals: Literal["closed", "open", "burst"] = Field(
        default="closed", description="Arrivals of a load test"
    )
    points: list[Annotated[float, Field(gt=0)]] = Field(
        default=[], max_length=12, description="Load levels, rising"
    )
    requests: int = Field(default=32, ge=1, description="Requests per repetition")
    repetitions: int = Field(default=3, ge=1)

    @property
    def posted(self) -> dict[str, str]:
        """Return the fields as the launch form posts them."""
        reuse = {None: "", True: "yes", False: "no"}[self.prefix_cache]
        return {
            "go": {"job": "launch"}.get(self.run, self.run),
            "name": self.name,
            "save_as": self.save_as,
            "hours": "" if self.hours is None else f"{self.hours:.17g}",
            "retries": str(self.retries),
            "priority": str(Priority.LOW.value if self.priority == "low" else 0),
            "engine": str(self.engine),
            "idle": "" if self.idle_minutes is None else f"{self.idle_minutes:.17g}",
            "reuse": reuse,
            "draft": self.draft,
            "adapters": "yes" if self.adapters else "",
            "adapter": self.adapter,
            "profile": "1" if self.profile else "",
            "arrivals": self.arrivals,
            "points": ", ".join(f"{point:.17g}" for point in self.points),
            "requests": str(self.requests),
            "repetitions": str(self.repetitions),
        }


# What options of a launch are for: of a plan to serve its run, of another plan its goal.
OPTIONS_OF: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("engine", "idle_minutes", "prefix_cache", "adapters"), ("endpoint",)),
    "draft": ("endpoint", "generate"),
    "adapter": ("generate",),
    "profile": ("job",),
    **dict.fromkeys(("arrivals", "points", "requests", "repetitions"), ("load",)),
}
LAUNCH_WORDS = {
    "job": "the benchmark of a plan to serve (run “job”)",
    "endpoint": "the endpoint of a plan to serve (run “endpoint”)",
    "load": "the load test of a plan to serve (run “load”)",
    "generate": "a batch generation",
    "compress": "a compression",
    "pretrain": "a pre-training",
    "finetune": "a fine-tuning",
}


def launch_check(plan: Plan, document: LaunchDocument) -> None:
    """Refuse options that this launch would not use.

    Raises:
        InvalidProblem: an option belongs to another goal or run.
    """
    goal = plan.draft["goal"]["goal"]
    if goal != "serve" and document.run != "job":
        raise InvalidProblem(
            "run",
            f"The field run is {document.run!r}, which is of {LAUNCH_WORDS[document.run]}; this "
            f"plan is {LAUNCH_WORDS[goal]}. Leave run out.",
        )
    kind = document.run if goal == "serve" else goal
    for name in document.model_dump(exclude_defaults=True):
        kinds = OPTIONS_OF.get(name, (kind,))
        if kind not in kinds:
            words = " or ".join(LAUNCH_WORDS[each] for each in kinds)
            raise InvalidProblem(
                name,
                f"The field {name} is of {words}, and this launch is {LAUNCH_WORDS[kind]}, which "
                "would not use it. Leave it out.",
            )


class PlanBase(Document):
    """What every plan's document has; what is left out keeps the wizard's default."""

    name: str = Field(default="", max_length=120, description="Left out: named by its content")
    objective: _literal(OBJECTIVES) | None = None  # type: ignore[valid-type]
    latency_target: _literal(SLOS) | None = Field(  # type: ignore[valid-type]
        default=None, description="Of serving: chat, code completion, or none"
    )
    percentile: _literal(PERCENTILES) | None = Field(  # type: ignore[valid-type]
        default=None, description="The share of requests that must meet the latency target"
    )
    model: str | ModelDocument | None = Field(
        default=None,
        description="A name of the catalog, “demo”, or a model of the team by its name or id",
    )
    hardware: HardwareDocument | None = None
    pins: _document_of("PinsDocument", PinsForm()) | None = Field(  # type: ignore[valid-type]
        default=None, description="Parts of the strategy that are fixed for the planner"
    )
    launch: LaunchDocument | None = Field(
        default=None, description="How POST /jobs and `slipway launch -f` start the plan"
    )


def _plan_document(goal: str, words: str) -> type[PlanBase]:
    title = goal.capitalize()
    workload = _document_of(f"{title}WorkloadDocument", WORKLOAD_FORMS[goal]())
    return create_model(
        f"{title}PlanDocument",
        __base__=PlanBase,
        __doc__=f"{words}.",
        goal=(cast("Any", Literal[goal]), Field(description=words)),
        workload=(Optional[workload], None),  # noqa: UP045 (a value)
    )


PLAN_DOCUMENTS = tuple(_plan_document(goal, words) for goal, _, words in GOAL_CHOICES)
if TYPE_CHECKING:
    PlanDocument = PlanBase
else:  # one document per goal, told apart by it
    PlanDocument = Annotated[Union[PLAN_DOCUMENTS], Field(discriminator="goal")]  # noqa: UP007


@cache
def adapter() -> TypeAdapter[Any]:
    """Return the parser of plan documents."""
    return TypeAdapter(PlanDocument)


@cache
def _schema() -> dict[str, Any]:
    return adapter().json_schema()


def document_parse(given: object) -> PlanBase:
    """Return a document that was put together here, from what somebody sent.

    Raises:
        InvalidProblem: a field is unknown, missing or has a value of another type.
    """
    try:
        parsed: PlanBase = adapter().validate_python(given)
    except ValidationError as error:
        faults = in_words(faults_of(error), _schema())
        release_frames(error)
        raise invalid([{**fault, "loc": without_tags(fault["loc"])} for fault in faults]) from None
    return parsed


def without_tags(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Return a fault's path without the name of the body and the goal of a plan's document."""
    path = location[1:] if location[:1] == ("body",) else location
    start = int(path[:1] == ("document",))  # of a request for approval
    has_tag = len(path) > start and path[start] in GOALS
    return path[:start] + path[start + 1 :] if has_tag else path


# From a document to a draft


def draft_fill(plan: Plan, document: PlanBase) -> list[str]:
    """Store a document's values in a plan's draft, step by step; the plan is not written.

    The result is notes on what else changed.

    Raises:
        InvalidProblem: a form refuses values; the problem lists each field.
    """
    options = Options(plan.team)
    draft: PlanDraft = plan.draft
    given = document.model_dump(exclude_unset=True)
    goal = {"goal": given["goal"]} | {
        ours: given[theirs]
        for ours, theirs in (
            ("objective", "objective"),
            ("slo", "latency_target"),
            ("percentile", "percentile"),
        )
        if theirs in given
    }
    _fill("goal", draft, options, goal, "")
    notes = []
    if document.model is not None:
        values = _model_values(document.model, options)
        if isinstance(document.model, str) and values["source"] == "catalog":
            notes += _read_model(values)
        _fill("model", draft, options, values, "model.")
    adapt_pretraining(draft, draft_shape(plan))
    adapt_requests(draft)
    shape = draft_shape(plan)
    before = dict(draft["workload"][given["goal"]])
    if shape and fit_context(draft, shape.max_position_embeddings):
        after = draft["workload"][given["goal"]]
        cut = {name for name, value in after.items() if value != before.get(name)}
        if cut - set(_workload_values(given.get("workload") or {})):  # not of this document
            notes.append(
                f"This model reads {shape.max_position_embeddings:,} tokens at once: the usual "
                "lengths of requests were shortened."
            )
    if given.get("hardware") is not None:
        values = _hardware_values(given["hardware"], draft, options)
        _fill("hardware", draft, options, values, "hardware.")
    if given.get("workload") is not None:
        _fill("workload", draft, options, _workload_values(given["workload"]), "workload.")
    if given.get("pins") is not None:
        _fill("pins", draft, options, given["pins"], "pins.")
    return notes


def _fill(
    step: str, draft: PlanDraft, options: Options, given: Mapping[str, Any], path: str
) -> None:
    """Store a step's values through its form, over those that the draft has."""
    shown = _form(step, draft, options)
    data = QueryDict(mutable=True)
    for name, field in shown.fields.items():
        value = given[name] if name in given else shown.get_initial_for_field(field, name)
        if value is not None and value is not False and not isinstance(field, forms.FileField):
            text = (
                json.dumps(value) if isinstance(value, dict) else str(field.prepare_value(value))
            )
            data[shown.add_prefix(name)] = text
    if foreign := sorted(set(given) - set(shown.fields)):
        raise InvalidProblem(
            "invalid",
            f"The field {path}{foreign[0]} does not apply to the goal {draft['goal']['goal']}. "
            f"Leave it out; this part can have {', '.join(shown.fields)}.",
            errors=[{"field": path + name, "message": "does not apply"} for name in foreign],
        )
    form = _form(step, draft, options, data)
    if not form.is_valid():
        raise form_problem(form, path)
    store(step, draft, form.cleaned_data)


def _form(
    step: str, draft: PlanDraft, options: Options, data: QueryDict | None = None
) -> StepForm:
    if step == "pins":
        return pins_form(draft, data)
    files: MultiValueDict[str, Any] = MultiValueDict()
    form = step_form(step, draft, options, data, files)
    if form is None:
        raise ValueError(step)
    return form


def form_problem(form: forms.BaseForm, path: str) -> InvalidProblem:
    """Return the problem that names each refused field of a form."""
    errors = [
        {"field": f"{path}{'' if name == '__all__' else name}".rstrip("."), "message": str(text)}
        for name, texts in form.errors.items()
        for text in texts
    ]
    first = errors[0]
    return InvalidProblem(
        "invalid", f"The field {first['field']} is not valid: {first['message']}", errors=errors
    )


def _model_values(model: str | ModelDocument, options: Options) -> dict[str, Any]:
    """Return the model step's values."""
    if isinstance(model, ModelDocument):
        return _model_by_means(model, options)
    if model == "demo":
        return {"source": "demo"}
    if (found := _team_model(model, options)) is not None:
        return {"source": "team", "team_model": found}
    return {"source": "catalog", "catalog_id": model}


def _read_model(values: dict[str, Any]) -> list[str]:
    """Set the model that a name stands for, and return what of the name is not used."""
    try:
        named = read_model_name(values["catalog_id"])
    except PlannerError:
        return []  # the form says what is wrong
    values["catalog_id"] = named.id
    stated = named.pins.get("quantization")
    if stated is None or named.assumed:
        return []
    unpinned = "the server's search chooses among its own formats, and this type is not pinned."
    return [f"The name of the model states {stated}: {unpinned}"]


def _model_by_means(model: ModelDocument, options: Options) -> dict[str, Any]:
    if model.team_model:
        found = _team_model(model.team_model, options)
        if found is None:
            names = ", ".join(each.name for each in options.team_models) or "none"
            raise InvalidProblem(
                "team_model",
                f"The field model.team_model is {model.team_model!r}, and your team's models are: "
                f"{names}.",
            )
        return {"source": "team", "team_model": found}
    if model.path:
        return {"source": "folder", "path": model.path, "folder_config": model.config or {}}
    if model.config:
        return {"source": "config", "config": model.config}
    if model.catalog_id:
        return {"source": "catalog", "catalog_id": model.catalog_id}
    raise InvalidProblem(
        "model",
        "The field model names nothing. Give the name of a model, or one of catalog_id, "
        "team_model, config, and path with config.",
    )


def _team_model(name: str, options: Options) -> str | None:
    """Return the id of the team's model of this id or name; None if there is none.

    Raises:
        InvalidProblem: several models have the name.
    """
    named = [each for each in options.team_models if name in {each.pk, each.name}]
    if len(named) > 1:
        listed = ", ".join(f"{each.pk} ({each.created_at:%Y-%m-%d %H:%M})" for each in named)
        raise InvalidProblem(
            "model",
            f"The field model is {name!r}, and {len(named)} models of your team have this name. "
            f"Name one by its id: {listed}.",
        )
    return str(named[0].pk) if named else None


def _named_devices(text: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the device that a text names, with its counts where it states some."""
    try:
        cluster = read_hardware(text, "hardware.device").cluster
    except PlannerError as error:
        raise InvalidProblem("device", sentence(error.message)) from error
    if "instance" in cluster:
        raise InvalidProblem(
            "device",
            f"The field hardware.device is {text!r}, a cloud offer. Give its device, with "
            "devices_per_node and nodes.",
        )
    for name in ("devices_per_node", "nodes"):
        stated = given.get(name)
        if name in cluster and stated is not None and stated != cluster[name]:
            raise InvalidProblem(
                name,
                f"The field hardware.{name} is {stated}, and hardware.device, {text!r}, says "
                f"{cluster[name]}. Give one of them.",
            )
    return cluster


def _hardware_values(
    given: Mapping[str, Any], draft: PlanDraft, options: Options
) -> dict[str, Any]:
    """Return the hardware step's values: the choice by name, and the rest as given."""
    places = [name for name in ("host", "pool", "device") if given.get(name)]
    if len(places) > 1:
        raise InvalidProblem(
            "hardware",
            f"The field hardware names {' and '.join(places)}. Give one of host, pool and device.",
        )
    values = {name: value for name, value in given.items() if name not in {"host", "pool"}}
    if host := given.get("host"):
        values["choice"] = f"host:{_place(host, 'host', options)}"
    elif pool := given.get("pool"):
        # The wizard shows a pool of one host as that host.
        alone = [each for each in options.hosts if pool in {each.pool_id, each.pool.name}]
        is_choice = any(pool in {each.pk, each.name} for each, _ in options.pools)
        values["choice"] = (
            f"host:{alone[0].pk}"
            if len(alone) == 1 and not is_choice
            else f"pool:{_place(pool, 'pool', options)}"
        )
    elif device := given.get("device"):
        values |= {"choice": "catalog", **_named_devices(device, given)}
        values.setdefault("devices_per_node", 1)
        values.setdefault("nodes", 1)
    if "engine" in values and "engine" not in _form("hardware", draft, options).fields:
        del values["engine"]
        if given["engine"]:
            raise InvalidProblem(
                "engine", f"The goal {draft['goal']['goal']} has no choice of an engine."
            )
    return values


def _place(name: str, kind: str, options: Options) -> str:
    """Return the id of a host or pool that the team may use.

    Raises:
        InvalidProblem: there is none of this name, or several.
    """
    if kind == "host":
        known = [(each.pk, {each.pk, each.name, each.slug}, each.name) for each in options.hosts]
    else:
        known = [(each.pk, {each.pk, each.name}, each.name) for each, _ in options.pools]
    found = [key for key, names, _ in known if name in names]
    if len(found) == 1:
        return str(found[0])
    listed = ", ".join(sorted(shown for _, _, shown in known)) or "none"
    raise InvalidProblem(
        kind,
        f"The field hardware.{kind} is {name!r}, which names {len(found) or 'no'} {kind}"
        f"{'s' if len(found) > 1 else ''} of your team. There are: {listed}.",
    )


def _workload_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a workload's form values; a mixture becomes the fields of its rows."""
    values = {name: value for name, value in given.items() if name != "mixture"}
    if given.get("mixture") is not None:
        rows = [*given["mixture"], *({} for _ in MIX_ROWS)]
        for number, row in zip(MIX_ROWS, rows, strict=False):
            values |= {
                f"mix_{name}_{number}": row.get(name, 1.0 if name == "weight" and row else None)
                for name in MIXTURE
            }
    return values


# From a document to a launch


def launch_options(document: LaunchDocument, endpoint_key: str | None) -> LaunchOptions:
    """Return a launch's options; ``endpoint_key`` is the new key of an endpoint.

    Raises:
        InvalidProblem: an option is invalid.
    """
    posted = document.posted
    options = launch_options_of(posted)
    if document.run == "endpoint":
        hashes = hashes_of(endpoint_key) if endpoint_key else ()
        options = options._replace(endpoint=endpoint_options_of(posted, hashes))
    measuring = measuring_of(posted, is_load=document.run == "load")
    return options._replace(measuring=measuring)


def launch_by_document(
    plan: Plan,
    by: User,
    document: LaunchDocument,
    options: LaunchOptions,
    *,
    idempotency_key: str | None = None,
) -> Job:
    """Launch a plan as its review page would.

    Raises:
        DraftProblem: there is nothing to launch.
        Problem: the job service refuses.
    """
    return plan_launch(
        plan=plan,
        by=by,
        name=document.name,
        idempotency_key=idempotency_key,
        secrets=document.secrets,
        wish=options,
        is_named=bool(document.name.strip()),
        as_new=document.save_as == "new",
    )


# From a draft to a document


def document_of(plan: Plan) -> dict[str, Any]:
    """Return a draft as a document with every value of its goal; {} of an unfinished draft."""
    draft: PlanDraft = plan.draft
    if missing_step(draft):
        return {}
    goal = draft["goal"]["goal"]
    document: dict[str, Any] = {
        "goal": goal,
        "objective": draft["goal"]["objective"],
        "latency_target": draft["goal"]["slo"],
        "percentile": percentile_of(draft),
        "model": _model_document(draft),
        "workload": _workload_document(goal, draft["workload"][goal]),
        "hardware": _hardware_document(draft, Options(plan.team)),
    }
    if plan.name and plan.is_named:
        document = {"name": plan.name, **document}
    known = set(PinsForm().fields)
    pins = {**draft["pins"], **(draft["pins"].get("disaggregated") or {})}
    if kept := {name: value for name, value in pins.items() if name in known and value}:
        document["pins"] = kept
    return document


def _model_document(draft: PlanDraft) -> str | dict[str, Any]:
    chosen = draft["model"]
    if chosen["source"] == "catalog":
        return chosen["catalog_id"]
    if chosen["source"] == "team":
        return {"team_model": chosen.get("team_model", "")}
    if chosen["source"] == "folder":
        return {"path": chosen.get("path", ""), "config": chosen.get("folder_config") or {}}
    return "demo" if chosen["source"] == "demo" else {"config": chosen.get("config") or {}}


def _workload_document(goal: str, values: Mapping[str, Any]) -> dict[str, Any]:
    form = WORKLOAD_FORMS[goal]()
    document = {
        name: value
        for name, value in values.items()
        if name in form.fields and not name.startswith("mix_") and value not in (None, "")
    }
    if goal in TRAINING_FORMS and values.get("data_source") == "mixed":
        rows = ({name: values.get(f"mix_{name}_{row}") for name in MIXTURE} for row in MIX_ROWS)
        document["mixture"] = [
            {name: value for name, value in row.items() if value not in (None, "")}
            for row in rows
            if row["source"]
        ]
        document |= {name: values[name] for name in ("mix_weights", "mix_every") if name in values}
    return document


def _hardware_document(draft: PlanDraft, options: Options) -> dict[str, Any]:
    hardware = draft["hardware"]
    kind, _, key = hardware["choice"].partition(":")
    document: dict[str, Any] = {}
    if kind == "host":
        host = options.host_of(draft)
        document["host"] = host.slug if host else key
    elif kind == "pool":
        document["pool"] = key
    else:
        names = ("device", "devices_per_node", "nodes")
        document |= {name: hardware[name] for name in names}  # type: ignore[literal-required]
    others = set(HardwareForm(hosts=(), engines={"": ""}).fields) & set(
        HardwareDocument.model_fields
    )
    for name in sorted(others - {"device", "devices_per_node", "nodes"}):
        if hardware.get(name):
            document[name] = hardware.get(name)
    return document


def job_document_of(job: Job) -> dict[str, Any]:
    """Return the document with which ``slipway launch -f`` starts a job like this one.

    Empty for a job that was not launched from a plan.
    """
    if job.plan is None:
        return {}
    fields = launch_fields(job)
    reuse = fields.get("reuse", "")
    points = [float(each) for each in str(fields.get("points", "")).split(",") if each.strip()]
    run = "endpoint" if job.kind == "serve" else "load" if points else "job"
    given = {
        "run": run,
        "name": fields["job_name"],
        "hours": float(fields["hours"]) if fields.get("hours") else None,
        "retries": int(fields["retries"]),
        "priority": "low" if fields["priority"] == str(Priority.LOW.value) else "normal",
        "secrets": list(fields["secrets"]),
        "engine": fields.get("engine", "slipway"),
        "idle_minutes": float(fields["idle"]) if fields.get("idle") else None,
        "prefix_cache": reuse == "yes" if reuse else None,
        "draft": str(fields.get("draft", "")),
        "adapters": bool(fields.get("adapters")),
        "adapter": str(fields.get("adapter", "")),
        "profile": bool(fields.get("profile")),
        "arrivals": fields.get("arrivals", "closed"),
        "points": points,
        "requests": int(fields.get("requests", 32)),
        "repetitions": int(fields.get("repetitions", 3)),
    }
    launch = LaunchDocument.model_validate(given).model_dump(mode="json", exclude_defaults=True)
    document = document_of(job.plan)
    return {**document, "launch": {"run": run, **launch}} if document else {}


def schema_address(request: HttpRequest) -> str:
    """Return the address of the documents' JSON schema, which needs no login: a static file."""
    return request.build_absolute_uri(settings.STATIC_URL + SCHEMA_FILE)


def yaml_of(document: Mapping[str, Any], address: str = "") -> str:
    """Return a document as YAML, with the address of its schema for editors."""
    head = f"# yaml-language-server: $schema={address}\n" if address else ""
    return head + yaml_text(dict(document))


# From a planner's request to a document


GOALS_BY_KIND = {"serve": "serve", "generate": "generate", "compress": "compress"}
MILLION, MINUTE, GIB = 1e6, 60.0, 1024.0**3
# Of the search and of one host, not of a plan.
OF_THE_SEARCH = frozenset({"id", "top", "host_calibration", "search_seconds"})
TARGET = re.compile(r"(ttft|tpot)(?:_(p50|p95|p99))?_seconds")


def document_of_request(
    request: Mapping[str, Any], *, host: str = "", pool: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """Return a planner's request as a plan document, and notes on what no form has a field for.

    The request may lack parts, which then have the wizard's defaults. ``host`` or ``pool`` takes
    the place of its cluster.

    Raises:
        InvalidProblem: it has no workload of a kind that is known.
    """
    rest: dict[str, Any] = {
        name: copy.deepcopy(value)
        for name, value in request.items()
        if name not in OF_THE_SEARCH and value is not None
    }
    workload = rest.pop("workload", None)
    kind = workload.pop("kind", None) if isinstance(workload, dict) else None
    if not isinstance(workload, dict) or kind not in {*GOALS_BY_KIND, "train"}:
        raise InvalidProblem(
            "workload",
            f"The field request.workload.kind is {kind!r}; it can be serve, generate, train or "
            "compress.",
        )
    is_pretraining = kind == "train" and workload.get("method") == "pretrain"
    goal = GOALS_BY_KIND.get(kind, "pretrain" if is_pretraining else "finetune")
    document: dict[str, Any] = {"goal": goal, "workload": {}, "hardware": {}, "pins": {}}
    if is_pretraining:
        workload.pop("method")
    if objective := rest.pop("objective", None):
        document["objective"] = objective
    if (model := rest.pop("model", None)) is not None:
        document["model"] = {"config": model} if isinstance(model, dict) else model
    constraints = rest.get("constraints") or {}
    if goal == "serve":
        document |= _latency_target(workload, constraints)
    _move_workload(goal, workload, document["workload"])
    _move_hardware(goal, rest, document["hardware"], host=host, pool=pool)
    _move_pins(rest.get("pins") or {}, document["pins"], goal)
    rest["workload"] = workload
    notes = [f"{path} = {json.dumps(value)[:60]} {NO_FIELD}" for path, value in _leaves(rest)]
    return {name: value for name, value in document.items() if value != {}}, notes


def _latency_target(workload: dict[str, Any], constraints: dict[str, Any]) -> dict[str, Any]:
    """Return the latency target whose limits a request has, and take them out of it."""
    found: dict[tuple[str, str], float] = {}
    for name, bound in constraints.items():
        match = TARGET.fullmatch(name)
        if match and isinstance(bound, dict) and set(bound) == {"max"}:
            found[match[1], match[2] or "mean"] = bound["max"]
    means = {
        (figure, "mean"): workload[f"{figure}_slo_seconds"]
        for figure in ("ttft", "tpot")
        if workload.get(f"{figure}_slo_seconds")
    }
    found = found or means
    for slo, limits in SLO_SECONDS.items():
        for percentile in {percentile for _, percentile in found}:
            wanted = dict(zip((("ttft", percentile), ("tpot", percentile)), limits, strict=True))
            if found == wanted:
                workload.pop("ttft_slo_seconds", None)
                workload.pop("tpot_slo_seconds", None)
                for name in [name for name in constraints if TARGET.fullmatch(name)]:
                    del constraints[name]
                return {"latency_target": slo, "percentile": percentile}
    return {"latency_target": "none"}


def _move_workload(goal: str, workload: dict[str, Any], into: dict[str, Any]) -> None:
    known = WORKLOAD_FORMS[goal]().fields
    for name in [name for name in workload if name in known]:
        into[name] = workload.pop(name)
    if (share := workload.pop("prefix_share_ratio", None)) is not None:
        into["prefix_share_percent"] = round(100 * share)
    tokens, seconds = workload.pop("tokens", None), workload.pop("time_budget_seconds", None)
    if goal in TRAINING_FORMS and (tokens or seconds):
        into["million_tokens"] = tokens / MILLION if tokens else None
        into["time_budget_minutes"] = seconds / MINUTE if seconds else None


def _move_hardware(
    goal: str, rest: dict[str, Any], into: dict[str, Any], *, host: str, pool: str
) -> None:
    cluster = rest.get("cluster") or {}
    if host or pool:
        into |= {"host": host} if host else {"pool": pool}
        rest.pop("cluster", None)
    elif isinstance(cluster.get("device"), str):
        for name in ("device", "devices_per_node", "nodes"):
            if name in cluster:
                into[name] = cluster.pop(name)
    engine = str(rest.get("engine") or "").partition(" ")[0]
    if engine in engine_choices(goal):
        into["engine"] = engine
        rest.pop("engine")
    peak = (rest.get("constraints") or {}).get("per_device_peak_bytes")
    if isinstance(peak, dict) and set(peak) == {"max"}:
        into["memory_limit_gib"] = rest["constraints"].pop("per_device_peak_bytes")["max"] / GIB


def _move_pins(pins: dict[str, Any], into: dict[str, Any], goal: str) -> None:
    pools = pins.pop("disaggregated", None)
    known = PinsForm(is_serving=goal == "serve").fields
    for name in [name for name in pins if name in known]:
        into[name] = pins.pop(name)
    if isinstance(pools, dict) and set(pools) <= set(known):
        into |= pools
    elif pools:
        pins["disaggregated"] = pools


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the values that are left in a document, each with its path."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}.{name}" if path else str(name))
    elif value is not None and value != []:
        yield path, value
