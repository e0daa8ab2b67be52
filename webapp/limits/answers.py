"""Texts and figures of an answer about a limit: the limit, its figures, the first failure."""

from dataclasses import dataclass

from planner.specs.plan import FirstFailure, InverseAnswer, Limit
from webapp.core.display import Figure, MemoryRow
from webapp.core.units import DASH, NBSP, TIMES, duration, memory, money, parameters, whole
from webapp.core.wording import capitalised
from webapp.limits.questions import BY_KEY, Question
from webapp.plans.alternatives import TARGET_WORDS
from webapp.plans.verdict import Verdict, estimate_figures, evidence_url, memory_rows
from webapp.plans.words import Draft, device_words, dtype_words, strategy_words

FIGURES = 4
ENOUGH = {"fewest_devices", "cheapest_instance"}
UNIT_WORDS = {"users": "people", "USD per hour": "$ an hour"}


@dataclass(frozen=True)
class Row:
    """One of several limits: the largest model for one weight dtype."""

    name: str
    value: str
    memory: str
    beyond: str


@dataclass(frozen=True)
class LimitAnswer:
    """The answer below the form of the page."""

    question: Question
    verdict: Verdict
    figures: tuple[Figure, ...] = ()
    rows: tuple[MemoryRow, ...] = ()
    ends: str = ""
    others: tuple[Row, ...] = ()
    searched: str = ""
    calibration: str = ""


def shown(answer: InverseAnswer, draft: Draft) -> LimitAnswer:
    """Return an answer as texts and figures."""
    question = BY_KEY[answer.question]
    noun = "search" if answer.searches == 1 else "searches"
    searched = f"{whole(answer.searches)} {noun} in {duration(answer.seconds)}"
    if not answer.limits:
        verdict = _nothing(answer)
        return LimitAnswer(question, verdict, searched=searched, calibration=answer.calibration)
    best, *_ = answer.limits
    several = answer.limits if len(answer.limits) > 1 else ()
    return LimitAnswer(
        question=question,
        verdict=Verdict("good", "fits", _sentence(answer.question, best), _detail(best)),
        figures=_figures(best, draft),
        rows=memory_rows(best.estimate),
        ends=_failure_sentence(best.beyond, best.unit, enough=answer.question in ENOUGH),
        others=tuple(_row(limit) for limit in several),
        searched=searched,
        calibration=answer.calibration,
    )


def _nothing(answer: InverseAnswer) -> Verdict:
    smallest = answer.smallest
    if smallest is None:
        return Verdict("bad", "does-not-fit", "Nothing works here", "No strategy applies.")
    tried = value_words(smallest.value, _unit_of(answer.question))
    return Verdict(
        "bad",
        "does-not-fit",
        f"Nothing works, not even {tried}",
        f"{capitalised(_reason(smallest))}.",
    )


def _unit_of(question: str) -> str:
    """Return the unit of a question's answer."""
    units = {"most_users": "users", "largest_batch": "sequences", "fewest_devices": "devices"}
    return units.get(question, "tokens")


def value_words(value: float | str, unit: str) -> str:
    """Return a tried value as text with its unit; a name is returned unchanged."""
    if isinstance(value, str):
        return value
    if unit == "parameters":
        return f"{parameters(value)} parameters"
    if unit == "USD per hour":
        return f"{money(value)} an hour"
    words = UNIT_WORDS.get(unit, unit)
    if value == 1:
        words = {"people": "person"}.get(words, words.removesuffix("s"))
    return f"{whole(value)}{NBSP}{words}"


def _sentence(question: str, limit: Limit) -> str:
    """Return the answer in one sentence."""
    value = value_words(limit.value, limit.unit)
    device = limit.cluster.device
    sentences = {
        "longest_context": f"Up to {value} of context",
        "most_users": f"Up to {value} at once",
        "largest_batch": f"Up to {value} in one batch",
        "longest_sequence": f"Up to {value} in one sequence",
        "largest_model": f"{limit.name} is the largest that fits",
        "fewest_devices": f"{value} {'is' if limit.value == 1 else 'are'} enough",
        "cheapest_instance": f"{limit.name} is enough, for {value}",
    }
    if question == "cheapest_instance":
        return sentences[question]
    name = device_words(device) if isinstance(device, str) else device.name or device.id
    count = limit.cluster.num_devices
    omits_count = question == "fewest_devices" or count == 1
    return f"{sentences[question]} on {name if omits_count else f'{count} {TIMES} {name}'}"


def _detail(limit: Limit) -> str:
    """Return the strategy at the limit as one line."""
    return f"{strategy_words(limit.estimate.strategy)}."


def _figures(limit: Limit, draft: Draft) -> tuple[Figure, ...]:
    """Return the limit and the figures at the limit: four in total."""
    others = estimate_figures(limit.estimate, draft)
    return (*_own_figure(limit), *others)[:FIGURES]


def _own_figure(limit: Limit) -> tuple[Figure, ...]:
    """Return the limit itself as a figure, if it is a number of tokens, users or sequences."""
    if limit.unit not in {"tokens", "users", "sequences"}:
        return ()
    words = UNIT_WORDS.get(limit.unit, limit.unit)
    low, high = limit.interval or (None, None)
    note, value = limit.estimate.error_class, float(limit.value)
    return (Figure("The limit", value, words, low, high, note=note, evidence=evidence_url()),)


def _failure_sentence(failure: FirstFailure | None, unit: str, *, enough: bool) -> str:
    """Return a sentence on the first failure beyond the limit."""
    if failure is None:
        return "Nothing was found to be too little." if enough else "Nothing larger is known."
    tried = value_words(failure.value, unit)
    word = "is not enough" if enough else "is too much"
    return f"{tried} {word}: {_reason(failure)}."


def _reason(failure: FirstFailure) -> str:
    """Return the reason of the first failure; for targets, with both times."""
    words = TARGET_WORDS.get(failure.constraint)
    if words and failure.required and failure.limit:
        return f"{words} {exact(failure.required)}, the target is {exact(failure.limit)}"
    if failure.constraint == "max_concurrency" and failure.required and failure.limit:
        return f"memory holds {whole(failure.required)} at once, not {whole(failure.limit)}"
    return failure.reason


def exact(seconds: float) -> str:
    """Return a time with four digits, to be distinguishable from its limit."""
    value, unit = (seconds * 1000, "ms") if seconds < 1 else (seconds, "s")
    return f"{value:.4g}{NBSP}{unit}"


def _row(limit: Limit) -> Row:
    dtype = dtype_words(limit.estimate.strategy.weight_dtype)
    name = limit.name.rsplit(" in ", 1)[0]
    usage = limit.estimate.memory
    return Row(
        name=name,
        value=f"{parameters(float(limit.value))} · {dtype}",
        memory=f"{memory(usage.per_device_peak_bytes)} of {memory(usage.capacity_bytes)}",
        beyond=f"{limit.beyond.value}: {_reason(limit.beyond)}" if limit.beyond else DASH,
    )
