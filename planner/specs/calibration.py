"""Predicted against measured, and the factors that follow from it."""

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from planner.specs.base import OperatorClass, SparseSpec


class Measurement(SparseSpec):
    """One figure that a job measured, beside what the plan had predicted for it."""

    metric: str
    predicted: PositiveFloat
    measured: PositiveFloat
    operator_class: OperatorClass
    host: str
    measured_at: str | None = None
    job: str | None = None


class CalibrationFactor(SparseSpec):
    """What times of one operator class are multiplied with, and how sure that is.

    ``spread`` is the standard deviation of the log ratio that is left after the factor.
    """

    factor: PositiveFloat
    n: PositiveInt
    spread: NonNegativeFloat


class HostCalibration(SparseSpec):
    """The factors of one host, by operator class; ``digest`` names the inputs."""

    host: str
    factors: dict[OperatorClass, CalibrationFactor] = Field(default_factory=dict)
    digest: str = ""
