"""Published speeds, the factors fitted to them, and the rows held out."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np

from planner.catalog.engines import COMMON_SERVING, COMMON_TRAINING, wrapped_engine
from planner.fitting.decode_fitting import fit_single_stream_decode_factors, stream_report
from planner.fitting.evidence import Row, digest, latest, round_factor, table, usable
from planner.fitting.generation_peaks import generation_factors, left_out_generation, peak_cases
from planner.fitting.generation_peaks import model_of as generating_model
from planner.fitting.generation_peaks import source_of as generating_source
from planner.fitting.left_out import (
    BY_SOURCE,
    NEW_ENGINE,
    NEW_FAMILY,
    PEAK,
    STEP,
    LeftOut,
    Novelty,
    Verdict,
    engine_of,
    engine_spread,
    family_of,
    is_covered,
    left_out_peaks,
    left_out_serving,
    left_out_steps,
    model_of,
    own_spread,
    source_of,
    weighted_quantile,
)
from planner.fitting.serving_factors import (
    SEEN,
    TABLES,
    UNSEEN,
    advised_report,
    build_serving_factors,
)
from planner.fitting.serving_throughput import throughput_factors, throughput_report
from planner.fitting.step_fitting import (
    PARTS,
    Columns,
    MemoryCase,
    StepCase,
    StepFactors,
    fields_of,
    fitted_memory,
    memory_case,
    step_case,
)
from planner.specs.base import JsonObject, PlannerError
from planner.specs.estimate import ErrorClass, Estimate, EstimateRequest
from planner.workload.costing import estimate_request
from planner.workload.outcome import Z_80

# ---------------------------------------------------------------------------
# Prediction errors on rows left out of the fit, for the factor file.
# ---------------------------------------------------------------------------


P90 = 0.9
# The left-out part of each class of figure.
HELD_OUT_PARTS: dict[tuple[str, Novelty], str] = {
    ("training", SEEN): "unseen model",
    ("training", UNSEEN): "unseen source",
    ("training", NEW_FAMILY): "unseen chips",
    ("training", NEW_ENGINE): "unseen engine",
    ("generation", SEEN): "unseen model",
    ("generation", UNSEEN): "unseen source",
    ("time", SEEN): "unseen sweep",
    ("time", UNSEEN): "unseen pair",
}


def summary(errors: Iterable[float] | Columns) -> JsonObject:
    """Return count, mean, median and 90th percentile of absolute relative errors."""
    absolute = np.abs(np.asarray(list(errors), dtype=float))
    return {
        "n": len(absolute),
        "mean": round(float(absolute.mean()), 4),
        "median": round(float(np.median(absolute)), 4),
        "p90": round(float(np.quantile(absolute, P90)), 4),
    }


def rightness(verdicts: Sequence[Verdict]) -> JsonObject:
    """Return the number of verdicts, the share of correct ones, and both kinds of error.

    >>> rightness([(True, True), (True, False)])
    {'n': 2, 'right': 0.5, 'said_fits_ran_out': 1, 'refused_ran': 0}
    """
    return {
        "n": len(verdicts),
        "right": round(float(np.mean([fits == ran for fits, ran in verdicts])), 4),
        "said_fits_ran_out": sum(fits and not ran for fits, ran in verdicts),
        "refused_ran": sum(ran and not fits for fits, ran in verdicts),
    }


def title_of(row: LeftOut) -> str:
    """Return the report title of a row: its figure and the left-out part.

    >>> title_of(LeftOut("training step", "same family", "", "", "", "", 1.0, 1.0))
    'training step, unseen model'
    """
    return f"{row.figure}, {HELD_OUT_PARTS[row.figure.split()[0], row.error_class]}"


def groups_of(rows: Sequence[LeftOut]) -> dict[str, list[LeftOut]]:
    """Return rows by report title, in their own order."""
    groups: dict[str, list[LeftOut]] = {}
    for row in rows:
        groups.setdefault(title_of(row), []).append(row)
    return groups


def classes_of(rows: Sequence[LeftOut]) -> dict[str, list[LeftOut]]:
    """Return rows by report title, with dense and sparse models also separate."""
    classes = groups_of(rows)
    for title, group in tuple(classes.items()):
        for kind in sorted({row.kind for row in group} - {""}):
            classes[f"{title}, {kind}"] = [row for row in group if row.kind == kind]
    return classes


def coverage(rows: Sequence[LeftOut], among: Sequence[LeftOut] = ()) -> float:
    """Return the share of rows inside intervals fitted to other parts.

    ``among`` are the rows that determine the intervals, by default the rows themselves. Of steps
    and peaks every source weighs the same.
    """
    inside = [is_covered(row, among or rows) for row in rows]
    if rows[0].figure not in BY_SOURCE:
        return round(float(np.mean(inside)), 4)
    by_source: dict[str, list[bool]] = defaultdict(list)
    for row, is_inside in zip(rows, inside, strict=True):
        by_source[row.source].append(is_inside)
    return round(float(np.mean([np.mean(each) for each in by_source.values()])), 4)


def left_out_rows(
    memory: Sequence[MemoryCase], steps: Sequence[StepCase]
) -> tuple[list[LeftOut], dict[str, list[Verdict]]]:
    """Return every prediction of a left-out row, and each (predicted, actual) verdict."""
    rows: list[LeftOut] = []
    verdicts = {}
    classes: tuple[tuple[ErrorClass, str], ...] = ((SEEN, "model"), (UNSEEN, "source"))
    for error_class, what in classes:
        part = model_of if error_class == SEEN else source_of
        peaks, right = left_out_peaks(memory, part, error_class)
        rows += [*left_out_steps(steps, part, error_class), *peaks]
        verdicts[f"training verdict, unseen {what}"] = right
        generating = generating_model if error_class == SEEN else generating_source
        peaks, right = left_out_generation(peak_cases(), generating, error_class)
        rows += peaks
        verdicts[f"generation verdict, unseen {what}"] = right
    rows += left_out_steps(steps, family_of, NEW_FAMILY)
    rows += left_out_steps(steps, engine_of, NEW_ENGINE)
    return rows + left_out_serving(), verdicts


def report(rows: Sequence[LeftOut], verdicts: dict[str, list[Verdict]]) -> JsonObject:
    """Return errors and coverage of left-out rows, by report title."""
    errors_by_title: JsonObject = {}
    groups = groups_of(rows)
    for title, group in sorted(classes_of(rows).items()):
        among = groups.get(title.rpartition(", ")[0], group)
        errors_by_title[title] = {
            **summary(row.error for row in group),
            "covered": coverage(group, among),
        }
    return errors_by_title | {title: rightness(right) for title, right in sorted(verdicts.items())}


# ---------------------------------------------------------------------------
# Build the factor file: each engine's factors from published measurements, with inputs.
#
# ``python -m planner calibrate`` prints it; the catalog stores the last version. Spreads come from
# rows outside the fit: each model of a source is left out in turn.
# ---------------------------------------------------------------------------


Case = TypeVar("Case", MemoryCase, StepCase)
FactorsOf = Callable[[str, str], Columns]
VERSION = "factors-2"
MEMORY_INPUTS = ("memory", "memory_fit")
INPUTS = (*MEMORY_INPUTS, "training", *TABLES, "inference_other", "inference_owned")
MIN_ROWS = 10


@cache
def memory_cases() -> tuple[MemoryCase, ...]:
    """Return every usable row of the two memory tables."""
    return tuple(memory_case(row) for name in MEMORY_INPUTS for row in usable(table(name)))


def by_engine(cases: Sequence[Case]) -> dict[str, list[Case]]:
    """Return the cases of each engine, engines in alphabetical order."""
    cases_by_engine: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        cases_by_engine[case.engine].append(case)
    return dict(sorted(cases_by_engine.items()))


def memory_factors(cases: Sequence[MemoryCase], engine: str) -> dict[str, float]:
    """Return the fields of one engine that describe its training memory."""
    fitted = fields_of(fitted_memory(cases, engine))
    return {name: round_factor(value) for name, value in fitted.items()}


def spreads(rows: Sequence[LeftOut], figure: str, engine: str) -> dict[str, float]:
    """Return the log spreads of one engine's figure: of what its rows cover, and beyond.

    Beyond lies, for steps, a family of chips that the engine's rows do not cover, or any chip if
    it has no rows; for peaks any engine without rows.
    """
    beyond: Novelty = UNSEEN
    if figure == STEP:
        beyond = NEW_FAMILY if engine else NEW_ENGINE
    spread_by_class: dict[str, float] = {}
    for error_class, novelty in ((SEEN, SEEN), (UNSEEN, beyond)):
        same = [row for row in rows if (row.figure, row.error_class) == (figure, novelty)]
        least = spread_by_class.get(SEEN, 0.0)
        spread_by_class[error_class] = max(least, round_factor(engine_spread(same, engine)))
    return spread_by_class


def tool_spread(rows: Sequence[LeftOut], engine: str) -> float:
    """Return the spread of peaks over an engine's tools, each predicted from the others."""
    unseen_peaks = [row for row in rows if (row.figure, row.error_class) == (PEAK, UNSEEN)]
    return round_factor(
        own_spread([row for row in unseen_peaks if wrapped_engine(row.engine) == engine])
    )


