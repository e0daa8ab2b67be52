"""The engine of a plan, and those that a refusal names, in words."""

import re

from runners.plans.document import PlanDocument
from runners.plans.engine_choice import chosen_engine, engine_choices

WORD = re.compile(r"\w+")


def engine_words(document: PlanDocument) -> str:
    """Return for which engine a plan is if one was chosen, "" otherwise."""
    title = engine_choices(document.goal).get(chosen_engine(document) or "")
    return f"Planned for {title}." if title else ""


def engines_named(sentence: str, document: PlanDocument) -> dict[str, str]:
    """Return the titles of the engines that the remedy at the end of a refusal names, by key."""
    words = WORD.findall(sentence.rpartition(";")[2])
    choices = engine_choices(document.goal)
    return {key: title for key, title in choices.items() if key in words}
