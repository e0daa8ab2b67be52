"""Fits how long compression takes to published times, and holds whole sources against the fit.

Methods that do alike share one factor: the weighted median of their sources' own, drawn to the
physics by a vague source's weight. Its spread is what holds four fifths of the rows of sources
left out.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import get_args

import numpy as np

from planner.catalog.compression import UNTRIED_SPREAD, factor_of
from planner.cost.compression import RECIPES
from planner.evidence import Row, number, table
from planner.held_out import summary
from planner.specs.base import JsonObject
from planner.specs.estimate import Estimate, EstimateRequest
from planner.specs.workload import CompressMethod
from planner.workload.estimator import estimate_request
from planner.workload.intervals import Z_80

TABLE = "compression"
# A source that says "about", as of a typical run, counts a quarter of one that timed runs; so does
# the physics alone.
VAGUE, VAGUE_WEIGHT, PRIOR_WEIGHT = "about", 0.25, 0.25
LEAST_SPREAD, FOUR_FIFTHS = 0.1, 0.8
AT_MOST = "<"
# Rounding takes what the disk takes, and no source names its disk: there is nothing to fit.
UNFITTED = frozenset({"rounding"})
GIGA = 1e9


@dataclass(frozen=True)
class Case:
    """One published time, and what the physics says of it before any factor."""

    row: Row
    estimate: Estimate

    @property
    def alike(self) -> str:
        """Return the kind of method that the time speaks for."""
        return RECIPES[self.row["method"]].alike

    @property
    def source(self) -> str:
        """Return who published it."""
        return self.row["source"]

    @property
    def seconds(self) -> float:
        """Return the published seconds."""
        return number(self.row, "seconds")

    @property
    def weight(self) -> float:
        """Return how much the source counts."""
        return VAGUE_WEIGHT if self.row["notes"].startswith(VAGUE) else 1.0

    @property
    def log_ratio(self) -> float:
        """Return the logarithm of the published time over the physics' own.

        Published times are of the work on the weights, without reading or writing the checkpoint,
        but for rounding, which does little else.
        """
        predicted = self.estimate.performance.duration_seconds or 0.0
        if self.alike not in UNFITTED:
            predicted -= sum(term.value for term in self.estimate.terms if term.key == "disk")
        return float(np.log(self.seconds / predicted * factor_of(self.alike)))


def compress_request(row: Row) -> JsonObject:
    """Return a row as a request; what it does not say takes the method's default."""
    said = ("bits", "group_size", "calibration_tokens")
    work = {name: int(row[name]) for name in said if row[name]}
    return {
        "id": row["row_id"],
        "model": row["model"],
        "cluster": {"device": row["device"], "devices_per_node": int(row["devices"])},
        "workload": {"kind": "compress", "method": row["method"], **work},
        "strategy": {"data_parallel_size": int(row["devices"])},
        "engine": "transformers",
    }


def _costed(row: Row) -> Estimate:
    return estimate_request(EstimateRequest.model_validate(compress_request(row)))


def compared(row: Row) -> bool:
    """Return whether the planner has the row's method."""
    return row["method"] in get_args(CompressMethod)


@cache
def cases() -> tuple[Case, ...]:
    """Return every published time of a method that the planner has, bounds left out."""
    rows = [row for row in table(TABLE) if compared(row) and row["relation"] != AT_MOST]
    return tuple(Case(row, _costed(row)) for row in rows)


def log_factor(found: Iterable[Case]) -> float:
    """Return the logarithm of the factor that some cases give."""
    by_source: dict[str, list[Case]] = defaultdict(list)
    for case in found:
        if case.alike not in UNFITTED:
            by_source[case.source].append(case)
    told = [(_of_source(own), max(case.weight for case in own)) for own in by_source.values()]
    whole = sum(weight for _, weight in told)
    return weighted_median(told) * whole / (whole + PRIOR_WEIGHT) if told else 0.0


