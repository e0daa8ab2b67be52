"""Fits the parts of full batches to published throughput tables, engine by engine.

A full batch is two kinds of steps: mixed ones, that read prompts beside decoding, and packed ones,
that only decode. Each part of a step has a factor; a table shows the sum of all steps, so that a
weighted least-absolute fit finds the factors at once, and every table's group of a model on a chip
weighs the same however many rows it has. Chips shrink towards their engine.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from scipy.optimize import linprog

from planner.catalog.engines import COMMON_SERVING
from planner.cost.equation import Ledger
from planner.evidence import Row
from planner.fitting import Columns
from planner.serving_cases import PART_BY_NAME
from planner.specs.base import JsonObject
from planner.specs.estimate import EstimateRequest
from planner.specs.workload import ServeWorkload
from planner.throughput_rows import (
    kind_of,
    layouts_of,
    measured_of,
    throughput_request,
    throughput_rows,
)
from planner.workload.resolve import resolve
from planner.workload.saturated import BESIDE, MIXED, PACKED
from planner.workload.serve import serve

FULL = frozenset({"full batch", "burst"})
NAMES = {
    **PART_BY_NAME,
    "Experts": "experts",
    "Issuing further operators": "further",
    "Moving tokens to and from experts": "routing",
}
# Each factor, the ledger's parts that it multiplies, its prior and its least and largest value.
# A routed token's state is written and read a handful of times: sorted, quantised, sent, summed.
SHARED = {
    "routing": (10.0, 1.0, 80.0),
    "expert_exchange": (1.0, 0.25, 8.0),
    "issue": (1.0, 0.1, 10.0),
    "further": (1.0, 0.1, 10.0),
    "scheduling": (1.0, 0.1, 50.0),
    "requests": (1.0, 0.1, 50.0),
}
# What a full batch hardly shows stays near the physics; what its many requests cost shows more.
STIFF = {"issue": 10.0, "scheduling": 10.0, "requests": 5.0}
OWN = {
    (MIXED, "linear"): (1.0, 0.8, 4.0),
    (PACKED, "linear"): (1.0, 0.8, 4.0),
    (MIXED, "experts"): (2.0, 0.8, 15.0),
    (PACKED, "experts"): (1.5, 0.8, 6.0),
    (MIXED, "attention"): (2.0, 0.5, 8.0),
    (PACKED, "attention"): (0.8, 0.56, 4.0),
    (MIXED, "elementwise"): (1.0, 0.25, 12.0),
    (PACKED, "elementwise"): (1.0, 0.25, 12.0),
    (MIXED, "tensor_parallel"): (1.2, 0.5, 6.0),
    (PACKED, "tensor_parallel"): (2.0, 0.5, 6.0),
}
PARTS = (*(f"{group}_{part}" for group, part in OWN), *SHARED)
BOUNDS = np.array([*OWN.values(), *SHARED.values()])
PRIOR, LEAST, MOST = BOUNDS.T
RIDGE = 0.03
STIFFNESS = np.array([STIFF.get(part, 1.0) for part in PARTS])
NEUTRAL: dict[str, object] = {
    "serving_factors": {},
    "full_factors": {"any": {f"{group}_routing": 1.0 for group in (MIXED, PACKED)}},
    "stream_factors": {},
}


@dataclass(frozen=True, eq=False)
class FullBatch:
    """One measured row: the seconds of each part at factor 1, and the seconds that it took."""

    engine: str
    source: str
    model: str
    device: str
    architecture: str
    seconds: Columns
    measured_s: float

    @property
    def group(self) -> str:
        """Return what rows of one table share: they weigh together as a few."""
        return f"{self.source}/{self.model}/{self.device}"

    def error(self, factors: Columns) -> float:
        """Return by which share the predicted throughput is off."""
        return self.measured_s / float(self.seconds @ factors) - 1


def full_batch(row: Row) -> FullBatch:
    """Return a row as the parts that an uncalibrated estimate writes into its ledger."""
    setting = resolve(EstimateRequest.model_validate(throughput_request(row)))
    setting = replace(setting, engine=setting.engine.model_copy(update=NEUTRAL))
    workload, ledger = setting.workload, Ledger()
    if not isinstance(workload, ServeWorkload) or not workload.burst_requests:
        raise TypeError("only bursts fill every place")
    serve(setting, workload, ledger)
    terms = {entry.key: entry for entry in ledger.entries}
    told = {one.name: float(one.value) for one in terms["burst"].inputs()}
    waves, mixed = told["waves"], told["mixed steps"]
    steps = {
        MIXED: waves * mixed,
        BESIDE: waves * mixed,
        PACKED: waves * (workload.output_tokens - mixed) + mixed,
    }
    seconds = dict.fromkeys(PARTS, 0.0)
    for entry in ledger.entries:
        if entry.unit == "s" and entry.group in steps and entry.name in NAMES:
            seconds[_factor(entry.group, NAMES[entry.name])] += steps[entry.group] * entry.value
    produced = workload.burst_requests * workload.output_tokens
    return FullBatch(
        engine=setting.engine.key,
        source=row["source_id"],
        model=setting.model.id,
        device=setting.device.id,
        architecture=setting.device.architecture,
        seconds=np.array([seconds[part] for part in PARTS]),
        measured_s=produced / measured_of(row),
    )


def _factor(group: str, part: str) -> str:
    return part if part in SHARED else f"{PACKED if group == BESIDE else group}_{part}"


@cache
def full_batches() -> tuple[FullBatch, ...]:
    """Return every row of the tables that filled all places, each with its parts."""
    return tuple(
        full_batch(row)
        for row in throughput_rows()
        if kind_of(row) in FULL and len(list(layouts_of(row))) == 1
    )


def fit_full(cases: Sequence[FullBatch], prior: Columns = PRIOR) -> Columns:
    """Return the factors of the least weighted relative error, near the prior.

    Absolute errors and distances from the prior make it a linear programme.
    """
    if not cases:
        return prior
    counts = Counter(case.group for case in cases)
    weights = np.array([counts[case.group] ** -0.5 for case in cases])
    shares = np.array([case.seconds / case.measured_s for case in cases])
    rows, parts = shares.shape
    off, away = np.eye(rows), np.eye(parts)
    near = np.diag(1 / prior)
    limits = np.block(
        [
            [shares, -off, np.zeros((rows, parts))],
            [-shares, -off, np.zeros((rows, parts))],
            [near, np.zeros((parts, rows)), -away],
            [-near, np.zeros((parts, rows)), -away],
        ]
    )
    most = np.concatenate([np.ones(rows), -np.ones(rows), np.ones(parts), -np.ones(parts)])
    costs = np.concatenate([np.zeros(parts), weights / weights.sum(), RIDGE / parts * STIFFNESS])
    bounds = [*zip(LEAST, MOST, strict=True), *[(0.0, None)] * (rows + parts)]
    found = linprog(costs, A_ub=limits, b_ub=most, bounds=bounds, method="highs")
    return np.asarray(found.x[:parts])


def fitted_for(cases: Sequence[FullBatch], target: FullBatch) -> Columns:
    """Return the factors that these cases give an engine on a chip: its own, then its chip's.

    An engine without a row takes what all have in common.
    """
    own = [case for case in cases if case.engine == target.engine]
    chip = [case for case in own if case.architecture == target.architecture]
    return fit_full(chip, fit_full(own or cases))


def left_out_full(
    cases: Sequence[FullBatch], part_of: Callable[[FullBatch], str]
) -> list[tuple[FullBatch, float]]:
    """Return the error of each case, fitted without its part."""
    found = []
    for part in sorted({part_of(case) for case in cases}):
        rest = [case for case in cases if part_of(case) != part]
        known: dict[tuple[str, str], Columns] = {}
        for case in (case for case in cases if part_of(case) == part):
            key = (case.engine, case.architecture)
            if key not in known:
                known[key] = fitted_for(rest, case)
            found.append((case, case.error(known[key])))
    return found


def named(factors: Columns) -> dict[str, float]:
    """Return the factors under the names that an estimate asks for."""
    found: dict[str, float] = {}
    for part, value in zip(PARTS, factors, strict=True):
        groups = (f"{MIXED}_", f"{PACKED}_") if part in SHARED else ("",)
        found |= {f"{group}{part}": float(f"{value:.4g}") for group in groups}
    return found


def throughput_factors() -> dict[str, dict[str, dict[str, float]]]:
    """Return each engine's factors of full batches: of any chip, and of those measured."""
    cases = full_batches()
    found: dict[str, dict[str, dict[str, float]]] = {
        COMMON_SERVING: {"any": named(fit_full(cases))}
    }
    for engine in sorted({case.engine for case in cases}):
        own = [case for case in cases if case.engine == engine]
        whole = fit_full(own)
        found[engine] = {"any": named(whole)}
        for chip in sorted({case.architecture for case in own}):
            same = [case for case in own if case.architecture == chip]
            found[engine][chip] = named(fit_full(same, whole))
    return found


def model_of(case: FullBatch) -> str:
    """Return the model that a row was measured with."""
    return case.model


def device_of(case: FullBatch) -> str:
    """Return the device that a row was measured on."""
    return case.device


@cache
def left_out_parts() -> dict[str, list[tuple[FullBatch, float]]]:
    """Return the error of every row without its model, and without its device."""
    cases = full_batches()
    parts = {"unseen model": model_of, "unseen device": device_of}
    return {name: left_out_full(cases, part) for name, part in parts.items()}


def throughput_report(summary: Callable[[list[float]], JsonObject]) -> JsonObject:
    """Return the held-out errors of full batches, by what was left out."""
    return {
        f"throughput of full batches, {name}": summary([error for _, error in found])
        for name, found in left_out_parts().items()
    }
