"""A plan's verdict: one sentence, figures, memory bars, checkpoint, prices, warnings."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from django.urls import reverse
from pydantic import ValidationError

from planner.catalog.devices import get_device
from planner.catalog.engines import get_engine
from planner.exports.export import CHECKPOINT_LABELS, ExportCase
from planner.exports.llama_cpp import LLAMA_CPP, gguf_type
from planner.exports.registry import SERVERS, export_case
from planner.specs.base import PlannerError
from planner.specs.estimate import ErrorClass, Estimate, PlanAnswer, PlannedStrategy, Rejection
from planner.specs.units import DAY
from runners.client.replies.plans import VerdictState
from runners.plans.document import PlanDocument
from runners.plans.workloads import CompressWork, PretrainWork
from webapp.core import display
from webapp.core.display import (
    Figure,
    MemoryRow,
    capitalised,
    gib,
    memory,
    memory_row,
    money,
    money_an_hour,
    money_for_tokens,
)
from webapp.plans.compression_gains import planned_gains
from webapp.plans.engine_words import compared_words, engine_words, generator_words
from webapp.plans.explanation import (
    BOUND_WORDS,
    compression_words,
    dtype_words,
    strategy_words,
    weights_words,
)
from webapp.plans.targets import Target, chance_below, odds_words, targets_of

ERROR_WORDS: Mapping[ErrorClass, str] = {  # where the interval of a figure comes from
    "calibrated on this host": "calibrated on this host",
    "same family": "from similar hardware",
    "datasheet only": "from data sheets",
}

# What an engine starts for a plan: the checkpoint as it is stored, or another one.


# Formats that an engine makes of a 16-bit checkpoint while loading it.
AT_LOAD = {each.key: each.at_load for each in SERVERS if each.at_load is not None}
GGUF_ENGINE = LLAMA_CPP.key
LEAD = " than the first plan"


class Start(NamedTuple):
    """An engine's title, and what a plan needs besides the checkpoint as it is stored, or ""."""

    engine: str
    need: str


def start_of(answer: PlanAnswer, plan: PlannedStrategy) -> Start | None:
    """Return what a plan starts, None for engines that convert any checkpoint by themselves."""
    if answer.request is None or plan.engine not in {*AT_LOAD, GGUF_ENGINE}:
        return None
    try:
        case = export_case(answer.request, plan)
        title = get_engine(plan.engine, case.device.kind).title
    except PlannerError:  # an answer older than the current catalogs
        return None
    return Start(title, _need(case, plan.engine or ""))


def _need(case: ExportCase, engine: str) -> str:
    if engine == GGUF_ENGINE:
        return f"needs a GGUF file of type {gguf_type(case)}"
    if case.is_stored:
        return ""
    weights = dtype_words(case.strategy.weight_dtype)
    if case.checkpoint(AT_LOAD[engine]) == case.model:
        return f"quantised to {weights} while loading"
    label = CHECKPOINT_LABELS.get(case.strategy.weight_dtype or "", weights)
    return f"needs a checkpoint in {weights}" + (f" ({label})" if label != weights else "")


def start_words(answer: PlanAnswer) -> str:
    """Return what the first plan starts, and a faster one that needs something else, or ""."""
    start = start_of(answer, answer.plans[0])
    if start is None:
        return ""
    if start.need:
        return f"Planned for {start.engine}: {start.need}."
    words = f"Planned for {start.engine}, which starts the checkpoint as it is stored."
    return words + _faster(answer, start.engine)


def _faster(answer: PlanAnswer, engine: str) -> str:
    """Return the next plan that is faster than the first one and needs something else, or "".

    ``engine`` is the title of the first plan's: another one is named.
    """
    for plan in answer.plans[1:]:
        faster = next((each for each in plan.reasons if each.endswith(f"faster{LEAD}")), "")
        start = start_of(answer, plan) if faster else None
        if start is not None and start.need:
            weights = f"{weights_words(plan.strategy)} weights"
            weights += "" if start.engine == engine else f" in {start.engine}"
            return f" {weights} would be {faster.removesuffix(LEAD)}: {start.need}."
    return ""


