"""Fit quality losses to published tables, and write the page of the fit's errors."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from statistics import median

import numpy as np

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
from planner.specs.base import JsonObject

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
        own, borrowed = _unseen_spreads(of_kind)
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


def _unseen_spreads(rows: list[QualityRow]) -> tuple[float, float]:
    """Return the spread of residuals with sources, and with families, left out."""
    return _left_out(rows, lambda row: row.source), _left_out(rows, lambda row: row.family)


def _left_out(rows: list[QualityRow], group_of: Callable[[QualityRow], str]) -> float:
    residuals = []
    for group in sorted({group_of(row) for row in rows}):
        rest = [row for row in rows if group_of(row) != group]
        if not rest:
            continue
        fit = _fit_kind(rest)
        residuals += [
            abs(row.log_loss - fit.log_loss(row.scheme, row.family, row.billions))
            for row in rows
            if group_of(row) == group and row.scheme in fit.schemes
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
