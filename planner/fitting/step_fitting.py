"""Fit of training steps, by robust regression of measured over predicted time."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.catalog.engines import wrapped_engine
from planner.cost.quantity import NullLedger
from planner.cost.weights import WIDE
from planner.fitting.evidence import (
    HARNESSES,
    SUPERSEDED,
    Row,
    not_counted,
    number,
    training_request,
)
from planner.specs.estimate import EstimateRequest
from planner.specs.units import GIB
from planner.specs.workload import TrainWorkload
from planner.workload.inference_memory import usable_bytes
from planner.workload.resolve import resolve
from planner.workload.setting import Setting
from planner.workload.train import train
from planner.workload.training_memory import fields_without_spare_blocks, stage_moments

# ---------------------------------------------------------------------------
# Fit the few factors of each engine to published measurements, shrunk towards the physics.
#
# Predictions come from the planner: a factor's effect on a row is the change when that factor
# changes, so no formula is repeated here. The loss uses absolute log ratios, so that a few
# outliers do not dominate the fit; every factor is regularised towards its prior.
# ---------------------------------------------------------------------------


Columns = npt.NDArray[np.float64]
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
LEAST_CHANGE = 1e-6


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
    return factors_of(fields_without_spare_blocks(fields_of(factors)))


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
        if before - least < LEAST_CHANGE * max(1.0, least):
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
    base_engine = wrapped_engine(engine) or engine
    tools = [case for case in cases if wrapped_engine(case.engine) == base_engine]
    return fit_memory(tools, ridge=COMMON_RIDGE) if tools else None


def fitted_memory(cases: Sequence[MemoryCase], engine: str) -> Columns:
    """Return an engine's factors from its own rows, shrunk towards similar tools."""
    own = [case for case in cases if case.engine == engine]
    return fit_memory(own, fit_common(cases, engine))


# ---------------------------------------------------------------------------
# Fit the factors of training steps to published runs, on several levels at once.
# ---------------------------------------------------------------------------


# Device work, which hides the issuing of operators ahead of it.
WORK = (
    "matmul",
    "matmul_8bit",
    "matmul_4bit",
    "experts",
    "experts_narrow",
    "attention",
    "attention_unfused",
    "elementwise",
    "sorting",
    "operands",
    "casts",
    "scores",
)
PARTS = (
    *WORK,
    "issue",
    "layer_overhead",
    "tensor_parallel",
    "expert_exchange",
    "pipeline",
    "exchange",
    "hidden",
    "rounds",
    "update",
)
ISSUE = PARTS.index("issue")
# Products do not exceed the peak (the prior is 70 % of it), attention does not exceed a plain
# product; any other part may be almost fully hidden.
FLOORS = {
    "matmul": 0.7,
    "matmul_8bit": 0.7,
    "matmul_4bit": 0.7,
    "experts": 0.7,
    "experts_narrow": 0.7,
    "attention": 1.0,
    "attention_unfused": 0.7,
}
DEFAULT_FLOOR = 0.02
# Beyond these factors the fit would describe something else. A hidden exchange costs a twentieth
# of its time: at 20 nothing of it is hidden.
CEILINGS = {
    "matmul": 2.5,
    "matmul_8bit": 2.5,
    "matmul_4bit": 2.5,
    "experts": 5.0,
    "experts_narrow": 5.0,
    "attention": 8.0,
    "attention_unfused": 8.0,
    "elementwise": 8.0,
    "sorting": 8.0,
    "operands": 4.0,
    "casts": 6.0,
    "scores": 4.0,
    "issue": 6.0,
    "layer_overhead": 60.0,
    "tensor_parallel": 4.0,
    "expert_exchange": 6.0,
    "pipeline": 6.0,
    "exchange": 12.0,
    "hidden": 20.0,
    "rounds": 40.0,
    "update": 20.0,
}
NEGLIGIBLE = 1e-9


