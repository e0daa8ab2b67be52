"""Measured figures of a job beside the predicted ones."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from planner.cost.roofline import MILLION, of_electricity, run_usd, usd_per_million_tokens
from runners.jobspec.compress import ORIGINAL_PREFIX
from runners.shared.reasons import Reason
from webapp.charts.plots import Prediction, Side
from webapp.core.display import TERMS, Figure, Quantity, memory, number, quantity
from webapp.core.figures import (
    MAIN_FIGURES,
    REGISTRY,
    FigureDefinition,
    definition_of,
    device_figures,
)
from webapp.hosts.machines import HOURLY, PER_KWH, price_of
from webapp.jobs.gangs import members_of
from webapp.jobs.models import FINAL_STATES, Attempt, Job
from webapp.jobs.points import (
    HOST_SERIES,
    PartialValue,
    PointsTaken,
    gpu_memories,
    highest_host_sample,
    highest_of,
    main_row_of,
)
from webapp.jobs.progress import AS_PREDICTED, elapsed_seconds, ratio_words
from webapp.metrics.models import MetricSource
from webapp.metrics.store import read_raw

# ---------------------------------------------------------------------------
# The figures of one job: predicted and measured values, their state, and their cards.
# ---------------------------------------------------------------------------


# Energy and cost of a job: measured joules and hours at the prices of its host.
#
# All functions expect a job loaded with its host.


TOTAL, PER_TOKEN = "energy_joules", "energy_joules_per_token"


class Cost(NamedTuple):
    """An amount in dollars, and how it was computed."""

    usd: float
    how: str


def why_energy_unmeasured(job: Job) -> str:
    """Return the reason why the job measured no energy.

    It is "" if energy was measured, or if the job has no result yet.
    """
    result = job.result or {}
    if TOTAL in result.get("measured", {}):
        return ""
    return str(result.get("notes", {}).get(TOTAL, ""))


def costs_of(job: Job) -> dict[str, Cost]:
    """Return the costs of an ended single-host job, if its host's labels have prices."""
    if job.host is None or job.num_hosts > 1 or job.state not in FINAL_STATES:
        return {}
    measured: Mapping[str, float] = (job.result or {}).get("measured", {})
    labels, host = job.host.labels, job.host.name
    costs: dict[str, Cost] = {}
    if (per_kwh := price_of(labels, PER_KWH)) is not None:
        costs |= _electricity(measured, per_kwh, f"${per_kwh:g} per kWh, label of {host}")
    if (hourly := price_of(labels, HOURLY)) is not None:
        costs |= _hire(job, measured, hourly, f"${hourly:g} an hour, label of {host}")
    return costs


def _electricity(measured: Mapping[str, float], per_kwh: float, price: str) -> dict[str, Cost]:
    amounts = {
        "run_electricity_usd": (TOTAL, 1.0),
        "electricity_usd_per_million_tokens": (PER_TOKEN, MILLION),
    }
    return {
        name: Cost(
            float(of_electricity(energy_joules=measured[source] * times, per_kwh=per_kwh)),
            f"measured joules at {price}; hosts and cooling beyond its sensors not counted",
        )
        for name, (source, times) in amounts.items()
        if source in measured
    }


def _hire(job: Job, measured: Mapping[str, float], hourly: float, price: str) -> dict[str, Cost]:
    costs = {}
    if job.started_at and job.ended_at:
        seconds = (job.ended_at - job.started_at).total_seconds()
        usd = float(run_usd(num_devices=1, hourly_usd=hourly, duration_s=seconds))
        costs["run_cost_usd"] = Cost(usd, f"from start to end at {price}")
    if rate := measured.get("tokens_per_second"):
        usd = float(usd_per_million_tokens(num_devices=1, hourly_usd=hourly, tokens_per_s=rate))
        costs["cost_usd_per_million_tokens"] = Cost(usd, f"at the measured speed, {price}")
    return costs


# Results of lm-evaluation-harness tasks, next to the original model's.


BEFORE = "original_"
CHANGES = ("difference", "ratio")
ENDINGS = ("stderr", *(f"{each}{end}" for each in CHANGES for end in ("", "_low", "_high")))
DIGITS = 4
PLUS_MINUS = "\N{PLUS-MINUS SIGN}"


