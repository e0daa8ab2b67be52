"""The load test of a launch: who sends requests, at which levels, and how often."""

from pydantic import ValidationError

from runners.jobspec.compress import LoadOptions
from runners.plans.launch import Launch, LaunchOptionError

# Arrivals of a launch -> the field of the options and of the planner's workload.
ARRIVAL_FIELDS = {
    "closed": "concurrency",
    "open": "request_rate_per_second",
    "burst": "burst_requests",
}
LIMITS = {
    "closed": "1 to 12 rising numbers of clients from 1 to 1024",
    "open": "1 to 12 rising numbers of requests a second above 0",
    "burst": "1 to 12 rising numbers of requests from 1 to 1024",
}


def load_options(launch: Launch) -> LoadOptions | None:
    """Return the load test of a launch; None if it is none.

    Raises:
        LaunchOptionError: the load levels do not rise, or are outside the limits of their kind.
    """
    if launch.run != "load":
        return None
    kind, points = launch.arrivals, launch.points
    try:
        return LoadOptions.model_validate(
            {
                "arrivals": {"kind": kind, ARRIVAL_FIELDS[kind]: points},
                "requests_per_repetition": launch.requests_per_repetition,
                "repetitions": launch.repetitions,
            }
        )
    except ValidationError:
        text = ", ".join(f"{point:g}" for point in points)
        raise LaunchOptionError(
            "points", f"“Load levels” is {text[:60]}; give {LIMITS[kind]}."
        ) from None
