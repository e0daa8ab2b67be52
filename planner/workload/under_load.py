"""Serving under load: percentiles, objectives, and the most that can be served.

The closed forms of ``planner.workload.serve`` give the means, and the search ranks by them; they
are calibrated on published sweeps. A simulation of the same engine gives the shape around each
mean. A percentile is the mean times what the simulation finds that percentile to be of its own
mean, so that ranking and explanation never disagree.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from planner.cost.columns import Flag, both
from planner.cost.equation import Ledger, Line, Unrecorded, equation
from planner.cost.quantity import Quantity
from planner.specs.estimate import Performance
from planner.specs.workload import ServeWorkload
from planner.workload.arrivals import (
    Batching,
    Floats,
    Timeline,
    Traffic,
    poisson_calls,
    simulate,
)
from planner.workload.serve import (
    GROUP,
    arrival_habits,
    intake_seconds,
    saturation_rate,
    serve,
)
from planner.workload.setting import Setting
from planner.workload.step_costs import step_costs

PERCENTILES = (50, 90, 95, 99)
MAX_CALLERS = 1024
MAX_REQUESTS = 1500
OPEN_REQUESTS = 300
STEADY_LIVES = 10
WARM_UP_RATIO = 0.3
IN_STEP_BURST_RATIO = 0.5  # from here on the callers stay in step: one engine step answers all
LENGTH_SPREAD = 0.03  # forced lengths still differ by a few tokens
MAX_CALLS_PER_CALLER = 10
MAX_DOUBLINGS = 20
PIECES = 32
ROUNDS = 2
BELOW_SATURATION = 0.999
TITLES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "latency": "Time to the last token",
}

Means = Callable[[ServeWorkload], Performance]


@equation(
    "T_p = t_0 + (T - t_0) · s_p / s_mean",
    unit="s",
    symbols={
        "mean_s": "T",
        "simulated_s": "s_p",
        "simulated_mean_s": "s_mean",
        "intake_s": "t_0",
    },
    source="own simulation of the engine's steps (seeded), scaled to the calibrated mean",
)
def percentile_seconds(
    *,
    mean_s: Quantity,
    simulated_s: Quantity,
    simulated_mean_s: Quantity,
    intake_s: Quantity = 0.0,
) -> Quantity:
    """Return a percentile of a time whose mean is known, by the shape that a simulation gives.

    ``intake_s`` is what taking a request in costs everybody alike, before the engine's steps.
    """
    return intake_s + (mean_s - intake_s) * simulated_s / simulated_mean_s


LINES = {
    (name, percent): Line(GROUP, f"{title}, {percent}th percentile", f"{name}_p{percent}")
    for name, title in TITLES.items()
    for percent in PERCENTILES
}


@dataclass(frozen=True)
class Simulated:
    """The requests of a simulation that count: warm-up is left out of an open loop."""

    ttft_s: Floats
    tpot_s: Floats
    latency_s: Floats


def under_load(
    setting: Setting, workload: ServeWorkload, means: Performance, ledger: Ledger
) -> tuple[Performance, tuple[str, ...]]:
    """Return the means with percentiles, objectives and limits, and what to warn of.

    A rate above saturation has no percentiles: its queue grows for as long as it lasts.
    """
    most = (means.max_concurrency or 0) // setting.layout.data
    if most < 1:
        return means, ()
    limit = saturation_rate(setting, workload, most)
    found: dict[str, float | int] = {"max_requests_per_second": limit}
    rate = workload.request_rate_per_second
    if rate is not None and rate >= limit:
        warning = f"{rate:g} requests a second cannot be served: the most is {limit:.3g}"
        return means.model_copy(update=found), (warning,)
    simulated, intake = _requests(setting, workload, means, most), intake_seconds(setting)
    found |= percentiles(means, simulated, ledger, intake)
    if workload.ttft_slo_seconds or workload.tpot_slo_seconds:
        found["slo_attainment_ratio"] = attained_ratio(workload, means, simulated, intake)
        found |= most_within_objectives(partial(served_means, setting), workload, limit)
    return means.model_copy(update=found), ()


def percentiles_alone(
    setting: Setting, workload: ServeWorkload, means: Performance
) -> dict[str, float]:
    """Return the percentiles that ``under_load`` finds, and nothing else; none where it has none.

    In s, by name, as ``ttft_p95_seconds``.
    """
    most = int(means.max_concurrency or 0) // setting.layout.data
    rate = workload.request_rate_per_second
    if most < 1 or (rate is not None and rate >= saturation_rate(setting, workload, most)):
        return {}
    simulated = _requests(setting, workload, means, most)
    return percentiles(means, simulated, Unrecorded(), intake_seconds(setting))


def _requests(
    setting: Setting, workload: ServeWorkload, means: Performance, most: int
) -> Simulated:
    """Return the times of one replica's requests, simulated once of a setting's own load."""
    rate = workload.request_rate_per_second
    in_flight = (rate or 0.0) / setting.layout.data * (means.latency_seconds or 0.0)

    def simulated() -> Simulated:
        return simulated_requests(setting, workload, most, in_flight)

    if workload != setting.workload:
        return simulated()
    return setting.once(f"requests {most} {_followed(in_flight)}", simulated)


def _followed(in_flight: float) -> int:
    """Return how many requests of an open loop are followed until it is steady."""
    return min(MAX_REQUESTS, max(OPEN_REQUESTS, round(STEADY_LIVES * in_flight)))


def simulated_requests(
    setting: Setting, workload: ServeWorkload, most: int, in_flight: float = 0.0
) -> Simulated:
    """Return the times of the requests that a simulation of one replica serves.

    An open loop is followed until it is steady: several times the requests ``in_flight``.
    """
    traffic, slots = _traffic(setting, workload, most, in_flight)
    budget = float(setting.strategy.max_batch_tokens or workload.input_tokens)
    in_step = float(arrival_habits(setting, workload).burst_ratio) >= IN_STEP_BURST_RATIO
    batching = Batching(slots, budget, prefill_first=in_step)
    costs = step_costs(setting, workload, slots, budget)
    return _counted(simulate(batching, traffic, costs), workload)


def _traffic(
    setting: Setting, workload: ServeWorkload, most: int, in_flight: float
) -> tuple[Traffic, int]:
    """Return the calls on one replica and its places, both scaled down where callers are many."""
    replicas, rate = setting.layout.data, workload.request_rate_per_second
    prompt = workload.input_tokens * (1 - workload.prefix_share_ratio)
    if rate is not None:
        calls = poisson_calls(rate / replicas, _followed(in_flight))
        return Traffic(prompt, workload.output_tokens, calls, 1, LENGTH_SPREAD), most
    callers = workload.concurrency or workload.burst_requests
    each = math.ceil(callers / replicas) if callers else most
    scale = min(1.0, MAX_CALLERS / each)
    number = max(1, round(each * scale))
    habits = arrival_habits(setting, workload)
    burst = float(habits.burst_ratio)
    calls_each = round(1 / burst) if burst else MAX_CALLS_PER_CALLER
    calls_each = min(calls_each, MAX_CALLS_PER_CALLER, max(1, MAX_REQUESTS // number))
    spread = 0.0 if burst >= IN_STEP_BURST_RATIO else LENGTH_SPREAD
    traffic = Traffic(prompt, workload.output_tokens, [0.0] * number, calls_each, spread)
    places = min(most, each - round(float(habits.withheld_slots)))
    return traffic, max(1, round(places * scale))


def _counted(timeline: Timeline, workload: ServeWorkload) -> Simulated:
    skipped = 0
    if workload.request_rate_per_second is not None:
        skipped = int(WARM_UP_RATIO * len(timeline.sent_s))
    gaps = np.maximum(timeline.output_tokens - 1, 1)
    tpot = (timeline.done_s - timeline.first_s) / gaps
    return Simulated(timeline.ttft_s[skipped:], tpot[skipped:], timeline.latency_s[skipped:])


def before_steps(name: str, intake_s: float) -> float:
    """Return the part of a time that lies before the engine's steps."""
    return 0.0 if name == "tpot" else intake_s