@dataclass(frozen=True)
class TaskRow:
    """One metric of one task; strings are empty if there is no original."""

    task: str
    metric: str
    value: str
    before: str
    change: str
    verdict: str
    how: str


def metrics_of(measured: Mapping[str, Any]) -> Iterator[str]:
    """Yield the ``task/metric`` names of a result, without derived values."""
    for name in measured:
        task, slash, metric = name.partition("/")
        is_before = name.startswith(BEFORE) and name.removeprefix(BEFORE) in measured
        is_part = any(
            metric.endswith(f"_{end}") and name.removesuffix(f"_{end}") in measured
            for end in ENDINGS
        )
        if slash and task and metric and not is_before and not is_part:
            yield name


def task_rows(job: Job) -> list[TaskRow]:
    """Return every metric of every task that the job ran."""
    measured: Mapping[str, Any] = job.result.get("measured", {})
    notes: Mapping[str, str] = job.result.get("notes", {})
    return [_row(name, measured, notes) for name in metrics_of(measured)]


def _row(name: str, measured: Mapping[str, Any], notes: Mapping[str, str]) -> TaskRow:
    task, _, metric = name.partition("/")
    kind = next((each for each in CHANGES if f"{name}_{each}" in measured), "")
    return TaskRow(
        task=task,
        metric=metric,
        value=_with_error(name, measured),
        before=_with_error(f"{BEFORE}{name}", measured),
        change=_change(name, kind, measured) if kind else "",
        verdict=notes.get(f"{name}_{kind}", "").partition(":")[0] if kind else "",
        how=notes.get(name, ""),
    )


def _with_error(name: str, measured: Mapping[str, Any]) -> str:
    if measured.get(name) is None:
        return ""
    error = measured.get(f"{name}_stderr")
    spread = "" if error is None else f" {PLUS_MINUS} {number(error, 2)}"
    return f"{number(measured[name], DIGITS)}{spread}"


def _change(name: str, kind: str, measured: Mapping[str, Any]) -> str:
    ends = [measured.get(f"{name}_{kind}{end}") for end in ("", "_low", "_high")]
    if None in ends:
        return ""
    middle, low, high = (number(float(each), 3) for each in ends if each is not None)
    factor = "factor " if kind == "ratio" else ""
    return f"{factor}{middle}, 95 % interval {low} to {high}"


MFU = "mfu"
SAMPLED = frozenset({"host_memory_bytes", "device_memory_bytes"})
State = Literal["measured", "so_far", "warm_up", "predicted"]


@dataclass(frozen=True)
class JobFigure:
    """One figure of one job, in base units.

    ``state``: measured (final), so_far (the job still runs), warm_up (shown, but not compared
    yet) or predicted (no value yet). ``state_words`` is the state as text.
    """

    definition: FigureDefinition
    predicted: Prediction | None
    measured: float | None
    state: State
    state_words: str = ""
    how: str = ""

    @property
    def name(self) -> str:
        """Return the registered name."""
        return self.definition.name

    @property
    def unit(self) -> str:
        """Return the base unit of the values, such as ``seconds`` or ``bytes``."""
        return self.definition.unit

    @property
    def shown(self) -> Quantity | None:
        """Return the measured value for display."""
        return None if self.measured is None else quantity(self.measured, self.unit)

    @property
    def predicted_value(self) -> float | None:
        """Return the predicted value, None if there is none."""
        return None if self.predicted is None else self.predicted.value

    @property
    def is_comparable(self) -> bool:
        """Return whether the measured value can be compared with the prediction."""
        return self.measured is not None and self.state in {"measured", "so_far"}

    @property
    def ratio(self) -> float | None:
        """Return measured over predicted, if comparable."""
        if not self.is_comparable or self.predicted is None or not self.predicted.value:
            return None
        return (self.measured or 0.0) / self.predicted.value

    @property
    def place(self) -> Side:
        """Return the value's side of the 80 % interval, if comparable."""
        prediction = self.predicted
        if not self.is_comparable or self.measured is None or prediction is None:
            return ""
        return prediction.side_of(self.measured)

    @property
    def card(self) -> Figure:
        """Return the figure as the page component."""
        prediction, label = self.predicted, self.definition.label
        note = " · ".join(part for part in (self._origin, self._prediction_note) if part)
        origin = "modelled" if self.measured is None else "measured"
        if prediction is None:
            value = self.measured or 0.0
            return Figure(label, value, self.unit, provenance=origin, note=note)
        return Figure(
            label, prediction.value, self.unit, prediction.low, prediction.high, origin, note,
            measured=self.measured, is_comparable=self.is_comparable,
        )  # fmt: skip

    @property
    def _origin(self) -> str:
        if self.measured is None:
            return f"predicted, {self.state_words}"  # the large number is the prediction
        if self.state == "measured":
            return "measured here" if self.predicted is None else "measured"
        return self.state_words if self.state == "warm_up" else f"measured {self.state_words}"

    @property
    def _prediction_note(self) -> str:
        prediction = self.predicted
        is_large = self.measured is None
        return (
            ""
            if prediction is None or is_large
            else f"predicted {quantity(prediction.value, self.unit)}"
        )


