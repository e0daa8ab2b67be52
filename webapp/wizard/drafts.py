"""Create drafts and apply suggestions to them."""

from collections.abc import Callable
from typing import Any

from django.contrib.auth.models import User

from planner.catalog.devices import get_device
from planner.errors import PlannerError
from webapp.accounts.models import Team
from webapp.hosts.models import RUNS_JOBS, Host, HostState
from webapp.jobs.models import Job, JobState
from webapp.modelhub.models import TeamModel
from webapp.plans.completeness import completed, missing_step
from webapp.plans.engine_choice import engine_choices
from webapp.plans.models import Plan, PlanState
from webapp.wizard.defaults import (
    MODEL_PRESETS,
    Draft,
    demo_draft,
    model_draft,
    serve_draft,
)


def first_host(team: Team) -> Host | None:
    """Return the default host of a new plan: the first enrolled ready host, else the first."""
    hosts = Host.objects.filter(team=team, kind__in=RUNS_JOBS).exclude(
        state__in=[HostState.RETIRED, HostState.PENDING]
    )
    ready = hosts.filter(state=HostState.READY).order_by("created_at").first()
    return ready or hosts.order_by("created_at").first()


def draft_begin(
    *, team: Team, owner: User, preset: str = "", model: TeamModel | None = None
) -> Plan:
    """Return a new plan with a complete draft, or the owner's existing untouched equal one."""
    draft = _first_draft(team, preset, model)
    untouched = Plan.objects.filter(team=team, owner=owner, state=PlanState.DRAFT, draft=draft)
    return untouched.first() or Plan.objects.create(team=team, owner=owner, draft=draft)


def _first_draft(team: Team, preset: str, model: TeamModel | None) -> Draft:
    host = first_host(team)
    if preset in MODEL_PRESETS and model is not None:
        return model_draft(preset, model, host)
    if preset == "demo":
        return demo_draft(host)
    has_finished_job = Job.objects.filter(team=team, state=JobState.SUCCEEDED).exists()
    return serve_draft(host) if has_finished_job or preset == "serve" else demo_draft(host)


def proposals_fill(plan: Plan) -> Plan:
    """Fill each missing step of a plan's draft with a default, without saving it."""
    if missing_step(plan.draft):
        plan.draft = completed(plan.draft, serve_draft(first_host(plan.team)))
    return plan


def suggestion_apply(draft: Draft, changes: dict[str, Any]) -> list[str]:
    """Apply a suggestion to a draft; return the changes that the draft has no field for."""
    appliers: dict[str, Callable[[Draft, Any], list[str]]] = {
        "workload": _apply_workload,
        "pins": _apply_pins,
        "cluster": _apply_cluster,
    }
    appliers |= {"constraints": _apply_constraints, "engine": _apply_engine}
    unapplied = []
    for name, value in changes.items():
        apply = appliers.get(name)
        unapplied += apply(draft, value) if apply else [name]
    draft["is_touched"] = True
    return unapplied


def _apply_workload(draft: Draft, workload: dict[str, Any]) -> list[str]:
    """Copy the fields that the goal's form has."""
    values = draft["workload"][draft["goal"]["goal"]]
    for name, value in workload.items():
        if name in values and value is not None:
            values[name] = value
    method = workload.get("method")
    return [f"method {method}"] if method not in {None, "pretrain", values.get("method")} else []


def _apply_pins(draft: Draft, pins: dict[str, Any]) -> list[str]:
    draft["pins"] = pins
    return []


def _apply_engine(draft: Draft, engine: str) -> list[str]:
    """Choose an engine that the draft's goal has."""
    if engine not in engine_choices(draft["goal"]["goal"]):
        return [f"engine {engine}"]
    draft["hardware"]["engine"] = engine
    return []


def _apply_constraints(draft: Draft, constraints: dict[str, Any]) -> list[str]:
    """Clear the memory limit if it is no longer among the constraints."""
    if "per_device_peak_bytes" not in constraints:
        draft["hardware"]["memory_limit_gib"] = None
    return []


def _apply_cluster(draft: Draft, cluster: dict[str, Any]) -> list[str]:
    """Choose catalog hardware instead of a host, because a host cannot be enlarged."""
    device = cluster["device"]
    name = device if isinstance(device, str) else str(device.get("id"))
    try:
        device_id = get_device(name).id
    except PlannerError:
        return [f"device {name}"]
    draft["hardware"] |= {
        "choice": "catalog",
        "device": device_id,
        "devices_per_node": cluster.get("devices_per_node", 1),
        "nodes": cluster.get("nodes", 1),
    }
    return []
