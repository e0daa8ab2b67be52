"""Parts of a training step of published runs, as input of the fit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.cost.quantity import Unrecorded
from planner.fitting.evidence import Row, number, training_request
from planner.fitting.robust_fit import Columns
from planner.specs.estimate import EstimateRequest
from planner.specs.workload import TrainWorkload
from planner.workload.resolve import resolve
from planner.workload.setting import Setting
from planner.workload.train import train

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
LEAST = 0.02
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


def with_factors(setting: Setting, factors: dict[str, Columns]) -> Setting:
    """Return the setting with an engine that has only these training factors."""
    own = {setting.device.architecture: factors}
    engine = setting.engine.model_copy(update={"training_factors": own})
    return replace(setting, engine=engine)


def step_case(row: Row) -> StepCase:
    """Return a row as its parts, each costed separately."""
    setting = resolve(EstimateRequest.model_validate(training_request(row)))
    if not isinstance(setting.workload, TrainWorkload):
        raise TypeError("only training rows have steps")
    columns = np.eye(len(PARTS)) * (1 - NEGLIGIBLE) + NEGLIGIBLE
    alone = dict(zip(PARTS, columns, strict=True))
    outcome = train(with_factors(setting, alone), setting.workload, Unrecorded())
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
