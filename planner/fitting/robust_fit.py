"""Fit the few factors of each engine to published measurements, shrunk towards the physics.

Predictions come from the planner: a factor's effect on a row is the change when that factor
changes, so no formula is repeated here. The loss uses absolute log ratios, so that a few outliers
do not dominate the fit; every factor is regularised towards its prior.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.catalog.engines import harnessed
from planner.cost.weights import WIDE
from planner.fitting.evidence import HARNESSES, Row, not_counted, number, training_request
from planner.specs.estimate import EstimateRequest
from planner.specs.workload import TrainWorkload
from planner.workload.inference_memory import usable_bytes
from planner.workload.resolve import resolve
from planner.workload.setting import Setting
from planner.workload.training_memory import bare_fields, stage_moments

Columns = npt.NDArray[np.float64]
GIB = float(1024**3)
# Each factor's prior and scale (distance per unit of loss). The extras of quantised rows are
# fitted as differences, so that they are zero without such rows.
MEMORY_FACTORS: dict[str, tuple[float, float]] = {
    "training_overhead_bytes": (GIB, 2 * GIB),
    "extra_state_bytes": (0.0, 4.0),
    "update_copies": (0.5, 1.0),
    "unfilled_ratio": (0.03, 0.1),
    "activation_ratio": (1.0, 0.5),
    "quantised_activation_extra": (0.0, 0.5),
    "loss_ratio": (1.0, 0.75),
    "quantised_loss_extra": (0.0, 0.75),
    "score_ratio": (1.0, 1.0),
}
NAMES = tuple(MEMORY_FACTORS)
PRIORS: Columns = np.array([prior for prior, _ in MEMORY_FACTORS.values()])
SCALES: Columns = np.array([scale for _, scale in MEMORY_FACTORS.values()])
# For each extra of quantised rows: the factor of all rows, and the engine's field for their ratio.
QUANTISED = {
    "quantised_activation_extra": ("activation_ratio", "quantised_activation_ratio"),
    "quantised_loss_extra": ("loss_ratio", "quantised_loss_ratio"),
}
LEAST_RATIO = 0.05
# Rows that only state whether a setting ran do not determine these.
SEEN_IN_PEAKS = ("update_copies", "unfilled_ratio")
RIDGE = 0.5
# Tools around one engine differ: their common factors are held closer to the physics.
COMMON_RIDGE = 3.0
PEAK_WEIGHT = 10.0  # a peak error of 10 % weighs as much as a wrong verdict
VERDICT_WEIGHT = 0.2  # near the limit the allocator's fragmentation decides
ROUNDS = 40
STEPS = (-2.0, -1.0, -0.4, -0.1, -0.03, 0.03, 0.1, 0.4, 1.0, 2.0)
CONVERGED = 1e-6


@dataclass(frozen=True)
class MemoryCase:
    """One row: each stage's peak as a linear function of the factors, and the measured peak.

    ``measured_bytes`` is zero for rows that only state whether the setting ran.
    """

    row_id: str
    engine: str
    source: str
    group: str
    base_bytes: Columns
    slopes: Columns
    usable_bytes: float
    measured_bytes: float = 0.0
    ran: bool = True
    returns_blocks: bool = False

    def peak_bytes(self, factors: Columns) -> float:
        """Return the highest stage's predicted bytes, with spare blocks returned."""
        shown = float(np.max(self.base_bytes + self.slopes @ factors))
        if not self.returns_blocks:
            return shown
        bare = float(np.max(self.base_bytes + self.slopes @ bare_factors(factors)))
        return min(shown, max(self.usable_bytes, bare))


def fields_of(factors: Sequence[float] | Columns) -> dict[str, float]:
    """Return fitted factors as engine fields, with extras converted to ratios."""
    fields = {name: float(value) for name, value in zip(NAMES, factors, strict=True)}
    for extra, (plain, ratio) in QUANTISED.items():
        quantised = fields[plain] + fields.pop(extra)
        fields[ratio] = max(quantised / fields[plain], LEAST_RATIO) if fields[plain] else 1.0
    return fields


def factors_of(fields: Mapping[str, float]) -> Columns:
    """Return engine fields as fitted factors."""
    plain = {name: fields[name] for name in NAMES if name not in QUANTISED}
    for extra, (name, ratio) in QUANTISED.items():
        plain[extra] = plain[name] * (fields[ratio] - 1)
    return np.array([plain[name] for name in NAMES], dtype=float)


