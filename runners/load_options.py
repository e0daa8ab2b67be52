"""How a benchmark loads an endpoint: who asks when, how often, and how long an answer may take."""

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
Requests = Annotated[int, Field(ge=1, le=1024)]  # at once: as many connections
Rate = Annotated[float, Field(gt=0.0, le=10_000.0)]


class _Arrivals(BaseModel):
    """What the kinds of arrival have in common; the points of a sweep rise."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @property
    def points(self) -> tuple[float, ...]:
        """Return the sweep: one number for each point."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _points_rise(self) -> Self:
        points = self.points
        if list(points) != sorted(set(points)):
            told = ", ".join(f"{each:g}" for each in points)
            raise ValueError(f"the points of a sweep rise, each once; these are {told}")
        return self


class ClosedLoop(_Arrivals):
    """So many clients, each of whom asks again as soon as it is answered."""

    kind: Literal["closed"] = "closed"
    concurrency: Annotated[tuple[Requests, ...], Field(min_length=1, max_length=MAX_POINTS)]

    @property
    def points(self) -> tuple[float, ...]:
        """Return the numbers of clients."""
        return tuple(float(each) for each in self.concurrency)


class OpenLoop(_Arrivals):
    """Requests that come at random, so many a second in the mean, whoever is answered."""

    kind: Literal["open"] = "open"
    request_rate_per_second: Annotated[
        tuple[Rate, ...], Field(min_length=1, max_length=MAX_POINTS)
    ]

    @property
    def points(self) -> tuple[float, ...]:
        """Return the rates."""
        return self.request_rate_per_second


class Burst(_Arrivals):
    """So many requests at one moment, and nobody after them."""

    kind: Literal["burst"] = "burst"
    burst_requests: Annotated[tuple[Requests, ...], Field(min_length=1, max_length=MAX_POINTS)]

    @property
    def points(self) -> tuple[float, ...]:
        """Return the sizes of the bursts."""
        return tuple(float(each) for each in self.burst_requests)


Arrivals = Annotated[ClosedLoop | OpenLoop | Burst, Field(discriminator="kind")]


class LoadOptions(BaseModel):
    """A sweep against an endpoint that the job itself starts on its host's loopback.

    Each point is measured ``repetitions`` times with prompts, and arrivals, of its own seed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    arrivals: Arrivals
    requests_per_repetition: PositiveInt = Field(default=32, le=100_000)  # a burst has its own
    warm_up_requests: NonNegativeInt = Field(default=4, le=1000)  # once, and not counted
    repetitions: PositiveInt = Field(default=3, le=20)
    request_timeout_seconds: PositiveFloat = Field(default=120.0, le=3600.0)

    def requests_at(self, point: float) -> int:
        """Return how many requests one repetition of a point sends."""
        if isinstance(self.arrivals, Burst):
            return round(point)
        if isinstance(self.arrivals, ClosedLoop):
            return max(self.requests_per_repetition, round(point))
        return self.requests_per_repetition

    def main_point(self, concurrency: int) -> float:
        """Return the point that stands for the sweep: that of a plan's clients, else the last."""
        points = self.arrivals.points
        has_plans = isinstance(self.arrivals, ClosedLoop) and concurrency in points
        return float(concurrency) if has_plans else points[-1]

    def places(self, at_least: int) -> int:
        """Return how many requests the endpoint answers together: all that may be there."""
        if isinstance(self.arrivals, OpenLoop):
            return at_least
        return max(at_least, round(self.arrivals.points[-1]))