# Prices of a plan's hardware: per hour, per run and per million tokens, for all devices.


class Price(NamedTuple):
    """The price of a plan as text: total, price per device, further prices, sources."""

    total: str
    each: str
    more: tuple[str, ...]
    sources: str

    def __str__(self) -> str:
        return " · ".join((self.total, *self.more))


def price_of(best: PlannedStrategy | None) -> Price | None:
    """Return the price of all devices of a plan; None if unknown."""
    if best is None:
        return None
    device, count = best.cluster.device, best.cluster.num_devices
    try:
        device_spec = get_device(device) if isinstance(device, str) else device
    except PlannerError:
        return None
    if device_spec.price_usd_per_hour is None or best.cluster.other_nodes:
        return None
    hourly = device_spec.price_usd_per_hour
    noun = "device" if device_spec.kind == "cpu" else "GPU"
    devices = f"all {count} {noun}s" if count > 1 else f"the {noun}"
    further = []
    if best.run_cost_usd is not None:
        further.append(f"{money(best.run_cost_usd)} for the run")
    if best.cost_usd_per_million_tokens is not None:
        further.append(str(money_for_tokens(best.cost_usd_per_million_tokens)))
    return Price(
        total=f"{money_an_hour(hourly * count)} for {devices}",
        each=f"{money_an_hour(hourly)} for each" if count > 1 else "",
        more=tuple(further),
        sources=device_spec.price_source or "the catalog",
    )


# The states of a plan that chips show; draft and incomplete: of one without an answer.
TIGHT_SHARE = 0.05  # of the capacity: less spare memory is called tight
MONTH, YEAR = 30 * DAY, 365 * DAY  # longer runs are mentioned, and warned of
COMPRESSED = DAY  # longer compressions are mentioned
MAX_BARS = 8  # devices drawn individually
MAX_ROWS = 16  # pipeline stages drawn; further ones are described


@dataclass(frozen=True)
class Verdict:
    """The verdict on a plan, as shown in the side panel and on its first card."""

    tone: str  # good, warn or bad
    state: VerdictState
    sentence: str
    detail: str = ""
    rows: tuple[MemoryRow, ...] = ()
    figures: tuple[Figure, ...] = ()
    memory_note: str = ""
    bound_by: str = ""
    searched: str = ""
    targets: tuple[Target, ...] = ()
    memory_range: str = ""
    start: str = ""
    warnings: tuple[str, ...] = ()
    brief: tuple[str, ...] = field(default=())

    @property
    def bound_words(self) -> str:
        """Return a sentence on the limiting resource."""
        return f"The resource that sets the pace of this plan is {self.bound_by}."

    @property
    def fullest(self) -> MemoryRow | None:
        """Return the bar of the device with the most used memory."""
        return max(self.rows, key=lambda row: row.total_bytes, default=None)

    @property
    def icon(self) -> str:
        """Return the icon of the tone."""
        return {"good": "check", "warn": "triangle", "bad": "cross"}.get(self.tone, "draft")


def verdict_of(
    answer: PlanAnswer, document: PlanDocument, plan_url: str = "", *, speed: str = ""
) -> Verdict:
    """Return the verdict on the best plan, or on why there is none.

    ``speed`` is a compression's change of speed as text.
    """
    took = display.duration(answer.searched.seconds)
    count = answer.searched.strategies
    noun = "strategy" if count == 1 else "strategies"
    searched = f"{display.whole(count)} {noun} compared in {took}"
    if not answer.plans:
        return _infeasible(answer, searched)
    best = answer.plans[0]
    figures = tuple(estimate_figures(best, document, plan_url))
    concerns, targets = concerns_of(best, document), targets_of(best, document)
    more = [f"{capitalised(concern.words)}." for concern in concerns[1:]]
    words = planned_gains(best, speed)
    return Verdict(
        tone=concerns[0].tone if concerns else "good",
        state=concerns[0].state if concerns else "fits",
        sentence=_sentence(best, concerns, targets) + (f": {words}" if words else ""),
        detail=" ".join([*more, f"{_detail(best, document)}."]),
        targets=targets,
        memory_range=memory_interval_words(best),
        start=_start_and_engines(answer, document),
        rows=memory_rows(best),
        memory_note=memory_words(best),
        figures=figures,
        bound_by=BOUND_WORDS.get(best.bound_by, best.bound_by),
        searched=searched,
        warnings=(
            *(each for each in best.warnings if not any(each == c.words for c in concerns)),
            *_uncosted(document),
        ),
        brief=tuple(f"{figure.label} {figure.shown}" for figure in figures[:1]),
    )


