"""Fit compression times to published times, and evaluate the fit with whole sources left out.

Similar methods share one factor: the weighted median of their sources' factors, shrunk towards the
physics with the weight of one vague source. Its spread covers four fifths of the rows of left-out
sources.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import get_args

import numpy as np

from planner.catalog.engines import UNTRIED_SPREAD, factor_of
from planner.cost.compression import RECIPES
from planner.fitting.evidence import Row, number, table
from planner.fitting.held_out import summary
from planner.specs.base import JsonObject
from planner.specs.estimate import Estimate, EstimateRequest
from planner.specs.workload import CompressMethod
from planner.workload.estimator import estimate_request
from planner.workload.outcome import Z_80

TABLE = "compression"
# Weight of an approximate source ("about") and of the physics, relative to a source with timed
# runs.
VAGUE, VAGUE_WEIGHT, PRIOR_WEIGHT = "about", 0.25, 0.25
LEAST_SPREAD, FOUR_FIFTHS = 0.1, 0.8
AT_MOST = "<"
# Rounding is limited by the disk, which no source names: there is nothing to fit.
UNFITTED = frozenset({"rounding"})
GIGA = 1e9


@dataclass(frozen=True)
class Case:
    """One published time, and its uncalibrated estimate."""

    row: Row
    estimate: Estimate

    @property
    def alike(self) -> str:
        """Return the group of methods that shares the case's factor."""
        return RECIPES[self.row["method"]].alike

    @property
    def source(self) -> str:
        """Return the publishing source."""
        return self.row["source"]

    @property
    def seconds(self) -> float:
        """Return the published seconds."""
        return number(self.row, "seconds")

    @property
    def weight(self) -> float:
        """Return the weight of the source."""
        return VAGUE_WEIGHT if self.row["notes"].startswith(VAGUE) else 1.0

    @property
    def log_ratio(self) -> float:
        """Return the logarithm of published over uncalibrated time.

        Published times exclude reading and writing the checkpoint, except for rounding, which does
        little else.
        """
        predicted = self.estimate.performance.duration_seconds or 0.0
        if self.alike not in UNFITTED:
            predicted -= sum(term.value for term in self.estimate.terms if term.key == "disk")
        return float(np.log(self.seconds / predicted * factor_of(self.alike)))


def compress_request(row: Row) -> JsonObject:
    """Return a row as a request; unstated fields take the method's default."""
    stated = ("bits", "group_size", "calibration_tokens")
    work = {name: int(row[name]) for name in stated if row[name]}
    return {
        "id": row["row_id"],
        "model": row["model"],
        "cluster": {"device": row["device"], "devices_per_node": int(row["devices"])},
        "workload": {"kind": "compress", "method": row["method"], **work},
        "strategy": {"data_parallel_size": int(row["devices"])},
        "engine": "transformers",
    }


def _estimated(row: Row) -> Estimate:
    return estimate_request(EstimateRequest.model_validate(compress_request(row)))


def compared(row: Row) -> bool:
    """Return whether the planner supports the row's method."""
    return row["method"] in get_args(CompressMethod)


@cache
def cases() -> tuple[Case, ...]:
    """Return every published time of a supported method, without upper bounds."""
    rows = [row for row in table(TABLE) if compared(row) and row["relation"] != AT_MOST]
    return tuple(Case(row, _estimated(row)) for row in rows)


def log_factor(found: Iterable[Case]) -> float:
    """Return the logarithm of the factor fitted to some cases."""
    by_source: dict[str, list[Case]] = defaultdict(list)
    for case in found:
        if case.alike not in UNFITTED:
            by_source[case.source].append(case)
    weighted = [
        (_source_median(own), max(case.weight for case in own)) for own in by_source.values()
    ]
    total_weight = sum(weight for _, weight in weighted)
    return (
        weighted_median(weighted) * total_weight / (total_weight + PRIOR_WEIGHT)
        if weighted
        else 0.0
    )


def _source_median(cases_of_source: Iterable[Case]) -> float:
    """Return the median over a source's models; runs of one model count once."""
    by_model: dict[str, list[float]] = defaultdict(list)
    for case in cases_of_source:
        by_model[case.row["model"]].append(case.log_ratio)
    return median(median(ratios) for ratios in by_model.values())


