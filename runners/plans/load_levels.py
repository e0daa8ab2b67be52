"""The load test of a launch: who sends requests, at which levels, and how often."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from runners.jobspec.compress import LoadOptions
from runners.plans.launch import Launch, LaunchOptionError
from runners.shared.load_search import DIGITS

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
MOST_CLIENTS, MOST_RATE, LEAST_RATE = 1024, 10_000.0, 0.01
ROOM = 0.8  # of the requests that memory holds by the plan, which may be wrong


class PlannedLoad(NamedTuple):
    """What a plan to serve says of load, from which a search begins.

    ``targets``: the longest seconds of measured figures. ``max_concurrency``: the most requests
    that memory holds at once. ``requests_per_second``: at ``concurrency``; 0 if unknown.
    """

    targets: Mapping[str, float]
    concurrency: int
    max_concurrency: int
    requests_per_second: float


def load_options(launch: Launch, planned: PlannedLoad | None = None) -> LoadOptions | None:
    """Return the load test of a launch; None if it is none. ``planned``: for a search.

    Raises:
        LaunchOptionError: the load levels do not rise, or are outside the limits of their kind; a
            search has no target, or levels that it does not use.
    """
    if launch.run != "load":
        return None
    kind, points, search = launch.arrivals, launch.points, None
    if launch.levels == "search":
        first, search = _search(launch, planned)
        points = [first]
    elif launch.max_search_seconds != Launch.model_fields["max_search_seconds"].default:
        raise LaunchOptionError(
            "max_search_seconds",
            "The field max_search_seconds is of a search, and the levels of this load test are "
            "given. Leave it out, or set levels to search.",
        )
    try:
        return LoadOptions.model_validate(
            {
                "arrivals": {"kind": kind, ARRIVAL_FIELDS[kind]: points},
                "requests_per_repetition": launch.requests_per_repetition,
                "repetitions": launch.repetitions,
                "search": search,
            }
        )
    except ValidationError:
        text = ", ".join(f"{point:g}" for point in points)
        raise LaunchOptionError(
            "points", f"“Load levels” is {text[:60]}; give {LIMITS[kind]}."
        ) from None


def _search(launch: Launch, planned: PlannedLoad | None) -> tuple[float, dict[str, Any]]:
    """Return the first level of a search and its options."""
    if launch.points:
        raise LaunchOptionError(
            "points",
            "“Load levels” are given, and a search chooses its own. Leave them out, or set levels "
            "to given.",
        )
    if launch.arrivals == "burst":
        raise LaunchOptionError(
            "arrivals",
            "“Arrivals” is burst, and a search varies the clients of a closed loop or the rate of "
            "an open one. Choose one of them, or give the load levels.",
        )
    if planned is None or not planned.targets:
        raise LaunchOptionError(
            "levels",
            "“Choice of levels” is search, which looks for the highest load that meets the "
            "latency target, and this plan has none. Set its latency target, or give the load "
            "levels.",
        )
    if launch.arrivals == "closed":
        room = max(planned.concurrency, int(ROOM * planned.max_concurrency))
        highest = float(min(MOST_CLIENTS, room))
        first = min(float(planned.concurrency), highest)
    else:
        highest = MOST_RATE
        rate = float(f"{planned.requests_per_second or 1.0:.{DIGITS}g}")
        first = min(max(rate, LEAST_RATE), highest)
    return first, {
        "targets": dict(planned.targets),
        "highest": highest,
        "max_seconds": launch.max_search_seconds,
    }
