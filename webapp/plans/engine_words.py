"""The engine of a plan, and those that a refusal names, in words."""

import re

from planner import api
from planner.catalog.engines import AUTO, get_engine
from planner.specs.base import PlannerError
from planner.specs.estimate import Estimate, PlanAnswer
from planner.specs.on_policy import GENERATED_BY, OWN_ENGINE
from runners.plans.document import PlanDocument
from runners.plans.engine_choice import chosen_engine, engine_choices
from webapp.core.display import capitalised, listed
from webapp.plans.explanation import format_words

WORD = re.compile(r"\w+")
REMEDY = re.compile(r";([^;]*?)(?:\. |$)")  # at the end of a reason
REFUSING = re.compile(r"\. (\w+): ")  # one of several engines, before its reason


def engine_words(document: PlanDocument) -> str:
    """Return for which engine a plan is if one was chosen, "" otherwise."""
    title = engine_choices(document.goal).get(chosen_engine(document) or "")
    return f"Planned for {title}." if title else ""


def generator_words(answer: PlanAnswer) -> str:
    """Return which engine generates a policy's answers, and why, "" of a plan without any."""
    reasons = answer.plans[0].reasons if answer.plans else ()
    said = next((each for each in reasons if each.startswith(GENERATED_BY)), "")
    if not said:
        return ""
    rollout = answer.plans[0].strategy.rollout
    if rollout is None or rollout.engine == OWN_ENGINE:
        return f"{capitalised(said)}."
    return (
        f"{capitalised(said)}; a job of Slipway generates with the trained weights instead "
        f"({OWN_ENGINE})."
    )


def engine_title(engine: str | None) -> str:
    """Return an engine's name as its makers write it."""
    return get_engine(engine, "gpu").title


def with_engine(words: str, plan: Estimate, answer: PlanAnswer) -> str:
    """Return a strategy in words, after its engine if several were compared."""
    is_open = answer.request is not None and answer.request.engine == AUTO
    return f"{engine_title(plan.engine)} · {words}" if is_open else words


def family_words(family: str) -> str:
    """Return a strategy family of the search in the words of a strategy."""
    packed, weights, rest = family.partition(" weights")
    *parts, last = (f"{format_words(packed)}{weights}{rest}" if weights else family).split(", ")
    title = engine_choices("serve").get(last)
    return " · ".join([title, *parts] if title else [*parts, last])


def compared_words(answer: PlanAnswer) -> str:
    """Return with which engines that of the first plan was compared, "" if one was asked for."""
    if answer.request is None or answer.request.engine != AUTO:
        return ""
    try:
        engines = api.engines_of(answer.request)
    except PlannerError:  # an answer older than the current catalogs
        return ""
    chosen = answer.plans[0].engine if answer.plans else None
    others = [engine_title(each) for each in engines if each != chosen]
    if not others:
        return ""
    return f"Engines compared{' with it' if chosen else ''}: {listed(others)}."


def engines_named(sentence: str, document: PlanDocument) -> dict[str, str]:
    """Return the titles of the engines that the remedies of a refusal name, by key.

    Those that the refusal is by are left out.
    """
    words = set(WORD.findall(" ".join(REMEDY.findall(sentence))))
    words -= set(REFUSING.findall(sentence))
    choices = engine_choices(document.goal)
    return {key: title for key, title in choices.items() if key in words}
