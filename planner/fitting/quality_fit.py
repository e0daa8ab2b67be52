"""Fit quality loss and duration of compression to published rows."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from statistics import median
from typing import get_args

import numpy as np

from planner.catalog.engines import UNTRIED_SPREAD, factor_of
from planner.catalog.quality import (
    REFERENCE_BILLIONS,
    TAIL,
    KindFit,
    QualityFit,
    QualityRow,
    fitted_quality,
    kind_of,
    quality_rows,
    scheme_quality,
)
from planner.cost.weights import RECIPES
from planner.fitting.evidence import Row, leave_one_group_out, number, table
from planner.fitting.published_speeds import summary
from planner.specs.base import JsonObject
from planner.specs.estimate import Estimate, EstimateRequest
from planner.specs.workload import CompressMethod
from planner.workload.costing import estimate_request
from planner.workload.outcome import Z_80

# ---------------------------------------------------------------------------
# Fit quality losses to published tables, and write the page of the fit's errors.
# ---------------------------------------------------------------------------


HELD_OUT = frozenset(
    {"efficientqat-readme", "matt-c1-mmlu", "llamacpp-l3-70b-dranger003", "flatquant-readme"}
)
# Prior spreads: families about zero, schemes about their median, and the slope; and its prior.
FAMILY_SPREAD, SCHEME_SPREAD, SLOPE_SPREAD, SLOPE_PRIOR = 0.5, 3.0, 0.2, -0.25
HUBER, ROUNDS = 1.5, 12
TO_DEVIATION = 1.4826  # from the median absolute residual
LEAST_SPREAD, DEFAULT_SPREAD, MOST_SPREAD, FEWEST_RESIDUALS = 0.1, 0.6, 1.0, 5


def fit_quality(rows: Iterable[QualityRow]) -> QualityFit:
    """Return the effects fitted to published perplexity rows, per kind."""
    used = [row for row in rows if row.metric == "perplexity"]
    kinds = {}
    for kind in sorted({kind_of(row.scheme) for row in used}):
        of_kind = [row for row in used if kind_of(row.scheme) == kind]
        fitted = _fit_kind(of_kind)
        own = _left_out(of_kind, lambda row: row.source)
        borrowed = _left_out(of_kind, lambda row: row.family)
        kinds[kind] = replace(fitted, spread=own, borrowed_spread=borrowed)
    return QualityFit(kinds)


def _fit_kind(rows: list[QualityRow]) -> KindFit:
    """Fit one kind by iteratively reweighted ridge regression."""
    schemes = sorted({row.scheme for row in rows})
    families = sorted({row.family for row in rows})
    design = np.zeros((len(rows), len(schemes) + len(families) + 1))
    target = np.array([row.log_loss for row in rows])
    for index, row in enumerate(rows):
        design[index, schemes.index(row.scheme)] = 1.0
        design[index, len(schemes) + families.index(row.family)] = 1.0
        design[index, -1] = np.log(row.billions / REFERENCE_BILLIONS)
    middle = float(np.median(target))
    prior = np.array([middle] * len(schemes) + [0.0] * len(families) + [SLOPE_PRIOR])
    widths = [SCHEME_SPREAD] * len(schemes) + [FAMILY_SPREAD] * len(families) + [SLOPE_SPREAD]
    effects = _reweighted(design, target, prior, np.array(widths))
    return KindFit(
        schemes=dict(zip(schemes, effects, strict=False)),
        families=dict(zip(families, effects[len(schemes) :], strict=False)),
        slope=min(0.0, effects[-1]),
        pairs=tuple(sorted({f"{row.scheme} {row.family}" for row in rows})),
    )


def _reweighted(
    design: np.ndarray, target: np.ndarray, prior: np.ndarray, widths: np.ndarray
) -> list[float]:
    """Return the effects; outliers get less weight in each round."""
    weights, effects, spread = np.ones(len(target)), prior, 1.0
    for _ in range(ROUNDS):
        penalty = np.diag((spread / widths) ** 2)
        weighted = design * weights[:, None]
        normal_matrix = weighted.T @ design + penalty
        effects = np.linalg.solve(normal_matrix, weighted.T @ target + penalty @ prior)
        residuals = target - design @ effects
        spread = max(TO_DEVIATION * float(np.median(np.abs(residuals))), LEAST_SPREAD)
        weights = 1.0 / np.maximum(np.abs(residuals) / (HUBER * spread), 1.0)
    return [round(float(effect), 5) for effect in effects]


def _left_out(rows: list[QualityRow], group_of: Callable[[QualityRow], str]) -> float:
    residuals = []
    for _, left_out_rows, rest in leave_one_group_out(rows, group_of):
        if not rest:
            continue
        fit = _fit_kind(rest)
        residuals += [
            abs(row.log_loss - fit.log_loss(row.scheme, row.family, row.billions))
            for row in left_out_rows
            if row.scheme in fit.schemes
        ]
    if len(residuals) < FEWEST_RESIDUALS:
        return DEFAULT_SPREAD
    return round(min(max(float(np.quantile(residuals, 0.8)) / TAIL, LEAST_SPREAD), MOST_SPREAD), 5)


def build_quality() -> JsonObject:
    """Return the fit without held-out sources, in the format of the shipped file."""
    fit = fit_quality(row for row in quality_rows() if row.source not in HELD_OUT)
    return {"held_out": sorted(HELD_OUT), "kinds": {k: asdict(v) for k, v in fit.kinds.items()}}


@dataclass(frozen=True)
class HeldOutQuality:
    """The prediction errors for one held-out source."""

    source: str
    rows: int
    unknown: int
    median_error: float | None
    covered: float | None


def held_out_quality() -> tuple[HeldOutQuality, ...]:
    """Return, per held-out source, the number of unknown pairs and the errors of the others.

    Errors are relative to the perplexity: 0.01 is one per cent.
    """
    fit, by_source = fitted_quality(), []
    for source in sorted(HELD_OUT):
        rows = [
            row for row in quality_rows() if row.source == source and row.metric == "perplexity"
        ]
        pairs = [(fit.ratio(row.scheme, row.family, row.billions), row.ratio) for row in rows]
        predicted_pairs = [(predicted, true) for predicted, true in pairs if predicted]
        errors = [abs(predicted[1] / true - 1) for predicted, true in predicted_pairs]
        inside = [predicted[0] <= true <= predicted[2] for predicted, true in predicted_pairs]
        by_source.append(
            HeldOutQuality(
                source=source,
                rows=len(rows),
                unknown=len(rows) - len(predicted_pairs),
                median_error=median(errors) if errors else None,
                covered=sum(inside) / len(inside) if inside else None,
            )
        )
    return tuple(by_source)


# Write the quality page: the error of the predicted loss on sources outside the fit.


SHOWN = ("gguf:q8_0", "gguf:q4_k_m", "gguf:q2_k", "gptq-4g", "awq-4g", "nf4", "smoothquant")
MODELS = (("llama-2", 7.0), ("llama-2", 70.0), ("llama-3", 8.0), ("qwen", 7.0))
HEAD = """# Quality

