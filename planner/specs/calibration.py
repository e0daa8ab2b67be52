"""Predicted and measured figures, and the calibration factors computed from them."""

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from planner.specs.base import OperatorClass, SparseSpec


class Measurement(SparseSpec):
    """One figure that a job measured, with the figure that the plan predicted."""

    metric: str
    predicted: PositiveFloat
    measured: PositiveFloat
    operator_class: OperatorClass
    host: str
    measured_at: str | None = None
    job: str | None = None


class CalibrationFactor(SparseSpec):
    """A multiplier for the times of one operator class, with its uncertainty.

    ``spread`` is the standard deviation of the remaining log ratios after the factor is applied.
    """

    factor: PositiveFloat
    n: PositiveInt
    spread: NonNegativeFloat


class HostCalibration(SparseSpec):
    """One host's factors by operator class; ``digest`` identifies the inputs."""

    host: str
    factors: dict[OperatorClass, CalibrationFactor] = Field(default_factory=dict)
    digest: str = ""
