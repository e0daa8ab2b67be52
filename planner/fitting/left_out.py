"""Predictions of rows outside the fit: whole models, sources, sweeps or pairs left out.

The accuracy page's left-out errors, interval coverage, layout choices and pictures come from
these.
"""

import csv
import io
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from functools import cache
from typing import Final, Literal, get_args

import numpy as np

from planner.catalog.engines import wrapped_engine
from planner.fitting.evidence import FOLDER, leave_one_group_out, round_factor
from planner.fitting.serving_factors import (
    SEEN,
    UNSEEN,
    fold_of,
    group_of,
    held_out,
    kind_of,
    serving_cases,
)
from planner.fitting.step_fitting import (
    Columns,
    MemoryCase,
    StepCase,
    StepFactors,
    fitted_memory,
)
from planner.specs.estimate import ErrorClass

STEP, PEAK, GENERATION_PEAK = "training step", "training peak", "generation peak"
TPOT, TTFT = "time per output token", "time to first token"
TABLE = "left_out.csv"
COVERED = 0.8
Z_80 = 1.2816
MIN_ROWS = 10
ROUNDING = 1e-9
# What a fit has not seen: a model of the engine, or whole sources; for steps, too, the chips of
# the engine, or the engine.
Novelty = ErrorClass | Literal["new family", "new engine"]
NEW_FAMILY: Final = "new family"
NEW_ENGINE: Final = "new engine"
NOVELTIES: dict[str, Novelty] = {
    name: name for names in get_args(Novelty) for name in get_args(names)
}
# Figures whose sources hold between one row and hundreds, with correlated errors.
BY_SOURCE = frozenset({STEP, PEAK, GENERATION_PEAK})


# (predicted to fit, ran).
Verdict = tuple[bool, bool]


@dataclass(frozen=True)
class LeftOut:
    """One measured figure, and its prediction with its part left out of the fit.

    ``kind`` separates dense models from mixtures, if both were measured.
    """

    figure: str
    error_class: Novelty
    row_id: str
    engine: str
    source: str
    part: str
    measured: float
    predicted: float
    kind: str = ""

    @property
    def error(self) -> float:
        """Return the relative error."""
        return self.predicted / self.measured - 1

    @property
    def distance(self) -> float:
        """Return the absolute log ratio of prediction and measurement."""
        return abs(math.log(self.predicted / self.measured))


def model_of(case: MemoryCase | StepCase) -> str:
    """Return the part of a row when models are left out."""
    return case.group


def source_of(case: MemoryCase | StepCase) -> str:
    """Return the part of a row when sources are left out."""
    return case.source


def family_of(case: StepCase) -> str:
    """Return the part of a row when an engine's chips of one family are left out."""
    return f"{case.engine} on {case.architecture}"


def engine_of(case: StepCase) -> str:
    """Return the part of a row when engines are left out."""
    return case.engine


def left_out_steps(
    cases: Sequence[StepCase], part_of: Callable[[StepCase], str], error_class: Novelty
) -> list[LeftOut]:
    """Return every run, predicted without its part.

    A part that holds all runs of its engine does not test seen engines: it counts only where
    sources or engines are left out.
    """
    predictions = []
    for part, runs, rest in leave_one_group_out(cases, part_of):
        fitted_engines = {case.engine for case in rest}
        factors = StepFactors(rest)
        for case in runs:
            if error_class in {SEEN, NEW_FAMILY} and case.engine not in fitted_engines:
                continue
            seconds = factors.step_s(case)
            predictions.append(_row(STEP, error_class, case, part, case.measured_s, seconds))
    return predictions


def left_out_peaks(
    cases: Sequence[MemoryCase], part_of: Callable[[MemoryCase], str], error_class: ErrorClass
) -> tuple[list[LeftOut], list[Verdict]]:
    """Return every peak predicted without its part, and each (predicted, actual) verdict."""
    predictions, verdicts = [], []
    for engine in sorted({case.engine for case in cases}):
        own = [case for case in cases if case.engine == engine]
        for part in sorted({part_of(case) for case in own}):
            rest = [case for case in cases if part_of(case) != part]
            fitted_engines = {wrapped_engine(case.engine) or case.engine for case in rest}
            if error_class == SEEN and (wrapped_engine(engine) or engine) not in fitted_engines:
                continue
            factors = fitted_memory(rest, engine)
            for case in (case for case in own if part_of(case) == part):
                peak = case.peak_bytes(factors)
                if case.measured_bytes:
                    predictions.append(
                        _row(PEAK, error_class, case, part, case.measured_bytes, peak)
                    )
                else:
                    verdicts.append((peak <= case.usable_bytes, case.ran))
    return predictions, verdicts


def _row(
    figure: str,
    error_class: Novelty,
    case: MemoryCase | StepCase,
    part: str,
    measured: float,
    predicted: float,
) -> LeftOut:
    return LeftOut(
        figure,
        error_class,
        case.row_id,
        case.engine,
        case.source,
        part,
        measured,
        round_factor(predicted),
    )


