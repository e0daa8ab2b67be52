"""Exports of a plan: other tools' formats, with a script that measures the plan's claims."""

from planner.exports.export import Export
from planner.exports.registry import export, export_case
from planner.specs.base import PlannerError
from planner.specs.estimate import PlanAnswer, PlanRequest
from webapp.plans.models import Plan

MEASURE = "measure"
MEASURE_FILE = "measure.py"


def export_plan(plan: Plan, answer: PlanAnswer, key: str) -> Export:
    """Return the plan in another tool's format.

    Raises:
        PlannerError: nothing fits, or the format cannot express this plan.
    """
    if not answer.plans:
        raise PlannerError("No plan fits this request, so there is nothing to export.")
    request = answer.request or PlanRequest.model_validate(plan.request)
    return export(key, export_case(request, answer.plans[0]))


def exports_of(plan: Plan, answer: PlanAnswer) -> list[Export]:
    """Return the plan in every format that can express it, as listed by the answer."""
    exports = []
    for key in answer.plans[0].exports if answer.plans else ():
        try:
            exports.append(export_plan(plan, answer, key))
        except PlannerError:
            # An answer older than the current catalogs may name removed entries.
            continue
    return exports


def file_of(plan: Plan, answer: PlanAnswer, key: str) -> tuple[str, str] | None:
    """Return the name and text of one file to download, or None if there is none."""
    by_key = {exported.key: exported for exported in exports_of(plan, answer)}
    if key == MEASURE and by_key:
        text = next(iter(by_key.values())).measure
        return (MEASURE_FILE, text) if text else None
    return (by_key[key].file_name, by_key[key].text) if key in by_key else None
