"""Published peaks of batch generation: requests, fit, predictions and contradictions."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from planner.fitting.evidence import (
    USUAL_TOKENS,
    Row,
    cluster_of,
    leave_one_group_out,
    model_named,
    number,
    round_factor,
    table,
)
from planner.fitting.left_out import GENERATION_PEAK, LeftOut, Verdict, spread_of
from planner.fitting.serving_factors import SEEN, UNSEEN
from planner.specs.base import JsonObject
from planner.specs.estimate import ErrorClass, EstimateRequest
from planner.specs.units import GIB, GIGA
from planner.workload.cluster import resolve_device
from planner.workload.costing import estimate_request
from planner.workload.inference_memory import usable_bytes
from planner.workload.resolve import resolve

OVERHEAD = "runtime_overhead"
# Prior of an engine's memory in addition to tensors, and its scale (distance per unit of loss).
PRIOR_BYTES, SCALE_BYTES = GIB, 4 * GIB
# From this date, releases compute logits of only the last prompt token.
SAMPLES_ALONE_SINCE = "2024-09"
BEFORE = {"transformers": "transformers_4.40"}
UNGROUPED, WHOLE_ROWS = " g- ", 16384  # one scale for all inputs of an output


@dataclass(frozen=True)
class PeakCase:
    """One row: tensor bytes, and the measured peak; zero if the row only states a verdict."""

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
    """Return the engine of a row, in the release of the row's date."""
    old = row["source_date"] < SAMPLES_ALONE_SINCE
    return BEFORE.get(row["engine"], row["engine"]) if old else row["engine"]


def strategy_of(row: Row) -> JsonObject:
    """Return a row's formats, with its layers split over the devices."""
    strategy: JsonObject = {
        "attention": "eager" if row["attention"] == "eager" else "flash",
        "pipeline_parallel_size": int(number(row, "num_gpus", 1)),
        "data_parallel_size": 1,
    }
    if row["quantization"]:
        strategy["quantization"] = row["quantization"]
    if UNGROUPED in row["quantization"]:
        strategy["group_size"] = WHOLE_ROWS
    if not row["quantization"] or row["quantization"].startswith("kv-"):
        strategy["weight_dtype"] = row["precision"]
    return strategy


def generation_request(row: Row) -> JsonObject:
    """Return a memory row as a request; unstated lengths take usual values."""
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
    """Return a row with its tensor bytes, averaged over devices as sources print it.

    A verdict uses the fullest device instead.
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
    """Yield the generation rows of both memory tables."""
    for name in ("memory", "memory_fit"):
        yield from (row for row in table(name) if row["kind"] == "generate")


@cache
def peak_cases() -> tuple[PeakCase, ...]:
    """Return every generation row with its tensor bytes."""
    return tuple(peak_case(row) for row in generation_rows())


def fit_overhead(cases: Sequence[PeakCase]) -> float:
    """Return the overhead bytes of least summed log error, shrunk towards the prior.

    Sources weigh the same. The loss is piecewise linear with kinks where a row is matched exactly,
    so the optimum is one of these points.
    """
    measured = [case for case in cases if case.measured_bytes]
    if not measured:
        return PRIOR_BYTES
    counts = Counter(case.source for case in measured)
    weights = np.array([len(measured) / counts[case.source] for case in measured]) / len(counts)
    tensors = np.array([case.tensor_bytes for case in measured])
    truth = np.array([case.measured_bytes for case in measured])
    candidates = np.unique(np.append(np.maximum(truth - tensors, 0.0), PRIOR_BYTES))
    errors = np.abs(np.log((tensors + candidates[:, None]) / truth))
    regrets = errors @ weights + np.abs(candidates - PRIOR_BYTES) / SCALE_BYTES
    return float(candidates[np.argmin(regrets)])


def model_of(case: PeakCase) -> str:
    """Return the part of a row when models are left out."""
    return case.model


def source_of(case: PeakCase) -> str:
    """Return the part of a row when sources are left out."""
    return case.source


def comparable_peaks(case: PeakCase, others: Sequence[PeakCase]) -> list[PeakCase]:
    """Return the peaks of the case's engine and definition, or of all engines if none."""
    same = [o for o in others if o.measured_bytes and o.by_allocator == case.by_allocator]
    return [other for other in same if other.engine == case.engine] or same


def left_out_generation(
    cases: Sequence[PeakCase], part_of: Callable[[PeakCase], str], error_class: ErrorClass
) -> tuple[list[LeftOut], list[Verdict]]:
    """Return every peak predicted without its part, and each (predicted, actual) verdict.

    Peaks use their source's definition; a verdict concerns the device.
    """
    predictions, verdicts = [], []
    for part, own, rest in leave_one_group_out(cases, part_of):
        for case in own:
            peak = case.tensor_bytes + fit_overhead(comparable_peaks(case, rest))
            if not case.measured_bytes:
                verdicts.append((peak <= case.usable_bytes, case.ran))
                continue
            predictions.append(
                LeftOut(
                    GENERATION_PEAK,
                    error_class,
                    case.row_id,
                    case.engine,
                    case.source,
                    part,
                    case.measured_bytes,
                    round_factor(peak),
                )
            )
    return predictions, verdicts


