"""Serving under load: latency percentiles, objectives and the maximum load."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np

from planner.cost.quantity import Flag, Ledger, Line, Quantity, Unrecorded, both, equation, maximum
from planner.cost.queueing import ArrivalHabits
from planner.specs.estimate import Performance
from planner.specs.workload import ServeWorkload
from planner.workload.arrivals import (
    Batching,
    Floats,
    StepCosts,
    Timeline,
    Traffic,
    poisson_calls,
    simulate,
    step_costs,
)
from planner.workload.capacity import max_concurrency
from planner.workload.heterogeneous_serving import Part, parts_of, serve_parts
from planner.workload.serve import GROUP, arrival_habits, intake_seconds, saturation_rate, serve
from planner.workload.setting import Setting

PERCENTILES = (50, 90, 95, 99)
MAX_CALLERS = 1024
MAX_REQUESTS = 1500
OPEN_REQUESTS = 300
STEADY_LIVES = 10
WARM_UP_RATIO = 0.3
IN_STEP_BURST_RATIO = 0.5  # above, callers stay synchronised: one engine step serves all
LENGTH_SPREAD = 0.03  # output lengths differ by a few tokens even if forced
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
    "T_p = t_0 + max(0, T - t_0) · s_p / s_mean",
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
    """Return a percentile of a time from its mean and the simulated distribution.

    ``intake_s`` is the constant time to accept a request before the engine's first step.
    """
    return intake_s + maximum(0.0, mean_s - intake_s) * simulated_s / simulated_mean_s


LINES = {
    (name, percent): Line(GROUP, f"{title}, {percent}th percentile", f"{name}_p{percent}")
    for name, title in TITLES.items()
    for percent in PERCENTILES
}
ALL_PERCENTILES = frozenset(f"{name}_p{percent}_seconds" for name, percent in LINES)


@dataclass(frozen=True)
class Simulated:
    """The times of simulated requests, without the warm-up of an open loop."""

    ttft_s: Floats
    tpot_s: Floats
    latency_s: Floats


def under_load(
    setting: Setting, workload: ServeWorkload, means: Performance, ledger: Ledger
) -> tuple[Performance, tuple[str, ...]]:
    """Return the means with percentiles, objectives and limits, and the warnings.

    A rate above saturation has no percentiles because its queue grows without bound.
    """
    most = (means.max_concurrency or 0) // setting.layout.data
    if most < 1:
        return means, ()
    limit = saturation_rate(setting, workload, most)
    figures: dict[str, float | int] = {"max_requests_per_second": limit}
    rate = workload.request_rate_per_second
    if rate is not None and rate >= limit:
        warning = f"{rate:g} requests a second cannot be served: the most is {limit:.3g}"
        return means.model_copy(update=figures), (warning,)
    simulated, intake = _simulated_once(setting, workload, means, most), intake_seconds(setting)
    figures |= percentiles(means, simulated, ledger, intake)
    if workload.ttft_slo_seconds or workload.tpot_slo_seconds:
        figures["slo_attainment_ratio"] = attained_ratio(workload, means, simulated, intake)
        figures |= most_within_objectives(partial(served_means, setting), workload, limit)
    return means.model_copy(update=figures), ()


def _simulated_once(
    setting: Setting, workload: ServeWorkload, means: Performance, most: int
) -> Simulated:
    """Return the times of one replica's requests, cached for the setting's own workload."""
    rate = workload.request_rate_per_second
    in_flight = (rate or 0.0) / setting.layout.data * (means.latency_seconds or 0.0)

    def simulated() -> Simulated:
        return simulated_requests(setting, workload, most, in_flight)

    if workload != setting.workload:
        return simulated()
    return setting.once(f"requests {most} {followed(in_flight)}", simulated)


def followed(in_flight: float) -> int:
    """Return the number of requests to simulate until an open loop is steady."""
    return min(MAX_REQUESTS, max(OPEN_REQUESTS, round(STEADY_LIVES * in_flight)))


def simulated_requests(
    setting: Setting, workload: ServeWorkload, most: int, in_flight: float = 0.0
) -> Simulated:
    """Return the times of the requests in a simulation of one replica.

    An open loop is simulated until it is steady: several times the requests ``in_flight``.
    """
    replica = Replica(
        number=setting.layout.data,
        habits=arrival_habits(setting, workload),
        budget_tokens=float(setting.strategy.max_batch_tokens or workload.input_tokens),
        costs=partial(step_costs, setting, workload),
    )
    return replica.serve(workload, most, in_flight)


@dataclass(frozen=True)
class Replica:
    """The simulation input of one of ``number`` replicas.

    ``costs`` returns the step costs for a number of slots and a token budget per step.
    """

    number: int
    habits: ArrivalHabits
    budget_tokens: float
    costs: Callable[[int, float], StepCosts]

    def serve(self, workload: ServeWorkload, most: int, in_flight: float) -> Simulated:
        """Return the times of the served requests, at most ``most`` at once."""
        traffic, slots = self._traffic(workload, most, in_flight)
        in_step = float(self.habits.burst_ratio) >= IN_STEP_BURST_RATIO
        batching = Batching(slots, self.budget_tokens, prefill_first=in_step)
        costs = self.costs(slots, self.budget_tokens)
        return _after_warm_up(simulate(batching, traffic, costs), workload)

    def _traffic(
        self, workload: ServeWorkload, most: int, in_flight: float
    ) -> tuple[Traffic, int]:
        """Return the traffic and slots of the replica, both scaled down for many callers."""
        rate = workload.request_rate_per_second
        prompt = workload.input_tokens * (1 - workload.prefix_share_ratio)
        if rate is not None:
            calls = poisson_calls(rate / self.number, followed(in_flight))
            return Traffic(prompt, workload.output_tokens, calls, 1, LENGTH_SPREAD), most
        callers = workload.concurrency or workload.burst_requests
        callers_each = math.ceil(callers / self.number) if callers else most
        scale = min(1.0, MAX_CALLERS / callers_each)
        number = max(1, round(callers_each * scale))
        burst = float(self.habits.burst_ratio)
        calls_each = round(1 / burst) if burst else MAX_CALLS_PER_CALLER
        calls_each = min(calls_each, MAX_CALLS_PER_CALLER, max(1, MAX_REQUESTS // number))
        spread = 0.0 if burst >= IN_STEP_BURST_RATIO else LENGTH_SPREAD
        traffic = Traffic(prompt, workload.output_tokens, [0.0] * number, calls_each, spread)
        slots = min(most, callers_each - round(float(self.habits.withheld_slots)))
        return traffic, max(1, round(slots * scale))


def _after_warm_up(timeline: Timeline, workload: ServeWorkload) -> Simulated:
    skipped = 0
    if workload.request_rate_per_second is not None:
        skipped = int(WARM_UP_RATIO * len(timeline.sent_s))
    gaps = np.maximum(timeline.output_tokens - 1, 1)
    tpot = (timeline.done_s - timeline.first_s) / gaps
    return Simulated(timeline.ttft_s[skipped:], tpot[skipped:], timeline.latency_s[skipped:])


def before_steps(name: str, intake_s: float) -> float:
    """Return the part of a time before the engine's first step."""
    return 0.0 if name == "tpot" else intake_s