class JobFigures(Mapping[str, JobFigure]):
    """All figures of a job by name, in registry order; figures without a value are absent.

    Assumes: ``job`` is loaded with its host and its current attempt.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._found = {each.name: each for each in _figures(job)}

    def __getitem__(self, name: str) -> JobFigure:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    @property
    def main(self) -> JobFigure | None:
        """Return the job's main figure, None before one is measured."""
        candidates = (self._found.get(name) for name in MAIN_FIGURES)
        return next((each for each in candidates if each and each.measured is not None), None)


def figures_of(job: Job) -> JobFigures:
    """Return every predicted or measured figure of a job."""
    return JobFigures(job)


def predictions(job: Job) -> dict[str, Prediction]:
    """Return the predictions stored at launch by registered name."""
    return {
        name: Prediction(float(entry["value"]), entry.get("low"), entry.get("high"))
        for name, entry in job.prediction.items()
        if isinstance(entry, Mapping) and isinstance(entry.get("value"), int | float)
    }


def utilisation_of(
    predictions: Mapping[str, Prediction], measured: Mapping[str, float]
) -> dict[str, float]:
    """Return the measured model FLOP utilisation (0 to 1) as ``{MFU: value}``.

    It is the predicted utilisation, scaled by measured over predicted tokens per second; {} if
    one of the three is missing.
    """
    predictions_needed = [predictions.get(MFU), predictions.get("tokens_per_second")]
    speed = measured.get("tokens_per_second")
    if not speed or not all(each and each.value for each in predictions_needed):
        return {}
    mfu, planned = (each.value for each in predictions_needed if each)
    return {MFU: mfu * speed / planned}


class _Facts(NamedTuple):
    """A job's inputs for its figures: predictions, final values, notes and points."""

    job: Job
    predictions: Mapping[str, Prediction]
    final: Mapping[str, float]
    notes: Mapping[str, str]
    points: PointsTaken

    @property
    def is_over(self) -> bool:
        return self.job.state in FINAL_STATES


def _figures(job: Job) -> Iterator[JobFigure]:
    result, costs = job.result or {}, costs_of(job)
    row = main_row_of(job)  # older results contain only its means
    measured = {**(row.measured if row else {}), **(result.get("measured") or {})}
    final = {**measured, **{name: each.usd for name, each in costs.items()}}
    if job.started_at is not None:
        final["run_seconds"] = elapsed_seconds(job)
    notes = {**(result.get("notes") or {}), **{name: each.how for name, each in costs.items()}}
    facts = _Facts(job, predictions(job), final, notes, PointsTaken(job))
    for name in _names(final):
        definition = definition_for(job, name)
        if job_figure := _figure_of(facts, definition):
            yield job_figure


def _names(final: Mapping[str, float]) -> list[str]:
    """Return the names of figures that may have a value: registry, originals, devices, tasks."""
    listed = [*REGISTRY, *(f"{ORIGINAL_PREFIX}{name}" for name in REGISTRY)]
    return list(dict.fromkeys([*listed, *device_figures(final), *metrics_of(final)]))


def definition_for(job: Job, name: str) -> FigureDefinition:
    """Return the definition of a figure of a job, whose kind may say more than the registry."""
    definition = definition_of(name)
    if name == "final_loss" and job.spec.get("objective") == "classification":
        return replace(definition, unit="nats per text")
    if name == "tokens_per_second" and job.kind == "train":
        return replace(definition, label="Tokens per second of steps")
    return definition


