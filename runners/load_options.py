"""Load options of an endpoint benchmark: arrivals, repetitions, timeout."""

from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

MAX_POINTS = 12
Requests = Annotated[int, Field(ge=1, le=1024)]  # concurrent, each on its own connection
Rate = Annotated[float, Field(gt=0.0, le=10_000.0)]


class _Arrivals(BaseModel):
    """The base of the arrival kinds; the points of a sweep must increase."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @property
    def points(self) -> tuple[float, ...]:
        """Return the sweep's points."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _points_rise(self) -> Self:
        points = self.points
        if list(points) != sorted(set(points)):
            listed = ", ".join(f"{each:g}" for each in points)
            raise ValueError(f"the points of a sweep rise, each once; these are {listed}")
        return self


class ClosedLoop(_Arrivals):
    """A fixed number of clients; each sends its next request when the last one is answered."""

    kind: Literal["closed"] = "closed"
    concurrency: Annotated[tuple[Requests, ...], Field(min_length=1, max_length=MAX_POINTS)]

    @property
    def points(self) -> tuple[float, ...]:
        """Return the concurrencies."""
        return tuple(float(each) for each in self.concurrency)


class OpenLoop(_Arrivals):
    """Random arrivals at a mean rate, independent of the answers (Poisson process)."""

    kind: Literal["open"] = "open"
    request_rate_per_second: Annotated[
        tuple[Rate, ...], Field(min_length=1, max_length=MAX_POINTS)
    ]

    @property
    def points(self) -> tuple[float, ...]:
        """Return the rates."""
        return self.request_rate_per_second


class Burst(_Arrivals):
    """A number of requests at one instant, and none after them."""

    kind: Literal["burst"] = "burst"
    burst_requests: Annotated[tuple[Requests, ...], Field(min_length=1, max_length=MAX_POINTS)]

    @property
    def points(self) -> tuple[float, ...]:
        """Return the burst sizes."""
        return tuple(float(each) for each in self.burst_requests)


Arrivals = Annotated[ClosedLoop | OpenLoop | Burst, Field(discriminator="kind")]


class LoadOptions(BaseModel):
    """A load sweep against an endpoint that the job starts on its host's loopback.

    Each point is measured ``repetitions`` times, with prompts and arrivals of its own seed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    arrivals: Arrivals
    requests_per_repetition: PositiveInt = Field(default=32, le=100_000)  # ignored by bursts
    warm_up_requests: NonNegativeInt = Field(default=4, le=1000)  # sent once, not measured
    repetitions: PositiveInt = Field(default=3, le=20)
    request_timeout_seconds: PositiveFloat = Field(default=120.0, le=3600.0)

    def requests_at(self, point: float) -> int:
        """Return the number of requests per repetition of a point."""
        if isinstance(self.arrivals, Burst):
            return round(point)
        if isinstance(self.arrivals, ClosedLoop):
            return max(self.requests_per_repetition, round(point))
        return self.requests_per_repetition

    def main_point(self, concurrency: int) -> float:
        """Return the sweep's main point: the plan's concurrency if present, else the last."""
        points = self.arrivals.points
        has_plans = isinstance(self.arrivals, ClosedLoop) and concurrency in points
        return float(concurrency) if has_plans else points[-1]

    def places(self, at_least: int) -> int:
        """Return the endpoint's concurrency limit: at least the largest point."""
        if isinstance(self.arrivals, OpenLoop):
            return at_least
        return max(at_least, round(self.arrivals.points[-1]))
