"""A refused launch form: the review page shows its values again and marks the wrong field."""

from collections.abc import Mapping
from typing import Any

from django.http import HttpRequest

from webapp.core.problems import Problem
from webapp.plans.explanation import DraftProblem
from webapp.plans.models import Plan

REFUSED = "refused_launch"  # in the session: the last refused form, until a page shows it again
# The fields of the review page's form. Hidden ones are made anew with the page.
FIELDS = (
    "name", "save_as", "priority", "retries", "hours", "idle", "engine", "reuse", "draft",
    "adapters", "adapter", "profile", "arrivals", "points", "requests", "repetitions",
)  # fmt: skip
LONGEST = 200  # characters kept of a value
MAX_SECRETS = 16


def refused_keep(request: HttpRequest, plan: Plan, problem: DraftProblem | Problem) -> None:
    """Keep the values of a refused launch form, and the field that the problem names."""
    posted = request.POST
    values: dict[str, Any] = {name: posted[name][:LONGEST] for name in FIELDS if name in posted}
    values["secrets"] = [each[:LONGEST] for each in posted.getlist("secret")[:MAX_SECRETS]]
    field = problem.field if isinstance(problem, DraftProblem) else _field_of(problem)
    request.session[REFUSED] = {
        "plan": plan.pk,
        "values": values,
        "wrong": field if field in values else "",
        "words": str(problem),
    }


def _field_of(problem: Problem) -> str:
    errors: Any = problem.facts.get("errors")
    return str(errors[0]["field"]) if errors else problem.code


def refused_show(request: HttpRequest, plan: Plan, page: Mapping[str, Any]) -> dict[str, Any]:
    """Return the review page's context with the values of the plan's last refused form, once."""
    refused = request.session.get(REFUSED)
    if not refused or refused["plan"] != plan.pk:
        return dict(page)
    del request.session[REFUSED]
    copied = page["filled"]  # which job the draft is a copy of
    about = {name: copied[name] for name in ("job", "job_name") if name in copied}
    wrong = {"wrong": refused["wrong"], "wrong_words": refused["words"]}
    return {**page, "filled": {**about, **refused["values"]}, **wrong}