@cache
def step_cases() -> tuple[StepCase, ...]:
    """Return every usable training row with a model of the catalog."""
    cases = []
    for row in usable(latest(table("training"))):
        if not row["step_seconds"]:
            continue
        with suppress(PlannerError):
            cases.append(step_case(row))
    return tuple(cases)


def step_factors(cases: Sequence[StepCase], factors: FactorsOf) -> dict[str, dict[str, float]]:
    """Return an engine's factors on any chip, on each chip family and on each chip."""
    chips = sorted({(case.architecture, case.device) for case in cases})
    families = {family: factors_by_part(factors(family, "")) for family, _ in chips}
    own = {chip: factors_by_part(factors(family, chip)) for family, chip in chips}
    return {"any": factors_by_part(factors("", "")), **families, **own}


def factors_by_part(factors: Columns) -> dict[str, float]:
    """Return the factors by the part that they multiply."""
    return {part: round_factor(float(value)) for part, value in zip(PARTS, factors, strict=True)}


@cache
def predictions() -> tuple[tuple[LeftOut, ...], dict[str, list[Verdict]]]:
    """Return the prediction of every row with its part left out, and every verdict."""
    rows, verdicts = left_out_rows(memory_cases(), step_cases())
    return tuple(rows), verdicts


def training_engines() -> dict[str, Any]:
    """Return every engine's fields for training memory and steps."""
    rows, _ = predictions()
    steps = step_cases()
    fitted = StepFactors(steps)
    fields_by_engine: dict[str, Any] = {
        COMMON_TRAINING: {
            "training_factors": step_factors(steps, partial(fitted.pooled.factors, "")),
            "step_spreads": {UNSEEN: spreads(rows, STEP, "")[UNSEEN]},
            "memory_spreads": {UNSEEN: spreads(rows, PEAK, "")[UNSEEN]},
        }
    }
    cases = memory_cases()
    for engine in by_engine(cases):
        widths = spreads(rows, PEAK, engine)
        if any(wrapped_engine(other) == engine for other in by_engine(cases)):
            widths[SEEN] = tool_spread(rows, engine)
        fields_by_engine[engine] = {**memory_factors(cases, engine), "memory_spreads": widths}
    for engine, runs in by_engine(steps).items():
        fields = fields_by_engine.setdefault(engine, {})
        fields["training_factors"] = step_factors(steps, partial(fitted.of, engine))
        fields["trained_on"] = sorted({run.architecture for run in runs})
        fields["step_spreads"] = spreads(rows, STEP, engine)
    return fields_by_engine


