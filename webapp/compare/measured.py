"""What each of several jobs was predicted to measure and did, one row a figure."""

from collections.abc import Iterator
from dataclasses import dataclass

from webapp.compare.jobs import Side
from webapp.core.display import quantity
from webapp.core.units import Quantity, number, signed_percent
from webapp.core.wording import listed
from webapp.jobs import figures
from webapp.jobs.energy import costs_of, device_labels
from webapp.jobs.figures import FIGURES, MAIN_METRICS
from webapp.jobs.memory_terms import TermRow, story_of
from webapp.jobs.models import Measurement
from webapp.jobs.plots import Drawn, latest_values
from webapp.jobs.task_figures import label_of, metrics_of

NEARLY = 0.005  # a change smaller than this is said to be none
BY_RATE = frozenset({"tokens_per_second", "prefill_tokens_per_second", "decode_tokens_per_second"})


@dataclass(frozen=True)
class Cell:
    """One figure of one job; None where it was not predicted or not measured."""

    unit: str
    predicted: float | None
    measured: float | None
    low: float | None
    high: float | None
    against_first: str  # ``+12 %`` of the first job's, nothing for the first itself

    @property
    def ratio(self) -> float | None:
        """Return measured over predicted."""
        return self.measured / self.predicted if self.measured and self.predicted else None

    @property
    def shown(self) -> Quantity | None:
        """Return what was measured, to read."""
        return None if self.measured is None else quantity(self.measured, self.unit)

    @property
    def predicted_words(self) -> str:
        """Return what was predicted, to read."""
        return "" if self.predicted is None else str(quantity(self.predicted, self.unit))

    @property
    def place(self) -> str:
        """Return on which side of its 80 % interval the measured figure lies."""
        if self.measured is None or self.low is None or self.high is None:
            return ""
        if self.low <= self.measured <= self.high:
            return "inside the interval"
        return "below the interval" if self.measured < self.low else "above the interval"


@dataclass(frozen=True)
class Row:
    """One figure of all jobs."""

    metric: str
    label: str
    cells: tuple[Cell, ...]

    @property
    def is_complete(self) -> bool:
        """Tell whether every job measured it."""
        return all(cell.measured is not None for cell in self.cells)


def rows_of(sides: list[Side], drawn: list[list[Drawn]]) -> list[Row]:
    """Return every figure that one of the jobs was predicted to measure, or measured."""
    values = [_values(side, charts) for side, charts in zip(sides, drawn, strict=True)]
    rows = []
    named = {name: (label_of(name), "") for found in values for name in metrics_of(found)}
    for found in values:
        named |= device_labels(found)
    for metric, (label, unit) in (FIGURES | named).items():
        cells = _cells(metric, unit, sides, values)
        if any(cell.measured is not None or cell.predicted is not None for cell in cells):
            rows.append(Row(metric, label, cells))
    return rows + _rank_rows(sides)


def _rank_rows(sides: list[Side]) -> list[Row]:
    """Return what a rank holds, term by term, where each job ran as several ranks."""
    if not all(side.job.is_shared_out and side.job.kind == "train" for side in sides):
        return []
    stories = [story_of(side.job) for side in sides]
    terms = [
        {row.term: row for row in story.rows if not row.is_rest} if story else {}
        for story in stories
    ]
    names = {term: row.name for found in terms for term, row in found.items()}
    return [
        Row(term, f"{name} on a rank", tuple(_rank_cells([found.get(term) for found in terms])))
        for term, name in names.items()
    ]


def _rank_cells(rows: list[TermRow | None]) -> Iterator[Cell]:
    first = rows[0].measured if rows[0] else None
    for at, row in enumerate(rows):
        measured = row.measured if row else None
        against = _change(measured, first) if at else ""
        predicted = row.predicted if row else None
        yield Cell("bytes", predicted, measured, None, None, against)


def _values(side: Side, charts: list[Drawn]) -> dict[str, float]:
    """Return what a job measured: its final figures, or its latest points while it runs."""
    job = side.job
    stored = Measurement.objects.filter(attempt=job.current_attempt_id)
    final = dict(stored.values_list("metric", "measured"))
    paid = {name: cost.usd for name, cost in costs_of(job).items()}
    found = {**latest_values(job, charts), **(job.result.get("measured") or {}), **final, **paid}
    return found | figures.utilisation_of(figures.predictions(job), found)


def _cells(
    metric: str, unit: str, sides: list[Side], values: list[dict[str, float]]
) -> tuple[Cell, ...]:
    first = values[0].get(metric)
    cells = []
    for side, found in zip(sides, values, strict=True):
        said = figures.predictions(side.job).get(metric)
        measured = found.get(metric)
        cells.append(
            Cell(
                unit=unit,
                predicted=said.value if said else None,
                measured=measured,
                low=said.low if said else None,
                high=said.high if said else None,
                against_first=_change(measured, first) if side.number > 1 else "",
            )
        )
    return tuple(cells)


def _change(value: float | None, first: float | None) -> str:
    if value is None or not first:
        return ""
    share = value / first - 1
    return "the same" if abs(share) < NEARLY else signed_percent(share * 100)


def answer(sides: list[Side], rows: list[Row]) -> str:
    """Return in one sentence which job did best in the figure that stands for them all."""
    by_metric = {row.metric: row for row in rows if row.is_complete}
    row = next((by_metric[name] for name in MAIN_METRICS if name in by_metric), None)
    if row is None:
        return "No figure was measured by all of them yet."
    values = [cell.measured or 0.0 for cell in row.cells]
    is_rate = row.metric in BY_RATE
    best = values.index(max(values) if is_rate else min(values))
    worst = max(values) if not is_rate else min(values)
    unit = row.cells[best].unit
    top = values[best]
    is_time = unit == "seconds"
    word = "fastest" if row.metric != "peak_memory_bytes" else "smallest"
    factor = (top / worst if is_rate else worst / top) if worst and top else 1.0
    if factor - 1 < NEARLY:
        return f"All are alike: {row.label.lower()} {quantity(top, unit)}."
    others = [
        f"{side.letter} {'took' if is_time else 'reached'} {quantity(value, unit)}"
        for side, value in zip(sides, values, strict=True)
        if side.number != best + 1
    ]
    furthest = "up to " if len(others) > 1 else ""
    return (
        f"{sides[best].letter} is {word} with {quantity(top, unit)} ({row.label.lower()}); "
        f"{listed(others)}: {furthest}{number(factor)} times apart."
    )
