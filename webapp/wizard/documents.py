"""Plan documents that somebody sends, and documents of plans and jobs to send."""

import copy
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any

from django import forms
from django.conf import settings
from django.contrib.auth.models import User
from django.http import HttpRequest
from pydantic import BeforeValidator, TypeAdapter, ValidationError

from planner.catalog.engines import AUTO
from planner.catalog.gguf_names import read_model_name
from planner.catalog.hardware_names import read_hardware
from planner.catalog.models import checkpoint_name, model_from_config
from planner.exports.yaml_text import yaml_text
from planner.specs.base import PlannerError
from planner.specs.units import GIB
from planner.specs.workload import TrainWorkload
from runners.jobspec.base import store_fault
from runners.plans.document import (
    GOALS,
    AnyPlan,
    HardwareChoice,
    ModelChoice,
    PlanDocument,
    shared_document,
)
from runners.plans.engine_choice import default_engine, engine_choices
from runners.plans.fields import Part, faults_in
from runners.plans.latency_limits import SLO_SECONDS
from runners.plans.launch import Launch, LaunchOptionError, check_used
from runners.plans.old_names import read_document, read_launch
from runners.plans.refusals import DraftProblem
from runners.plans.weights import is_gguf_repository, names_weights
from runners.plans.workloads import NAMED_SOURCES, TRAINING_GOALS, WORKLOADS, TrainingData
from webapp.accounts.models import Team
from webapp.core.display import sentence
from webapp.core.faults import in_words
from webapp.core.problems import InvalidProblem, faults_of, invalid, release_frames
from webapp.hosts.models import Host
from webapp.jobs.launching import launch_of_job
from webapp.jobs.models import Job
from webapp.plans.models import Plan
from webapp.plans.places import draft_shape
from webapp.plans.repositories import UnreachableError, checked_name, is_repository, with_config
from webapp.wizard.drafts import (
    Options,
    first_host,
    goal_change,
    resized,
    serve_document,
    stored_draft,
    workload_of,
)
from webapp.wizard.engine_search import engine_settle
from webapp.wizard.forms import GOAL_FIELDS

SCHEMA_FILE = "schemas/job.json"  # below static/, written by manage.py client
NO_FIELD = "has no field in the wizard and is left out."
OF_CONFIG = (
    "The plan is for the weights that the repository's config.json states; a GGUF file of another "
    "type has another size and speed."
)
# A document or a launch as the API reads it: also with the field names of before 0.1.
SentPlan = Annotated[AnyPlan, BeforeValidator(read_document, json_schema_input_type=AnyPlan)]
SentLaunch = Annotated[Launch, BeforeValidator(read_launch, json_schema_input_type=Launch)]


@cache
def adapter() -> TypeAdapter[AnyPlan]:
    """Return the parser of plan documents that somebody sends."""
    return TypeAdapter(SentPlan)


@cache
def _schema() -> dict[str, Any]:
    return adapter().json_schema()


def document_parse(given: object) -> PlanDocument:
    """Return a document that was put together here, from what somebody sent.

    Raises:
        InvalidProblem: a field is unknown, missing or has a value of another type.
    """
    try:
        parsed: PlanDocument = adapter().validate_python(given)
    except ValidationError as error:
        faults = in_words(faults_of(error), _schema())
        release_frames(error)
        raise invalid([{**fault, "loc": without_tags(fault["loc"])} for fault in faults]) from None
    return parsed