def build_factors() -> JsonObject:
    """Return the whole factor file as a document; the same inputs give the same document."""
    engines = training_engines()
    for engine, fields in build_serving_factors(COMMON_SERVING).items():
        engines.setdefault(engine, {}).update(fields)
    for engine, fields in fit_single_stream_decode_factors().items():
        engines.setdefault(engine, {}).update(fields)
    for engine, fields in generation_factors(predictions()[0]).items():
        engines.setdefault(engine, {}).update(fields)
    for engine, places in throughput_factors().items():
        engines.setdefault(engine, {})["full_factors"] = places
    return {
        "version": VERSION,
        "inputs": {f"{name}.csv": digest(name) for name in INPUTS},
        "held_out": {
            **report(*predictions()),
            **advised_report(summary),
            **stream_report(summary),
            **throughput_report(summary),
        },
        "engines": dict(sorted(engines.items())),
    }


# ---------------------------------------------------------------------------
# Evaluations on what no factor was fitted to: published speeds and layout sweeps.
# ---------------------------------------------------------------------------


# Evaluate the planner's first choice of layout on published sweeps.
#
# A sweep is one source's runs of one model, batch and number of devices. Predictions are made with
# the sweep's model left out of the fit.


SAME = (
    "source_id",
    "engine",
    "model",
    "num_attention_heads",
    "gpu",
    "num_gpus",
    "global_batch_size",
    "sequence_length",
    "precision",
    "method",
)
LAYOUT = ("tp", "pp", "micro_batch_size", "recompute", "zero_stage")
MIN_LAYOUTS = 4
CHOICE_TOLERANCE = 0.03


