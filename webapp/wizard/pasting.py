"""Drafts from pasted text: another tool's command line or configuration, or a config.json."""

import copy
import shlex
from collections.abc import Mapping
from typing import Any

from django.contrib.auth.models import User
from pydantic import ValidationError

from planner.imports import Import, became, read_paste
from planner.imports.documents import read_yaml
from planner.imports.draft import Item
from planner.imports.paste import MOST_CHARACTERS
from planner.specs.base import PlannerError
from planner.specs.units import HOUR
from runners.jobspec.engine_args import MOST_WORDS, usable_args
from runners.jobspec.engines import ROWS, EngineName
from runners.jobspec.rewards import BUILT_IN
from runners.plans.document import DEFAULT_DEVICE, DEFAULT_MODEL, GOALS
from runners.plans.fields import faults_in
from runners.plans.workloads import TRAINING_GOALS, PretrainWork
from webapp.accounts.models import Team
from webapp.core.display import sentence
from webapp.core.problems import InvalidProblem
from webapp.hosts.models import Host
from webapp.plans.models import Plan
from webapp.wizard.documents import NO_FIELD, document_of_request, document_parse, draft_fill
from webapp.wizard.drafts import Options, first_host, serve_document, stored_draft
from webapp.wizard.pasted_defaults import settle_on, shorten_requests

STARTED_AS: Mapping[str, EngineName] = {each.planned_as: each.name for each in ROWS}
# Tools whose command lines are those of an engine that jobs have.
ENGINE_OF: Mapping[str, EngineName] = {**STARTED_AS, "llama_server": "llamacpp"}
NO_EFFECT = "no effect on the plan"
NOT_MODELLED = "Slipway does not model"
ENGINE_ARGS = "launch.engine_args"
# Reward functions of TRL and Open R1 that are a built-in one here.
REWARDS = {**{name: name for name in BUILT_IN}, "think_format_reward": "think_format"}
# Load tests of other tools, and how their requests arrive by the field of the planner's request.
LOAD_TESTS = frozenset({"vllm_bench", "sglang_bench", "aiperf"})
ARRIVALS = {
    "concurrency": "closed",
    "request_rate_per_second": "open",
    "burst_requests": "burst",
}
SENT = {"open": "{:g} requests a second", "burst": "{:g} requests at once"}
MOST_SHOWN = 60  # settings of each kind that the review lists


def paste_read(text: str) -> Import:
    """Return what pasted text says.

    Raises:
        InvalidProblem: it is not of a tool that is known, or cannot be read.
    """
    try:
        return _with_engine_args(read_paste(text))
    except PlannerError as error:
        raise InvalidProblem(
            "text", f"The pasted text: {sentence(error.message)}", field=error.field or "text"
        ) from error


def _with_engine_args(imported: Import) -> Import:
    """Return an import whose settings that no plan has are kept for its engine's start.

    Those that the engine's release does not know, or that a launch cannot have, stay ignored.
    """
    engine = ENGINE_OF.get(imported.kind)
    if engine is None:
        return imported
    kept, ignored = [], []
    for item in imported.ignored:
        reason = item.reason or ""
        is_open = reason.startswith((NO_EFFECT, NOT_MODELLED)) and not item.source.endswith("…")
        words = _engine_words(engine, item) if is_open else ()
        if words:
            unsaid = None if reason.startswith(NO_EFFECT) else reason
            value = shlex.join(words)
            kept.append(Item(source=item.source, field=ENGINE_ARGS, value=value, reason=unsaid))
        else:
            ignored.append(item)
    understood = (*imported.understood, *kept)
    return imported.model_copy(update={"understood": understood, "ignored": tuple(ignored)})


def _engine_words(engine: EngineName, item: Item) -> tuple[str, ...]:
    """Return a setting as words of its engine's command line, nothing if it cannot be one."""
    flag, _, rest = item.source.partition(" ")
    forms = ([flag, rest], [flag, *rest.split()]) if rest else ([flag],)
    found = (usable_args(engine, words) for words in forms)
    return next((words for words in found if words), ())


def _launch_of(imported: Import) -> dict[str, Any]:
    """Return the launch of a server's text: its engine, and the arguments that no plan has."""
    engine = STARTED_AS.get(str(imported.request.get("engine")))
    if imported.kind in LOAD_TESTS:
        return _load_of(imported)
    if engine is None or imported.goal != "serve":
        return {}
    lines = [str(each.value) for each in imported.understood if each.field == ENGINE_ARGS]
    words = shlex.split(" ".join(lines))[:MOST_WORDS]
    return {
        "run": "endpoint",
        "engine": engine,
        **({"engine_args": words} if words else {}),
        "idle_stop_seconds": HOUR,
    }