@dataclass(frozen=True, eq=False)
class StepCase:
    """One run: the seconds of each part at factor 1, and the measured seconds.

    ``runs_ahead`` is true if issuing operators is hidden behind the work that they start.
    """

    row_id: str
    engine: str
    architecture: str
    device: str
    source: str
    group: str
    seconds: Columns
    runs_ahead: bool
    measured_s: float

    def step_s(self, factors: Columns) -> float:
        """Return the predicted seconds of the step."""
        parts = self.seconds * factors
        total = float(parts.sum())
        if not self.runs_ahead:
            return total
        return total - min(float(parts[ISSUE]), float(parts[: len(WORK)].sum()))

    def error(self, factors: Columns) -> float:
        """Return the relative error of the prediction."""
        return self.step_s(factors) / self.measured_s - 1


def step_case(row: Row) -> StepCase:
    """Return a row as its parts, each costed separately."""
    setting = resolve(EstimateRequest.model_validate(training_request(row)))
    if not isinstance(setting.workload, TrainWorkload):
        raise TypeError("only training rows have steps")
    columns = np.eye(len(PARTS)) * (1 - NEGLIGIBLE) + NEGLIGIBLE
    alone = dict(zip(PARTS, columns, strict=True))
    own = {setting.device.architecture: alone}
    engine = setting.engine.model_copy(update={"training_factors": own})
    outcome = train(replace(setting, engine=engine), setting.workload, NullLedger())
    seconds = np.asarray(outcome.performance.step_seconds)
    return StepCase(
        row_id=row["row_id"],
        engine=row["engine"],
        architecture=setting.device.architecture,
        device=setting.device.id,
        source=row["source_id"],
        group=f"{row['source_id']}/{row['model']}",
        seconds=seconds,
        runs_ahead=setting.engine.role == "runner",
        measured_s=number(row, "step_seconds"),
    )


def median_error(cases: Sequence[StepCase], factors: Columns) -> float:
    """Return the median of the absolute relative errors."""
    return float(np.median([abs(case.error(factors)) for case in cases]))


# Fit the factors of training steps on several levels at once.
#
# The logarithm of a factor is a sum of effects: common, engine, chip family, chip, and engine on a
# family. Each effect is shrunk towards zero according to the spread of its level, so that an
# unseen combination of engine and chip takes what each shows elsewhere. The loss uses absolute log
# ratios, so that a few outliers do not dominate the fit. It is solved by iteratively reweighted
# least squares, always starting from the physics, so that left-out runs have no influence.


Key = tuple[str, ...]
# Prior log spread of each part about the physics: products reach well-known shares of the peak,
# while the exposed share of an exchange depends on the software alone.
PART_SPREADS = {
    "matmul": 0.2,
    "matmul_8bit": 0.1,
    "matmul_4bit": 0.2,
    "experts": 0.3,
    "experts_narrow": 0.3,
    "operands": 0.3,
    "attention": 0.6,
    "attention_unfused": 0.6,
    "tensor_parallel": 0.6,
    "expert_exchange": 0.8,
    "pipeline": 0.8,
    "update": 0.8,
    "layer_overhead": 1.0,
    "exchange": 1.0,
    "hidden": 3.0,
    "rounds": 0.2,
}
USUAL_SPREAD = 0.5
# Share of a part's spread on each level, for engines with runs.
TOGETHER = {"common": 1.0, "engine": 0.7, "family": 0.5, "chip": 0.6, "pair": 1.0}
# The same for the pooled fit, used for engines without runs.
POOLED = {"common": 0.3, "family": 0.15, "chip": 0.3}
UNIT = 0.05  # an error of 5 % is as unlikely as a factor one spread from the physics
ROUNDING = 0.02  # errors below this are squared
OLD_WEIGHT = 0.03  # weight of runs that a newer version of the engine supersedes
ITERATIONS = 40
CONVERGED = 3e-5
LONGEST_STEP = 1.5
SHORTEST_SHARE = 1e-3
NEGLIGIBLE_SHARE = 1e-4


def keys_of(engine: str, family: str, chip: str) -> dict[str, Key]:
    """Return the effects that a run's factors consist of, by level."""
    return {
        "common": ("common",),
        "engine": ("engine", engine),
        "family": ("family", family),
        "chip": ("chip", chip),
        "pair": ("pair", engine, family),
    }