@dataclass(frozen=True)
class Choice:
    """The predicted best layout of a sweep, compared with the fastest measured one."""

    source: str
    model: str
    devices: int
    runs: int
    chosen: str
    best: str
    lost: float

    @property
    def is_close(self) -> bool:
        """Return whether the choice is within 3 % of the fastest."""
        return self.lost <= CHOICE_TOLERANCE


def layout_of(row: Row) -> str:
    """Return a row's layout as text.

    >>> layout_of({"tp": "2", "pp": "4", "micro_batch_size": "1", "recompute": "none",
    ...            "zero_stage": "1"})
    'tensor 2, pipeline 4, micro-batch 1, none recomputed'
    """
    return (
        f"tensor {row['tp'] or 1}, pipeline {row['pp'] or 1}, "
        f"micro-batch {row['micro_batch_size'] or '?'}, {row['recompute'] or '?'} recomputed"
    )


def choices(predictions: Iterable[LeftOut]) -> list[Choice]:
    """Return the choice in every sweep of at least four runs over at least two layouts.

    For an engine with only one model, the source is left out instead of the model.
    """
    steps = [row for row in predictions if row.figure == STEP]
    predictions_by_row: dict[str, LeftOut] = {}
    for error_class in (UNSEEN, SEEN):
        predictions_by_row |= {row.row_id: row for row in steps if row.error_class == error_class}
    sweeps: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in table("training"):
        if row["row_id"] in predictions_by_row:
            sweeps[tuple(row[name] for name in SAME)].append(row)
    valid_sweeps = (rows for _, rows in sorted(sweeps.items()) if _is_sweep(rows))
    return [_choice(rows, predictions_by_row) for rows in valid_sweeps]


def _is_sweep(rows: list[Row]) -> bool:
    layouts = {tuple(row[name] for name in LAYOUT) for row in rows}
    return len(rows) >= MIN_LAYOUTS and len(layouts) > 1


def _choice(rows: list[Row], predictions_by_row: dict[str, LeftOut]) -> Choice:
    first = min(rows, key=lambda row: predictions_by_row[row["row_id"]].predicted)
    best = min(rows, key=lambda row: predictions_by_row[row["row_id"]].measured)
    chosen_seconds, fastest = (predictions_by_row[row["row_id"]].measured for row in (first, best))
    return Choice(
        source=first["source_id"],
        model=first["model"],
        devices=int(first["num_gpus"]),
        runs=len(rows),
        chosen=layout_of(first),
        best=layout_of(best),
        lost=chosen_seconds / fastest - 1,
    )