def without_tags(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Return a fault's path without the name of the body and the goal of a plan's document."""
    path = location[1:] if location[:1] == ("body",) else location
    if path[:1] == ("steps",):  # of a workflow: its index, then the tag
        return path[:2] + without_tags(path[2:])
    start = int(path[:1] == ("document",))  # of a request for approval
    has_tag = len(path) > start and path[start] in GOALS
    return path[:start] + path[start + 1 :] if has_tag else path


def check_launch(plan: Plan, launch: Launch) -> None:
    """Refuse options that this launch would not use.

    Raises:
        InvalidProblem: an option belongs to another goal or run.
    """
    try:
        check_used(plan.document.goal, launch)
    except LaunchOptionError as error:
        raise InvalidProblem(error.name, str(error)) from error


# From a document to a draft


def draft_of_document(
    team: Team,
    owner: User,
    document: PlanDocument,
    *,
    model: ModelChoice | None = None,
    host: Host | None = None,
) -> tuple[Plan, list[str]]:
    """Return a draft of a document, neither planned nor saved, and notes on what else changed.

    ``model`` stands for the one that the document leaves out; ``host`` likewise, else it is the
    team's first one.

    Raises:
        InvalidProblem: a value does not suit the team, the model or the goal.
    """
    draft = stored_draft(serve_document(host or first_host(team)))
    plan = Plan(team=team, owner=owner, draft=draft)
    notes = draft_fill(plan, document, model)
    if document.hardware.engine == AUTO:
        try:
            notes += engine_settle(plan, document.launch)
        except DraftProblem as problem:
            raise _wrong("hardware.engine", problem.sentence) from problem
    if document.name:
        plan.name, plan.is_named = document.name, True
    return plan, notes


def draft_fill(plan: Plan, given: PlanDocument, model: ModelChoice | None = None) -> list[str]:
    """Store what a document states in a plan's draft; the plan is not written.

    What it leaves out keeps the value of the draft, or the default for the model that it names;
    ``model`` stands for that model. The result is notes on what else changed.

    Raises:
        InvalidProblem: a value does not suit the team, the model or the goal.
    """
    options, stated = Options(plan.team), given.model_fields_set
    goal_change(plan, given.goal)
    document = plan.document
    notes: list[str] = []
    if given.goal != "serve" and given.pins.disaggregated:
        raise _wrong(
            "pins.disaggregated",
            f"It does not apply to the goal {given.goal}: only serving has separate devices for "
            "prefill and decode. Leave it out.",
        )
    for name in {*GOAL_FIELDS, "launch", "pins"} & stated:
        setattr(document, name, getattr(given, name))
    if "model" in stated or model is not None:
        before = workload_of(plan, given.goal)
        document.model, notes = (model, []) if model else _model(given.model, options)
        plan.document = document
        plan.wizard.pop("lacks_model", None)
        resized(plan, before)
        document = plan.document
    if "hardware" in stated:
        before = workload_of(plan, given.goal)
        document.hardware = _hardware(given, document.hardware, options)
        plan.document = document
        resized(plan, before)
        document = plan.document
    workload = given.workload if "workload" in stated else None
    notes += _shortened(plan, document, workload)
    if workload is not None:
        document.workload = _workload(document.workload, workload, options)
    plan.document = document
    return notes


def _shortened(plan: Plan, document: PlanDocument, given: Part | None) -> list[str]:
    """Return the note on default lengths that the model's context shortened."""
    shape, usual = draft_shape(plan), WORKLOADS[document.goal]()
    stated = given.model_fields_set if given else set()
    shorter = any(
        getattr(document.workload, name, 0) < getattr(usual, name, 0)
        for name in {"input_tokens", "output_tokens", "sequence_length"} - stated
    )
    if shape is None or not shorter or document.goal == "pretrain":
        return []
    tokens = f"{shape.max_position_embeddings:,} tokens at once"
    return [f"This model reads {tokens}: the usual lengths of requests were shortened."]


def _workload(before: Part, given: Part, options: Options) -> Part:
    stated = given.model_dump(exclude_unset=True)
    try:
        values = before.with_values(**stated)
    except ValidationError as error:
        fault = faults_in(error)[0]
        raise _wrong(f"workload.{fault.field}", fault.sentence) from error
    if isinstance(values, TrainingData):
        _check_uploads(values, options)
    return values


def _check_uploads(values: TrainingData, options: Options) -> None:
    """Refuse an uploaded file that the team does not have."""
    named = {"dataset": values.dataset if values.data_source == "upload" else ""}
    rows = values.mixture if values.data_source == "mixed" else []
    named |= {f"mixture.{number}.source": row.source for number, row in enumerate(rows)}
    known = {each.pk for each in options.datasets}
    for name, dataset in named.items():
        if dataset and dataset not in {*known, "host", *NAMED_SOURCES}:
            raise _wrong(
                f"workload.{name}",
                f"{dataset[:60]} is no uploaded file of your team; give the id of one, which "
                "GET /api/v1/datasets lists.",
            )


def _wrong(path: str, sentence_: str) -> InvalidProblem:
    return InvalidProblem(
        "invalid",
        f"The field {path} is not valid: {sentence_}",
        errors=[{"field": path, "message": sentence_}],
    )


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


def _model(given: ModelChoice, options: Options) -> tuple[ModelChoice, list[str]]:
    """Return the model that a document names, by its source, and what of a name is not used."""
    model, notes = _model_of_source(given, options)
    return model.with_values(rope_scaling=given.rope_scaling), notes


def _model_of_source(given: ModelChoice, options: Options) -> tuple[ModelChoice, list[str]]:
    if given.name is not None:
        return _named_model(given.name, options)
    if given.source == "team" or given.team_model:
        found = _team_model(given.team_model or "", options)
        if found is None:
            names = ", ".join(each.name for each in options.team_models) or "none"
            raise InvalidProblem(
                "team_model",
                f"The field model.team_model is {given.team_model!r}, and your team's models are: "
                f"{names}.",
            )
        return ModelChoice(source="team", team_model=found), []
    if given.source in {"folder", "config"}:
        return _checked_config(given), []
    if given.source == "demo":
        return ModelChoice(source="demo"), []
    if given.source == "catalog":
        model, notes = _catalog_model(given.catalog_id, "model.catalog_id")
        if given.repository:
            checked_name(given)
        own = given.model_dump(include={"repository", "revision"}, exclude_none=True)
        return model.with_values(**own), notes
    if given.source == "hub":
        return _hub_model(given, options.team), []
    raise InvalidProblem(
        "model",
        "The field model names nothing. Give the name of a model, or one of catalog_id, "
        "repository, team_model, config, and path with config.",
    )


def _named_model(name: str, options: Options) -> tuple[ModelChoice, list[str]]:
    """Return the model of a name alone: the demo, or one of team, catalog or Hub."""
    found = None if name == "demo" else _team_model(name, options)
    if found is not None:
        return ModelChoice(source="team", team_model=found), []
    if name == "demo":
        return ModelChoice(source="demo"), []
    try:
        return _catalog_model(name, "model")
    except InvalidProblem as unknown:
        if not is_repository(name):
            raise
        try:
            chosen = with_config(ModelChoice(source="hub", repository=name), options.team)
            return chosen, [OF_CONFIG] if is_gguf_repository(name) else []
        except UnreachableError as error:
            # Without the words that both sentences begin with.
            known = unknown.detail.partition(": ")[2]
            raise _wrong("model", f"{known} The Hub was not asked: {error}") from error


def _hub_model(given: ModelChoice, team: Team) -> ModelChoice:
    try:
        return with_config(given, team)
    except UnreachableError as error:
        raise _wrong(
            "model.repository",
            f"The Hub was not asked for {given.repository}: {error} Give its config.json too, or "
            "a model of the catalog.",
        ) from error


def _catalog_model(name: str, path: str) -> tuple[ModelChoice, list[str]]:
    try:
        named = read_model_name(name)
    except PlannerError:
        named = None
    try:
        known = checkpoint_name(named.id if named else name)
    except PlannerError as error:
        raise _wrong(path, sentence(error.message)) from error
    model = ModelChoice(source="catalog", catalog_id=known)
    if names_weights(name):
        model.repository = name
    stated = named.pins.get("quantization") if named else None
    if named is None or stated is None or named.assumed:
        return model, []
    unpinned = "the server's search chooses among its own formats, and this type is not pinned."
    return model, [f"The name of the model states {stated}: {unpinned}"]


def _checked_config(given: ModelChoice) -> ModelChoice:
    """Refuse a folder outside the host's model folder, and a config.json of no known family."""
    if given.source == "folder" and ".." in (given.path or "").split("/"):
        raise _wrong("model.path", "A folder's path may not contain “..”.")
    if given.source == "folder" and (fault := store_fault(given.path or "")):
        raise _wrong("model.path", sentence(fault))
    if not given.config:
        raise _wrong("model.config", "Give the content of config.json.")
    try:
        model_from_config(given.config)
    except PlannerError as error:
        raise _wrong("model.config", sentence(error.message)) from error
    return given


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


def _hardware(given: PlanDocument, before: HardwareChoice, options: Options) -> HardwareChoice:
    """Return the hardware that a document names, by the ids of the team's hosts and pools."""
    stated = given.hardware.model_dump(exclude_unset=True)
    places = [name for name in ("host", "pool", "device") if stated.get(name)]
    if len(places) > 1:
        raise InvalidProblem(
            "hardware",
            f"The field hardware names {' and '.join(places)}. Give one of host, pool and device.",
        )
    joined = [name for name in HardwareChoice.TOPOLOGY if stated.get(name)]
    kept = before.model_dump(include={"host", "pool"})  # a device takes their place
    if joined and not stated.get("device") and any((kept | stated)[name] for name in kept):
        raise _wrong(
            f"hardware.{joined[0]}",
            f"It is {stated[joined[0]]!r}, of hardware of the catalog. Leave it out, or give a "
            "device in place of a host or pool.",
        )
    if host := stated.get("host"):
        place = {"host": _place(host, "host", options), "pool": None}
        stated |= dict.fromkeys(HardwareChoice.TOPOLOGY) | place
    elif pool := stated.get("pool"):
        # The wizard shows a pool of one host as that host.
        alone = [each for each in options.hosts if pool in {each.pool_id, each.pool.name}]
        is_choice = any(pool in {each.pk, each.name} for each, _ in options.pools)
        is_host = len(alone) == 1 and not is_choice
        stated |= dict.fromkeys(HardwareChoice.TOPOLOGY) | {
            "host": str(alone[0].pk) if is_host else None,
            "pool": None if is_host else _place(pool, "pool", options),
        }
    elif device := stated.get("device"):
        each = {} if stated.get("topology") else {"devices_per_node": 1}
        counts = {**each, "nodes": 1, **dict.fromkeys(HardwareChoice.TOPOLOGY)} | stated
        stated = {**counts, **_named_devices(device, stated), "host": None, "pool": None}
    if stated.get("engine") == AUTO == default_engine(given.goal, runs_jobs=False):
        stated["engine"] = None
    if (engine := stated.get("engine")) and engine not in engine_choices(given.goal):
        known = ", ".join(engine_choices(given.goal)) or "no choice of an engine"
        raise _wrong("hardware.engine", f"It is {engine!r}; the goal {given.goal} has: {known}.")
    return before.with_values(**stated)


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


# From a draft to a document


def document_of(plan: Plan) -> dict[str, Any]:
    """Return a draft as a document with every value of its goal; {} of an unfinished draft."""
    document = plan.readable_document
    if document is None:
        return {}
    if document.goal != "serve":  # the draft keeps it for its plan to serve
        document.pins = document.pins.model_copy(update={"disaggregated": None})
    found = shared_document(document)
    found.pop("launch", None)
    if not (plan.name and plan.is_named):
        found.pop("name", None)
    else:
        found = {"name": plan.name, **found}
    found["model"] = _model_document(document.model)
    found["hardware"] = _hardware_document(document.hardware, Options(plan.team))
    return found


def _model_document(chosen: ModelChoice) -> str | dict[str, Any]:
    document = _source_document(chosen)
    if chosen.rope_scaling is None:
        return document
    named = {"name": document} if isinstance(document, str) else document
    return {**named, "rope_scaling": chosen.rope_scaling.stated}


def _source_document(chosen: ModelChoice) -> str | dict[str, Any]:
    hub = {"repository": chosen.repository, "revision": chosen.revision}
    from_hub = {name: value for name, value in hub.items() if value}
    if chosen.source == "catalog":
        return {"catalog_id": chosen.catalog_id, **from_hub} if from_hub else chosen.catalog_id
    if chosen.source == "hub":
        return {**from_hub, "config": chosen.config or {}}
    if chosen.source == "team":
        return {"team_model": chosen.team_model}
    if chosen.source == "folder":
        return {"path": chosen.path, "config": chosen.config or {}}
    return "demo" if chosen.source == "demo" else {"config": chosen.config or {}}


def _hardware_document(hardware: HardwareChoice, options: Options) -> dict[str, Any]:
    found = shared_document(hardware)
    if hardware.is_catalog:
        return found
    host = options.host_of(hardware)
    kept = {name: found[name] for name in found if name not in HardwareChoice.DEVICES}
    return kept | ({"host": host.slug} if host else {})


def job_document_of(job: Job) -> dict[str, Any]:
    """Return the document with which ``slipway launch -f`` starts a job like this one.

    Empty for a job that was not launched from a plan.
    """
    if job.plan is None:
        return {}
    launch = launch_of_job(job)
    options = launch.model_dump(mode="json", exclude_defaults=True)
    document = document_of(job.plan)
    named = {"run": launch.run, "name": job.name, **options}
    return {**document, "launch": named} if document else {}


def schema_address(request: HttpRequest) -> str:
    """Return the address of the documents' JSON schema, which needs no login: a static file."""
    return request.build_absolute_uri(settings.STATIC_URL + SCHEMA_FILE)


def yaml_of(document: Mapping[str, Any], address: str = "") -> str:
    """Return a document as YAML, with the address of its schema for editors."""
    head = f"# yaml-language-server: $schema={address}\n" if address else ""
    return head + yaml_text(dict(document))


# From a planner's request to a document


GOALS_BY_KIND = {"serve": "serve", "generate": "generate", "compress": "compress"}
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
        for name in ("objective", "precompute_reference"):  # a pre-training has no other
            if workload.get(name) == TrainWorkload.model_fields[name].default:
                workload.pop(name)
    if objective := rest.pop("objective", None):
        document["objective"] = objective
    repository = rest.pop("repository", None)
    if (model := rest.pop("model", None)) is not None:
        named = {"repository": repository} if repository else {}
        if isinstance(model, dict):
            document["model"] = {**named, "config": model}
        else:
            document["model"] = {"catalog_id": model, **named} if named else model
    constraints = rest.get("constraints") or {}
    if goal == "serve":
        document |= _latency_target(workload, constraints)
    _move_workload(goal, workload, document["workload"])
    _move_hardware(goal, rest, document["hardware"], host=host, pool=pool)
    document["pins"] = rest.pop("pins", None) or {}
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
    known = set(WORKLOADS[goal].model_fields) - {"length_schedule"}  # of the planner: its stages
    for name in [name for name in workload if name in known]:
        into[name] = workload.pop(name)
    if into.get("objective") == "grpo":
        _count_prompts(workload, into)
    if goal in TRAINING_GOALS and {"tokens", "time_budget_seconds"} & set(into):
        into |= {name: into.get(name) for name in ("tokens", "time_budget_seconds")}


def _count_prompts(workload: dict[str, Any], into: dict[str, Any]) -> None:
    """Count a policy's batch in prompts, as documents do; the planner counts their completions.

    A batch that divides the completions of a prompt stays in ``workload``, to be named.
    """
    completions = into.pop("global_batch_size", None)
    each = into.get("num_generations", TrainWorkload.model_fields["num_generations"].default)
    if isinstance(completions, int) and completions % each == 0:
        into["global_batch_size"] = completions // each
    elif completions is not None:
        workload["global_batch_size"] = completions


def _move_hardware(
    goal: str, rest: dict[str, Any], into: dict[str, Any], *, host: str, pool: str
) -> None:
    cluster = rest.get("cluster") or {}
    if host or pool:
        into |= {"host": host} if host else {"pool": pool}
        rest.pop("cluster", None)
    elif isinstance(cluster.get("device"), str):
        for name in ("device", "devices_per_node", "nodes", *HardwareChoice.TOPOLOGY):
            if name in cluster:
                into[name] = cluster.pop(name)
    engine = str(rest.get("engine") or "").partition(" ")[0]
    if engine == AUTO == default_engine(goal, runs_jobs=bool(host or pool)):
        rest.pop("engine")  # what a document without one asks
    elif engine in engine_choices(goal):
        into["engine"] = engine
        rest.pop("engine")
    peak = (rest.get("constraints") or {}).get("per_device_peak_bytes")
    if isinstance(peak, dict) and set(peak) == {"max"}:
        into["memory_limit_gib"] = rest["constraints"].pop("per_device_peak_bytes")["max"] / GIB


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the values that are left in a document, each with its path."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}.{name}" if path else str(name))
    elif value is not None and value != []:
        yield path, value