def _start_and_engines(answer: PlanAnswer, document: PlanDocument) -> str:
    """Return what is started, with which engines it was compared, and what generates answers."""
    words = (
        start_words(answer) or engine_words(document),
        compared_words(answer),
        generator_words(answer),
    )
    return " ".join(filter(None, words))


def _uncosted(document: PlanDocument) -> Iterator[str]:
    """Yield what the job will do and the figures leave out."""
    values = document.workload
    if not isinstance(values, PretrainWork):
        return
    if values.activation_offload == "disk":
        yield (
            "activations on the host's disk are not costed: the memory shown is without the "
            "offload, and a step takes longer than shown"
        )
    if values.qat_bits:
        yield "rounding in training is not costed: a step takes longer than shown"
    if values.compiled:
        yield "the figures are of a step that is not compiled: a compiled one may be faster"


def _detail(best: PlannedStrategy, document: PlanDocument) -> str:
    """Return the chosen strategy in one line; for a compression, its method."""
    values = document.workload
    if not isinstance(values, CompressWork):
        return strategy_words(best.strategy)
    source = weights_words(best.strategy)
    return f"{compression_words(values)}, from {source} weights"


def problem_verdict(sentence: str, *, is_refused: bool = False) -> Verdict:
    """Return the verdict on a draft that is refused, or cannot be planned yet."""
    if is_refused:
        return Verdict("bad", "refused", "Cannot be planned like this", sentence)
    return Verdict("none", "incomplete", "Not planned yet", sentence)


def _infeasible(answer: PlanAnswer, searched: str) -> Verdict:
    """Return the verdict of a search without a result: the closest miss."""
    missed = closest_miss(answer.rejected)
    detail = f"{capitalised(missed.reason)}." if missed else "Every strategy was ruled out."
    sentence = "Nothing fits on this hardware"
    if missed and missed.required and missed.limit and missed.unit in {"bytes", "B"}:
        over = memory(missed.required - missed.limit)
        sentence = f"Does not fit: {over} over at best"
    compared = compared_words(answer)
    return Verdict("bad", "does-not-fit", sentence, detail, searched=searched, start=compared)


def closest_miss(rejected: Mapping[str, Rejection]) -> Rejection | None:
    """Return the rejected strategy family closest to its limit."""
    numbered = [each for each in rejected.values() if each.required and each.limit]
    numbered = [each for each in numbered if each.constraint == "memory"] or numbered
    if numbered:
        return min(numbered, key=lambda each: (each.required or 0) / (each.limit or 1))
    return next(iter(rejected.values()), None)


class Concern(NamedTuple):
    """A weakness of a plan; the smallest ``rank`` is reported first.

    With equal rank, the larger ratio comes first.
    """

    rank: int
    ratio: float
    state: VerdictState
    tone: str
    words: str


def concerns_of(best: PlannedStrategy, document: PlanDocument) -> list[Concern]:
    """Return the weaknesses of a plan that fits, the worst first."""
    concerns = [*_length_concerns(best, document), *_target_concerns(best, document)]
    return sorted([*concerns, *_memory_concerns(best)], key=lambda each: (each.rank, -each.ratio))