def _figure_of(facts: _Facts, definition: FigureDefinition) -> JobFigure | None:
    name, prediction = definition.name, facts.predictions.get(definition.name)
    if name in facts.final:
        is_growing = name == "run_seconds" and not facts.is_over
        state: State = "so_far" if is_growing else "measured"
        words = "so far" if is_growing else ""
        how = _with_interval(facts.notes.get(name, ""), name, facts.final)
        return JobFigure(definition, prediction, facts.final[name], state, words, how)
    if name == MFU:
        return _utilisation(facts, definition)
    if current := _so_far(facts, definition):
        state, words = _state(facts, definition, current)
        how = facts.notes.get(name) or definition.taking(facts.job.kind).words
        return JobFigure(definition, prediction, current.value, state, words, how)
    if prediction is None:
        return None
    words = "not measured" if facts.is_over else "not measured yet"
    return JobFigure(definition, prediction, None, "predicted", words, facts.notes.get(name, ""))


def _with_interval(how: str, name: str, final: Mapping[str, float]) -> str:
    """Return a note on a figure with the ends of its interval, if the job measured them."""
    low, high = final.get(f"{name}_low"), final.get(f"{name}_high")
    if not how or low is None or high is None:
        return how
    return f"{how}: {number(low)} to {number(high)}"


def _so_far(facts: _Facts, definition: FigureDefinition) -> PartialValue | None:
    """Return the value of the points so far; under load only sampled metrics have one."""
    taking = definition.taking(facts.job.kind)
    is_mixed = facts.job.spec.get("load") and definition.name not in SAMPLED
    return None if not taking.series or is_mixed else facts.points.value(taking)


def _state(
    facts: _Facts, definition: FigureDefinition, current: PartialValue
) -> tuple[State, str]:
    if current.num_seen < current.needed:
        counted = definition.taking(facts.job.kind).counted
        start = "not compared: it ended in its" if facts.is_over else "not compared yet:"
        return "warm_up", f"{start} warm-up, {current.num_seen} of {current.needed} {counted}"
    return ("measured", "") if facts.is_over else ("so_far", "so far")


def _utilisation(facts: _Facts, definition: FigureDefinition) -> JobFigure | None:
    """Return MFU, in the state of the speed that it derives from."""
    speed = _figure_of(facts, definition_for(facts.job, "tokens_per_second"))
    prediction = facts.predictions.get(MFU)
    if prediction is None or speed is None:
        return None
    speeds = {} if speed.measured is None else {"tokens_per_second": speed.measured}
    value = utilisation_of(facts.predictions, speeds).get(MFU)
    return JobFigure(
        definition, prediction, value, speed.state, speed.state_words, definition.definition
    )


def as_json(figure: JobFigure) -> dict[str, Any]:
    """Return one figure as JSON for the API and exports: base units, not rounded."""
    prediction = figure.predicted
    return {
        "name": figure.name,
        "label": figure.definition.label,
        "unit": figure.unit.removeprefix("elapsed_"),
        "measured": figure.measured,
        "predicted": figure.predicted_value,
        "predicted_low": prediction.low if prediction else None,
        "predicted_high": prediction.high if prediction else None,
        "ratio": figure.ratio,
        "state": figure.state,
        "state_words": figure.state_words,
        "definition": figure.definition.definition,
        "how": figure.how,
    }


# The figure cards of a job's page: a few shown, the rest folded, and a summary.


MOST_CARDS = 8
NAMED = 3  # folded figures named in the label


class Cards(NamedTuple):
    """The figures of a job, the main ones apart."""

    shown: Sequence[JobFigure]
    folded: Sequence[JobFigure]
    answer: str

    @property
    def rows(self) -> list[JobFigure]:
        """Return all figures, for the table."""
        return [*self.shown, *self.folded]

    @property
    def folded_words(self) -> str:
        """Return the label of the folded figures: a count and some names."""
        names = [each.definition.label for each in self.folded[:NAMED]]
        more = ", …" if len(self.folded) > NAMED else ""
        return f"{len(self.folded)} more: {', '.join(names)}{more}"


