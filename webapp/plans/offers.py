"""Suggested changes of a plan, grouped by purpose."""

from typing import Any, NamedTuple

from planner.catalog.devices import get_device
from planner.errors import PlannerError
from planner.specs.cluster import ClusterSpec
from planner.specs.plan import PlanAnswer, Purpose, Suggestion
from webapp.core.display import quantity
from webapp.core.units import memory, money, whole
from webapp.core.wording import capitalised
from webapp.plans.words import FIELD_WORDS, METHOD_WORDS

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