What compression costs, from published tables: the perplexity of the compressed model over that of
the same source's uncompressed one. `planner/catalog/data/quality.csv` holds the rows and
`quality_sources.csv` where they are from. `python -m planner quality` writes this page, and a test
holds it to that. An interval holds four fifths of what sources that a fit did not see say; a
family without rows of a scheme borrows those of others, for a wider one; a scheme without rows is
unknown.
"""


def quality_page() -> str:
    """Return the quality page as Markdown, recomputed from the rows."""
    lines = [HEAD, "## Sources left out of the fit\n"]
    lines += ["| Source | Rows | Unknown pairs | Median error | Inside the interval |"]
    lines += ["|---|---|---|---|---|"]
    for entry in held_out_quality():
        error = "" if entry.median_error is None else f"{entry.median_error:.1%}"
        covered = "" if entry.covered is None else f"{entry.covered:.0%}"
        lines.append(f"| {entry.source} | {entry.rows} | {entry.unknown} | {error} | {covered} |")
    lines += ["\n## What to expect\n"]
    titles = " | ".join(f"{family} {billions:g}B" for family, billions in MODELS)
    lines += [f"| Scheme | {titles} |", "|---" * (len(MODELS) + 1) + "|"]
    lines += [f"| {scheme} | {_cells(scheme)} |" for scheme in SHOWN]
    return "\n".join(lines) + "\n"


def _cells(scheme: str) -> str:
    """Return the low, expected and high perplexity ratio of a scheme for each model."""
    cells = []
    for family, billions in MODELS:
        ratio = scheme_quality(scheme, family, billions).perplexity_ratio
        cells.append(" / ".join(f"{end:.3f}" for end in ratio) if ratio else "unknown")
    return " | ".join(cells)


# ---------------------------------------------------------------------------
# Fit compression times to published times, and evaluate the fit with whole sources left out.
#
# Similar methods share one factor: the weighted median of their sources' factors, shrunk towards
# the physics with the weight of one vague source. Its spread covers four fifths of the rows of
# left-out sources.
# ---------------------------------------------------------------------------


TABLE = "compression"
# Weight of an approximate source ("about") and of the physics, relative to a source with timed
# runs.
VAGUE, VAGUE_WEIGHT, PRIOR_WEIGHT = "about", 0.25, 0.25
LEAST_DURATION_SPREAD, FOUR_FIFTHS = 0.1, 0.8
AT_MOST = "<"
# Rounding is limited by the disk, which no source names: there is nothing to fit.
UNFITTED = frozenset({"rounding"})


@dataclass(frozen=True)
class Case:
    """One published time, and its uncalibrated estimate."""

    row: Row
    estimate: Estimate

    @property
    def method_group(self) -> str:
        """Return the group of methods that shares the case's factor."""
        return RECIPES[self.row["method"]].method_group

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
        if self.method_group not in UNFITTED:
            predicted -= sum(term.value for term in self.estimate.terms if term.key == "disk")
        return float(np.log(self.seconds / predicted * factor_of(self.method_group)))