def _of_source(found: Iterable[Case]) -> float:
    """Return the median over a source's models: runs of one model are near-copies."""
    by_model: dict[str, list[float]] = defaultdict(list)
    for case in found:
        by_model[case.row["model"]].append(case.log_ratio)
    return median(median(ratios) for ratios in by_model.values())


def weighted_median(told: Sequence[tuple[float, float]]) -> float:
    """Return the value with half of the weight on either side, the mean of two where they tie.

    >>> weighted_median([(1.0, 1.0), (2.0, 0.25), (9.0, 0.25)])
    1.0
    """
    half = sum(weight for _, weight in told) / 2
    below, kept = 0.0, []
    for value, weight in sorted(told):
        if below <= half <= below + weight:
            kept.append(value)
        below += weight
    return sum(kept) / len(kept)


def left_out(found: Sequence[Case]) -> list[tuple[Case, float]]:
    """Return each case with its log error when its whole source is left out of the fit."""
    told = []
    for case in found:
        others = [other for other in found if other.source != case.source]
        told.append((case, log_factor(others) - case.log_ratio))
    return told


def kinds() -> dict[str, list[Case]]:
    """Return the cases by the kind of method that they speak for."""
    found: dict[str, list[Case]] = defaultdict(list)
    for case in cases():
        found[case.alike].append(case)
    return dict(sorted(found.items()))


def spread_left(errors: Sequence[float], sources: int) -> float:
    """Return the log spread that holds four fifths of left-out errors; one source is no test."""
    if sources == 1:
        return UNTRIED_SPREAD
    return max(LEAST_SPREAD, float(np.quantile(np.abs(errors), FOUR_FIFTHS)) / Z_80)


def build_compression() -> JsonObject:
    """Return the factors of all kinds of methods, as the shipped file has them."""
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
    """Return published times and memory of compression beside the planner's, as Markdown."""
    lines = [
        "## Compression jobs\n",
        "Published times and peaks of device memory against the planner's. Left out means",
        "that the factor of a row's kind of method never saw its source; a kind with one source",
        "alone has only the physics to go by then. Devices that a source does not name are",
        "assumed (`planner/validation/compression.csv` says so row by row).\n",
        "| Methods | Sources | n | Factor | Median left out | 90th percentile | 80 % interval |",
        "|---|---|---|---|---|---|---|",
    ]
    for alike, one in build_compression()["methods"].items():
        reach = float(np.exp(Z_80 * one["spread"]))
        lines.append(
            f"| {alike.replace('_', ' ')} | {len(one['sources'])} | {one['n']} | "
            f"{one['factor']:.2f} | {one['left_out']['median']:.1%} | {one['left_out']['p90']:.1%}"
            f" | by a factor of {reach:.2f} |"
        )
    lines += ["", _memory_line(), "", *_bounds(), "", *_not_compared()]
    return "\n".join(lines) + "\n"


def _memory_line() -> str:
    errors = [
        case.estimate.memory.per_device_peak_bytes / number(case.row, "peak_memory_bytes") - 1
        for case in cases()
        if case.row["peak_memory_bytes"]
    ]
    found = summary(errors)
    return (
        f"Peak memory of the device: {found['n']} rows, median error {found['median']:.1%}, 90th "
        f"percentile {found['p90']:.1%}."
    )


def _bounds() -> list[str]:
    """Return the published upper bounds beside what the planner says."""
    lines = []
    for row in table(TABLE):
        if row["relation"] == AT_MOST:
            hours = (_costed(row).performance.duration_seconds or 0.0) / 3600
            published = number(row, "seconds") / 3600
            lines.append(
                f"- {row['method']} of {row['model']}: published as under {published:.1f} h, "
                f"predicted {hours:.1f} h ({row['source_path']})."
            )
    return lines


def _not_compared() -> list[str]:
    kept: dict[str, int] = defaultdict(int)
    for row in table(TABLE):
        if not compared(row):
            reason = row["notes"].partition("not compared: ")[2]
            kept[f"{row['method'].replace('_', ' ')}: {reason}"] += 1
    return [f"- Not compared, {count} rows of {words}." for words, count in kept.items()]