WORDS = """Speeds of serving that others published with their conditions, asked as they were
measured and never fitted: decode time per token, or output tokens per second where only they are
stated. Every row is kept that states its conditions; none uses speculative decoding or a shared
prefix. They gave the spread by which others serve slower than the campaigns of the fit, part of
80 % intervals of serving: nine of ten lie within it, every source weighing the same. To the fast
side intervals are as wide as errors within the campaigns, for no more than one of ten was faster.
Until December 2026 intervals reached as far to both sides (0.33): time per token of sweeps in no
fit (below) lay inside in 100 of 100 cases, and of the third set in 93.
"""
FRESH_WORDS = """A third set was written down before the planner was asked, then asked once;
nothing is tuned to it. NVIDIA and Qwen publish two of its collections and are in the first line
too. What the tables do not say is assumed: SXM cards, default settings, and the lengths in each
row's notes (`planner/validation/fresh_speeds.csv`). Ratios are predicted over published
times per token.
"""


@dataclass(frozen=True)
class PublishedSpeed:
    """A published figure and its prediction; the log ratio is positive if predicted too slow.

    ``spread`` is that of errors within the campaigns of the fit, which counts both ways.
    """

    row: Row
    log_ratio: float
    spread: float
    is_covered: bool

    @property
    def error(self) -> float:
        """Return the relative error of the predicted time per token."""
        return math.expm1(self.log_ratio)

    @property
    def between_sources(self) -> float:
        """Return the least spread to the slow side with which the interval holds the figure."""
        slower = max(0.0, -self.log_ratio) / Z_80
        return math.sqrt(max(0.0, slower**2 - self.spread**2))


def source_name(text: str) -> str:
    """Return the collection of a source: its repository or site.

    >>> source_name("QwenLM/Qwen3@c7f51a1 docs/speed.md"), source_name("vllm-project/vllm pull 1")
    ('QwenLM/Qwen3', 'vllm-project/vllm')
    """
    return text.split("@", maxsplit=1)[0].split(" ", maxsplit=1)[0].split("/p/", maxsplit=1)[0]


def collection_of(row: Row) -> str:
    """Return the collection of a row."""
    return source_name(row["source"])


def load_of(row: Row) -> str:
    """Return the load of a row in words."""
    return "one request at a time" if int(row["concurrency"]) == 1 else "several requests"


def question_of(row: Row) -> EstimateRequest:
    """Return a row as a question; copies within one tensor group share the attention."""
    tensor, data = int(row["tensor_parallel_size"]), int(row["data_parallel_size"])
    shared = tensor == int(row["gpus"])
    question: dict[str, Any] = {
        "model": row["model"],
        "cluster": {"device": row["gpu"], "devices_per_node": int(row["gpus"]), "nodes": 1},
        "workload": {
            "kind": "serve",
            **{name: int(row[name]) for name in ("input_tokens", "output_tokens", "concurrency")},
        },
        "strategy": {
            "tensor_parallel_size": tensor,
            "attention_data_parallel_size" if shared else "data_parallel_size": data,
            "expert_parallel_size": int(row["expert_parallel_size"]),
            "kv_cache_dtype": row["kv_cache_dtype"] or None,
            "quantization": row.get("quantization") or None,
        },
        "engine": row["engine"],
    }
    return EstimateRequest.model_validate(question)


def compare_row(row: Row, answer: Estimate) -> PublishedSpeed:
    """Return a published row with its prediction: time per token, or rate of all requests."""
    if row["tpot_ms"]:
        name, sign, measured = "tpot_seconds", 1, float(row["tpot_ms"]) / 1e3
    else:
        name, sign = "output_tokens_per_second", -1
        measured = float(row["output_tokens_per_second"])
    predicted, (low, high) = getattr(answer.performance, name), answer.interval[name]
    faster = predicted / low if sign > 0 else high / predicted
    return PublishedSpeed(
        row,
        sign * math.log(predicted / measured),
        math.log(faster) / Z_80,
        low <= measured <= high,
    )


