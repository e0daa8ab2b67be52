"""Fits the few factors of each engine to published measurements, shrunk towards the physics.

The predictions themselves come from the planner: a factor's effect on a row is what changes when
that factor changes, so that nothing of a formula is written twice. Errors count as absolute log
ratios, so that a few odd rows do not steer the fit; every factor is pulled to its prior.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.cost.dtypes import WIDE
from planner.cost.equation import Ledger
from planner.evidence import Row, number, training_request
from planner.specs.estimate import EstimateRequest
from planner.specs.workload import TrainWorkload
from planner.workload.inference_memory import usable_bytes
from planner.workload.resolve import resolve
from planner.workload.setting import Setting
from planner.workload.training_memory import training_memory

Columns = npt.NDArray[np.float64]
GIB = float(1024**3)
# Each factor: its prior, and how far from it one unit of regret lies.
MEMORY_FACTORS: dict[str, tuple[float, float]] = {
    "training_overhead_bytes": (GIB, 2 * GIB),
    "extra_state_bytes": (0.0, 4.0),
    "activation_ratio": (1.0, 0.5),
    "quantised_activation_ratio": (1.0, 0.5),
    "loss_ratio": (1.0, 0.75),
}
RIDGE = 0.5
PEAK_WEIGHT = 10.0  # ten per cent of a peak weigh as much as a wrong verdict
VERDICT_WEIGHT = 1.0
ROUNDS = 40
STEPS = (-2.0, -1.0, -0.4, -0.1, -0.03, 0.03, 0.1, 0.4, 1.0, 2.0)
CONVERGED = 1e-6


@dataclass(frozen=True)
class MemoryCase:
    """One row: the peak of each stage as a linear function of the factors, and the truth.

    ``measured_bytes`` is zero for rows that only say whether the setting ran.
    """

    engine: str
    group: str
    base_bytes: Columns
    slopes: Columns
    usable_bytes: float
    measured_bytes: float = 0.0
    ran: bool = True

    def peak_bytes(self, factors: Columns) -> float:
        """Return the highest stage's bytes under these factors."""
        return float(np.max(self.base_bytes + self.slopes @ factors))


def neutral(setting: Setting, **factors: float) -> Setting:
    """Return the setting with an engine that carries just these factors, the others neutral."""
    plain = {name: prior for name, (prior, _) in MEMORY_FACTORS.items()}
    update: dict[str, Any] = {**plain, **factors}
    return replace(setting, engine=setting.engine.model_copy(update=update))


def stage_peaks(setting: Setting) -> Columns:
    """Return the peak bytes of each pipeline stage of a training run."""
    if not isinstance(setting.workload, TrainWorkload):
        raise TypeError("only training settings have stage peaks")
    use = training_memory(setting, Ledger(), setting.workload)
    return np.array([stage.peak_bytes for stage in use.stages])


def memory_case(row: Row) -> MemoryCase:
    """Return a row as a linear function of the factors, by changing one at a time."""
    setting = resolve(EstimateRequest.model_validate(training_request(row)))
    quantised = setting.weight_dtype not in WIDE
    zero = dict.fromkeys(MEMORY_FACTORS, 0.0) | {"quantised_activation_ratio": 1.0}
    base = stage_peaks(neutral(setting, **zero))
    slopes = []
    for name in MEMORY_FACTORS:
        if name == "quantised_activation_ratio":
            changed = {**zero, "activation_ratio": float(quantised)}
        elif name == "activation_ratio":
            changed = {**zero, name: float(not quantised)}
        else:
            changed = {**zero, name: 1.0}
        slopes.append(stage_peaks(neutral(setting, **changed)) - base)
    return MemoryCase(
        engine=row["engine"],
        group=f"{row['source_id']}/{row['model']}",
        base_bytes=base,
        slopes=np.array(slopes).T,
        usable_bytes=usable_bytes(setting),
        measured_bytes=number(row, "peak_memory_bytes"),
        ran=row.get("fits", "true") == "true",
    )


def memory_regret(cases: Sequence[MemoryCase], factors: Columns) -> float:
    """Return how wrong the factors are on these rows, and how far from the physics."""
    names = list(MEMORY_FACTORS)
    priors = np.array([MEMORY_FACTORS[name][0] for name in names])
    scales = np.array([MEMORY_FACTORS[name][1] for name in names])
    regret = RIDGE * float(np.sum(np.abs((factors - priors) / scales)))
    for case in cases:
        peak = case.peak_bytes(factors)
        if case.measured_bytes:
            regret += PEAK_WEIGHT * abs(float(np.log(peak / case.measured_bytes)))
        else:
            margin = float(np.log(peak / case.usable_bytes))
            wrong = margin if case.ran else -margin
            regret += VERDICT_WEIGHT * (max(0.0, min(wrong * PEAK_WEIGHT, 1.0)) + (wrong > 0))
    return regret


def descend(
    regret: Callable[[Columns], float],
    start: Columns,
    scales: Columns,
    floors: Columns | float = 0.0,
    ceilings: Columns | float = np.inf,
) -> Columns:
    """Return the factors of least regret: one coordinate at a time, each within its bounds."""
    highest = np.broadcast_to(np.asarray(ceilings, dtype=float), start.shape)
    lowest = np.broadcast_to(np.asarray(floors, dtype=float), start.shape)
    best, least = start.copy(), regret(start)
    for _ in range(ROUNDS):
        before = least
        for index, scale in enumerate(scales):
            for step in STEPS:
                tried = best.copy()
                wanted = tried[index] + step * scale
                tried[index] = min(max(wanted, float(lowest[index])), float(highest[index]))
                value = regret(tried)
                if value < least:
                    best, least = tried, value
        if before - least < CONVERGED * max(1.0, least):
            break
    return best


def fit_memory(cases: Iterable[MemoryCase]) -> Columns:
    """Return the memory factors of one engine, in the order of ``MEMORY_FACTORS``."""
    kept = tuple(cases)
    priors = np.array([prior for prior, _ in MEMORY_FACTORS.values()])
    scales = np.array([scale for _, scale in MEMORY_FACTORS.values()])
    return descend(lambda factors: memory_regret(kept, factors), priors, scales)