def _length_concerns(best: PlannedStrategy, document: PlanDocument) -> list[Concern]:
    """Return concerns about a long run, and about sequences beyond the model's context."""
    concerns = [
        Concern(1, 1.0, "over-context", "warn", warning)
        for warning in best.warnings
        if "exceed the model's context" in warning
    ]
    batch = document.goal == "generate"
    seconds = best.performance.latency_seconds if batch else best.performance.duration_seconds
    if seconds and seconds > YEAR:
        concerns.append(
            Concern(0, 1.0, "too-long", "bad", f"it takes {display.duration(seconds)}")
        )
    elif seconds and seconds > (COMPRESSED if document.goal == "compress" else MONTH):
        concerns.append(Concern(3, 1.0, "long", "warn", f"it takes {display.duration(seconds)}"))
    return concerns


def _target_concerns(best: PlannedStrategy, document: PlanDocument) -> list[Concern]:
    concerns = []
    for target in targets_of(best, document):
        if not target.is_met:
            concerns.append(Concern(2, target.ratio, "slow", "warn", target.missed_words))
        elif target.is_narrow:
            subject = {"ttft": "the first token", "tpot": "further tokens"}[target.figure]
            words = f"its target for {subject} is met narrowly: {target.odds}"
            concerns.append(Concern(3, target.ratio, "narrow", "warn", words))
    return concerns


def _memory_concerns(best: PlannedStrategy) -> list[Concern]:
    """Return concerns about little spare memory, or likely runs without enough."""
    peak, capacity = best.memory.per_device_peak_bytes, best.memory.capacity_bytes
    low, high = best.interval.get("per_device_peak_bytes", (peak, peak))
    words = f"only {memory(max(0, capacity - peak))} to spare{_on_each(best)}"
    if high > capacity:
        over = 1 - chance_below(peak, low, high, capacity)
        words += f", and {odds_words(over)} would need more memory than there is"
    elif capacity - peak >= TIGHT_SHARE * capacity:
        return []
    return [Concern(4, 1.0, "tight", "warn", words)]


def _on_each(best: PlannedStrategy) -> str:
    devices = best.cluster.num_devices
    return "" if devices == 1 else f" on each of {devices} devices"


def stored_state(answer: dict[str, Any], document: PlanDocument | None) -> VerdictState:
    """Return the verdict of a stored answer, without parsing its terms."""
    if not answer.get("plans"):
        return "does-not-fit"
    if document is None:
        return "computed"
    try:
        best = PlannedStrategy.model_validate({**answer["plans"][0], "terms": []})
    except ValidationError:  # stored by a release with other fields
        return "computed"
    concerns = concerns_of(best, document)
    return concerns[0].state if concerns else "fits"


def memory_interval_words(best: Estimate) -> str:
    """Return one device's peak and capacity as text, with the 80 % interval."""
    usage = best.memory
    words = f"{gib(usage.per_device_peak_bytes)} of {gib(usage.capacity_bytes)} GiB"
    bounds = best.interval.get("per_device_peak_bytes")
    return f"{words}, likely {gib(bounds[0])}{display.DASH}{gib(bounds[1])}" if bounds else words


def _sentence(best: PlannedStrategy, concerns: list[Concern], targets: tuple[Target, ...]) -> str:
    """Return the verdict's sentence: the worst concern, or the spare memory."""
    if concerns:
        return f"Fits, but {concerns[0].words}"
    spare = memory(best.memory.capacity_bytes - best.memory.per_device_peak_bytes)
    met = {1: ", and meets its target", 2: ", and meets both targets"}.get(len(targets), "")
    return f"Fits, {spare} to spare{_on_each(best)}{met}"


