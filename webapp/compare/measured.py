"""Predicted and measured figures of several jobs, one row per figure."""

from collections.abc import Iterator
from dataclasses import dataclass

from webapp.compare.jobs import Side
from webapp.core.display import quantity
from webapp.core.units import Quantity, number, signed_percent
from webapp.core.wording import listed
from webapp.figures.registry import MAIN_FIGURES, REGISTRY, definition_of
from webapp.jobs.measured_figures import JobFigure, JobFigures
from webapp.jobs.memory_terms import TermRow, story_of

RUN_TIME = "run_seconds"
NEARLY = 0.005  # smaller relative changes count as equal


@dataclass(frozen=True)
class Cell:
    """One figure of one job; None for missing values."""

    unit: str
    predicted: float | None
    measured: float | None
    ratio: float | None  # measured / predicted, once it can be evaluated
    place: str  # position of the measured value relative to the 80 % interval
    against_first: str  # change against the first job, such as "+12 %"; "" for the first
    state_words: str = ""

    @property
    def shown(self) -> Quantity | None:
        """Return the measured value, formatted."""
        return None if self.measured is None else quantity(self.measured, self.unit)

    @property
    def predicted_words(self) -> str:
        """Return the predicted value as text."""
        return "" if self.predicted is None else str(quantity(self.predicted, self.unit))


@dataclass(frozen=True)
class Row:
    """One figure of all jobs."""

    metric: str
    label: str
    cells: tuple[Cell, ...]

    @property
    def is_complete(self) -> bool:
        """Return whether every job measured it."""
        return all(cell.measured is not None for cell in self.cells)


def rows_of(sides: list[Side], figures: list[JobFigures]) -> list[Row]:
    """Return every figure that is predicted or measured for at least one job."""
    names = [*REGISTRY, *(name for each_job in figures for name in each_job)]
    rows = []
    for name in dict.fromkeys(names):
        if name == RUN_TIME:
            continue  # shown with the jobs themselves
        cells = [each_job.get(name) for each_job in figures]
        if any(cells):
            definition = next(each.definition for each in cells if each)
            rows.append(Row(name, definition.label, tuple(_cells(cells))))
    return rows + _rank_rows(sides)


def _cells(figures: list[JobFigure | None]) -> Iterator[Cell]:
    first = figures[0].measured if figures[0] else None
    for at, each in enumerate(figures):
        if each is None:
            yield Cell("", None, None, None, "", "")
            continue
        yield Cell(
            unit=each.unit,
            predicted=each.predicted_value,
            measured=each.measured,
            ratio=each.ratio,
            place=f"{each.place} the interval" if each.place else "",
            against_first=_change(each.measured, first) if at else "",
            state_words=each.state_words,
        )


def _rank_rows(sides: list[Side]) -> list[Row]:
    """Return the memory terms of a rank, if all jobs are training runs on several ranks."""
    if not all(side.job.is_shared_out and side.job.kind == "train" for side in sides):
        return []
    stories = [story_of(side.job) for side in sides]
    terms = [
        {row.term: row for row in story.rows if not row.is_rest} if story else {}
        for story in stories
    ]
    names = {term: row.name for rank_terms in terms for term, row in rank_terms.items()}
    return [
        Row(
            term,
            f"{name} on a rank",
            tuple(_rank_cells([rank_terms.get(term) for rank_terms in terms])),
        )
        for term, name in names.items()
    ]


def _rank_cells(rows: list[TermRow | None]) -> Iterator[Cell]:
    first = rows[0].measured if rows[0] else None
    for at, row in enumerate(rows):
        measured = row.measured if row else None
        against = _change(measured, first) if at else ""
        predicted, ratio = (row.predicted, row.ratio) if row else (None, None)
        yield Cell("bytes", predicted, measured, ratio, "", against)


def _change(value: float | None, first: float | None) -> str:
    if value is None or not first:
        return ""
    share = value / first - 1
    return "the same" if abs(share) < NEARLY else signed_percent(share * 100)


def answer(sides: list[Side], rows: list[Row]) -> str:
    """Return a sentence on the best job in the first main figure that all jobs measured."""
    by_metric = {row.metric: row for row in rows if row.is_complete}
    row = next((by_metric[name] for name in MAIN_FIGURES if name in by_metric), None)
    if row is None:
        return "No figure was measured by all of them yet."
    values = [cell.measured or 0.0 for cell in row.cells]
    is_rate = definition_of(row.metric).better == "higher"
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