def _load_of(imported: Import) -> dict[str, Any]:
    """Return the launch of a load test: how requests arrive, and how many."""
    work = imported.request.get("workload", {})
    found = next((name for name in ARRIVALS if name in work), None)
    load = {"arrivals": ARRIVALS[found], "points": [float(work[found])]} if found else {}
    return {"run": "load", **load}


def _without_arrivals(request: dict[str, Any], launch: Mapping[str, Any]) -> list[str]:
    """Leave to a load test what a plan's document has no field for; return the note on it."""
    work = request.get("workload", {})
    left = [work.pop(name, None) for name in ("request_rate_per_second", "burst_requests")]
    if not any(left) or not launch.get("points"):
        return []
    sent = SENT[launch["arrivals"]].format(launch["points"][0])
    note = (
        f"The load test sends {sent}, as the text does. The plan itself is for requests in "
        "flight: state how many in the Workload step."
    )
    return [note]


def named_draft(*, team: Team, owner: User, name: str) -> tuple[Plan, list[str]]:
    """Return an unsaved draft that serves a model on the default host, and notes on its name.

    Raises:
        InvalidProblem: the name is none of the team, the catalog or the Hub.
    """
    if not name:
        raise InvalidProblem("model", "No model is named. Type a name, such as Qwen/Qwen3-0.6B.")
    host = first_host(team)
    plan = Plan(team=team, owner=owner, draft=stored_draft(serve_document(host), "serve"))
    document: dict[str, Any] = {"goal": "serve", "model": {"name": name}}
    if host is not None and host.facts and not host.facts.get("gpus"):
        document["workload"] = {"concurrency": 1}  # a processor answers one person at a time
    try:
        notes = draft_fill(plan, document_parse(document))
    except InvalidProblem as problem:
        faults: Any = problem.facts.get("errors") or [{"message": problem.detail}]
        words = str(faults[0]["message"])  # without the field's name: the page has one field
        if "/" not in name:
            words = f"{words} Name a repository of the Hub as owner/name."
        raise InvalidProblem("model", words) from problem
    plan.wizard.update(is_touched=True)
    return plan, notes


def own_draft(*, team: Team, owner: User, text: str) -> Plan | None:
    """Return an unsaved draft of a plan's own document, or None for any other text.

    Raises:
        InvalidProblem: a value of the document is refused.
    """
    if len(text) > MOST_CHARACTERS:
        return None
    try:
        found = [each for each in read_yaml(text) if each is not None]
    except PlannerError:
        return None
    if len(found) != 1 or not isinstance(found[0], dict) or found[0].get("goal") not in GOALS:
        return None  # no other tool's file has a goal
    document = document_parse(found[0])
    plan = Plan(
        team=team, owner=owner, draft=stored_draft(serve_document(first_host(team)), "serve")
    )
    draft_fill(plan, document)
    if document.name:
        plan.name, plan.is_named = document.name, True
    plan.wizard.update(is_touched=True)
    return plan


def paste_draft(
    *, team: Team, owner: User, imported: Import, host: str = "", pool: str = ""
) -> tuple[Plan, list[str]]:
    """Return an unsaved draft of an import, and notes on what the wizard has no field for.

    What the text does not say has the wizard's default.

    Raises:
        InvalidProblem: a value is outside the wizard's limits.
    """
    request: dict[str, Any] = copy.deepcopy(dict(imported.request))
    if "workload" not in request:
        request["workload"] = {"kind": imported.goal or "serve"}
    own = first_host(team)
    named = _with_device(request, own) if not host and not pool else []
    launch = _launch_of(imported)
    named += _without_arrivals(request, launch)
    document, notes = document_of_request(request, host=host, pool=pool)
    if imported.repository:
        document["model"] = {"catalog_id": document["model"], "repository": imported.repository}
    if imported.rope_scaling and (model := document.get("model")):
        chosen = {"name": model} if isinstance(model, str) else model
        document["model"] = {**chosen, "rope_scaling": imported.rope_scaling}
    if imported.data and document["goal"] in TRAINING_GOALS:
        notes += _with_data(document, imported.data)
    notes += _with_rewards(document, imported.rewards)
    if launch:
        document["launch"] = launch
    notes += shorten_requests(document)
    parsed = document_parse(document)
    plan = Plan(team=team, owner=owner, draft=stored_draft(serve_document(own), "serve"))
    notes = [*named, *_without_model(imported), *notes, *draft_fill(plan, parsed)]
    if chosen := Options(team).host_of(plan.document.hardware):
        has_batch = "global_batch_size" in parsed.workload.model_fields_set
        notes += settle_on(plan, chosen, is_batch_stated=has_batch)
    plan.wizard.update(is_touched=True, imported=imported_words(imported, notes))
    if imported.goal is not None and "model" not in imported.request:
        plan.wizard["lacks_model"] = _model_words(imported)
    return plan, [*imported.assumptions, *notes]