def compress_request(row: Row) -> JsonObject:
    """Return the planner's request for one published compression time, as JSON.

    Bits, group size and calibration tokens that the source does not state are left out.
    """
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


def has_supported_method(row: Row) -> bool:
    """Return whether the planner supports the row's method."""
    return row["method"] in get_args(CompressMethod)


@cache
def cases() -> tuple[Case, ...]:
    """Return every published time of a supported method, without upper bounds."""
    rows = [
        row for row in table(TABLE) if has_supported_method(row) and row["relation"] != AT_MOST
    ]
    return tuple(Case(row, _estimated(row)) for row in rows)


def log_factor(fitted_cases: Iterable[Case]) -> float:
    """Return the logarithm of the factor fitted to some cases."""
    by_source: dict[str, list[Case]] = defaultdict(list)
    for case in fitted_cases:
        if case.method_group not in UNFITTED:
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


def weighted_median(weighted_values: Sequence[tuple[float, float]]) -> float:
    """Return the weighted median, the mean of two values on a tie.

    >>> weighted_median([(1.0, 1.0), (2.0, 0.25), (9.0, 0.25)])
    1.0
    """
    half = sum(weight for _, weight in weighted_values) / 2
    below, medians = 0.0, []
    for value, weight in sorted(weighted_values):
        if below <= half <= below + weight:
            medians.append(value)
        below += weight
    return sum(medians) / len(medians)


def left_out(fitted_cases: Sequence[Case]) -> list[tuple[Case, float]]:
    """Return each case with its log error when its whole source is left out of the fit."""
    errors = []
    for case in fitted_cases:
        others = [other for other in fitted_cases if other.source != case.source]
        errors.append((case, log_factor(others) - case.log_ratio))
    return errors


def kinds() -> dict[str, list[Case]]:
    """Return the cases by group of methods."""
    cases_by_kind: dict[str, list[Case]] = defaultdict(list)
    for case in cases():
        cases_by_kind[case.method_group].append(case)
    return dict(sorted(cases_by_kind.items()))


def spread_left(errors: Sequence[float], sources: int) -> float:
    """Return the log spread that covers four fifths of left-out errors; needs two sources."""
    if sources == 1:
        return UNTRIED_SPREAD
    return max(LEAST_DURATION_SPREAD, float(np.quantile(np.abs(errors), FOUR_FIFTHS)) / Z_80)


def build_compression() -> JsonObject:
    """Return the factors of all groups of methods, in the format of the shipped file."""
    methods: JsonObject = {}
    for method_group, found in kinds().items():
        sources = sorted({case.source for case in found})
        errors = [error for _, error in left_out(found)]
        methods[method_group] = {
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
    for method_group, row in build_compression()["methods"].items():
        interval_factor = float(np.exp(Z_80 * row["spread"]))
        lines.append(
            f"| {method_group.replace('_', ' ')} | {len(row['sources'])} | {row['n']} | "
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
        if not has_supported_method(row):
            reason = row["notes"].partition("not compared: ")[2]
            counts[f"{row['method'].replace('_', ' ')}: {reason}"] += 1
    return [f"- Not compared, {count} rows of {words}." for words, count in counts.items()]