def bare_factors(factors: Columns) -> Columns:
    """Return the factors without what an allocator may return."""
    return factors_of(bare_fields(fields_of(factors)))


def neutral(setting: Setting, **factors: float) -> Setting:
    """Return the setting with an engine that has only these factors, the others zero."""
    plain = {name: 0.0 for name in NAMES if name not in QUANTISED}
    ratios = {ratio: 1.0 for _, ratio in QUANTISED.values()}
    update: dict[str, Any] = {**plain, **ratios, **factors}
    return replace(setting, engine=setting.engine.model_copy(update=update))


def stage_peaks(setting: Setting) -> Columns:
    """Return the bytes at each moment of each pipeline stage of a training run."""
    if not isinstance(setting.workload, TrainWorkload):
        raise TypeError("only training settings have stage peaks")
    return np.array([moment.peak_bytes for moment in stage_moments(setting, setting.workload)])


def memory_case(row: Row) -> MemoryCase:
    """Return a row as a linear function of the factors, by changing one at a time.

    A peak follows its source's definition: factors of excluded parts have slope zero.
    """
    excluded = not_counted(row) if row.get("peak_memory_bytes") else ()
    setting = resolve(EstimateRequest.model_validate(training_request(row)))
    quantised = setting.weight_dtype not in WIDE
    base = stage_peaks(neutral(setting))
    slopes = []
    for name in NAMES:
        changed = {QUANTISED[name][0]: float(quantised)} if name in QUANTISED else {name: 1.0}
        slope = stage_peaks(neutral(setting, **changed)) - base
        slopes.append(slope * (name not in excluded))
    return MemoryCase(
        row_id=row["row_id"],
        engine=HARNESSES.get(row["source_id"], row["engine"]),
        source=row["source_id"],
        group=f"{row['source_id']}/{row['model']}",
        base_bytes=base,
        slopes=np.array(slopes).T,
        usable_bytes=usable_bytes(setting),
        measured_bytes=number(row, "peak_memory_bytes"),
        ran=row.get("fits", "true") == "true",
        returns_blocks=setting.engine.returns_blocks,
    )


@dataclass(frozen=True)
class MemoryTable:
    """Many cases as columns; short cases repeat a moment.

    ``bases`` is (case, moment), ``slopes`` is (case, moment, factor).
    """

    bases: Columns
    slopes: Columns
    usable_bytes: Columns
    measured_bytes: Columns
    ran: npt.NDArray[np.bool_]
    weights: Columns
    returns_blocks: npt.NDArray[np.bool_]

    def peaks(self, factors: Columns) -> Columns:
        """Return the highest moment's bytes of every case."""
        peaks: Columns = np.max(self.bases + self.slopes @ factors, axis=1)
        if not self.returns_blocks.any():
            return peaks
        bare = np.max(self.bases + self.slopes @ bare_factors(factors), axis=1)
        limited = np.minimum(peaks, np.maximum(self.usable_bytes, bare))
        return np.where(self.returns_blocks, limited, peaks)

    def regret(self, factors: Columns) -> float:
        """Return the loss of the factors on these cases."""
        peaks, is_peak = self.peaks(factors), self.measured_bytes > 0
        truth = np.where(is_peak, self.measured_bytes, self.usable_bytes)
        margins = np.log(peaks / truth)
        misses = np.where(self.ran, margins, -margins)
        verdicts = np.clip(misses * PEAK_WEIGHT, 0.0, 1.0) + (misses > 0)
        losses = np.where(is_peak, PEAK_WEIGHT * np.abs(margins), VERDICT_WEIGHT * verdicts)
        return float(losses @ self.weights)


def memory_table(cases: Sequence[MemoryCase]) -> MemoryTable:
    """Return cases as columns."""
    moments = max((len(case.base_bytes) for case in cases), default=1)

    def widened(values: Columns) -> Columns:
        return np.concatenate([values, np.repeat(values[:1], moments - len(values), axis=0)])

    shape = (len(cases), moments, len(MEMORY_FACTORS))
    return MemoryTable(
        bases=np.array([widened(case.base_bytes) for case in cases]).reshape(shape[:2]),
        slopes=np.array([widened(case.slopes) for case in cases]).reshape(shape),
        usable_bytes=np.array([case.usable_bytes for case in cases]),
        measured_bytes=np.array([case.measured_bytes for case in cases]),
        ran=np.array([case.ran for case in cases], dtype=bool),
        weights=_weights(cases),
        returns_blocks=np.array([case.returns_blocks for case in cases], dtype=bool),
    )


