"""Measuring a serve plan: which load its endpoint is put under, and what the plan says of it."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from planner.specs.estimate import Estimate
from planner.specs.strategy import Strategy
from planner.specs.workload import ServeWorkload
from runners.load_options import LoadOptions
from webapp.core.problems import InvalidProblem
from webapp.plans.planning import estimate_as_planned
from webapp.plans.questions import Question
from webapp.plans.verdict import figure_values

FIELDS = {  # the launch form's kinds -> the field of the options, which is the planner's too
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
CURVE = "under_load"  # where a job's prediction keeps the curve
CURVE_FIGURES = ("tokens_per_second", "ttft_seconds", "tpot_seconds")
BETWEEN = 16  # points of the curve besides those that are measured


class Measuring(NamedTuple):
    """What a person adds to a serve plan's measurement."""

    load: LoadOptions | None = None
    profile: bool = False


def measuring_of(posted: Mapping[str, str], *, is_load: bool) -> Measuring:
    """Return what the launch form says of the measurement.

    Raises:
        InvalidProblem: a field holds what it cannot.
    """
    if not is_load:
        return Measuring(profile=bool(posted.get("profile")))
    kind = posted.get("arrivals", "closed")
    if kind not in FIELDS:
        raise InvalidProblem("arrivals", f"“Who asks” is {kind[:20]}; choose one of the list.")
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
        found = [float(each) for each in re.split(r"[\s,;]+", text.strip()) if each]
    except ValueError:
        raise _bad_points(text, kind) from None
    if not all(map(math.isfinite, found)):
        raise _bad_points(text, kind)
    return found


def _bad_points(text: str, kind: str) -> InvalidProblem:
    return InvalidProblem("points", f"“Points” are {text[:60]}; give {LIMITS[kind]}.")


def usual_points(concurrency: int) -> str:
    """Return a sweep up to a plan's clients, doubling from 1 on."""
    doubled = [2**at for at in range(concurrency.bit_length()) if 2**at < concurrency]
    return ", ".join(map(str, [*doubled[-11:], concurrency]))


# What the plan says


def workload_at(workload: ServeWorkload, kind: str, point: float) -> ServeWorkload:
    """Return a serve plan's workload with other callers."""
    others = dict.fromkeys(FIELDS.values())
    value = point if kind == "open" else round(point)
    return workload.model_copy(update={**others, FIELDS[kind]: value})


def estimate_at(
    question: Question, strategy: Strategy, options: LoadOptions, point: float
) -> Estimate | None:
    """Return what the plan's strategy costs at a point, where the planner has an answer."""
    asked = question.request.workload
    if not isinstance(asked, ServeWorkload):
        return None
    workload = workload_at(asked, options.arrivals.kind, point)
    return estimate_as_planned(question.request, workload, strategy)


def curve_of(question: Question, strategy: Strategy, options: LoadOptions) -> dict[str, Any]:
    """Return the plan's figures at every measured point and between them, for the run's page."""
    rows = []
    for point in curve_points(options.arrivals.points, whole=options.arrivals.kind != "open"):
        estimate = estimate_at(question, strategy, options, point)
        found = {name: figure_values(estimate, name) for name in CURVE_FIGURES if estimate}
        if known := {name: figure for name, figure in found.items() if figure}:
            rows.append({"point": point, **known})
    return {"rows": rows}


def curve_points(points: Sequence[float], *, whole: bool) -> list[float]:
    """Return the points and some evenly between the first and the last."""
    first, last = points[0], points[-1]
    steps = [first + (last - first) * at / (BETWEEN + 1) for at in range(1, BETWEEN + 1)]
    between = [float(round(each)) for each in steps] if whole else steps
    return sorted({*points, *between})
