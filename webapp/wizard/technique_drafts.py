"""Drafts that begin with a technique of the catalog: its goal, its settings, enough devices."""

from math import prod
from typing import Any

from pydantic import ValidationError

from planner.catalog.models import find_model
from planner.specs.workload import Strategy
from planner.techniques.registry import Technique
from runners.plans.document import (
    DEFAULT_DEVICE,
    PLANS,
    HardwareChoice,
    ModelChoice,
    PlanDocument,
)
from runners.plans.fields import Part
from runners.plans.workloads import WORKLOADS
from webapp.hosts.models import Host

GOAL_OF_PHASE = {"inference": "serve", "training": "finetune", "compression": "compress"}
PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def is_carried(technique: Technique) -> bool:
    """Return whether a plan can state a technique; the planner uses the others by itself."""
    return bool(technique.settings) or bool(_changes(technique, WORKLOADS[goal_of(technique)]()))


def goal_of(technique: Technique) -> str:
    """Return the goal of a technique's worked example, else of its first phase."""
    work = technique.example.request.get("workload", {}) if technique.example else {}
    kind = work.get("kind")
    if kind == "train":
        return "pretrain" if work.get("method") == "pretrain" else "finetune"
    if kind in WORKLOADS:
        return str(kind)
    return next(goal for phase, goal in GOAL_OF_PHASE.items() if phase in technique.phases)


def technique_document(technique: Technique, host: Host | None) -> PlanDocument:
    """Return the document of a new plan that uses a technique, with its example's model.

    It is for catalog hardware where the host has fewer devices than the settings need.
    """
    goal = goal_of(technique)
    work = WORKLOADS[goal]()
    return PLANS[goal](
        goal=goal,
        model=ModelChoice(source="catalog", **_example_model(technique)),
        workload=work.with_values(**_changes(technique, work)),
        hardware=_hardware(technique, host),
        pins=Strategy.model_validate(technique.settings),
    )


def _example_model(technique: Technique) -> dict[str, str]:
    name = technique.example.request.get("model") if technique.example else None
    return {"catalog_id": name} if isinstance(name, str) and find_model(name) else {}


def _changes(technique: Technique, work: Part) -> dict[str, Any]:
    """Return the values of a workload by which a plan uses a technique."""
    for alternative in technique.used:
        named = {
            path.removeprefix("workload."): accepted[0]
            for path, accepted in alternative.items()
            if path.startswith("workload.") and isinstance(accepted, list | tuple)
        }
        own = {name: value for name, value in named.items() if name in type(work).model_fields}
        try:
            work.with_values(**own)
        except ValidationError:  # a value that only the planner has
            continue
        if own:
            return own
    return {}


def _hardware(technique: Technique, host: Host | None) -> HardwareChoice:
    pins = technique.settings
    pools = pins.get("disaggregated")
    sizes = pools.values() if isinstance(pools, dict) else ()
    grid = prod(int(pins.get(name, 1)) for name in PARALLEL)
    needed = max(sum(sizes), grid, int(pins.get("expert_parallel_size", 1)))
    num_own = max(1, len(host.facts.get("gpus") or [])) if host else 0
    if host is not None and num_own >= needed:
        return HardwareChoice(host=host.pk)
    return HardwareChoice(device=DEFAULT_DEVICE, devices_per_node=needed)