def memory_rows(estimate: Estimate) -> tuple[MemoryRow, ...]:
    """Return one bar per device, or per pipeline stage if there are many devices.

    Of a training that generates its completions, the fuller of its two phases is drawn.
    """
    answer = estimate.memory
    if estimate.strategy.rollout is not None:
        phase = max(_phases(estimate), key=lambda each: each.peak_bytes)
        return (memory_row(phase.name, answer.breakdown_bytes, answer.capacity_bytes),)
    peaks = answer.per_stage_peak_bytes or (answer.per_device_peak_bytes,)
    devices = estimate.cluster.num_devices if isinstance(estimate, PlannedStrategy) else 1
    if len(peaks) == 1 and devices <= MAX_BARS:
        labels = [f"GPU {index}" for index in range(devices)] if devices > 1 else ["Memory"]
        peaks *= devices
    else:
        labels = [f"Stage {index}" for index in range(len(peaks))] if len(peaks) > 1 else ["Each"]
    rows = []
    for label, peak in list(zip(labels, peaks, strict=True))[:MAX_ROWS]:
        share = peak / max(1, answer.per_device_peak_bytes)
        parts = {name: size * share for name, size in answer.breakdown_bytes.items()}
        rows.append(memory_row(label, parts, answer.capacity_bytes))
    return tuple(rows)


class _Phase(NamedTuple):
    """What generates completions, or learns from them: the fullest device's peak."""

    name: str
    peak_bytes: int


def _phases(estimate: Estimate) -> tuple[_Phase, _Phase]:
    """Return training and generation of a plan with a rollout.

    Its stages are those of the training, then those of the generation: one on devices of its own,
    else as many again.
    """
    peaks, rollout = estimate.memory.per_stage_peak_bytes, estimate.strategy.rollout
    trained = len(peaks) - 1 if rollout and rollout.devices else len(peaks) // 2
    return (
        _Phase("Training", max(peaks[:trained])),
        _Phase("Generation", max(peaks[trained:])),
    )


def _phase_words(estimate: Estimate) -> str:
    """Return the memory of both phases, and which devices run which."""
    training, generation = (memory(each.peak_bytes) for each in _phases(estimate))
    rollout = estimate.strategy.rollout
    if rollout is None or not rollout.devices:
        return (
            f"Each device generates and trains in turn: {generation} while it generates, "
            f"{training} while it trains. The bar is of the fuller."
        )
    return (
        f"Devices that generate ({rollout.devices}) take {generation} each, those that train "
        f"{training}. The bar is of the fuller."
    )


def memory_words(estimate: Estimate) -> str:
    """Return a note on the bars: devices per bar, the fullest stage, stages not drawn."""
    if estimate.strategy.rollout is not None:
        return _phase_words(estimate)
    peaks = estimate.memory.per_stage_peak_bytes
    devices = estimate.cluster.num_devices if isinstance(estimate, PlannedStrategy) else 1
    if len(peaks) <= 1:
        return f"The same on each of {devices} devices." if devices > MAX_BARS else ""
    each = f"{devices // len(peaks)} devices a stage. " if devices > len(peaks) else ""
    fullest = f"Stage {peaks.index(max(peaks))} is the fullest."
    undrawn = peaks[MAX_ROWS:]
    more = (
        f" {len(undrawn)} further stages take at most {memory(max(undrawn))}." if undrawn else ""
    )
    return f"{each}{fullest}{more}"


def estimate_figures(
    estimate: Estimate, document: PlanDocument, plan_url: str = ""
) -> list[Figure]:
    """Return the goal's figures that apply, the most important first."""
    figures = [
        _figure(estimate, name, label, unit, plan_url)
        for name, label, unit in GOAL_FIGURES[document.goal]
    ]
    return [figure for figure in figures if figure is not None]


