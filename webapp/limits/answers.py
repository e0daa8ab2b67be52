"""An answer about a limit as the page says it: how far, what it is like there, what ends it."""

from dataclasses import dataclass

from planner.specs.inverse import Beyond, InverseAnswer, Limit
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
    """One of several limits: the largest model in one format of the weights."""

    name: str
    value: str
    memory: str
    beyond: str


@dataclass(frozen=True)
class LimitAnswer:
    """What the page shows below its form."""

    question: Question
    verdict: Verdict
    figures: tuple[Figure, ...] = ()
    rows: tuple[MemoryRow, ...] = ()
    ends: str = ""
    others: tuple[Row, ...] = ()
    searched: str = ""
    calibration: str = ""


def shown(answer: InverseAnswer, draft: Draft) -> LimitAnswer:
    """Return an answer in words and figures."""
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
        ends=_ends(best.beyond, best.unit, enough=answer.question in ENOUGH),
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
    """Return the unit of what a question looks for."""
    units = {"most_users": "users", "largest_batch": "sequences", "fewest_devices": "devices"}
    return units.get(question, "tokens")


def value_words(value: float | str, unit: str) -> str:
    """Return a tried value as people say it; a name stands for itself."""
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
    is_said = question == "fewest_devices" or count == 1
    return f"{sentences[question]} on {name if is_said else f'{count} {TIMES} {name}'}"


def _detail(limit: Limit) -> str:
    """Return the strategy at the limit in one line."""
    return f"{strategy_words(limit.estimate.strategy)}."


def _figures(limit: Limit, draft: Draft) -> tuple[Figure, ...]:
    """Return the limit and what it is like there: four figures in one row."""
    others = estimate_figures(limit.estimate, draft)
    return (*_own_figure(limit), *others)[:FIGURES]


def _own_figure(limit: Limit) -> tuple[Figure, ...]:
    """Return the limit itself as a figure, where it is a number that grows with memory."""
    if limit.unit not in {"tokens", "users", "sequences"}:
        return ()
    words = UNIT_WORDS.get(limit.unit, limit.unit)
    low, high = limit.interval or (None, None)
    note, value = limit.estimate.error_class, float(limit.value)
    return (Figure("The limit", value, words, low, high, note=note, evidence=evidence_url()),)


def _ends(beyond: Beyond | None, unit: str, *, enough: bool) -> str:
    """Return what happens one step beyond, in one sentence."""
    if beyond is None:
        return "Nothing was found to be too little." if enough else "Nothing larger is known."
    tried = value_words(beyond.value, unit)
    word = "is not enough" if enough else "is too much"
    return f"{tried} {word}: {_reason(beyond)}."


def _reason(beyond: Beyond) -> str:
    """Return what ends the way, times in the words of the target."""
    words = TARGET_WORDS.get(beyond.constraint)
    if words and beyond.required and beyond.limit:
        return f"{words} {exact(beyond.required)}, the target is {exact(beyond.limit)}"
    if beyond.constraint == "max_concurrency" and beyond.required and beyond.limit:
        return f"memory holds {whole(beyond.required)} at once, not {whole(beyond.limit)}"
    return beyond.reason


def exact(seconds: float) -> str:
    """Return a time that stands beside its limit with the digits that tell them apart."""
    value, unit = (seconds * 1000, "ms") if seconds < 1 else (seconds, "s")
    return f"{value:.4g}{NBSP}{unit}"


def _row(limit: Limit) -> Row:
    dtype = dtype_words(limit.estimate.strategy.weight_dtype)
    name = limit.name.rsplit(" in ", 1)[0]
    held = limit.estimate.memory
    return Row(
        name=name,
        value=f"{parameters(float(limit.value))} · {dtype}",
        memory=f"{memory(held.per_device_peak_bytes)} of {memory(held.capacity_bytes)}",
        beyond=f"{limit.beyond.value}: {_reason(limit.beyond)}" if limit.beyond else DASH,
    )
