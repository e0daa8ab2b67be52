"""Published peaks of generating one batch: asked, fitted and foreseen with their model left out.

Everything but one figure is physics: weights, caches, the widest step. What an engine holds beside
its tensors is fitted, apart for sources that print what the allocator handed out and for those
that print what the whole device shows, context and unfilled blocks included.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from planner.evidence import Row, number, table
from planner.inference_evidence import USUAL_TOKENS, model_named
from planner.left_out import DIGITS, LeftOut, Verdict, spread_of
from planner.serving_factors import SEEN, UNSEEN
from planner.specs.base import JsonObject
from planner.specs.estimate import ErrorClass, EstimateRequest
from planner.workload.estimator import estimate_request
from planner.workload.inference_memory import usable_bytes
from planner.workload.resolve import resolve

GENERATION_PEAK = "generation peak"
OVERHEAD = "runtime_overhead"
GIB = float(1024**3)
# What an engine holds beside tensors before anything is measured, and how far from it one unit of
# regret lies: a row that is off by this share weighs as much.
PRIOR_BYTES, SCALE_BYTES = GIB, 4 * GIB
# Releases from then on compute the logits of a prompt's last token alone.
SAMPLES_ALONE_SINCE = "2024-09"
BEFORE = {"transformers": "transformers_4.40"}
UNGROUPED, WHOLE_ROWS = " g- ", 16384  # one scale for all inputs of an output


@dataclass(frozen=True)
class PeakCase:
    """One row: the bytes of all but the runtime, and the truth; none where it only says it ran."""

    row_id: str
    engine: str
    source: str
    model: str
    tensor_bytes: float
    usable_bytes: float
    measured_bytes: float
    ran: bool
    by_allocator: bool


def engine_of(row: Row) -> str:
    """Return the engine of a row in the release of its date."""
    old = row["source_date"] < SAMPLES_ALONE_SINCE
    return BEFORE.get(row["engine"], row["engine"]) if old else row["engine"]


def strategy_of(row: Row) -> JsonObject:
    """Return a row's formats as it names them, and its layers split over the devices."""
    found: JsonObject = {
        "attention": "eager" if row["attention"] == "eager" else "flash",
        "pipeline_parallel_size": int(number(row, "num_gpus", 1)),
        "data_parallel_size": 1,
    }
    if row["quantization"]:
        found["quantization"] = row["quantization"]
    if UNGROUPED in row["quantization"]:
        found["group_size"] = WHOLE_ROWS
    if not row["quantization"] or row["quantization"].startswith("kv-"):
        found["weight_dtype"] = row["precision"]
    return found


def generation_request(row: Row) -> JsonObject:
    """Return a row of a memory table as an estimate's request; unstated lengths are usual ones."""
    devices = int(number(row, "num_gpus", 1))
    return {
        "id": row["row_id"],
        "model": model_named(row["model"]),
        "cluster": {"device": row["gpu"].lower(), "devices_per_node": devices},
        "workload": {
            "kind": "generate",
            "batch_size": int(number(row, "batch_size", 1)),
            "input_tokens": int(number(row, "input_tokens", USUAL_TOKENS)),
            "output_tokens": max(2, int(number(row, "output_tokens", USUAL_TOKENS))),
        },
        "strategy": strategy_of(row),
        "engine": engine_of(row),
    }


def peak_case(row: Row) -> PeakCase:
    """Return a row with what its tensors take, the mean over its devices as the sources print it.

    A verdict needs the fullest device instead.
    """
    request = EstimateRequest.model_validate(generation_request(row))
    memory = estimate_request(request, explain=False).memory
    measured = number(row, "peak_memory_bytes")
    stages = memory.per_stage_peak_bytes or (memory.per_device_peak_bytes,)
    peak = float(np.mean(stages)) if measured else float(max(stages))
    return PeakCase(
        row_id=row["row_id"],
        engine=engine_of(row),
        source=row["source_id"],
        model=model_named(row["model"]),
        tensor_bytes=peak - memory.breakdown_bytes.get(OVERHEAD, 0),
        usable_bytes=usable_bytes(resolve(request)),
        measured_bytes=measured,
        ran=row.get("fits", "true") == "true",
        by_allocator="allocated" in row.get("memory_definition", ""),
    )