GOAL_FIGURES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "serve": (
        ("tokens_per_second_per_person", "Per request", "tokens_per_second"),
        ("ttft_seconds", "First token, mean", "seconds"),
        ("output_tokens_per_second", "Total", "tokens_per_second"),
        ("cost_usd_per_million_tokens", "Cost, all GPUs", "usd_per_million_tokens"),
    ),
    "generate": (
        ("output_tokens_per_second", "Written", "tokens_per_second"),
        ("ttft_seconds", "Prefill", "seconds"),
        ("latency_seconds", "Time per batch", "seconds"),
        ("cost_usd_per_million_tokens", "Cost, all GPUs", "usd_per_million_tokens"),
    ),
    "finetune": (
        ("tokens_per_second", "Speed", "tokens_per_second"),
        ("step_seconds", "One step", "seconds"),
        ("duration_seconds", "The whole run", "seconds"),
        ("wall_seconds", "With its failures", "seconds"),
        ("goodput_ratio", "Goodput", "share"),
        ("checkpoint_interval_seconds", "Checkpoint every", "seconds"),
        ("run_cost_usd", "Cost of the run", "usd"),
        ("rollout_idle_ratio", "Generating devices wait", "share"),
        ("trainer_idle_ratio", "Training devices wait", "share"),
        ("mfu", "Model FLOP utilisation", "share"),
        ("cost_usd_per_million_tokens", "Cost, all GPUs", "usd_per_million_tokens"),
    ),
    "compress": (
        ("duration_seconds", "Compression time", "seconds"),
        ("written_weights_bytes", "Checkpoint afterwards", "bytes"),
        ("scratch_bytes", "Scratch in host memory", "bytes"),
        ("peak_memory_bytes", "Peak on the device", "bytes"),
        ("perplexity_ratio", "Perplexity ratio", ""),
    ),
}
GOAL_FIGURES["pretrain"] = GOAL_FIGURES["finetune"]


def _figure(estimate: Estimate, name: str, label: str, unit: str, url: str) -> Figure | None:
    """Return one figure of an estimate with its interval, or None if it does not apply."""
    values = figure_values(estimate, name)
    if values is None:
        return None
    value, low, high = values
    if name == "perplexity_ratio":
        return Figure(label, value, unit, low, high, "published", "published", url)
    return Figure(
        label,
        value,
        unit,
        low,
        high,
        note=ERROR_WORDS[estimate.error_class],
        href=url,
        evidence=evidence_url(),
    )


def evidence_url() -> str:
    """Return the URL of the accuracy page, with the evidence of such figures."""
    return reverse("docs", args=["accuracy"])


Value = tuple[float, float | None, float | None]  # value, low, high


def figure_values(estimate: Estimate, name: str) -> Value | None:
    """Return value, low and high of a figure by name, or None if it does not apply."""
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
    """Return the size of the compressed checkpoint, without the original."""
    size = estimate.memory.checkpoint_bytes
    return None if size is None else (float(size), None, None)


def _scratch(estimate: Estimate) -> Value | None:
    """Return a job's scratch space in host memory; None if it needs none."""
    size = estimate.memory.host_bytes
    return (float(size), None, None) if size and estimate.memory.checkpoint_bytes else None


def _perplexity(estimate: Estimate) -> Value | None:
    ratio = estimate.quality.perplexity_ratio if estimate.quality else None
    return (ratio[1], ratio[0], ratio[2]) if ratio else None


def _wall(estimate: Estimate) -> Value | None:
    found = estimate.reliability
    return (found.wall_seconds, *found.wall_interval) if found else None


def _goodput(estimate: Estimate) -> Value | None:
    found = estimate.reliability
    return (found.goodput_ratio, *found.goodput_interval) if found else None


def _checkpoint_interval(estimate: Estimate) -> Value | None:
    found = estimate.reliability
    return (found.checkpoint_interval_seconds, None, None) if found else None


SPECIAL_FIGURES: dict[str, Callable[[Estimate], Value | None]] = {
    "tokens_per_second_per_person": _per_person,
    "peak_memory_bytes": _peak_memory,
    "written_weights_bytes": _written_weights,
    "scratch_bytes": _scratch,
    "perplexity_ratio": _perplexity,
    "wall_seconds": _wall,
    "goodput_ratio": _goodput,
    "checkpoint_interval_seconds": _checkpoint_interval,
}


def _inverse(value: float | None) -> float | None:
    return 1 / value if value else None