@cache
def published_speeds() -> tuple[PublishedSpeed, ...]:
    """Return every published speed with the planner's prediction of it."""
    rows = table("published_speeds")
    return tuple(
        compare_row(row, estimate_request(question_of(row), explain=False)) for row in rows
    )


@cache
def fresh_speeds() -> tuple[tuple[PublishedSpeed, ...], tuple[Row, ...]]:
    """Return the rows written down before they were asked: with predictions, and refused ones."""
    speeds, refused = [], []
    for row in table("fresh_speeds"):
        try:
            answer = estimate_request(question_of(row), explain=False)
        except PlannerError:
            refused.append(row)
        else:
            speeds.append(compare_row(row, answer))
    return tuple(speeds), tuple(refused)


def source_spread(speeds: Sequence[PublishedSpeed]) -> float:
    """Return the spread to the slow side that one of ten figures exceeds, sources alike."""
    needed = np.array([speed.between_sources for speed in speeds])
    return weighted_quantile(needed, [collection_of(speed.row) for speed in speeds], P90)


def share_inside(speeds: Sequence[PublishedSpeed]) -> float:
    """Return the share of figures inside their intervals, sources weighing alike."""
    by_source: dict[str, list[bool]] = defaultdict(list)
    for speed in speeds:
        by_source[collection_of(speed.row)].append(speed.is_covered)
    return float(np.mean([np.mean(each) for each in by_source.values()]))


def share_inside_without_own() -> float:
    """Return the share of published figures inside intervals that their sources did not set."""
    shares = []
    for source in {collection_of(speed.row) for speed in published_speeds()}:
        own = [speed for speed in published_speeds() if collection_of(speed.row) == source]
        rest = [speed for speed in published_speeds() if collection_of(speed.row) != source]
        width = source_spread(rest)
        within = [
            speed.between_sources <= width and speed.log_ratio <= Z_80 * speed.spread
            for speed in own
        ]
        shares.append(np.mean(within))
    return float(np.mean(shares))


def published_section() -> str:
    """Return the errors of the published speeds as a section of the accuracy page."""
    lines = [
        "## Published speeds of others\n",
        WORDS,
        "| Sources | n | Mean | Median | 90th percentile | Inside 80 % intervals, sources alike | set without their own source |",  # noqa: E501 -- a row of a table
        "|---|---|---|---|---|---|---|",
    ]
    speeds = published_speeds()
    sources = sorted({collection_of(speed.row) for speed in speeds})
    s = summary([speed.error for speed in speeds])
    shares = " | ".join(f"{s[key]:.1%}" for key in ("mean", "median", "p90"))
    inside = f"{share_inside(speeds):.1%} | {share_inside_without_own():.1%}"
    lines.append(f"| {', '.join(sources)} | {s['n']} | {shares} | {inside} |")
    return "\n".join(lines) + "\n\n" + fresh_section()


def fresh_section() -> str:
    """Return the errors of the third set by engine and by source."""
    speeds, refused = fresh_speeds()
    groups: dict[str, list[PublishedSpeed]] = defaultdict(list)
    for name_of in (lambda row: row["engine"], load_of, collection_of, lambda _: "all"):
        for speed in speeds:
            groups[name_of(speed.row)].append(speed)
    lines = [
        FRESH_WORDS,
        "| Rows of | n | Median | 90th percentile | Median ratio | Inside 80 % intervals |",
        "|---|---|---|---|---|---|",
    ]
    for name, group in groups.items():
        s = summary([speed.error for speed in group])
        ratio = math.exp(float(np.median([speed.log_ratio for speed in group])))
        covered = sum(speed.is_covered for speed in group) / len(group)
        shares = f"{s['median']:.1%} | {s['p90']:.1%} | {ratio:.2f} | {covered:.1%}"
        lines.append(f"| {name} | {s['n']} | {shares} |")
    if refused:
        asked = "; ".join(f"{row['model']} on {row['gpus']} {row['gpu']}" for row in refused)
        lines.append(f"\nPublished but refused by the planner: {asked}.")
    return "\n".join(lines) + "\n"
