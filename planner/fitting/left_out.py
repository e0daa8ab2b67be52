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
from planner.fitting.step_fitting import MemoryCase, StepCase, StepFactors, fitted_memory
from planner.specs.estimate import ErrorClass

STEP, PEAK = "training step", "training peak"
TPOT, TTFT = "time per output token", "time to first token"
TABLE = "left_out.csv"
COVERED = 0.8
Z_80 = 1.2816
MIN_ROWS = 10


# (predicted to fit, ran).
Verdict = tuple[bool, bool]


@dataclass(frozen=True)
class LeftOut:
    """One measured figure, and its prediction with its part left out of the fit.

    ``kind`` separates dense models from mixtures, if both were measured.
    """

    figure: str
    error_class: ErrorClass
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


def left_out_steps(
    cases: Sequence[StepCase], part_of: Callable[[StepCase], str], error_class: ErrorClass
) -> list[LeftOut]:
    """Return every run, predicted without its part.

    A part that holds all runs of its engine does not test seen engines: it counts only where
    sources are left out.
    """
    predictions = []
    for part, runs, rest in leave_one_group_out(cases, part_of):
        fitted_engines = {case.engine for case in rest}
        factors = StepFactors(rest)
        for case in runs:
            if error_class == SEEN and case.engine not in fitted_engines:
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
    error_class: ErrorClass,
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

    Sources of training peaks measured between one and seventy rows, with correlated errors: there
    every part counts once.
    """
    distances = np.array([row.distance for row in rows])
    if rows[0].figure != PEAK:
        return float(np.quantile(distances, COVERED)) / Z_80
    counts = Counter(row.part for row in rows)
    order = np.argsort(distances)
    shares = np.array([1 / counts[row.part] for row in rows])[order].cumsum() / len(counts)
    reached = min(int(np.searchsorted(shares, COVERED)), len(rows) - 1)
    return float(distances[order][reached]) / Z_80


def interval_rows(row: LeftOut, rows: Sequence[LeftOut]) -> list[LeftOut]:
    """Return the rows whose errors set the 80 % interval of a row.

    These are the rows of the same figure, error class and kind of model; if engines of the fit
    are tested, only those of the row's engine, where there are at least ``MIN_ROWS``.
    """
    row_class = (row.figure, row.error_class, row.kind)
    same = [other for other in rows if (other.figure, other.error_class, other.kind) == row_class]
    if row.error_class == UNSEEN:
        return same
    own = [other for other in same if other.engine == row.engine]
    return own if len(own) >= MIN_ROWS else same


def is_covered(row: LeftOut, rows: Sequence[LeftOut]) -> bool:
    """Return whether a row lies inside an 80 % interval fitted without its part."""
    others = [other for other in interval_rows(row, rows) if other.part != row.part]
    others = others or [other for other in rows if other.part != row.part]
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
            error_class=SEEN if row["error_class"] == SEEN else UNSEEN,
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