def weighted_median(told: Sequence[tuple[float, float]]) -> float:
    """Return the weighted median, the mean of two values on a tie.

    >>> weighted_median([(1.0, 1.0), (2.0, 0.25), (9.0, 0.25)])
    1.0
    """
    half = sum(weight for _, weight in told) / 2
    below, medians = 0.0, []
    for value, weight in sorted(told):
        if below <= half <= below + weight:
            medians.append(value)
        below += weight
    return sum(medians) / len(medians)


def left_out(found: Sequence[Case]) -> list[tuple[Case, float]]:
    """Return each case with its log error when its whole source is left out of the fit."""
    errors = []
    for case in found:
        others = [other for other in found if other.source != case.source]
        errors.append((case, log_factor(others) - case.log_ratio))
    return errors


def kinds() -> dict[str, list[Case]]:
    """Return the cases by group of methods."""
    cases_by_kind: dict[str, list[Case]] = defaultdict(list)
    for case in cases():
        cases_by_kind[case.alike].append(case)
    return dict(sorted(cases_by_kind.items()))


def spread_left(errors: Sequence[float], sources: int) -> float:
    """Return the log spread that covers four fifths of left-out errors; needs two sources."""
    if sources == 1:
        return UNTRIED_SPREAD
    return max(LEAST_SPREAD, float(np.quantile(np.abs(errors), FOUR_FIFTHS)) / Z_80)


def build_compression() -> JsonObject:
    """Return the factors of all groups of methods, in the format of the shipped file."""
    methods: JsonObject = {}
    for alike, found in kinds().items():
        sources = sorted({case.source for case in found})
        errors = [error for _, error in left_out(found)]
        methods[alike] = {
            "factor": round(float(np.exp(log_factor(found))), 4),
            "spread": round(spread_left(errors, len(sources)), 4),
            "n": len(found),
            "sources": sources,
            "left_out": summary(np.exp(error) - 1 for error in errors),
        }
    return {"table": TABLE, "methods": methods}


def compression_section() -> str:
    """Return published and predicted times and memory of compression, as Markdown."""
    lines = [
        "## Compression jobs\n",
        "Published times and peaks of device memory against the planner's. Left out means",
        "that the factor of a row's kind of method never saw its source; a kind with one source",
        "alone has only the physics to go by then. Devices that a source does not name are",
        "assumed (`planner/validation/compression.csv` says so row by row).\n",
        "| Methods | Sources | n | Factor | Median left out | 90th percentile | 80 % interval |",
        "|---|---|---|---|---|---|---|",
    ]
    for alike, row in build_compression()["methods"].items():
        interval_factor = float(np.exp(Z_80 * row["spread"]))
        lines.append(
            f"| {alike.replace('_', ' ')} | {len(row['sources'])} | {row['n']} | "
            f"{row['factor']:.2f} | {row['left_out']['median']:.1%} | {row['left_out']['p90']:.1%}"
            f" | by a factor of {interval_factor:.2f} |"
        )
    lines += ["", _memory_line(), "", *_bounds(), "", *_not_compared()]
    return "\n".join(lines) + "\n"


def _memory_line() -> str:
    errors = [
        case.estimate.memory.per_device_peak_bytes / number(case.row, "peak_memory_bytes") - 1
        for case in cases()
        if case.row["peak_memory_bytes"]
    ]
    stats = summary(errors)
    return (
        f"Peak memory of the device: {stats['n']} rows, median error {stats['median']:.1%}, 90th "
        f"percentile {stats['p90']:.1%}."
    )


def _bounds() -> list[str]:
    """Return the published upper bounds with the predicted times."""
    lines = []
    for row in table(TABLE):
        if row["relation"] == AT_MOST:
            hours = (_estimated(row).performance.duration_seconds or 0.0) / 3600
            published = number(row, "seconds") / 3600
            lines.append(
                f"- {row['method']} of {row['model']}: published as under {published:.1f} h, "
                f"predicted {hours:.1f} h ({row['source_path']})."
            )
    return lines


def _not_compared() -> list[str]:
    counts: dict[str, int] = defaultdict(int)
    for row in table(TABLE):
        if not compared(row):
            reason = row["notes"].partition("not compared: ")[2]
            counts[f"{row['method'].replace('_', ' ')}: {reason}"] += 1
    return [f"- Not compared, {count} rows of {words}." for words, count in counts.items()]
