"""An answer as the page says it: one sentence, the figures, the memory, what would help."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from django.urls import reverse

from planner.specs.estimate import Estimate
from planner.specs.plan import PlanAnswer, PlannedStrategy, Rejection, Suggestion
from webapp.core import units
from webapp.core.display import Figure, MemoryRow, memory_row, quantity
from webapp.core.units import memory, number
from webapp.core.wording import capitalised
from webapp.plans.words import BOUND_WORDS, METHOD_WORDS, dtype_words, strategy_words

Draft = dict[str, Any]
TIGHT_SHARE = 0.05  # of the capacity: less to spare than this is said to be tight
MAX_BARS = 8  # devices that are drawn one by one
MAX_ROWS = 16  # stages of a pipeline; longer ones are said in words


@dataclass(frozen=True)
class Verdict:
    """What the right rail and the plan's first card show."""

    tone: str  # good, warn or bad
    state: str  # fits, tight, slow, does-not-fit or incomplete
    sentence: str
    detail: str = ""
    rows: tuple[MemoryRow, ...] = ()
    figures: tuple[Figure, ...] = ()
    memory_note: str = ""
    bound_by: str = ""
    searched: str = ""
    suggestions: tuple[Suggestion, ...] = ()
    warnings: tuple[str, ...] = ()
    brief: tuple[str, ...] = field(default=())

    @property
    def bound_words(self) -> str:
        """Return what sets the pace, in one sentence."""
        return f"The resource that sets the pace of this plan is {self.bound_by}."

    @property
    def fullest(self) -> MemoryRow | None:
        """Return the bar of the device that holds the most."""
        return max(self.rows, key=lambda row: row.total_bytes, default=None)

    @property
    def icon(self) -> str:
        """Return the shape that goes with the tone."""
        return {"good": "check", "warn": "triangle", "bad": "cross"}.get(self.tone, "draft")


def verdict_of(answer: PlanAnswer, draft: Draft, plan_url: str = "") -> Verdict:
    """Return the verdict on the best plan, or on why there is none."""
    took = units.duration(answer.searched.seconds)
    count = answer.searched.strategies
    noun = "strategy" if count == 1 else "strategies"
    searched = f"{units.whole(count)} {noun} compared in {took}"
    if not answer.plans:
        return _infeasible(answer, searched)
    best = answer.plans[0]
    figures = tuple(estimate_figures(best, draft, plan_url))
    sentence, state = _sentence(best, draft)
    return Verdict(
        tone="good" if state == "fits" else "warn",
        state=state,
        sentence=sentence,
        detail=f"{_detail(best, draft)}.",
        rows=memory_rows(best),
        memory_note=memory_words(best),
        figures=figures,
        bound_by=BOUND_WORDS.get(best.bound_by, best.bound_by),
        searched=searched,
        suggestions=answer.suggestions,
        warnings=best.warnings,
        brief=tuple(str(figure.shown) for figure in figures[:3]),
    )


def _detail(best: PlannedStrategy, draft: Draft) -> str:
    """Return the chosen strategy in one line; a compression is its method."""
    if draft["goal"]["goal"] != "compress":
        return strategy_words(best.strategy)
    method = METHOD_WORDS[draft["workload"]["compress"]["method"]]
    return f"{method}, from {dtype_words(best.strategy.weight_dtype)}"


def problem_verdict(sentence: str) -> Verdict:
    """Return the verdict on a draft that cannot be planned yet."""
    return Verdict("none", "incomplete", "Not planned yet", sentence)


def _infeasible(answer: PlanAnswer, searched: str) -> Verdict:
    """Return the verdict of a search that found nothing: the closest miss and the ways out."""
    missed = closest_miss(answer.rejected)
    detail = f"{capitalised(missed.reason)}." if missed else "Every strategy was ruled out."
    sentence = "Nothing fits on this hardware"
    if missed and missed.required and missed.limit and missed.unit in {"bytes", "B"}:
        over = memory(missed.required - missed.limit)
        sentence = f"Does not fit: {over} over at best"
    return Verdict(
        "bad", "does-not-fit", sentence, detail, searched=searched, suggestions=answer.suggestions
    )


def closest_miss(rejected: Mapping[str, Rejection]) -> Rejection | None:
    """Return the rejected family that came nearest to its limit."""
    numbered = [one for one in rejected.values() if one.required and one.limit]
    numbered = [one for one in numbered if one.constraint == "memory"] or numbered
    if numbered:
        return min(numbered, key=lambda one: (one.required or 0) / (one.limit or 1))
    return next(iter(rejected.values()), None)