def _with_data(document: dict[str, Any], data: Mapping[str, str]) -> list[str]:
    """Name the data set of a text in a document; return a note if its name cannot be one."""
    if way := data.get("packing_strategy"):
        document["workload"] = {**document.get("workload", {}), "packing_strategy": way}
    if "data_repository" not in data:
        return []
    fields = {"data_source": "hub", **data}
    try:
        PretrainWork(**fields)
    except ValidationError as error:
        return [f"The text's data set is not used: {faults_in(error)[0].sentence}"]
    document["workload"] = {**document.get("workload", {}), **fields}
    return []


def _with_rewards(document: dict[str, Any], named: tuple[str, ...]) -> list[str]:
    """Name the reward functions of a text that jobs have; return a note on the others.

    GRPO learns from at least one: without any that jobs have it is the first built-in one.
    """
    work = document.get("workload", {})
    if work.get("objective") != "grpo":
        return []
    found = list(dict.fromkeys(REWARDS[each] for each in named if each in REWARDS))
    work["reward_function"] = "\n".join(found) or next(iter(BUILT_IN))
    left = [each for each in named if each not in REWARDS]
    if found and not left:
        return []
    why = (
        f"Rewards of the text that jobs do not have: {', '.join(left)}."
        if left
        else ("The text names no reward function.")
    )
    chosen = ", ".join(work["reward_function"].splitlines())
    return [f"{why} Planned with {chosen}. Choose yours in the Workload step, or a Python file."]


def _with_device(request: dict[str, Any], own: Host | None) -> list[str]:
    """Name a device of the catalog where a text says only how many, and the host has fewer."""
    cluster = request.get("cluster") or {}
    count = int(cluster.get("devices_per_node") or 1) * int(cluster.get("nodes") or 1)
    num_own = own.devices.filter(is_present=True, kind="gpu").count() if own else 0
    if "device" in cluster or "instance" in cluster or count <= max(1, num_own):
        return []
    request["cluster"] = {**cluster, "device": DEFAULT_DEVICE}
    note = (
        f"The text has {count} devices and does not say which: planned for {DEFAULT_DEVICE}. "
        "Choose yours in the Hardware step."
    )
    return [note]


def _without_model(imported: Import) -> list[str]:
    """Return the note on the model of a text that names none of the catalog."""
    if imported.goal is None or "model" in imported.request:
        return []
    note = (
        f"The text names {_model_words(imported)}: the plan is for {DEFAULT_MODEL}. Choose yours "
        "in the Model step."
    )
    return [note]


def _model_words(imported: Import) -> str:
    if not isinstance(imported.model, str):
        return "no model"
    return f"the model {imported.model}, which the catalog does not have"


def imported_words(imported: Import, notes: list[str]) -> dict[str, list[list[str]]]:
    """Return what became of each setting, for the review page: pairs of source and words.

    A setting stands in one of the lists, those that change the work first in theirs.
    """
    left_out = [note.partition(" = ")[0] for note in notes if NO_FIELD in note]
    understood: list[list[str]] = []
    without_field: list[list[str]] = []
    for item in imported.understood:
        has_field = not any(_is_within(path, item.field or "") for path in left_out)
        words = became(item) if has_field else f"{became(item)} {NO_FIELD}"
        (understood if has_field else without_field).append([item.source, words])
    said = set(imported.assumptions)
    ignored = sorted(
        imported.ignored, key=lambda each: f"{each.source}: {each.reason}" not in said
    )
    unused = [["", note] for note in notes if NO_FIELD not in note]
    unused += [[each.source, each.reason or ""] for each in ignored] + without_field
    unknown = [[each.source, each.reason or ""] for each in imported.unknown]
    return {
        name: _first(rows)
        for name, rows in (("understood", understood), ("unused", unused), ("unknown", unknown))
    }


def _first(rows: list[list[str]]) -> list[list[str]]:
    """Return the first rows, and how many others there are."""
    more = len(rows) - MOST_SHOWN
    return rows[:MOST_SHOWN] + ([["", f"{more} further settings"]] if more > 0 else [])


def _is_within(path: str, field: str) -> bool:
    """Return whether a path of a request is a field, or lies in it."""
    return path == field or path.startswith(f"{field}.")
