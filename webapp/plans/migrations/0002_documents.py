"""Stored drafts become plan documents: one model of the question, with the names of today."""

from collections.abc import Mapping
from typing import Any

from django.apps.registry import Apps
from django.db import migrations
from django.db.backends.base.schema import BaseDatabaseSchemaEditor

from runners.plans.old_names import read_document, read_workload

ROWS = range(1, 5)  # of a mixture
HARDWARE = ("engine", "memory_limit_gib", "ranks_per_host", "on_lost_rank")
DEVICES = ("device", "devices_per_node", "nodes")
BATCH = 200


def document_of_draft(draft: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document of a draft as the wizard stored it before; an incomplete one as {}."""
    goal_step, hardware = draft.get("goal") or {}, draft.get("hardware") or {}
    goal, workloads = goal_step.get("goal"), draft.get("workload") or {}
    if not goal or not isinstance(goal_step, Mapping):
        return {}
    document: dict[str, Any] = {
        "goal": goal,
        "objective": goal_step.get("objective"),
        "latency_target": goal_step.get("slo"),
        "percentile": goal_step.get("percentile"),
        "model": _model(draft.get("model") or {}),
        "workload": _workload(workloads.get(goal) or {}),
        "hardware": _hardware(hardware),
        "pins": _stated(draft.get("pins") or {}),
    }
    others = {name: _workload(each) for name, each in workloads.items() if name != goal}
    wizard = {
        "preset": draft.get("preset", ""),
        "is_touched": draft.get("is_touched", True),
        "others": others,
    }
    if imported := draft.get("imported"):
        wizard["imported"] = imported
    if launch := draft.get("launch"):
        document["launch"] = _launch(launch)
        wizard |= {"copied_job": launch.get("job"), "copied_name": launch.get("job_name")}
    return {**read_document(_stated(document)), "wizard": wizard}


def _stated(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in (None, "")}


def _model(chosen: Mapping[str, Any]) -> dict[str, Any]:
    config = chosen.get("folder_config" if chosen.get("source") == "folder" else "config")
    names = ("source", "catalog_id", "team_model", "path")
    return _stated({**{name: chosen.get(name) for name in names}, "config": config or None})


def _hardware(hardware: Mapping[str, Any]) -> dict[str, Any]:
    kind, _, key = str(hardware.get("choice") or "catalog").partition(":")
    place = {kind: key} if key else {}
    return _stated({**place, **{name: hardware.get(name) for name in (*DEVICES, *HARDWARE)}})


def _workload(values: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in values.items() if not name.startswith("mix_")}
    sources = [
        _stated(
            {
                "source": values.get(f"mix_source_{row}"),
                "path": values.get(f"mix_path_{row}"),
                "weight": values.get(f"mix_weight_{row}"),
                "reference_loss": values.get(f"mix_reference_{row}"),
            }
        )
        for row in ROWS
        if values.get(f"mix_source_{row}")
    ]
    if "data_source" in values:
        plain |= {
            "mixture": sources,
            "mix_weights": values.get("mix_weights"),
            "mix_every": values.get("mix_every"),
            "data_format": values.get("data_format") or None,
        }
    found: dict[str, Any] = read_workload(plain)
    return found


def _launch(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the launch form's texts."""
    hours, idle, points = fields.get("hours"), fields.get("idle"), fields.get("points")
    given = {
        "run": "load" if points else "endpoint" if "engine" in fields else "job",
        "priority": "low" if fields.get("priority") == "-1" else "normal",
        "max_retries": int(fields.get("retries") or 0),
        "secrets": list(fields.get("secrets") or ()),
        "max_duration_seconds": float(hours) * 3600 if hours else None,
        "idle_stop_seconds": float(idle) * 60 if idle else None,
        "engine": fields.get("engine"),
        "adapters": fields.get("adapters"),
        "adapter": fields.get("adapter"),
        "draft_model": fields.get("draft"),
        "profile": fields.get("profile"),
        "arrivals": fields.get("arrivals"),
        "points": [float(each) for each in str(points).split(",")] if points else None,
        "requests_per_repetition": int(fields["requests"]) if fields.get("requests") else None,
        "repetitions": int(fields["repetitions"]) if fields.get("repetitions") else None,
    }
    if reuse := fields.get("reuse"):
        given["prefix_caching"] = reuse == "yes"
    return _stated(given)


def read_drafts(apps: Apps, _editor: BaseDatabaseSchemaEditor) -> None:
    """Write each stored draft as a document."""
    plan_model = apps.get_model("plans", "Plan")
    changed = []
    for plan in plan_model.objects.only("draft").iterator(BATCH):
        plan.draft = document_of_draft(plan.draft) if isinstance(plan.draft, dict) else {}
        changed.append(plan)
        if len(changed) == BATCH:
            plan_model.objects.bulk_update(changed, ["draft"])
            changed = []
    plan_model.objects.bulk_update(changed, ["draft"])


class Migration(migrations.Migration):
    """Convert ``Plan.draft``."""

    dependencies = [("plans", "0001_initial")]

    operations = [migrations.RunPython(read_drafts, migrations.RunPython.noop)]