def percentiles(
    means: Performance, simulated: Simulated, ledger: Ledger, intake_s: float
) -> dict[str, float]:
    """Return the percentiles of each time that has a mean, by the shape of simulated ones."""
    found = {}
    for name in ("ttft", "tpot", "latency"):
        mean: float | None = getattr(means, f"{name}_seconds")
        times: Floats = getattr(simulated, f"{name}_s")
        if mean is None or not times.mean() > 0:
            continue
        for percent, own in zip(PERCENTILES, np.percentile(times, PERCENTILES), strict=True):
            found[f"{name}_p{percent}_seconds"] = ledger.term(
                percentile_seconds,
                LINES[name, percent],
                mean_s=mean,
                simulated_s=float(own),
                simulated_mean_s=float(times.mean()),
                intake_s=before_steps(name, intake_s),
            )
    return found


def attained_ratio(
    workload: ServeWorkload, means: Performance, simulated: Simulated, intake_s: float
) -> float:
    """Return the share of the requests that meet every objective given."""
    good = np.ones(len(simulated.ttft_s), dtype=bool)
    for name in ("ttft", "tpot"):
        objective: float | None = getattr(workload, f"{name}_slo_seconds")
        mean: float | None = getattr(means, f"{name}_seconds")
        times: Floats = getattr(simulated, f"{name}_s")
        if objective is not None and mean is not None and times.mean() > 0:
            before = before_steps(name, intake_s)
            good &= before + times * ((mean - before) / times.mean()) <= objective
    return float(good.mean())