def cards_of(figures: JobFigures) -> Cards:
    """Return the cards of a job: predicted figures first, then the others, in their order.

    Figures of an original model are shown in the before/after table instead.
    """
    rows = [each for name, each in figures.items() if not name.startswith("original_")]
    rows = [each for each in rows if "/" not in each.name and each.name != "run_seconds"]
    first = sorted(rows, key=lambda each: each.predicted is None)
    return Cards(first[:MOST_CARDS], first[MOST_CARDS:], answer(rows))


HEADLINES = (MAIN_FIGURES[:-1], ("peak_memory_bytes", "host_memory_bytes"))
PLACES = {name: f"{name} its interval" for name in ("inside", "below", "above")}


def outcome_words(figures: JobFigures, why_not: Callable[[str], str] | None = None) -> str:
    """Return a job's speed and memory against their predictions, and why they do not count.

    ``why_not`` returns why a metric does not count; "" if it does.
    """
    parts, reasons = [], {}
    for names in HEADLINES:
        figure = next((figures[n] for n in names if n in figures and figures[n].ratio), None)
        if figure is None or figure.ratio is None:
            continue
        said = ratio_words(figure.ratio, figure.unit)
        than = "" if said == AS_PREDICTED else " than predicted"
        where = PLACES.get(figure.place, "")
        label = figure.definition.label
        parts.append(f"{label} {said}{than}{f', {where}' if where else ''}")
        if why_not and (why := why_not(figure.name)):
            reasons[label] = why
    if not parts:
        return ""
    return f"{'; '.join(parts)}.{_not_counted(reasons, len(parts))}"


def _not_counted(reasons: Mapping[str, str], num_figures: int) -> str:
    """Return the first reason, with its figure's label if another figure counts."""
    if not reasons:
        return ""
    label, why = next(iter(reasons.items()))
    subject = "Not" if len(reasons) == num_figures else f"{label} not"
    return f" {subject} counted: {why}"


def answer(rows: Iterable[JobFigure]) -> str:
    """Return in one sentence how many measured figures lie in their intervals, no warm-ups."""
    comparable = [row for row in rows if row.place]
    if not comparable:
        return ""
    inside = sum(row.place == "inside" for row in comparable)
    so_far = " so far" if any(row.state == "so_far" for row in comparable) else ""
    if inside == len(comparable):
        return f"Every measured figure lies inside its 80 % interval{so_far}."
    return (
        f"{inside} of {len(comparable)} measured figures lie inside their 80 % interval{so_far}."
    )


# ---------------------------------------------------------------------------
# Compare a job's memory with its prediction per tensor class, and parse OOM messages.
# ---------------------------------------------------------------------------


# Parse allocator messages on exhausted memory: requested, total and free bytes.


_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"([0-9]+(?:\.[0-9]+)?) (bytes|[KMGT]iB)"
_REQUESTED = (
    re.compile(rf"[Tt]ried to allocate {_SIZE}"),  # torch, both allocators
    re.compile(rf"Unable to allocate {_SIZE}"),  # numpy
    re.compile(rf"allocating {_SIZE} on device"),  # llama.cpp
    re.compile(rf"memory allocation of {_SIZE} failed"),  # Rust
)
_CAPACITY = re.compile(rf"total capaci?ty of {_SIZE}")
_FREE = re.compile(rf"of which {_SIZE} is free")
_IN_USE = re.compile(rf"this process has {_SIZE} memory in use")
_UNALLOCATED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")


class OutOfMemoryFigures(NamedTuple):
    """The figures of the last such message, in bytes; None if not stated."""

    requested_bytes: int | None = None
    capacity: int | None = None
    free: int | None = None
    in_use: int | None = None
    unallocated: int | None = None


def read_oom(lines: Sequence[str]) -> OutOfMemoryFigures:
    """Return the figures of the last allocator message in a job's last lines."""
    text = "\n".join(lines)
    requested = next(
        (size for each in _REQUESTED if (size := _last(each, text)) is not None), None
    )
    return OutOfMemoryFigures(
        requested,
        _last(_CAPACITY, text),
        _last(_FREE, text),
        _last(_IN_USE, text),
        _last(_UNALLOCATED, text),
    )


