"""The draft of a plan: the values of the wizard's steps, as ``Plan.draft`` stores them.

The forms in ``webapp/wizard/forms.py`` and ``workload_forms.py`` check each value before it is
stored. A draft of an earlier version may lack keys: ``explanation.missing_step`` names the step,
and ``explanation.completed_draft`` fills it.
"""

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

# A document that may lack steps or values: stored by an earlier version, or uploaded.
StoredDraft = Mapping[str, Any]


class GoalStep(TypedDict):
    """What the model should do, and the latency target of an endpoint."""

    goal: str  # serve, generate, finetune, pretrain, compress
    objective: str  # a planner objective
    slo: str  # chat, code, none
    percentile: NotRequired[str]  # at which the latency target is evaluated


class ModelStep(TypedDict):
    """The model: of the catalog, of the team, the demo's, or by its ``config.json``."""

    source: str  # catalog, team, demo, config, folder
    catalog_id: str
    team_model: NotRequired[str]  # id of a TeamModel
    config: NotRequired[dict[str, Any]]  # an uploaded or pasted config.json
    path: NotRequired[str]  # a folder on the host
    folder_config: NotRequired[dict[str, Any]]  # its config.json, as read by the host


class HardwareStep(TypedDict):
    """Where it should run: a host, a pool, or hardware of the catalog."""

    choice: str  # host:<id>, pool:<id>, catalog
    device: str  # of the catalog
    devices_per_node: int
    nodes: int
    engine: NotRequired[str]
    memory_limit_gib: NotRequired[float | None]  # per device
    ranks_per_host: NotRequired[int | None]
    on_lost_rank: NotRequired[str]  # of a data-parallel job


# By goal; the keys of each are those of its form. A goal keeps its values while another is chosen.
Workloads = dict[str, dict[str, Any]]


class PlanDraft(TypedDict):
    """All steps of the wizard; ``pins`` are fixed fields of the planner's Strategy."""

    preset: str
    is_touched: bool
    goal: GoalStep
    model: ModelStep
    workload: Workloads
    hardware: HardwareStep
    pins: dict[str, Any]
    imported: NotRequired[dict[str, Any]]  # of a pasted text: what became of its settings
