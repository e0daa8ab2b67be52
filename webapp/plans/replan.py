"""A failed job's plan, thought over: with the memory that it really needed as a limit."""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

from django.contrib.auth.models import User
from django.core.cache import cache

from planner import api
from planner.errors import PlannerError
from planner.specs.plan import Bound, PlanRequest, Suggestion
from planner.specs.strategy import Strategy
from webapp.core.units import memory
from webapp.core.wording import capitalised
from webapp.jobs.memory_terms import MemoryStory
from webapp.jobs.models import Job
from webapp.plans.errors import DraftProblem
from webapp.plans.models import Plan
from webapp.plans.verdict import suggestion_effect
from webapp.plans.words import strategy_words

PEAK = "per_device_peak_bytes"
GIB = 2**30
CACHE_SECONDS = 3600
NO_LIMIT = "no limit on"  # what would lift the very limit that is asked for


class Change(NamedTuple):
    """One change that would have fitted, proven by a search; ``changes`` is for the draft."""

    title: str
    effect: str
    changes: dict[str, Any]


def smallest_changes(job: Job, story: MemoryStory) -> list[Change]:
    """Return what would have fitted: the planner's own choice first, then one change of a kind.

    Each is asked of the planner with the measured need as its limit. Searches take seconds, so
    the answer is kept for an hour.
    """
    key = f"smallest-changes:{job.pk}:{story.limit_bytes:.0f}"
    found: list[Change] | None = cache.get(key)
    if found is None:
        found = _search(job, story.limit_bytes)
        cache.set(key, found, CACHE_SECONDS)
    return found


def _search(job: Job, limit_bytes: float) -> list[Change]:
    if not job.plan_request or limit_bytes <= 0:
        return []
    asked = PlanRequest.model_validate(job.plan_request)
    limits = {**asked.constraints, PEAK: Bound(max=limit_bytes)}
    bound = asked.model_copy(update={"constraints": limits})
    ran = Strategy.model_validate(job.estimate.get("strategy") or {})
    return [*_own_choice(bound), *_near(bound.model_copy(update={"pins": ran}))]


def _own_choice(request: PlanRequest) -> list[Change]:
    """Return the best plan within the limit, where the question leaves the planner a choice."""
    try:
        answer = api.plan(request)
    except PlannerError:
        return []
    if not answer.plans:
        return []
    best = answer.plans[0]
    words = strategy_words(best.strategy)
    effect = suggestion_effect(Suggestion(title="", changes={}, estimate=best))
    return [Change(f"The planner's own choice: {words}", effect, {})]


def _near(request: PlanRequest) -> list[Change]:
    """Return the smallest change of each kind to what the job ran."""
    try:
        answer = api.plan(request)
    except PlannerError:
        return []
    return [
        Change(capitalised(one.title), suggestion_effect(one), _for_draft(request, one))
        for one in answer.suggestions
        if not one.title.startswith(NO_LIMIT)
    ]


def _for_draft(request: PlanRequest, one: Suggestion) -> dict[str, Any]:
    """Return a suggestion's changes as a draft takes them: of the pins, those that it changes."""
    if "pins" not in one.changes:
        return dict(one.changes)
    ran = request.pins.model_dump(mode="json")
    pins = {name: value for name, value in one.changes["pins"].items() if ran.get(name) != value}
    return {**one.changes, "pins": pins}


def replan(*, job: Job, owner: User, story: MemoryStory | None) -> Plan:
    """Return a new draft like the job's plan; with a story it keeps to what was measured.

    Raises:
        DraftProblem: the job was not launched from a plan.
    """
    if job.plan is None:
        raise DraftProblem(
            "This job was not launched from a plan, so there is nothing to plan again."
        )
    draft = copy.deepcopy(job.plan.draft)
    draft["is_touched"] = True
    if story is not None and story.limit_bytes > 0:
        draft["hardware"]["memory_limit_gib"] = round(story.limit_bytes / GIB, 3)
    name = f"{(job.plan.name or job.name)[:108]}, replanned"
    return Plan.objects.create(team=job.team, owner=owner, name=name, draft=draft)


def limit_words(story: MemoryStory) -> str:
    """Return why a replanned draft has a limit on its memory."""
    return (
        f"Planned with at most {memory(story.limit_bytes)} of each device: the job needed "
        f"{story.ratio:.2f} times what was predicted for it."
    )


def change_at(changes: Sequence[Change], chosen: str) -> Change | None:
    """Return the change that a button named, if it is still one of these."""
    return changes[int(chosen)] if chosen.isdigit() and int(chosen) < len(changes) else None
