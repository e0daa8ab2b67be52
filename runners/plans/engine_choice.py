"""The engine of a document: the one it names, and the one that it gets without a name."""

from planner.catalog.engines import (
    AUTO,
    DEFAULT_ENGINE,
    PREFERENCE_ENGINE,
    engines_by_work,
    get_engine,
)
from runners.jobspec.engines import ENGINES, OWN, ROWS, EngineName
from runners.jobspec.objectives import TRL
from runners.plans.document import PlanDocument
from runners.plans.refusals import DraftProblem
from runners.plans.training_options import engine_and_objective
from runners.plans.workloads import TRAINING_GOALS, FinetuneWork, Workload

OWN_TITLE = "Slipway's own, on PyTorch"


def engine_choices(goal: str) -> dict[str, str]:
    """Return the titles of the engines that can be chosen for a goal, by key."""
    if goal == "compress":
        return {}
    engines = engines_by_work(training=goal in TRAINING_GOALS) | {DEFAULT_ENGINE: OWN_TITLE}
    if goal == "finetune":  # a tool around transformers that fine-tunes alone
        engines[PREFERENCE_ENGINE] = get_engine(PREFERENCE_ENGINE, "gpu", training=True).title
    return engines


def chosen_engine(document: PlanDocument) -> str | None:
    """Return the engine that a document names, None to leave it to the goal and the hardware.

    An engine that was chosen for another goal does not count.
    """
    chosen = document.hardware.engine
    return chosen if chosen in engine_choices(document.goal) else None


def work_of(document: PlanDocument) -> Workload:
    """Return a document's workload, by TRL if that is the engine and no trainer is named."""
    values: Workload = document.workload
    is_trls = chosen_engine(document) == PREFERENCE_ENGINE
    if is_trls and isinstance(values, FinetuneWork) and values.engine is None:
        return values.model_copy(update={"engine": TRL})
    return values


def trains_by_trl(document: PlanDocument) -> bool:
    """Return whether a document is of a fine-tuning whose trainer is one of TRL's."""
    values = work_of(document)
    return isinstance(values, FinetuneWork) and engine_and_objective(values)["engine"] == TRL


def default_engine(goal: str, *, runs_jobs: bool, by_trl: bool = False) -> str | None:
    """Return the engine of a document that names none; None leaves it to the planner.

    Where no job can run, the engines that sites run on the hardware are compared. Trainings on a
    host that runs jobs name Slipway's trainer, so that only its layouts are searched; one
    ``by_trl`` has TRL's anywhere.
    """
    if by_trl:
        return PREFERENCE_ENGINE
    if runs_jobs:
        return DEFAULT_ENGINE if goal in TRAINING_GOALS else None
    return None if goal in {*TRAINING_GOALS, "compress"} else AUTO


def check_engine(document: PlanDocument, endpoint: EngineName | None) -> None:
    """Refuse to start a plan on another engine than the one that was chosen for it.

    Raises:
        DraftProblem: the plan was made for another engine; the message names a remedy.
    """
    chosen, by_trl = chosen_engine(document), trains_by_trl(document)
    planned = PREFERENCE_ENGINE if by_trl else ENGINES[endpoint or OWN].planned_as
    if chosen in {None, planned}:
        return
    title = engine_choices(document.goal)[chosen or ""]
    if by_trl or chosen == PREFERENCE_ENGINE:
        trainer = "TRL" if by_trl else "Slipway's own"
        raise DraftProblem(
            f"This plan is for the engine {title}, and its trainer is {trainer}. Choose the "
            "engine “Automatic” in the Hardware step, or the other trainer.",
            "engine",
        )
    served_by = next((each.name for each in ROWS if each.planned_as == chosen), None)
    if served_by and endpoint:
        raise DraftProblem(
            f"This plan is for the engine {title}, and its endpoint was asked of the engine "
            f"{endpoint}. Give the launch the engine {served_by} (`--engine {served_by}` of "
            "slipway launch), or choose the engine “Automatic” in the Hardware step.",
            "engine",
        )
    runs = " start an endpoint of that engine," if served_by else ""
    raise DraftProblem(
        f"This plan is for the engine {title}, which this kind of job cannot start. Download the "
        f"plan's export,{runs} or choose the engine “Automatic” in the Hardware step.",
        "engine",
    )
