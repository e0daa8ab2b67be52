"""Measured figures of a job beside the predicted ones."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from planner.cost.roofline import MILLION, of_electricity, run_usd, usd_per_million_tokens
from runners.jobspec.compress import ORIGINAL_PREFIX
from webapp.charts.plots import Prediction, Side
from webapp.core.display import Figure, Quantity, number, quantity
from webapp.core.figures import (
    MAIN_FIGURES,
    REGISTRY,
    FigureDefinition,
    definition_of,
    device_figures,
)
from webapp.hosts.machines import HOURLY, PER_KWH, price_of
from webapp.jobs.benchmark_reports import main_row_of
from webapp.jobs.models import FINAL_STATES, Job
from webapp.jobs.points import PartialValue, PointsTaken
from webapp.jobs.progress import AS_PREDICTED, elapsed_seconds, ratio_words

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