def _last(pattern: re.Pattern[str], text: str) -> int | None:
    matches = pattern.findall(text)
    if not matches:
        return None
    number, unit = matches[-1]
    return int(float(number) * _UNITS[unit])


NOTABLE_RATIO = 1.05  # up to this ratio a term counts as predicted
ROOM_SHARE = 0.9  # of the capacity: if an allocation failed below it, the device was shared
OOM = frozenset({Reason.OOM_GPU, Reason.OOM_HOST})


@dataclass(frozen=True)
class TermRow:
    """One tensor class: predicted bytes, and measured bytes if known."""

    term: str
    name: str
    predicted: float
    measured: float | None
    is_rest: bool = False  # the peak's remainder beyond the counted terms

    @property
    def ratio(self) -> float | None:
        """Return measured over predicted."""
        return self.measured / self.predicted if self.measured and self.predicted else None

    @property
    def excess(self) -> float:
        """Return by how many bytes the prediction was exceeded."""
        return 0.0 if self.measured is None else self.measured - self.predicted


@dataclass(frozen=True)
class MemoryComparison:
    """A job's memory compared with its prediction."""

    rows: tuple[TermRow, ...]
    predicted_bytes: float
    capacity_bytes: float
    peak_bytes: float
    allocator: OutOfMemoryFigures
    metric: tuple[str, str]  # source and name of the series with the peak
    is_oom: bool = False

    @property
    def needed_bytes(self) -> float:
        """Return the peak plus the last failed allocation."""
        return self.peak_bytes + (self.allocator.requested_bytes or 0)

    @property
    def room_bytes(self) -> float:
        """Return the available bytes: the capacity, for an out-of-memory job at most its peak."""
        return min(self.capacity_bytes, self.peak_bytes) if self.is_oom else self.capacity_bytes

    @property
    def ratio(self) -> float:
        """Return the needed over the predicted memory."""
        return self.needed_bytes / self.predicted_bytes if self.predicted_bytes else 0.0

    @property
    def culprit(self) -> TermRow | None:
        """Return the term that exceeded its prediction the most, if notable."""
        worst = max(self.rows, key=lambda row: row.excess, default=None)
        is_notable = worst and worst.measured and worst.measured > NOTABLE_RATIO * worst.predicted
        return worst if is_notable else None

    @property
    def limit_bytes(self) -> float:
        """Return a limit for predictions that keeps the margin which this job needed.

        It is at most the room that there was: a job that needed less than predicted was short of
        room, and its need says nothing about the prediction's margin.
        """
        return self.room_bytes / max(1.0, self.ratio) if self.ratio else 0.0


def story_of(job: Job) -> MemoryComparison | None:
    """Return the memory comparison of a job with a prediction; else None.

    For a job on several hosts it is that of the host that needed the most.
    """
    stories = stories_of(job)
    return stories[0][1] if stories else None


def shortage_of(job: Job) -> MemoryComparison | None:
    """Return the memory comparison of the part that ran out of memory; None if none did."""
    return next((story for _, story in stories_of(job) if story.is_oom), None)


def stories_of(job: Job) -> list[tuple[Attempt, MemoryComparison]]:
    """Return each host's part with its memory comparison.

    Parts that ran out of memory come first, then those with the largest need.
    """
    if job.current_attempt is None:
        return []
    stories = [
        (member, story)
        for member in members_of(job.current_attempt)
        if (story := _story(job, member)) is not None
    ]
    return sorted(
        stories,
        key=lambda each: (
            not each[1].is_oom,
            not each[1].allocator.requested_bytes,
            -each[1].needed_bytes,
        ),
    )


def _story(job: Job, attempt: Attempt) -> MemoryComparison | None:
    answer = job.estimate.get("memory") if isinstance(job.estimate, Mapping) else None
    if not answer:
        return None
    reason = str(attempt.exit_record.get("reason") or "")  # each host of a gang has its own
    if not reason and job.num_hosts == 1:
        reason = job.reason
    metric = _metric(reason, attempt)
    peak = _peak(attempt, metric)
    if not peak:
        return None
    lines = attempt.exit_record.get("last_lines", [])
    oom = read_oom(lines) if reason in OOM else OutOfMemoryFigures()
    rows = _rows(answer["breakdown_bytes"], _held(attempt), peak + (oom.requested_bytes or 0))
    return MemoryComparison(
        rows=tuple(rows),
        predicted_bytes=float(answer["per_device_peak_bytes"]),
        capacity_bytes=_capacity(answer, attempt, oom),
        peak_bytes=peak,
        allocator=oom,
        metric=metric,
        is_oom=reason in OOM,
    )