def generation_rows() -> Iterator[Row]:
    """Yield the rows that generate, of both memory tables."""
    for name in ("memory", "memory_fit"):
        yield from (row for row in table(name) if row["kind"] == "generate")


@cache
def peak_cases() -> tuple[PeakCase, ...]:
    """Return every row that generates, with what its tensors take."""
    return tuple(peak_case(row) for row in generation_rows())


def fit_overhead(cases: Sequence[PeakCase]) -> float:
    """Return the bytes beside tensors of least summed log error, drawn to what is usual.

    Sources count alike. The sum bends only where a row comes out exactly: one of these is best.
    """
    measured = [case for case in cases if case.measured_bytes]
    if not measured:
        return PRIOR_BYTES
    counts = Counter(case.source for case in measured)
    weights = np.array([len(measured) / counts[case.source] for case in measured]) / len(counts)
    tensors = np.array([case.tensor_bytes for case in measured])
    truth = np.array([case.measured_bytes for case in measured])
    tried = np.unique(np.append(np.maximum(truth - tensors, 0.0), PRIOR_BYTES))
    errors = np.abs(np.log((tensors + tried[:, None]) / truth))
    regrets = errors @ weights + np.abs(tried - PRIOR_BYTES) / SCALE_BYTES
    return float(tried[np.argmin(regrets)])


def model_of(case: PeakCase) -> str:
    """Return what a row belongs to when models are left out."""
    return case.model


def source_of(case: PeakCase) -> str:
    """Return what a row belongs to when sources are left out."""
    return case.source


def alike(case: PeakCase, others: Sequence[PeakCase]) -> list[PeakCase]:
    """Return the peaks of the case's engine in its definition; of all engines if it has none."""
    same = [o for o in others if o.measured_bytes and o.by_allocator == case.by_allocator]
    return [other for other in same if other.engine == case.engine] or same


def left_out_generation(
    cases: Sequence[PeakCase], part_of: Callable[[PeakCase], str], error_class: ErrorClass
) -> tuple[list[LeftOut], list[Verdict]]:
    """Return every peak, predicted without its part, and each verdict: what was said, what was.

    Rows are compared in their source's own definition of a peak; a verdict is about the device.
    """
    found, verdicts = [], []
    for part in sorted({part_of(case) for case in cases}):
        rest = [case for case in cases if part_of(case) != part]
        for case in (case for case in cases if part_of(case) == part):
            peak = case.tensor_bytes + fit_overhead(alike(case, rest))
            if not case.measured_bytes:
                verdicts.append((peak <= case.usable_bytes, case.ran))
                continue
            found.append(
                LeftOut(
                    GENERATION_PEAK,
                    error_class,
                    case.row_id,
                    case.engine,
                    case.source,
                    part,
                    case.measured_bytes,
                    float(f"{peak:.{DIGITS}g}"),
                )
            )
    return found, verdicts


def generation_factors(rows: Sequence[LeftOut]) -> dict[str, dict[str, Any]]:
    """Return the fields of every engine that describe the peaks of generation."""
    peaks = [row for row in rows if row.figure == GENERATION_PEAK]
    spreads = {
        name: float(f"{spread_of([r for r in peaks if r.error_class == name]):.{DIGITS}g}")
        for name in (SEEN, UNSEEN)
    }
    found: dict[str, dict[str, Any]] = {}
    cases = peak_cases()
    for engine in sorted({case.engine for case in cases}):
        own = [case for case in cases if case.engine == engine]
        overhead = fit_overhead([case for case in own if case.by_allocator] or own)
        found[engine] = {
            "generation_overhead_bytes": float(f"{overhead:.{DIGITS}g}"),
            "generation_spreads": spreads,
        }
    return found