def _sentence(best: PlannedStrategy, draft: Draft) -> tuple[str, str]:
    """Return the answer in one sentence, and its state."""
    spare = best.memory.capacity_bytes - best.memory.per_device_peak_bytes
    devices = best.cluster.num_devices
    where = "" if devices == 1 else f" on each of {devices} devices"
    missed = _missed_target(best, draft)
    if missed:
        return f"Fits, but {missed}", "slow"
    if spare < TIGHT_SHARE * best.memory.capacity_bytes:
        return f"Fits, with only {memory(max(0, spare))} to spare{where}", "tight"
    return f"Fits, {memory(spare)} to spare{where}", "fits"


def _missed_target(best: Estimate, draft: Draft) -> str:
    """Return which target of the goal is missed, with both numbers."""
    targets = {"chat": (1.0, 0.05), "code": (0.5, 0.03)}
    limits = targets.get(draft["goal"]["slo"])
    if draft["goal"]["goal"] != "serve" or limits is None:
        return ""
    ttft, tpot = best.performance.ttft_seconds, best.performance.tpot_seconds
    if ttft and ttft > limits[0]:
        return f"the first token takes {units.duration(ttft)}; the target is {limits[0]:g} s"
    if tpot and tpot > limits[1]:
        return f"it writes {number(1 / tpot)} tokens a second; the target is {1 / limits[1]:.0f}"
    return ""


def memory_rows(estimate: Estimate) -> tuple[MemoryRow, ...]:
    """Return one bar per device, or per pipeline stage where there are many devices."""
    answer = estimate.memory
    peaks = answer.per_stage_peak_bytes or (answer.per_device_peak_bytes,)
    devices = estimate.cluster.num_devices if isinstance(estimate, PlannedStrategy) else 1
    if len(peaks) == 1 and devices <= MAX_BARS:
        labels = [f"GPU {at}" for at in range(devices)] if devices > 1 else ["Memory"]
        peaks *= devices
    else:
        labels = [f"Stage {at}" for at in range(len(peaks))] if len(peaks) > 1 else ["Each"]
    rows = []
    for label, peak in list(zip(labels, peaks, strict=True))[:MAX_ROWS]:
        share = peak / max(1, answer.per_device_peak_bytes)
        parts = {name: size * share for name, size in answer.breakdown_bytes.items()}
        rows.append(memory_row(label, parts, answer.capacity_bytes))
    return tuple(rows)


def memory_words(estimate: Estimate) -> str:
    """Return what bars alone do not say: how many devices each is, how many stages are left."""
    peaks = estimate.memory.per_stage_peak_bytes
    devices = estimate.cluster.num_devices if isinstance(estimate, PlannedStrategy) else 1
    if len(peaks) <= 1:
        return f"The same on each of {devices} devices." if devices > MAX_BARS else ""
    each = f"{devices // len(peaks)} devices a stage. " if devices > len(peaks) else ""
    fullest = f"Stage {peaks.index(max(peaks))} is the fullest."
    left = peaks[MAX_ROWS:]
    more = f" {len(left)} further stages take at most {memory(max(left))}." if left else ""
    return f"{each}{fullest}{more}"


def estimate_figures(estimate: Estimate, draft: Draft, plan_url: str = "") -> list[Figure]:
    """Return the figures that matter for the goal, best first, only those that apply."""
    found = [
        _figure(estimate, name, label, unit, plan_url)
        for name, label, unit in GOAL_FIGURES[draft["goal"]["goal"]]
    ]
    budget = draft["workload"][draft["goal"]["goal"]].get("time_budget_minutes")
    rate = estimate.performance.tokens_per_second
    if budget and rate:
        low, high = estimate.interval.get("tokens_per_second", (rate, rate))
        seconds = budget * 60
        ends = (rate * seconds, low * seconds, high * seconds)
        label = f"In {units.clock(seconds)}"
        note = estimate.error_class
        low, high = ends[1:]
        found.append(
            Figure(
                label,
                ends[0],
                "tokens",
                low,
                high,
                note=note,
                href=plan_url,
                evidence=evidence_url(),
            )
        )
    return [figure for figure in found if figure is not None]


