"""The engine of a document: the one it names, and the one that it gets without a name."""

from typing import Any

from planner.catalog.devices import get_device
from planner.catalog.engines import (
    DEFAULT_ENGINE,
    engines_by_work,
    engines_for,
    get_engine,
    refusal,
    sixteen_bit_dtype,
)
from planner.catalog.models import find_model
from planner.specs.base import PlannerError
from planner.specs.cluster import ClusterSpec
from runners.jobspec.engines import ENGINES, OWN, ROWS, EngineName
from runners.plans.document import PlanDocument
from runners.plans.refusals import DraftProblem
from runners.plans.workloads import TRAINING_GOALS

OWN_TITLE = "Slipway's own, on PyTorch"


def engine_choices(goal: str) -> dict[str, str]:
    """Return the titles of the engines that can be chosen for a goal, by key."""
    if goal == "compress":
        return {}
    return engines_by_work(training=goal in TRAINING_GOALS) | {DEFAULT_ENGINE: OWN_TITLE}


def chosen_engine(document: PlanDocument) -> str | None:
    """Return the engine that a document names, None to leave it to the goal and the hardware.

    An engine that was chosen for another goal does not count.
    """
    chosen = document.hardware.engine
    return chosen if chosen in engine_choices(document.goal) else None


def default_engine(
    goal: str, cluster: ClusterSpec, model: str | dict[str, Any], *, runs_jobs: bool
) -> str | None:
    """Return the engine of a document that names none; None leaves it to the planner.

    Trainings on a host that runs jobs name Slipway's trainer, so that only its layouts are
    searched.
    """
    if runs_jobs:
        return DEFAULT_ENGINE if goal in TRAINING_GOALS else None
    return _catalog_engine(goal, cluster, model)


def _catalog_engine(goal: str, cluster: ClusterSpec, model: str | dict[str, Any]) -> str | None:
    """Return the usual engine on a device that does not refuse it, or the model, as a whole."""
    if goal in {*TRAINING_GOALS, "compress"}:
        return None
    try:
        device = get_device(cluster.device) if isinstance(cluster.device, str) else cluster.device
    except PlannerError:  # the plan is refused by the same error
        return None
    usual, shape = engines_for(device, training=False), find_model(model)
    half = sixteen_bit_dtype(device)

    def refuses(name: str) -> bool:
        engine = get_engine(name, device.kind)
        refused = shape and refusal(engine, device, shape, (half, half, None))
        return bool(refused and refused.field == "engine")

    return next((name for name in usual if not refuses(name)), usual[0])


def check_engine(document: PlanDocument, endpoint: EngineName | None) -> None:
    """Refuse to start a plan on another engine than the one that was chosen for it.

    Raises:
        DraftProblem: the plan was made for another engine; the message names a remedy.
    """
    chosen = chosen_engine(document)
    if chosen in {None, ENGINES[endpoint or OWN].planned_as}:
        return
    title = engine_choices(document.goal)[chosen or ""]
    can_serve = any(each.planned_as == chosen for each in ROWS)
    runs = " start an endpoint of that engine," if can_serve else ""
    raise DraftProblem(
        f"This plan is for the engine {title}, which this kind of job cannot start. Download the "
        f"plan's export,{runs} or choose the engine “Automatic” in the Hardware step.",
        "engine",
    )