def _metric(reason: str, attempt: Attempt) -> tuple[str, str]:
    """Return the series with the predicted peak: the fullest GPU's, or the processes' RSS."""
    names = gpu_memories(attempt)
    if not names or reason == Reason.OOM_HOST:
        return "host", HOST_SERIES
    return "gpu", max(names, key=lambda name: highest_of(attempt, [name]))


def _peak(attempt: Attempt, metric: tuple[str, str]) -> float:
    """Return the highest sample, the same as in the job's captions."""
    if metric[0] == "host":
        return highest_host_sample(attempt)
    return highest_of(attempt, [metric[1]])


def _held(attempt: Attempt) -> dict[str, float]:
    """Return the peak bytes that the job reported per tensor class."""
    stored = MetricSource.objects.filter(attempt_id=attempt.pk, source="job").first()
    peaks = {}
    for name in stored.metrics if stored else ():
        if name.startswith("held_") and name.endswith("_bytes"):
            values = read_raw(attempt.pk, "job", name).value
            peaks[name.removeprefix("held_").removesuffix("_bytes")] = float(values.max())
    return peaks


def _capacity(answer: Mapping[str, Any], attempt: Attempt, oom: OutOfMemoryFigures) -> float:
    """Return a device's capacity: from the allocator, else the host's limit, else planned."""
    limit = attempt.facts.get("job_memory_bytes")
    return float(oom.capacity or limit or answer["capacity_bytes"])


def _rows(
    predicted: Mapping[str, float], reported: Mapping[str, float], needed: float
) -> list[TermRow]:
    counted = {
        term: sum(reported[part] for part in parts if part in reported)
        for term, _, parts in TERMS
        if any(part in reported for part in parts)
    }
    expected = {term: sum(predicted.get(part, 0.0) for part in parts) for term, _, parts in TERMS}
    rest = "activations" if expected["activations"] else "overhead"
    if counted and rest not in counted:
        counted[rest] = max(0.0, needed - sum(counted.values()))
    rows = [
        TermRow(term, name, expected[term], counted.get(term), is_rest=term == rest)
        for term, name, _ in TERMS
    ]
    return [row for row in rows if row.predicted or row.measured]


def story_sentence(story: MemoryComparison) -> str:
    """Return a sentence on what went wrong with a job's memory, with its figures."""
    return f"{_need_words(story)}{_room_words(story)}"


def _need_words(story: MemoryComparison) -> str:
    needed, predicted = memory(story.needed_bytes), memory(story.predicted_bytes)
    if story.ratio <= NOTABLE_RATIO:
        if not story.is_oom:  # it may have ended before it held everything
            return f"It held at most {needed} until it ended; {predicted} were predicted."
        return f"It needed no more than was predicted: {needed} against {predicted}."
    if (worst := story.culprit) is not None:
        return (
            f"{worst.name} measured {memory(worst.measured or 0)} against "
            f"{memory(worst.predicted)} predicted."
        )
    return f"It needed {needed}, {number(story.ratio)} times the predicted {predicted}."


def _room_words(story: MemoryComparison) -> str:
    """Return a sentence about a shared device, if the job ran out of memory below its capacity."""
    if not story.is_oom or story.room_bytes >= ROOM_SHARE * story.capacity_bytes:
        return ""
    return (
        f" A further allocation was refused at {memory(story.room_bytes)} of "
        f"{memory(story.capacity_bytes)}: less memory was available than planned."
    )


def facts_of(figures: OutOfMemoryFigures) -> Sequence[tuple[str, str]]:
    """Return the allocator's figures as (label, value)."""
    labels = ("Last allocation request", "The device holds", "Free then", "Held by this process")
    rows = [
        (label, str(memory(value)))
        for label, value in zip(labels, figures, strict=False)
        if value is not None
    ]
    if figures.unallocated:
        rows.append(("Reserved but unused", str(memory(figures.unallocated))))
    return rows
