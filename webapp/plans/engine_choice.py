"""The engine that a plan is for: the chosen one, else the usual one of its goal and hardware."""

import re
from typing import Any

from planner.catalog.engines import DEFAULT_ENGINE, engines_by_work
from runners.jobspec.serve import EngineName
from webapp.plans.errors import DraftProblem
from webapp.plans.sharing import TRAININGS

Draft = dict[str, Any]
# The engine of an endpoint -> the planner's.
PLANNED_AS: dict[EngineName, str] = {
    "slipway": DEFAULT_ENGINE,
    "llamacpp": "llama_cpp",
    "vllm": "vllm",
    "sglang": "sglang",
}
OWN_TITLE = "Slipway's own, on PyTorch"
WORD = re.compile(r"\w+")


def engine_choices(goal: str) -> dict[str, str]:
    """Return the titles of the engines that can be chosen for a goal, by key."""
    if goal == "compress":
        return {}
    return engines_by_work(training=goal in TRAININGS) | {DEFAULT_ENGINE: OWN_TITLE}


def chosen_engine(draft: Draft) -> str | None:
    """Return the engine that a draft names, None to leave it to the goal and the hardware.

    An engine that was chosen for another goal does not count.
    """
    chosen = draft["hardware"].get("engine")
    return chosen if chosen in engine_choices(draft["goal"]["goal"]) else None


def engine_words(draft: Draft) -> str:
    """Return for which engine a plan is if one was chosen, "" otherwise."""
    title = engine_choices(draft["goal"]["goal"]).get(chosen_engine(draft) or "")
    return f"Planned for {title}." if title else ""


def engines_named(sentence: str, draft: Draft) -> dict[str, str]:
    """Return the titles of the engines that the remedy at the end of a refusal names, by key."""
    words = WORD.findall(sentence.rpartition(";")[2])
    choices = engine_choices(draft["goal"]["goal"])
    return {key: title for key, title in choices.items() if key in words}


def check_engine(draft: Draft, endpoint: EngineName | None) -> None:
    """Refuse to start a plan on another engine than the one that was chosen for it.

    Raises:
        DraftProblem: with a remedy.
    """
    chosen = chosen_engine(draft)
    if chosen in {None, PLANNED_AS[endpoint or "slipway"]}:
        return
    title = engine_choices(draft["goal"]["goal"])[chosen or ""]
    runs = " or start it as an endpoint of that engine," if chosen in PLANNED_AS.values() else ""
    raise DraftProblem(
        f"This plan is for {title}, which jobs do not start: take its export,{runs} or choose the "
        "engine “Automatic” under hardware.",
        "engine",
    )
