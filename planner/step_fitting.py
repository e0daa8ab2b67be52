"""Fits the parts of a training step to published runs, engine by engine and chip by chip."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from planner.cost.equation import Ledger
from planner.evidence import Row, number, training_request
from planner.fitting import Columns, descend
from planner.specs.estimate import EstimateRequest
from planner.specs.workload import TrainWorkload
from planner.workload.resolve import resolve
from planner.workload.setting import Setting
from planner.workload.train import train

PARTS = (
    "matmul",
    "attention",
    "elementwise",
    "operands",
    "scores",
    "issue",
    "tensor_parallel",
    "expert_exchange",
    "pipeline",
    "exchange",
    "hidden",
    "update",
)
WORK = tuple(
    PARTS.index(part) for part in ("matmul", "attention", "elementwise", "operands", "scores")
)
ISSUE = PARTS.index("issue")
# No product beats the peak (the prior is 70 % of it) and attention no plain product; elsewhere
# nearly all of a part may hide behind others.
FLOORS = {"matmul": 0.7, "attention": 1.0}
LEAST = 0.05
# Far above the physics a factor no longer describes its part but something else.
CEILINGS = {
    "matmul": 2.5,
    "attention": 6.0,
    "elementwise": 8.0,
    "operands": 4.0,
    "scores": 4.0,
    "issue": 4.0,
    "tensor_parallel": 4.0,
    "expert_exchange": 6.0,
    "pipeline": 6.0,
    "exchange": 6.0,
    "hidden": 20.0,
    "update": 4.0,
}
SCALE = 0.5
RIDGE = 0.3
ERROR_WEIGHT = 10.0
NEGLIGIBLE = 1e-9


@dataclass(frozen=True, eq=False)
class StepCase:
    """One run: the seconds of each part at factor 1, and the seconds that were measured.

    ``runs_ahead`` says that issuing operators hides behind the work that they start.
    """

    row_id: str
    engine: str
    architecture: str
    source: str
    group: str
    seconds: Columns
    runs_ahead: bool
    measured_s: float

    def step_s(self, factors: Columns) -> float:
        """Return the seconds of the step under these factors."""
        parts = self.seconds * factors
        total = float(parts.sum())
        if not self.runs_ahead:
            return total
        return total - min(float(parts[ISSUE]), float(parts[list(WORK)].sum()))

    def error(self, factors: Columns) -> float:
        """Return the relative error of the prediction."""
        return self.step_s(factors) / self.measured_s - 1


def with_factors(setting: Setting, factors: dict[str, float]) -> Setting:
    """Return the setting with an engine that carries just these training factors."""
    own = {setting.device.architecture: factors}
    engine = setting.engine.model_copy(update={"training_factors": own})
    return replace(setting, engine=engine)


def step_case(row: Row) -> StepCase:
    """Return a row as its parts, each costed alone."""
    setting = resolve(EstimateRequest.model_validate(training_request(row)))
    if not isinstance(setting.workload, TrainWorkload):
        raise TypeError("only training rows have steps")
    seconds = []
    for part in PARTS:
        alone = {name: 1.0 if name == part else NEGLIGIBLE for name in PARTS}
        outcome = train(with_factors(setting, alone), setting.workload, Ledger())
        seconds.append(outcome.performance.step_seconds or 0.0)
    return StepCase(
        row_id=row["row_id"],
        engine=row["engine"],
        architecture=setting.device.architecture,
        source=row["source_id"],
        group=f"{row['source_id']}/{row['model']}",
        seconds=np.array(seconds),
        runs_ahead=setting.engine.role == "runner",
        measured_s=number(row, "step_seconds"),
    )


@dataclass(frozen=True)
class StepTable:
    """Many runs as columns, so that one product predicts them all."""

    seconds: Columns
    runs_ahead: npt.NDArray[np.bool_]
    measured_s: Columns

    def steps_s(self, factors: Columns) -> Columns:
        """Return the seconds of every step under these factors."""
        parts = self.seconds * factors
        work = parts[:, list(WORK)].sum(axis=1)
        hidden = np.where(self.runs_ahead, np.minimum(parts[:, ISSUE], work), 0.0)
        whole: Columns = parts.sum(axis=1) - hidden
        return whole


def step_table(cases: Iterable[StepCase]) -> StepTable:
    """Return runs as columns."""
    kept = tuple(cases)
    return StepTable(
        seconds=np.array([case.seconds for case in kept]).reshape(len(kept), len(PARTS)),
        runs_ahead=np.array([case.runs_ahead for case in kept], dtype=bool),
        measured_s=np.array([case.measured_s for case in kept]),
    )


def fit_step(cases: Iterable[StepCase], prior: Columns | None = None) -> Columns:
    """Return the factors of the parts, in the order of ``PARTS``, shrunk towards the prior."""
    kept = tuple(cases)
    start = np.ones(len(PARTS)) if prior is None else prior
    table = step_table(kept)

    def regret(factors: Columns) -> float:
        wrong = float(np.abs(np.log(table.steps_s(factors) / table.measured_s)).sum())
        return ERROR_WEIGHT * wrong + RIDGE * float(np.abs(factors - start).sum()) / SCALE

    if not kept:
        return start
    floors = np.array([FLOORS.get(part, LEAST) for part in PARTS])
    ceilings = np.array([CEILINGS.get(part, np.inf) for part in PARTS])
    return descend(regret, start, np.full(len(PARTS), SCALE), floors, ceilings)


def median_error(cases: Sequence[StepCase], factors: Columns) -> float:
    """Return the median of the absolute relative errors."""
    return float(np.median([abs(case.error(factors)) for case in cases]))
