"""Problems of a draft, as a sentence with the field; missing steps are problems."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from webapp.plans.words import GOAL_WORDS


@dataclass(unsafe_hash=True)  # not frozen: exception handling sets the traceback
class DraftProblem(Exception):  # noqa: N818 -- shown to people, who have problems
    """A draft that cannot be planned or launched; the sentence includes a remedy."""

    sentence: str
    field: str = ""
    is_passing: bool = False  # temporary: callers may retry
    is_refused: bool = False  # complete, but the planner or the engine refuses it

    def __str__(self) -> str:
        return self.sentence


# Check drafts for missing steps: they may come from the API or from older releases.


Draft = dict[str, Any]
# Required fields of each step.
NEEDED = {
    "goal": ("goal", "objective", "slo"),
    "model": ("source",),
    "hardware": ("choice", "device", "devices_per_node", "nodes"),
    "pins": (),
}


def missing_step(draft: Draft) -> str:
    """Return the first incomplete step of a draft, or "" if all are complete."""
    for step, fields in NEEDED.items():
        values = draft.get(step)
        if not isinstance(values, Mapping) or any(name not in values for name in fields):
            return step
    goal, workload = draft["goal"]["goal"], draft.get("workload")
    if goal not in GOAL_WORDS:
        return "goal"
    values = workload.get(goal) if isinstance(workload, Mapping) else None
    return "" if values and isinstance(values, Mapping) else "workload"


def refuse_incomplete(draft: Draft) -> None:
    """Refuse an incomplete draft.

    Raises:
        DraftProblem: a step is missing; the sentence names it.
    """
    step = missing_step(draft)
    if step:
        raise DraftProblem(
            f"This plan has no value for its {step} yet. Choose Edit: each step has a proposal.",
            step,
        )


def completed(draft: Draft, proposal: Draft) -> Draft:
    """Return a draft with missing values filled from a proposal.

    An unknown goal counts as missing.
    """
    whole = {step: _filled(draft.get(step), value) for step, value in proposal.items()}
    if whole["goal"]["goal"] not in GOAL_WORDS:
        whole["goal"] = proposal["goal"]
    workloads = draft.get("workload")
    each = workloads if isinstance(workloads, Mapping) else {}
    whole["workload"] = {
        goal: _filled(each.get(goal), values) for goal, values in proposal["workload"].items()
    }
    return whole


def _filled(own: Any, proposed: Any) -> Any:  # noqa: ANN401 -- JSON of any shape
    if isinstance(proposed, dict):
        return {**proposed, **own} if isinstance(own, Mapping) else proposed
    return proposed if own is None else own
