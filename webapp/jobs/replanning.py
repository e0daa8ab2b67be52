"""Plan a failed job again with its measured memory need as a limit."""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

from django.contrib.auth.models import User
from django.core.cache import cache

from planner import api
from planner.specs.base import PlannerError
from planner.specs.estimate import Bound, PlanRequest, Suggestion
from planner.specs.units import GIB
from planner.specs.workload import Strategy
from runners.plans.refusals import DraftProblem
from webapp.core.display import capitalised, memory
from webapp.jobs.memory_comparison import MemoryComparison
from webapp.jobs.models import Job
from webapp.plans.alternatives import suggestion_effect
from webapp.plans.explanation import strategy_words
from webapp.plans.models import Plan
from webapp.plans.saving import draft_begun_from

PEAK = "per_device_peak_bytes"
CACHE_SECONDS = 3600


class Change(NamedTuple):
    """A change that would fit, found by a search; ``changes`` apply to the draft."""

    title: str
    effect: str
    changes: dict[str, Any]


def smallest_changes(job: Job, story: MemoryComparison) -> list[Change]:
    """Return changes that would fit: the planner's choice, then one change per kind.

    Each is planned with the measured need as its limit. Searches take seconds, so the result is
    cached for an hour.
    """
    key = f"smallest-changes:{job.pk}:{story.limit_bytes:.0f}"
    cached: list[Change] | None = cache.get(key)
    if cached is None:
        cached = _search(job, story.limit_bytes)
        cache.set(key, cached, CACHE_SECONDS)
    return cached


def _search(job: Job, limit_bytes: float) -> list[Change]:
    if not job.plan_request or limit_bytes <= 0:
        return []
    request = PlanRequest.model_validate(job.plan_request)
    limits = {**request.constraints, PEAK: Bound(max=limit_bytes)}
    bound = request.model_copy(update={"constraints": limits})
    ran = Strategy.model_validate(job.estimate.get("strategy") or {})
    return [*_own_choice(bound), *_near(bound.model_copy(update={"pins": ran}))]


def _own_choice(request: PlanRequest) -> list[Change]:
    """Return the best plan within the limit, if the request leaves a choice."""
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
    """Return the smallest change of each kind to the job's strategy."""
    try:
        answer = api.plan(request)
    except PlannerError:
        return []
    return [
        Change(
            capitalised(suggestion.title),
            suggestion_effect(suggestion),
            _for_draft(request, suggestion),
        )
        for suggestion in answer.suggestions
        if suggestion.purpose == "fit"
        and "constraints" not in suggestion.changes  # the need is measured
        and "engine" not in suggestion.changes  # the job runs again on the same host
    ]


def _for_draft(request: PlanRequest, suggestion: Suggestion) -> dict[str, Any]:
    """Return a suggestion's changes for a draft; of the pins, only changed ones."""
    if "pins" not in suggestion.changes:
        return dict(suggestion.changes)
    ran = request.pins.model_dump(mode="json")
    pins = {
        name: value for name, value in suggestion.changes["pins"].items() if ran.get(name) != value
    }
    return {**suggestion.changes, "pins": pins}


NO_SHORTAGE = (
    "This job did not run out of memory, so its need sets no limit. "
    "Clone it with changes, or run it again."
)


def replan(*, job: Job, owner: User, story: MemoryComparison | None) -> Plan:
    """Return a draft of the version that a job ran, limited to the measured need.

    Raises:
        DraftProblem: the job was not launched from a plan.
    """
    if job.plan is None:
        raise DraftProblem(
            "This job was not launched from a plan, so there is nothing to plan again."
        )
    draft = {**copy.deepcopy(job.plan.draft), "wizard": {"is_touched": True}}
    if story is not None and story.limit_bytes > 0:
        draft["hardware"]["memory_limit_gib"] = round(story.limit_bytes / GIB, 3)
    cleared: dict[str, Any] = {"request": {}, "answer": {}, "computed_at": None}
    return draft_begun_from(job.plan, owner, draft=draft, revision=1, **cleared)


def limit_words(story: MemoryComparison) -> str:
    """Return why a replanned draft has a memory limit."""
    if story.ratio <= 1:
        return (
            f"Planned with at most {memory(story.limit_bytes)} of each device: the job needed no "
            "more than was predicted, and there was no more room."
        )
    return (
        f"Planned with at most {memory(story.limit_bytes)} of each device: the job needed "
        f"{story.ratio:.2f} times what was predicted for it."
    )


def change_at(changes: Sequence[Change], chosen: str) -> Change | None:
    """Return the change that a button selected, if it still exists."""
    return changes[int(chosen)] if chosen.isdigit() and int(chosen) < len(changes) else None
