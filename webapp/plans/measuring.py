"""Load tests of serving plans: options of the form, and the plan's predictions."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from planner.specs.estimate import Estimate
from planner.specs.workload import ServeWorkload, Strategy
from runners.jobspec.benchmark import LoadOptions
from webapp.core.problems import InvalidProblem
from webapp.plans.planning import estimate_as_planned
from webapp.plans.questions import Question
from webapp.plans.verdict import figure_values

FIELDS = {  # the form's arrival kind -> field of the options and of the planner's workload
    "closed": "concurrency",
    "open": "request_rate_per_second",
    "burst": "burst_requests",
}
LIMITS = {
    "closed": "1 to 12 rising numbers of clients from 1 to 1024",
    "open": "1 to 12 rising numbers of requests a second above 0",
    "burst": "1 to 12 rising numbers of requests from 1 to 1024",
}
COUNTS = {"requests": ("requests_per_repetition", 100_000), "repetitions": ("repetitions", 20)}
CURVE = "under_load"  # key of the load curve in a job's prediction
CURVE_FIGURES = ("tokens_per_second", "ttft_seconds", "tpot_seconds")
BETWEEN = 16  # points of the curve between the measured ones


class Measuring(NamedTuple):
    """Measurement options of a serving plan."""

    load: LoadOptions | None = None
    profile: bool = False


def measuring_of(posted: Mapping[str, str], *, is_load: bool) -> Measuring:
    """Return the measurement options of a launch form.

    Raises:
        InvalidProblem: a field is invalid.
    """
    if not is_load:
        return Measuring(profile=bool(posted.get("profile")))
    kind = posted.get("arrivals", "closed")
    if kind not in FIELDS:
        raise InvalidProblem("arrivals", f"“Arrivals” is {kind[:20]}; choose one of the list.")
    counts = {field: _count(posted, name, most) for name, (field, most) in COUNTS.items()}
    points = _points(posted.get("points", ""), kind)
    try:
        options = LoadOptions.model_validate(
            {"arrivals": {"kind": kind, FIELDS[kind]: points}, **counts}
        )
    except ValidationError:
        raise _bad_points(posted.get("points", ""), kind) from None
    return Measuring(load=options)


def _count(posted: Mapping[str, str], name: str, most: int) -> int:
    text = posted.get(name, "").strip()
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise InvalidProblem(name, f"“{name.capitalize()}” is {text[:20]}; it can be 1 to {most}.")
    return int(text)


def _points(text: str, kind: str) -> list[float]:
    try:
        points = [float(each) for each in re.split(r"[\s,;]+", text.strip()) if each]
    except ValueError:
        raise _bad_points(text, kind) from None
    if not all(map(math.isfinite, points)):
        raise _bad_points(text, kind)
    return points


def _bad_points(text: str, kind: str) -> InvalidProblem:
    return InvalidProblem("points", f"“Points” are {text[:60]}; give {LIMITS[kind]}.")


def usual_points(concurrency: int) -> str:
    """Return the default sweep up to a plan's concurrency, doubling from 1."""
    doubled = [2**power for power in range(concurrency.bit_length()) if 2**power < concurrency]
    return ", ".join(map(str, [*doubled[-11:], concurrency]))


# Predictions


def workload_at(workload: ServeWorkload, kind: str, point: float) -> ServeWorkload:
    """Return a serving workload with another arrival rate or concurrency."""
    others = dict.fromkeys(FIELDS.values())
    value = point if kind == "open" else round(point)
    return workload.model_copy(update={**others, FIELDS[kind]: value})


def estimate_at(
    question: Question, strategy: Strategy, options: LoadOptions, point: float
) -> Estimate | None:
    """Return the estimate of the plan's strategy at a load point, if the planner has one."""
    planned = question.request.workload
    if not isinstance(planned, ServeWorkload):
        return None
    workload = workload_at(planned, options.arrivals.kind, point)
    return estimate_as_planned(question.request, workload, strategy)


def curve_of(question: Question, strategy: Strategy, options: LoadOptions) -> dict[str, Any]:
    """Return the plan's figures at the measured points and between them."""
    rows = []
    for point in curve_points(options.arrivals.points, whole=options.arrivals.kind != "open"):
        estimate = estimate_at(question, strategy, options, point)
        figures = {name: figure_values(estimate, name) for name in CURVE_FIGURES if estimate}
        if available := {name: figure for name, figure in figures.items() if figure}:
            rows.append({"point": point, **available})
    return {"rows": rows}


def curve_points(points: Sequence[float], *, whole: bool) -> list[float]:
    """Return the points, with evenly spaced ones added between the first and the last."""
    first, last = points[0], points[-1]
    steps = [first + (last - first) * index / (BETWEEN + 1) for index in range(1, BETWEEN + 1)]
    between = [float(round(each)) for each in steps] if whole else steps
    return sorted({*points, *between})