def meets_objectives(workload: ServeWorkload, means: Performance) -> Flag:
    """Return whether both means are within the objectives given, of columns row by row."""
    ttft = _within(means.ttft_seconds, workload.ttft_slo_seconds)
    return both(ttft, _within(means.tpot_seconds, workload.tpot_slo_seconds))


def _within(value: float | None, limit: float | None) -> Flag:
    return True if value is None or limit is None else value <= limit


def served_means(setting: Setting, workload: ServeWorkload) -> Performance:
    """Return the mean figures of serving a load, or a column of loads."""
    return serve(setting, workload, Unrecorded()).performance


def most_within_objectives(
    means_of: Means, workload: ServeWorkload, limit: float
) -> dict[str, float | int]:
    """Return the largest rate or number of callers whose mean times meet the objectives."""
    if workload.request_rate_per_second is not None:
        rate = _largest(means_of, workload, "request_rate_per_second", limit)
        return {"slo_max_requests_per_second": rate}
    return {"slo_max_concurrency": int(_largest(means_of, workload, "concurrency", None))}


def _largest(means_of: Means, workload: ServeWorkload, name: str, limit: float | None) -> float:
    """Return the largest value of a workload's load that meets the objectives; 0 if none does.

    Loads between a good and a bad one are costed together as a column, round after round; without
    a limit they are whole numbers of callers.
    """

    def good(loads: Floats) -> int:
        asked = {"concurrency": None, "burst_requests": None, "request_rate_per_second": None}
        load = workload.model_copy(update={**asked, name: loads})
        found = meets_objectives(workload, means_of(load))
        bad = np.flatnonzero(~np.broadcast_to(found, loads.shape))
        return int(bad[0]) if len(bad) else len(loads)

    low, high = 0.0, BELOW_SATURATION * (limit or 0.0)
    loads = _doubled() if limit is None else _between(low, high)
    for _ in range(ROUNDS if limit else MAX_DOUBLINGS):
        count = good(loads)
        low = float(loads[count - 1]) if count else low
        high = float(loads[count]) if count < len(loads) else max(high, low)
        loads = _between(low, high) if limit else np.unique(np.floor(_between(low, high)))
        loads = loads[(loads > low) & (loads < high)]
        if not len(loads):
            break
    return low


def _doubled() -> Floats:
    return np.asarray(2.0 ** np.arange(MAX_DOUBLINGS + 1), dtype=np.float64)


def _between(low: float, high: float) -> Floats:
    """Return the loads that cut what lies between two others into equal pieces."""
    return np.asarray(low + (high - low) / PIECES * np.arange(1, PIECES), dtype=np.float64)