GOAL_FIGURES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "serve": (
        ("tokens_per_second_per_person", "Per person", "tokens_per_second"),
        ("ttft_seconds", "First token", "seconds"),
        ("output_tokens_per_second", "All together", "tokens_per_second"),
        ("cost_usd_per_million_tokens", "Cost", "$/M tok"),
    ),
    "generate": (
        ("output_tokens_per_second", "Written", "tokens_per_second"),
        ("ttft_seconds", "Prompts read in", "seconds"),
        ("latency_seconds", "One batch takes", "seconds"),
        ("cost_usd_per_million_tokens", "Cost", "$/M tok"),
    ),
    "finetune": (
        ("tokens_per_second", "Speed", "tokens_per_second"),
        ("step_seconds", "One step", "seconds"),
        ("duration_seconds", "The whole run", "seconds"),
        ("cost_usd_per_million_tokens", "Cost", "$/M tok"),
    ),
    "compress": (
        ("duration_seconds", "Takes", "seconds"),
        ("written_weights_bytes", "Weights afterwards", "bytes"),
        ("peak_memory_bytes", "Peak memory", "bytes"),
        ("perplexity_ratio", "Perplexity, times", ""),
    ),
}
GOAL_FIGURES["pretrain"] = GOAL_FIGURES["finetune"]


def _figure(estimate: Estimate, name: str, label: str, unit: str, url: str) -> Figure | None:
    """Return one figure of an estimate with its interval, or nothing where it does not apply."""
    found = figure_values(estimate, name)
    if found is None:
        return None
    value, low, high = found
    if name == "perplexity_ratio":
        return Figure(label, value, unit, low, high, "published", "published", url)
    return Figure(
        label, value, unit, low, high, note=estimate.error_class, href=url, evidence=evidence_url()
    )


def evidence_url() -> str:
    """Return the page that says how far such figures were off, with every row behind it."""
    return reverse("docs", args=["accuracy"])


Value = tuple[float, float | None, float | None]  # value, low, high


def figure_values(estimate: Estimate, name: str) -> Value | None:
    """Return value, low and high of a figure by name, or nothing where it does not apply."""
    if special := SPECIAL_FIGURES.get(name):
        return special(estimate)
    value = getattr(estimate.performance, name, None) or getattr(estimate, name, None)
    if value is None:
        return None
    low, high = estimate.interval.get(name, (None, None))
    return float(value), low, high


def _per_person(estimate: Estimate) -> Value | None:
    if not estimate.performance.tpot_seconds:
        return None
    low, high = estimate.interval.get("tpot_seconds", (None, None))
    return 1 / estimate.performance.tpot_seconds, _inverse(high), _inverse(low)


def _peak_memory(estimate: Estimate) -> Value:
    low, high = estimate.interval.get("per_device_peak_bytes", (None, None))
    return float(estimate.memory.per_device_peak_bytes), low, high


def _written_weights(estimate: Estimate) -> Value | None:
    """Return the size of the compressed weights: what is on disk without the source."""
    if estimate.memory.disk_bytes is None:
        return None
    source = estimate.memory.breakdown_bytes.get("weights", 0)
    return float(estimate.memory.disk_bytes - source), None, None


def _perplexity(estimate: Estimate) -> Value | None:
    ratio = estimate.quality.perplexity_ratio if estimate.quality else None
    return (ratio[1], ratio[0], ratio[2]) if ratio else None


SPECIAL_FIGURES: dict[str, Callable[[Estimate], Value | None]] = {
    "tokens_per_second_per_person": _per_person,
    "peak_memory_bytes": _peak_memory,
    "written_weights_bytes": _written_weights,
    "perplexity_ratio": _perplexity,
}


def _inverse(value: float | None) -> float | None:
    return 1 / value if value else None


def suggestion_effect(suggestion: Suggestion) -> str:
    """Return what a suggestion brings, in a few words."""
    spare = suggestion.estimate.memory.capacity_bytes
    spare -= suggestion.estimate.memory.per_device_peak_bytes
    rate = suggestion.estimate.performance.tokens_per_second
    speed = f", {quantity(rate, 'tokens_per_second')}" if rate else ""
    return f"fits, {memory(max(0, spare))} to spare{speed}"


def suggestion_chips(answer: PlanAnswer, draft: Draft) -> list[tuple[int, str, str]]:
    """Return number, title and effect of each suggestion that the draft has a place for."""
    return [
        (at, capitalised(one.title), suggestion_effect(one))
        for at, one in enumerate(answer.suggestions)
        if _has_place(one, draft)
    ]


def _has_place(suggestion: Suggestion, draft: Draft) -> bool:
    """Return whether the goal has the method that is suggested: pre-training has one only."""
    method = suggestion.changes.get("workload", {}).get("method")
    has_methods = "method" in draft["workload"][draft["goal"]["goal"]]
    return has_methods or method in {None, "pretrain"}
