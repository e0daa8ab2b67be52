"""The figures of one job: predicted and measured values, and their state.

All consumers (cards, captions, tables, comparisons, exports, the API) read ``figures_of``;
names are defined in ``webapp/figures/registry.py``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from runners.jobspec.benchmark import ORIGINAL_PREFIX
from webapp.charts.figures import Prediction, Side
from webapp.core.display import Figure, quantity
from webapp.core.units import Quantity
from webapp.figures.registry import (
    MAIN_FIGURES,
    REGISTRY,
    FigureDefinition,
    definition_of,
    device_figures,
)
from webapp.jobs.energy import costs_of
from webapp.jobs.figures import elapsed_seconds
from webapp.jobs.measured_load import main_row_of
from webapp.jobs.models import FINAL_STATES, Job
from webapp.jobs.points_taken import PointsTaken, Taken
from webapp.jobs.task_figures import metrics_of

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
        """Return the base unit."""
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
    said: Mapping[str, Prediction], measured: Mapping[str, float]
) -> dict[str, float]:
    """Return the measured MFU of a training: its share of the devices' peak."""
    predictions_needed = [said.get(MFU), said.get("tokens_per_second")]
    speed = measured.get("tokens_per_second")
    if not speed or not all(each and each.value for each in predictions_needed):
        return {}
    mfu, planned = (each.value for each in predictions_needed if each)
    return {MFU: mfu * speed / planned}


class _Facts(NamedTuple):
    """A job's inputs for its figures: predictions, final values, notes and points."""

    job: Job
    said: Mapping[str, Prediction]
    final: Mapping[str, float]
    notes: Mapping[str, str]
    taken: PointsTaken

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
        definition = _definition(job, name)
        if job_figure := _figure_of(facts, definition):
            yield job_figure


def _names(final: Mapping[str, float]) -> list[str]:
    """Return the names of figures that may have a value: registry, originals, devices, tasks."""
    listed = [*REGISTRY, *(f"{ORIGINAL_PREFIX}{name}" for name in REGISTRY)]
    return list(dict.fromkeys([*listed, *device_figures(final), *metrics_of(final)]))


def _definition(job: Job, name: str) -> FigureDefinition:
    definition = definition_of(name)
    if name == "final_loss" and job.spec.get("objective") == "classification":
        return replace(definition, unit="nats per text")
    return definition


def _figure_of(facts: _Facts, definition: FigureDefinition) -> JobFigure | None:
    name, prediction = definition.name, facts.said.get(definition.name)
    if name in facts.final:
        is_growing = name == "run_seconds" and not facts.is_over
        state: State = "so_far" if is_growing else "measured"
        words = "so far" if is_growing else ""
        how = facts.notes.get(name, "")
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


def _so_far(facts: _Facts, definition: FigureDefinition) -> Taken | None:
    """Return the value of the points so far; under load only sampled metrics have one."""
    taking = definition.taking(facts.job.kind)
    is_mixed = facts.job.spec.get("load") and definition.name not in SAMPLED
    return None if not taking.series or is_mixed else facts.taken.value(taking)


def _state(facts: _Facts, definition: FigureDefinition, current: Taken) -> tuple[State, str]:
    if current.num_seen < current.needed:
        counted = definition.taking(facts.job.kind).counted
        start = "not compared: it ended in its" if facts.is_over else "not compared yet:"
        return "warm_up", f"{start} warm-up, {current.num_seen} of {current.needed} {counted}"
    return ("measured", "") if facts.is_over else ("so_far", "so far")


def _utilisation(facts: _Facts, definition: FigureDefinition) -> JobFigure | None:
    """Return MFU, in the state of the speed that it derives from."""
    speed = _figure_of(facts, definition_of("tokens_per_second"))
    prediction = facts.said.get(MFU)
    if prediction is None or speed is None:
        return None
    speeds = {} if speed.measured is None else {"tokens_per_second": speed.measured}
    value = utilisation_of(facts.said, speeds).get(MFU)
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
