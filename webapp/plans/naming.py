"""Plan names: set by a person, or a title derived from the content."""

from webapp.plans.completeness import missing_step
from webapp.plans.errors import DraftProblem
from webapp.plans.models import Plan
from webapp.plans.questions import question_of
from webapp.plans.sharing import pool_words
from webapp.plans.words import hardware_words, model_words, plan_title


def title_of(plan: Plan) -> str:
    """Return a title from the plan's goal, model and hardware, as far as they exist."""
    if missing_step(plan.draft):
        return "Unfinished plan"
    try:
        question = question_of(plan)
    except DraftProblem:
        return plan_title(plan.draft, model_words(plan.draft), hardware_words(plan.draft))
    model = question.team_model.name if question.team_model else ""
    host = question.host.name if question.host else ""
    if question.pool is not None:
        host = f"pool {pool_words(question.pool, plan.team)}"
    words = model_words(plan.draft, model), hardware_words(plan.draft, host)
    return plan_title(plan.draft, *words)


def is_named(plan: Plan) -> bool:
    """Return whether a person named the plan, so that content changes keep the name.

    For a plan of an older release, a name different from its title counts as a person's.
    """
    if plan.is_named is not None:
        return plan.is_named
    return bool(plan.name) and plan.name != title_of(plan)


def follow_content(plan: Plan) -> None:
    """Update an unnamed plan's name to the title of its content."""
    if plan.is_named is False:
        plan.name = title_of(plan)
