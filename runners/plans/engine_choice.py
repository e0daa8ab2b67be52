"""The engine of a document: the one it names, and the one that it gets without a name."""

from collections.abc import Mapping

from planner.catalog.engines import (
    AUTO,
    DEFAULT_ENGINE,
    PREFERENCE_ENGINE,
    engines_by_work,
    get_engine,
)
from runners.jobspec.engines import ENGINES, OWN, ROWS, EngineName
from runners.jobspec.objectives import OWN_TRAINER, PREFERENCES, TRL, TrainEngine
from runners.plans.document import PlanDocument
from runners.plans.refusals import DraftProblem
from runners.plans.training_options import objective_of
from runners.plans.workloads import TRAINING_GOALS, FinetuneWork

TRAINERS: Mapping[str | None, TrainEngine] = {DEFAULT_ENGINE: OWN_TRAINER, PREFERENCE_ENGINE: TRL}
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


def trainer_of(document: PlanDocument) -> TrainEngine:
    """Return whose trainer the job of a training runs.

    It is the chosen engine's. Where none is chosen, or one that no job runs, it is TRL's for the
    objectives that only TRL has, else Slipway's own.
    """
    chosen, values = chosen_engine(document), document.workload
    if chosen in TRAINERS:
        return TRAINERS[chosen]
    is_trls = isinstance(values, FinetuneWork) and objective_of(values) in PREFERENCES
    return TRL if is_trls else OWN_TRAINER


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
    chosen, by_trl = chosen_engine(document), trainer_of(document) == TRL
    planned = PREFERENCE_ENGINE if by_trl else ENGINES[endpoint or OWN].planned_as
    if chosen in {None, planned}:
        return
    title = engine_choices(document.goal)[chosen or ""]
    served_by = next((each.name for each in ROWS if each.planned_as == chosen), None)
    if served_by and endpoint:
        raise DraftProblem(
            f"This plan is for the engine {title}, and its endpoint was asked of the engine "
            f"{endpoint}. Give the launch the engine {served_by} (`--engine {served_by}` of "
            "slipway launch), or choose the engine “Automatic” in the Hardware step.",
            "engine",
        )
    runs = " start an endpoint of that engine," if served_by else ""
    if document.goal == "serve" and not served_by:
        runs = " start it on the host by its command, and add that as an observed server;"
    raise DraftProblem(
        f"This plan is for the engine {title}, which this kind of job cannot start. Download the "
        f"plan's export,{runs} or choose the engine “Automatic” in the Hardware step.",
        "engine",
    )
