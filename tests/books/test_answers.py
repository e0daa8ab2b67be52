"""The planner's answers to the questions of ``answers/questions.toml`` are the stored ones.

Each question is a request of ``planner.api``, with ``function`` (``plan`` unless given). Answers
are stored whole, except for the seconds that a search took and for most terms: the first plan has
all, further plans only their values, the frontier and the suggestions only their number.
"""

import tomllib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from planner import api
from planner.specs.base import PlannerError
from planner.specs.estimate import EstimateRequest, InverseRequest, PlanRequest
from tests.books.book import FOLDER, Book, json_differences, json_text

BOOK = Book("answers", ".json", json_differences)
QUESTIONS: dict[str, dict[str, Any]] = tomllib.loads(
    (FOLDER / "answers" / "questions.toml").read_text("utf-8")
)
REQUESTS = {
    "plan": PlanRequest,
    "best_plan": PlanRequest,
    "estimate": EstimateRequest,
    "inverse": InverseRequest,
}
SHORT = ("terms", "interval", "time_breakdown_seconds")  # of the frontier: their numbers alone


def answer_of(question: dict[str, Any]) -> dict[str, Any]:
    """Return the answer as a JSON document; a refusal has the error's type and text."""
    fields = dict(question)
    function = fields.pop("function", "plan")
    try:
        answer = getattr(api, function)(REQUESTS[function].model_validate(fields))
    except PlannerError as error:
        return {"error": type(error).__name__, "message": str(error)}
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        return {"error": "ValidationError", "problems": found}
    return shortened(answer.model_dump(mode="json"))


def shortened(document: dict[str, Any]) -> dict[str, Any]:
    """Return an answer without seconds, its terms as short as the module's text says."""
    document.get("searched", {}).pop("seconds", None)
    document.pop("seconds", None)
    first, *others = document.get("plans") or [document]
    if terms := first.get("terms"):
        first["terms"] = by_key(terms, whole_term)
    for plan in others:
        plan["terms"] = by_key(plan["terms"], lambda term: term["value"])
    further = [one["estimate"] for one in document.get("suggestions", [])]
    for estimate in (*document.get("pareto", []), *further):
        for name in SHORT:
            estimate[name] = len(estimate.get(name, ()))
    return document


def by_key(terms: list[dict[str, Any]], what: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Return what is stored of each term by its group and key, with a number from the second."""
    found: dict[str, Any] = {}
    seen: Counter[str] = Counter()
    for term in terms:
        name = f"{term['group']}.{term['key']}"
        seen[name] += 1
        found[name if seen[name] == 1 else f"{name} {seen[name]}"] = what(term)
    return found


def whole_term(term: dict[str, Any]) -> dict[str, Any]:
    """Return a term with its inputs in one object: ``{"symbol name unit": value}``."""
    rest = {name: value for name, value in term.items() if name not in {"group", "key"}}
    inputs = [(f"{one['symbol']} {one['name']} {one['unit']}".strip(), one["value"])
              for one in term["inputs"]]  # fmt: skip
    return rest | {"inputs": dict(inputs) if len(dict(inputs)) == len(inputs) else inputs}


@pytest.mark.parametrize("name", QUESTIONS)
def test_an_answer_is_the_stored_one(name: str, is_rewriting: bool) -> None:
    text = json_text(answer_of(QUESTIONS[name]))

    BOOK.compare(name, text, is_rewriting=is_rewriting)


def test_every_stored_answer_has_a_question(is_rewriting: bool) -> None:
    BOOK.compare_entries(QUESTIONS, is_rewriting=is_rewriting)