def generation_factors(rows: Sequence[LeftOut]) -> dict[str, dict[str, Any]]:
    """Return by engine the memory overhead in bytes and the spreads of predicted peaks.

    The peaks are those of generation, with models that the fit has seen and that it has not.
    """
    peaks = [row for row in rows if row.figure == GENERATION_PEAK]
    spreads = {
        name: round_factor(spread_of([r for r in peaks if r.error_class == name]))
        for name in (SEEN, UNSEEN)
    }
    fields_by_engine: dict[str, dict[str, Any]] = {}
    cases = peak_cases()
    for engine in sorted({case.engine for case in cases}):
        own = [case for case in cases if case.engine == engine]
        overhead = fit_overhead([case for case in own if case.by_allocator] or own)
        fields_by_engine[engine] = {
            "generation_overhead_bytes": round_factor(overhead),
            "generation_spreads": spreads,
        }
    return fields_by_engine


# Contradictions among published peaks: pairs of rows that no formula can reproduce together.
#
# With everything else equal, more tokens on a device never need less memory, and no device holds
# more than its capacity. Rows that violate this remain in every fit and score; this module lists
# them.


# Columns for the work per device, and columns that do not describe the setting.
SIZES = ("micro_batch_size", "sequence_length", "batch_size", "input_tokens", "output_tokens")
REMARKS = (
    "row_id",
    "source_date",
    "source_url_or_repo_path",
    "global_batch_size",
    "peak_memory_bytes",
    "step_seconds",
    "notes",
)
MARGIN = 0.02  # published figures have two or three digits


@dataclass(frozen=True)
class Contradiction:
    """Two rows of one setting: the row with more work has the lower published peak."""

    source: str
    less: Row
    more: Row

    @property
    def gap(self) -> float:
        """Return the relative excess of the smaller run's published peak."""
        return number(self.less, "peak_memory_bytes") / number(self.more, "peak_memory_bytes") - 1


def settings(rows: Sequence[Row]) -> dict[tuple[str, ...], list[Row]]:
    """Return rows grouped by everything except the size of their work."""
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        fixed = (value for name, value in row.items() if name not in {*SIZES, *REMARKS})
        remarks = row["notes"].split(";")
        # The remarks that describe the setting: targets, kernels, optimiser.
        kept = [word for word in remarks if "samples/s" not in word and "token" not in word]
        groups[(*fixed, ";".join(kept))].append(row)
    return groups


def contradictions(rows: Sequence[Row]) -> Iterator[Contradiction]:
    """Yield the worst contradicting pair of each row with less work."""
    for same_setting in settings(rows).values():
        for less in same_setting:
            pairs = [
                Contradiction(less["source_id"], less, m)
                for m in same_setting
                if _works_more(m, less)
            ]
            worst = max(pairs, key=lambda pair: pair.gap, default=None)
            if worst is not None and worst.gap > MARGIN:
                yield worst


def _works_more(row: Row, other: Row) -> bool:
    """Return whether another row has at least as much work in every size."""
    sizes = [(number(row, name), number(other, name)) for name in SIZES]
    return row is not other and all(more >= less for more, less in sizes)


def rows_over_device_memory(rows: Sequence[Row]) -> Iterator[tuple[Row, float]]:
    """Yield rows with a published peak above the device memory, with that memory."""
    for row in rows:
        device = resolve_device(cluster_of(row)["device"])
        if number(row, "peak_memory_bytes") > device.memory_bytes:
            yield row, float(device.memory_bytes)


def section() -> str:
    """Return the accuracy page's section on contradictory peaks."""
    rows = table("memory")
    lines = [
        "## Peaks that contradict themselves\n",
        "Everything else alike, the run with more tokens was printed with less memory. Of such a",
        "pair one row must be missed by at least half the gap. They stay in every figure above.\n",
        "| Source | Model | Tokens | Printed | Tokens | Printed | Gap |",
        "|---|---|---|---|---|---|---|",
    ]
    for pair in sorted(contradictions(rows), key=lambda pair: -pair.gap):
        sides = " | ".join(
            f"{_work_text(row)} | {_peak_text(row)}" for row in (pair.less, pair.more)
        )
        model = model_named(pair.less["model"])
        lines.append(f"| {pair.source} | {model} | {sides} | {pair.gap:.0%} |")
    lines += [
        "",
        "Printed with more than the device has:\n",
        "| Source | Model | Printed | Device |",
    ]
    lines.append("|---|---|---|---|")
    for row, capacity in rows_over_device_memory(rows):
        model = model_named(row["model"])
        lines.append(
            f"| {row['source_id']} | {model} | {_peak_text(row)} | {capacity / GIGA:.1f} GB |"
        )
    return "\n".join(lines) + "\n"


def _work_text(row: Row) -> str:
    if row["sequence_length"]:
        return f"{int(number(row, 'micro_batch_size', 1))} x {row['sequence_length']}"
    tokens = int(number(row, "input_tokens")) + int(number(row, "output_tokens"))
    return f"{int(number(row, 'batch_size', 1))} x {tokens}"


def _peak_text(row: Row) -> str:
    return f"{number(row, 'peak_memory_bytes') / GIGA:.1f} GB"