def left_out_serving() -> list[LeftOut]:
    """Return both times of every serving point, predicted without its sweeps or pair."""
    predictions = []
    for error_class, part_of in ((SEEN, fold_of), (UNSEEN, group_of)):
        tpots, ttfts, order = held_out(serving_cases(), part_of)
        for figure, errors in ((TPOT, tpots), (TTFT, ttfts)):
            for error, case in zip(errors, order, strict=True):
                if figure == TTFT and not case.counts_ttft:
                    continue
                measured = case.tpot_s if figure == TPOT else case.ttft_s
                predicted = round_factor(measured * (1 + error))
                predictions.append(
                    LeftOut(
                        figure,
                        error_class,
                        case.row_id,
                        case.engine,
                        case.group,
                        part_of(case),
                        measured,
                        predicted,
                        kind_of(case),
                    )
                )
    return predictions


def spread_of(rows: Sequence[LeftOut]) -> float:
    """Return the log spread whose 80 % interval covers four fifths of these rows.

    Of steps and peaks every source weighs the same, and the quantile is the one that holds a
    further source in four of five cases, 0.8 (n + 1) / n of n sources (split conformal prediction;
    Vovk et al. 2005); not where an engine's own rows widen the interval (``engine_spread``).
    """
    distances = np.array([row.distance for row in rows])
    if rows[0].figure not in BY_SOURCE:
        return float(np.quantile(distances, COVERED)) / Z_80
    num_sources, level = len({row.source for row in rows}), COVERED
    if not _widened_by_own(rows[0]):
        level = min(1.0, COVERED * (num_sources + 1) / num_sources)
    return weighted_quantile(distances, [row.source for row in rows], level) / Z_80


def _widened_by_own(row: LeftOut) -> bool:
    return row.error_class == SEEN and row.figure in {STEP, PEAK}


def own_spread(rows: Sequence[LeftOut]) -> float:
    """Return the log spread of one engine's rows, of whose peaks every part weighs the same."""
    distances = np.array([row.distance for row in rows])
    if rows[0].figure != PEAK:
        return float(np.quantile(distances, COVERED)) / Z_80
    return weighted_quantile(distances, [row.part for row in rows], COVERED) / Z_80


def weighted_quantile(distances: Columns, groups: Sequence[str], level: float) -> float:
    """Return the smallest distance within which lies this share, every group weighing the same."""
    counts = Counter(groups)
    order = np.argsort(distances)
    shares = np.array([1 / counts[group] for group in groups])[order].cumsum() / len(counts)
    reached = min(int(np.searchsorted(shares, level - ROUNDING)), len(groups) - 1)
    return float(distances[order][reached])


def engine_spread(rows: Sequence[LeftOut], engine: str, without: str = "") -> float:
    """Return the log spread of an engine's figure among rows of one class.

    The calm rows of one campaign do not narrow it below that of all engines, for they say nothing
    of the next campaign; restless ones widen it. The source ``without`` has no say in the former.
    """
    widths = [spread_of([row for row in rows if row.source != without] or rows)]
    own = [row for row in rows if row.engine == engine]
    if len(own) >= MIN_ROWS and _widened_by_own(rows[0]):
        widths.append(own_spread(own))
    return max(widths)


def class_of(row: LeftOut, rows: Sequence[LeftOut]) -> list[LeftOut]:
    """Return the rows of the same figure, novelty and kind of model."""
    row_class = (row.figure, row.error_class, row.kind)
    return [other for other in rows if (other.figure, other.error_class, other.kind) == row_class]


def is_covered(row: LeftOut, rows: Sequence[LeftOut]) -> bool:
    """Return whether a row lies inside an 80 % interval set without its part.

    Of steps and peaks, its source has no say in the width of all engines either.
    """
    others = [other for other in class_of(row, rows) if other.part != row.part]
    others = others or [other for other in rows if other.part != row.part]
    if row.figure in BY_SOURCE:
        return row.distance <= Z_80 * engine_spread(others, row.engine, without=row.source)
    return row.distance <= Z_80 * spread_of(others)


def to_csv(rows: Sequence[LeftOut]) -> str:
    """Return rows as CSV text."""
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow(field.name for field in fields(LeftOut))
    writer.writerows(astuple(row) for row in rows)
    return sink.getvalue()


@cache
def kept_rows() -> tuple[LeftOut, ...]:
    """Return the stored predictions of the last calibration."""
    with (FOLDER / TABLE).open(encoding="utf-8", newline="") as file:
        rows = tuple(csv.DictReader(file))
    return tuple(
        LeftOut(
            figure=row["figure"],
            error_class=NOVELTIES[row["error_class"]],
            row_id=row["row_id"],
            engine=row["engine"],
            source=row["source"],
            part=row["part"],
            measured=float(row["measured"]),
            predicted=float(row["predicted"]),
            kind=row["kind"],
        )
        for row in rows
    )
