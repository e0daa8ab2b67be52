"""A plan's first answer as files for other tools, and the script that measures what it claims."""

from planner.errors import PlannerError
from planner.exports.export import Export
from planner.exports.registry import export, export_case
from planner.specs.plan import PlanAnswer, PlanRequest
from webapp.plans.models import Plan

MEASURE = "measure"
MEASURE_FILE = "measure.py"


def export_plan(plan: Plan, answer: PlanAnswer, key: str) -> Export:
    """Return the plan in another tool's words.

    Raises:
        PlannerError: nothing fits, or the format cannot say this plan.
    """
    if not answer.plans:
        raise PlannerError("Nothing fits this question, so that there is nothing to export.")
    request = answer.request or PlanRequest.model_validate(plan.request)
    return export(key, export_case(request, answer.plans[0]))


def exports_of(plan: Plan, answer: PlanAnswer) -> list[Export]:
    """Return the plan in every format that can say it; the answer names them."""
    found = []
    for key in answer.plans[0].exports if answer.plans else ():
        try:
            found.append(export_plan(plan, answer, key))
        except PlannerError:
            # An answer from before the catalogs changed may name what is gone.
            continue
    return found


def file_of(plan: Plan, answer: PlanAnswer, key: str) -> tuple[str, str] | None:
    """Return the name and the text of one file to download, or nothing if there is none."""
    found = {one.key: one for one in exports_of(plan, answer)}
    if key == MEASURE and found:
        text = next(iter(found.values())).measure
        return (MEASURE_FILE, text) if text else None
    return (found[key].file_name, found[key].text) if key in found else None