def _weights(cases: Sequence[MemoryCase]) -> Columns:
    """Return the weight of each case; repeated measurements of a point count once.

    All sources of one engine weigh the same, however many points they measured.
    """
    points = [(case.base_bytes.tobytes(), case.measured_bytes, case.ran) for case in cases]
    repeats = Counter(points)
    weight_once = np.array([1 / repeats[point] for point in points])
    sources: dict[tuple[str, bool], float] = defaultdict(float)
    kinds = [(case.source, case.measured_bytes > 0) for case in cases]
    for kind, weight in zip(kinds, weight_once, strict=True):
        sources[kind] += float(weight)
    total_weight = {
        peak: sum(w for (_, p), w in sources.items() if p == peak) for peak in (True, False)
    }
    count = {peak: sum(p == peak for _, p in sources) for peak in (True, False)}
    share = [total_weight[kind[1]] / count[kind[1]] / sources[kind] for kind in kinds]
    weights: Columns = weight_once * np.array(share)
    return weights


def memory_regret(cases: Sequence[MemoryCase], factors: Columns) -> float:
    """Return the loss of the factors on these rows, with the distance from the prior."""
    return memory_table(cases).regret(factors) + _distance(factors, prior_of(cases), RIDGE)


def prior_of(cases: Sequence[MemoryCase]) -> Columns:
    """Return the factors before the fit, zero for factors that these rows cannot determine."""
    absent = () if any(case.measured_bytes for case in cases) else SEEN_IN_PEAKS
    return np.where([name in absent for name in NAMES], 0.0, PRIORS)


def _distance(factors: Columns, prior: Columns, ridge: float) -> float:
    return ridge * float(np.sum(np.abs((factors - prior) / SCALES)))


def descend(
    regret: Callable[[Columns], float],
    start: Columns,
    scales: Columns,
    floors: Columns | float = 0.0,
    ceilings: Columns | float = np.inf,
) -> Columns:
    """Return the factors of least loss by bounded coordinate descent."""
    highest = np.broadcast_to(np.asarray(ceilings, dtype=float), start.shape)
    lowest = np.broadcast_to(np.asarray(floors, dtype=float), start.shape)
    best, least = start.copy(), regret(start)
    for _ in range(ROUNDS):
        before = least
        for index, scale in enumerate(scales):
            for step in STEPS:
                tried = best.copy()
                proposed = tried[index] + step * scale
                tried[index] = min(max(proposed, float(lowest[index])), float(highest[index]))
                value = regret(tried)
                if value < least:
                    best, least = tried, value
        if before - least < CONVERGED * max(1.0, least):
            break
    return best


def fit_memory(
    cases: Iterable[MemoryCase], prior: Columns | None = None, ridge: float = RIDGE
) -> Columns:
    """Return the memory factors of one engine, in the order of ``MEMORY_FACTORS``."""
    fitted_cases = tuple(cases)
    table, start = memory_table(fitted_cases), prior_of(fitted_cases) if prior is None else prior
    floors = np.array([-SCALES[i] if name in QUANTISED else 0.0 for i, name in enumerate(NAMES)])
    return descend(
        lambda factors: table.regret(factors) + _distance(factors, start, ridge),
        start,
        SCALES,
        floors,
    )


def fit_common(cases: Sequence[MemoryCase], engine: str) -> Columns | None:
    """Return the common factors of the tools around an engine, or None without tools."""
    base_engine = harnessed(engine) or engine
    tools = [case for case in cases if harnessed(case.engine) == base_engine]
    return fit_memory(tools, ridge=COMMON_RIDGE) if tools else None


def fitted_memory(cases: Sequence[MemoryCase], engine: str) -> Columns:
    """Return an engine's factors from its own rows, shrunk towards similar tools."""
    own = [case for case in cases if case.engine == engine]
    return fit_memory(own, fit_common(cases, engine))