def percentiles(
    means: Performance,
    simulated: Simulated,
    ledger: Ledger,
    intake_s: float,
    names: Collection[str] = ALL_PERCENTILES,
) -> dict[str, float]:
    """Return the named percentiles of each time that has a mean, from the simulation."""
    values = {}
    for name in ("ttft", "tpot", "latency"):
        mean: float | None = getattr(means, f"{name}_seconds")
        times: Floats = getattr(simulated, f"{name}_s")
        percents = [each for each in PERCENTILES if f"{name}_p{each}_seconds" in names]
        if not percents or mean is None or not times.mean() > 0:
            continue
        for percent, simulated_s in zip(percents, np.percentile(times, percents), strict=True):
            values[f"{name}_p{percent}_seconds"] = ledger.term(
                percentile_seconds,
                LINES[name, percent],
                mean_s=mean,
                simulated_s=float(simulated_s),
                simulated_mean_s=float(times.mean()),
                intake_s=before_steps(name, intake_s),
            )
    return values


def attained_ratio(
    workload: ServeWorkload, means: Performance, simulated: Simulated, intake_s: float
) -> float:
    """Return the share of the requests that meet all given objectives."""
    met = np.ones(len(simulated.ttft_s), dtype=bool)
    for name in ("ttft", "tpot"):
        objective: float | None = getattr(workload, f"{name}_slo_seconds")
        mean: float | None = getattr(means, f"{name}_seconds")
        times: Floats = getattr(simulated, f"{name}_s")
        if objective is not None and mean is not None and times.mean() > 0:
            intake = before_steps(name, intake_s)
            met &= intake + times * ((mean - intake) / times.mean()) <= objective
    return float(met.mean())


def meets_objectives(workload: ServeWorkload, means: Performance) -> Flag:
    """Return whether both means meet the given objectives, per row for columns."""
    ttft = _within(means.ttft_seconds, workload.ttft_slo_seconds)
    return both(ttft, _within(means.tpot_seconds, workload.tpot_slo_seconds))


def _within(value: float | None, limit: float | None) -> Flag:
    return True if value is None or limit is None else value <= limit


def served_means(setting: Setting, workload: ServeWorkload) -> Performance:
    """Return the mean performance of serving a load, or a column of loads."""
    return serve(setting, workload, Unrecorded()).performance


def most_within_objectives(
    means_of: Means, workload: ServeWorkload, limit: float
) -> dict[str, float | int]:
    """Return the largest request rate or concurrency whose means meet the objectives."""
    if workload.request_rate_per_second is not None:
        rate = _largest(means_of, workload, "request_rate_per_second", limit)
        return {"slo_max_requests_per_second": rate}
    return {"slo_max_concurrency": int(_largest(means_of, workload, "concurrency", None))}


