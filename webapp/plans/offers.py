"""Suggested changes of a plan, and the replan of a job that ran out of memory."""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

from django.contrib.auth.models import User
from django.core.cache import cache

from planner import api
from planner.catalog.devices import get_device
from planner.errors import PlannerError
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import Bound, PlanAnswer, PlanRequest, Purpose, Suggestion
from planner.specs.workload import Strategy
from webapp.core.display import quantity
from webapp.core.units import memory, money, whole
from webapp.core.wording import capitalised
from webapp.jobs.memory_terms import MemoryComparison
from webapp.jobs.models import Job
from webapp.plans.errors import DraftProblem
from webapp.plans.models import Plan
from webapp.plans.saving import draft_begun_from
from webapp.plans.words import FIELD_WORDS, METHOD_WORDS, strategy_words

Draft = dict[str, Any]
HEADINGS: dict[Purpose, str] = {
    "fit": "The smallest changes that make it fit",
    "target": "The smallest changes that meet the target",
}

SIZES = ("concurrency", "input_tokens", "batch_size", "sequence_length")  # fields of a workload


class Chip(NamedTuple):
    """One suggestion: its index in the answer, title and effect."""

    at: int
    title: str
    effect: str


class Offers(NamedTuple):
    """Suggestions for one purpose, the least costly for the user first."""

    heading: str
    chips: tuple[Chip, ...]


def offers_of(answer: PlanAnswer, draft: Draft) -> list[Offers]:
    """Return the suggestions that apply to the draft, by purpose."""
    offers = []
    for purpose, heading in HEADINGS.items():
        chips = tuple(
            Chip(index, _title(suggestion, draft), suggestion_effect(suggestion))
            for index, suggestion in enumerate(answer.suggestions)
            if suggestion.purpose == purpose and _has_place(suggestion, draft)
        )
        offers += [Offers(heading, chips)] if chips else []
    return offers


def _has_place(suggestion: Suggestion, draft: Draft) -> bool:
    """Return whether the draft has the suggested method, and the plan would meet its targets."""
    if suggestion.purpose == "target" and "constraints" in suggestion.changes:
        return False  # to lift a target is no way to meet it
    method = suggestion.changes.get("workload", {}).get("method")
    has_methods = "method" in draft["workload"][draft["goal"]["goal"]]
    return has_methods or method in {None, "pretrain"}


def _title(suggestion: Suggestion, draft: Draft) -> str:
    """Return the title of a suggestion, with old and new value of a size or method."""
    now = draft["workload"][draft["goal"]["goal"]]
    then = suggestion.changes.get("workload") or {}
    for name in SIZES:
        if name in then and name in now and then[name] != now[name]:
            return f"{FIELD_WORDS[name]} {whole(then[name])} instead of {whole(now[name])}"
    method = then.get("method")
    if method in METHOD_WORDS and now.get("method") in METHOD_WORDS and method != now["method"]:
        return f"{capitalised(METHOD_WORDS[method])} instead of {METHOD_WORDS[now['method']]}"
    return capitalised(suggestion.title)


def suggestion_effect(suggestion: Suggestion) -> str:
    """Return the effect of a suggestion in short: spare memory, speed, price."""
    spare = suggestion.estimate.memory.capacity_bytes
    spare -= suggestion.estimate.memory.per_device_peak_bytes
    rate = suggestion.estimate.performance.tokens_per_second
    met = "meets it, " if suggestion.purpose == "target" else "fits, "
    words = [f"{met}{memory(max(0, spare))} to spare"]
    words += [str(quantity(rate, "tokens_per_second"))] if rate else []
    if suggestion.estimate.strategy.offload_places:  # else the host holds a checkpoint's copy
        words += [f"{memory(suggestion.estimate.memory.host_bytes or 0)} of host memory"]
    return ", ".join(words + _hourly(suggestion.changes.get("cluster")))


def _hourly(cluster: dict[str, Any] | None) -> list[str]:
    """Return the hourly price of other hardware, for all its devices."""
    if not cluster:
        return []
    try:
        spec = ClusterSpec.model_validate(cluster)
        device = get_device(spec.device) if isinstance(spec.device, str) else spec.device
    except PlannerError:
        return []
    if device.price_usd_per_hour is None:
        return []
    return [f"{money(device.price_usd_per_hour * spec.num_devices)} an hour in all"]


# Replan a failed job with its measured memory need as a limit.


PEAK = "per_device_peak_bytes"
GIB = 2**30
CACHE_SECONDS = 3600
NO_LIMIT = "no limit on"  # suggestions that would lift the limit itself


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
        and not suggestion.title.startswith(NO_LIMIT)
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


def replan(*, job: Job, owner: User, story: MemoryComparison | None) -> Plan:
    """Return a draft of the version that a job ran, limited to the measured need.

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
    cleared: dict[str, Any] = {"request": {}, "answer": {}, "computed_at": None}
    return draft_begun_from(job.plan, owner, draft=draft, revision=1, **cleared)


def limit_words(story: MemoryComparison) -> str:
    """Return why a replanned draft has a memory limit."""
    return (
        f"Planned with at most {memory(story.limit_bytes)} of each device: the job needed "
        f"{story.ratio:.2f} times what was predicted for it."
    )


def change_at(changes: Sequence[Change], chosen: str) -> Change | None:
    """Return the change that a button selected, if it still exists."""
    return changes[int(chosen)] if chosen.isdigit() and int(chosen) < len(changes) else None