def bounds() -> tuple[Columns, Columns]:
    """Return the lowest and the highest factor of each part."""
    floors = np.array([FLOORS.get(part, DEFAULT_FLOOR) for part in PARTS])
    return floors, np.array([CEILINGS[part] for part in PARTS])


@dataclass(frozen=True, eq=False)
class Levels:
    """The fitted effects of each level: logarithms by part that sum to a run's factors."""

    effects: Mapping[Key, Columns]

    def factors(self, engine: str, family: str, chip: str = "") -> Columns:
        """Return the factors of the parts; a level without runs adds nothing."""
        keys = keys_of(engine, family, chip).values()
        logs = sum(
            (self.effects[key] for key in keys if key in self.effects), np.zeros(len(PARTS))
        )
        clipped: Columns = np.clip(np.exp(logs), *bounds())
        return clipped

    def step_s(self, case: StepCase) -> float:
        """Return the predicted seconds of a run."""
        return case.step_s(self.factors(case.engine, case.architecture, case.device))


@dataclass(frozen=True)
class _Cell:
    """The runs of one engine on one chip, which share all factors."""

    blocks: tuple[int, ...]
    seconds: Columns
    measured_s: Columns
    weights: Columns
    runs_ahead: bool

    def derivatives(self, logs: Columns) -> tuple[Columns, Columns]:
        """Return the log errors, and the share of each part in each predicted step."""
        factors = np.exp(logs)
        low, high = bounds()
        parts = self.seconds * np.clip(factors, low, high)
        if self.runs_ahead:
            work = parts[:, : len(WORK)].sum(axis=1)
            is_issue_bound = parts[:, ISSUE] > work
            parts[is_issue_bound, : len(WORK)] = 0.0
            parts[~is_issue_bound, ISSUE] = 0.0
        steps = parts.sum(axis=1)
        shares = np.where((factors < low) | (factors > high), 0.0, parts / steps[:, None])
        return np.log(steps / self.measured_s), shares


class _Problem:
    """All runs of a fit, and the loss of given effects."""

    def __init__(self, cases: Sequence[StepCase], spreads: Mapping[str, float]) -> None:
        newest = {case.engine for case in cases if case.source not in SUPERSEDED}
        self.keys: list[Key] = []
        self.cells: list[_Cell] = []
        levels: list[float] = []
        groups: dict[tuple[str, str, str], list[StepCase]] = {}
        for case in cases:
            groups.setdefault((case.engine, case.architecture, case.device), []).append(case)
        for names, runs in groups.items():
            own = keys_of(*names)
            for level in spreads:
                if own[level] not in self.keys:
                    self.keys.append(own[level])
                    levels.append(spreads[level])
            is_superseded = [run.source in SUPERSEDED and run.engine in newest for run in runs]
            self.cells.append(
                _Cell(
                    blocks=tuple(self.keys.index(own[level]) for level in spreads),
                    seconds=np.array([run.seconds for run in runs]),
                    measured_s=np.array([run.measured_s for run in runs]),
                    weights=np.where(is_superseded, OLD_WEIGHT, 1.0),
                    runs_ahead=runs[0].runs_ahead,
                )
            )
        parts = np.array([PART_SPREADS.get(part, USUAL_SPREAD) for part in PARTS])
        self.stiffness = (np.outer(levels, parts)) ** -2.0
        self.active = self._active()

    def _active(self) -> npt.NDArray[np.bool_]:
        """Return the parts that the runs of each block can determine."""
        is_active = np.zeros(self.stiffness.shape, dtype=bool)
        for cell in self.cells:
            is_visible = (cell.seconds / cell.measured_s[:, None]).max(axis=0) > NEGLIGIBLE_SHARE
            for block in cell.blocks:
                is_active[block] |= is_visible
        return is_active

    def cost(self, effects: Columns) -> float:
        """Return the loss: errors on the runs plus distance from the physics."""
        total = 0.5 * float((self.stiffness * effects**2).sum())
        for cell in self.cells:
            errors, _ = cell.derivatives(effects[list(cell.blocks)].sum(axis=0))
            total += float(cell.weights @ np.sqrt(errors**2 + ROUNDING**2)) / UNIT
        return total

    def step(self, effects: Columns) -> Columns:
        """Return one step of iteratively reweighted least squares."""
        blocks, parts = effects.shape
        curvature = np.zeros((blocks, parts, blocks, parts))
        slope = self.stiffness * effects
        for cell in self.cells:
            errors, shares = cell.derivatives(effects[list(cell.blocks)].sum(axis=0))
            weights = cell.weights / np.sqrt(errors**2 + ROUNDING**2) / UNIT
            own = (shares * weights[:, None]).T @ shares
            pull = shares.T @ (weights * errors)
            for row_block in cell.blocks:
                slope[row_block] += pull
                for column_block in cell.blocks:
                    curvature[row_block, :, column_block] += own
        active_indices = np.flatnonzero(self.active)
        matrix = curvature.reshape(blocks * parts, blocks * parts)[
            np.ix_(active_indices, active_indices)
        ]
        matrix[np.diag_indices_from(matrix)] += self.stiffness.reshape(-1)[active_indices]
        solution = np.zeros(blocks * parts)
        solution[active_indices] = np.linalg.solve(matrix, -slope.reshape(-1)[active_indices])
        clipped: Columns = np.clip(solution, -LONGEST_STEP, LONGEST_STEP).reshape(effects.shape)
        return clipped