def _largest(means_of: Means, workload: ServeWorkload, name: str, limit: float | None) -> float:
    """Return the largest load that meets the objectives; 0 if none does.

    Each round costs a column of loads between the largest good and the smallest bad one. Without
    a limit, loads are whole numbers of callers.
    """

    def count_good(loads: Floats) -> int:
        unset = {"concurrency": None, "burst_requests": None, "request_rate_per_second": None}
        load = workload.model_copy(update={**unset, name: loads})
        met = meets_objectives(workload, means_of(load))
        failures = np.flatnonzero(~np.broadcast_to(met, loads.shape))
        return int(failures[0]) if len(failures) else len(loads)

    low, high = 0.0, BELOW_SATURATION * (limit or 0.0)
    loads = _doubled() if limit is None else _between(low, high)
    for _ in range(ROUNDS if limit else MAX_DOUBLINGS):
        count = count_good(loads)
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
    """Return evenly spaced loads between two others."""
    return np.asarray(low + (high - low) / PIECES * np.arange(1, PIECES), dtype=np.float64)


# Latency percentiles over replicas of different speed: those of the mixture.
#
# Each kind of replica is simulated with its share of the load, and the requests of all kinds are
# pooled, so slow replicas show in the high percentiles.


SAMPLES = 6000  # leaves 60 requests beyond the 99th percentile


def under_unlike_load(
    setting: Setting, workload: ServeWorkload, means: Performance, ledger: Ledger
) -> tuple[Performance, tuple[str, ...]]:
    """Return the means with percentiles, objectives and limits, and the warnings."""
    parts = parts_of(setting, workload)
    if len(parts) == 1:
        return under_load(parts[0].setting, workload, means, ledger)
    most = [int(max_concurrency(part.setting, workload)) for part in parts]
    if min(most) < 1:
        return means, ()
    limit = float(sum(part.rate * part.dealt.replicas for part in parts))
    figures: dict[str, float | int] = {"max_requests_per_second": limit}
    rate = workload.request_rate_per_second
    if rate is not None and rate >= limit:
        warning = f"{rate:g} requests a second cannot be served: the most is {limit:.3g}"
        return means.model_copy(update=figures), (warning,)
    pooled = _pooled(parts, workload, most)
    figures |= percentiles(means, pooled, ledger, 0.0)
    if workload.ttft_slo_seconds or workload.tpot_slo_seconds:
        figures["slo_attainment_ratio"] = attained_ratio(workload, means, pooled, 0.0)

        def served(load: ServeWorkload) -> Performance:
            return serve_parts(parts, load, Unrecorded()).performance

        figures |= most_within_objectives(served, workload, limit)
    return means.model_copy(update=figures), ()


def _pooled(parts: Sequence[Part], workload: ServeWorkload, most: Sequence[int]) -> Simulated:
    """Return simulated requests of all replicas, in proportion to the rate of each kind."""
    loads = [part.load(workload) for part in parts]
    own_means = [served_means(part.setting, load) for part, load in zip(parts, loads, strict=True)]
    rates = [cast("float", one.requests_per_second) for one in own_means]
    samples = []
    for part, load, means, slots, rate in zip(parts, loads, own_means, most, rates, strict=True):
        rate_per_replica = (load.request_rate_per_second or 0.0) / part.setting.layout.data
        in_flight = rate_per_replica * (means.latency_seconds or 0.0)
        simulated = simulated_requests(part.setting, load, slots, in_flight)
        count = max(1, round(SAMPLES * rate / sum(rates)))
        samples.append(_sampled(_scaled(part.setting, simulated, means), count))
    return Simulated(
        *(
            np.concatenate([getattr(one, f"{name}_s") for one in samples])
            for name in ("ttft", "tpot", "latency")
        )
    )


def _scaled(setting: Setting, simulated: Simulated, means: Performance) -> Simulated:
    """Return simulated requests scaled to the calibrated means of their replica."""

    def times(name: str) -> Floats:
        simulated_s: Floats = getattr(simulated, f"{name}_s")
        mean: float = getattr(means, f"{name}_seconds") or 0.0
        before = before_steps(name, intake_seconds(setting))
        return (
            simulated_s
            if not simulated_s.mean() > 0
            else before + simulated_s * ((mean - before) / simulated_s.mean())
        )

    return replace(
        simulated, ttft_s=times("ttft"), tpot_s=times("tpot"), latency_s=times("latency")
    )


def _sampled(simulated: Simulated, count: int) -> Simulated:
    """Return ``count`` of the requests, at evenly spaced positions."""
    length = len(simulated.ttft_s)
    chosen = np.arange(count) * length // count
    return Simulated(
        simulated.ttft_s[chosen], simulated.tpot_s[chosen], simulated.latency_s[chosen]
    )