def _line_search(problem: _Problem, effects: Columns, cost: float) -> tuple[Columns, float]:
    """Return the best effects along a step, by line search, and their cost."""
    step, share = problem.step(effects), 1.0
    trial_cost = problem.cost(effects + step)
    while trial_cost >= cost:
        share /= 2
        if share < SHORTEST_SHARE:
            return effects, cost
        trial_cost = problem.cost(effects + share * step)
    while share >= 1.0:
        farther = problem.cost(effects + 2 * share * step)
        if farther >= trial_cost:
            break
        share, trial_cost = 2 * share, farther
    return effects + share * step, trial_cost


def fit_levels(cases: Iterable[StepCase], spreads: Mapping[str, float]) -> Levels:
    """Return the factors fitted on the levels that ``spreads`` names."""
    all_cases = tuple(cases)
    if not all_cases:
        return Levels({})
    problem = _Problem(all_cases, spreads)
    effects = np.zeros(problem.stiffness.shape)
    cost = problem.cost(effects)
    for _ in range(ITERATIONS):
        moved, lower = _line_search(problem, effects, cost)
        gained = cost - lower
        effects, cost = moved, lower
        if gained < CONVERGED * max(1.0, cost):
            break
    return Levels(dict(zip(problem.keys, effects, strict=True)))


def fit_pooled(cases: Iterable[StepCase]) -> Levels:
    """Return the common factors of engines, without runners, whose operator issue differs."""
    return fit_levels([case for case in cases if not case.runs_ahead], POOLED)


class StepFactors:
    """The factors of every engine: its own if it has runs, otherwise the pooled ones.

    Each fit is computed on first use.
    """

    def __init__(self, cases: Sequence[StepCase]) -> None:
        self.cases = tuple(cases)
        self.engines = frozenset(case.engine for case in cases)

    @cached_property
    def together(self) -> Levels:
        """Return the fit of engines with runs."""
        return fit_levels(self.cases, TOGETHER)

    @cached_property
    def pooled(self) -> Levels:
        """Return the fit for engines without runs."""
        return fit_pooled(self.cases)

    def of(self, engine: str, family: str, chip: str = "") -> Columns:
        """Return the factors of an engine on a chip."""
        levels = self.together if engine in self.engines else self.pooled
        return levels.factors(engine, family, chip)

    def step_s(self, case: StepCase) -> float:
        """Return the predicted seconds of a run."""
        return case.step_s(self.of(case.engine, case.architecture, case.device))
