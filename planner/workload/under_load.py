"""Serving under load: latency percentiles, objectives and the maximum load."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np

from planner.catalog.engines import client_of_sweeps
from planner.cost.quantity import Flag, Ledger, Line, NullLedger, Quantity, both, equation, maximum
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
from planner.workload.disaggregate import ReplicaShare, replica_shares, serve_replica_shares
from planner.workload.generate import batch_limit, max_concurrency
from planner.workload.mixed_steps import uncached_prompt
from planner.workload.outcome import Admission, Outcome
from planner.workload.serve import GROUP, saturation_rate, serve
from planner.workload.setting import Setting

PERCENTILES = (50, 90, 95, 99)
MAX_CALLERS = 1024
MAX_REQUESTS = 1500
OPEN_REQUESTS = 300
UNEVEN_REQUESTS = 1000  # of which long ones are a small share
MOST_REPETITIONS = 100
STEADY_LIVES = 10
WARM_UP_RATIO = 0.3
LENGTH_SPREAD = 0.03  # output lengths differ by a few tokens even if forced
MAX_DOUBLINGS = 20
LEAST_CALLS = 3  # of a caller, of which the first is in the burst
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
        "admission_s": "t_0",
    },
    source="own simulation of the engine's steps (seeded), scaled to the calibrated mean",
)
def percentile_seconds(
    *,
    mean_s: Quantity,
    simulated_s: Quantity,
    simulated_mean_s: Quantity,
    admission_s: Quantity = 0.0,
) -> Quantity:
    """Return a percentile of a time from its mean and the simulated distribution.

    ``admission_s`` is the time until a step can read a request's prompt, which all have alike.
    """
    return admission_s + maximum(0.0, mean_s - admission_s) * simulated_s / simulated_mean_s


LINES = {
    (name, percent): Line(GROUP, f"{title}, {percent}th percentile", f"{name}_p{percent}")
    for name, title in TITLES.items()
    for percent in PERCENTILES
}
ALL_PERCENTILES = frozenset(f"{name}_p{percent}_seconds" for name, percent in LINES)


@dataclass(frozen=True)
class RequestTimes:
    """The times of simulated requests, without the warm-up of an open loop."""

    ttft_s: Floats
    tpot_s: Floats
    latency_s: Floats

    @classmethod
    def pooled(cls, parts: Iterable["RequestTimes"]) -> "RequestTimes":
        """Return the times of all requests of several simulations."""
        columns = zip(*((part.ttft_s, part.tpot_s, part.latency_s) for part in parts), strict=True)
        return cls(*(np.concatenate(column) for column in columns))

    def after_looks(self, mean_s: float) -> "RequestTimes":
        """Return the times with waits of ``mean_s`` on average, uniform from none on."""
        if not mean_s:
            return self
        waits = 2 * mean_s * np.random.default_rng(0).random(len(self.ttft_s))
        return replace(self, ttft_s=self.ttft_s + waits, latency_s=self.latency_s + waits)

    def at_means(self, means: Performance, admission: Admission) -> "RequestTimes":
        """Return the times with what passes before a step reads a prompt, scaled to the means."""
        waited = self.after_looks(admission.looks_s)

        def scaled(name: str) -> Floats:
            times: Floats = getattr(waited, f"{name}_s")
            mean: float | None = getattr(means, f"{name}_seconds")
            if mean is None or not times.mean() > 0:
                return times
            same = same_for_all(name, admission)
            result: Floats = same + times * (max(0.0, mean - same) / times.mean())
            return result

        return RequestTimes(scaled("ttft"), scaled("tpot"), scaled("latency"))


def under_load(
    setting: Setting, workload: ServeWorkload, outcome: Outcome, ledger: Ledger
) -> tuple[Performance, tuple[str, ...]]:
    """Return the means with percentiles, objectives and limits, and the warnings.

    A rate above saturation has no percentiles because its queue grows without bound.
    """
    means = outcome.performance
    held = (means.max_concurrency or 0) // setting.layout.data
    most = min(held, int(batch_limit(setting, workload)))
    if most < 1:
        return means, ()
    limit = saturation_rate(setting, workload, most)
    simulate = partial(_simulated_once, setting, workload, means, most)
    means_of = partial(served_means, setting)
    return _with_limits(workload, outcome, ledger, limit, simulate, means_of)


def _with_limits(
    workload: ServeWorkload,
    outcome: Outcome,
    ledger: Ledger,
    limit: float,
    simulate: Callable[[], RequestTimes],
    means_of: Means,
) -> tuple[Performance, tuple[str, ...]]:
    means, admission = outcome.performance, outcome.admission
    figures: dict[str, float | int] = {"max_requests_per_second": limit}
    rate = workload.request_rate_per_second
    if rate is not None and rate >= limit:
        warning = f"{rate:g} requests a second cannot be served: the most is {limit:.3g}"
        return means.model_copy(update=figures), (warning,)
    simulated = simulate()
    figures |= percentiles(means, simulated, ledger, admission)
    if workload.ttft_slo_seconds or workload.tpot_slo_seconds:
        served = simulated.at_means(means, admission)
        figures["slo_attainment_ratio"] = attained_ratio(workload, means, served)
        figures |= largest_load_within_objectives(means_of, workload, limit)
    return means.model_copy(update=figures), ()


def _simulated_once(
    setting: Setting, workload: ServeWorkload, means: Performance, most: int
) -> RequestTimes:
    """Return the times of one replica's requests, cached for the setting's own workload."""
    rate = workload.request_rate_per_second
    in_flight = (rate or 0.0) / setting.layout.data * (means.latency_seconds or 0.0)

    def simulated() -> RequestTimes:
        return simulated_requests(setting, workload, most, in_flight)

    if workload != setting.workload:
        return simulated()
    return setting.cached_cost(f"requests {most} {simulated_count(in_flight)}", simulated)


def simulated_count(in_flight: float) -> int:
    """Return the number of requests to simulate until an open loop is steady."""
    return min(MAX_REQUESTS, max(OPEN_REQUESTS, round(STEADY_LIVES * in_flight)))


def simulated_requests(
    setting: Setting, workload: ServeWorkload, most: int, in_flight: float = 0.0
) -> RequestTimes:
    """Return the times of the requests in a simulation of one replica.

    An open loop is simulated until it is steady: several times the requests ``in_flight``.
    """
    replica = Replica(
        number=setting.layout.data,
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
    budget_tokens: float
    costs: Callable[[int, float], StepCosts]

    def serve(self, workload: ServeWorkload, most: int, in_flight: float) -> RequestTimes:
        """Return the times of the served requests, at most ``most`` at once."""
        traffic, slots = self._traffic(workload, most, in_flight)
        costs = self.costs(slots, self.budget_tokens)
        batching, kept = (
            Batching(slots, self.budget_tokens),
            _first_calls_kept(traffic.calls_per_caller),
        )
        times = [
            _after_warm_up(simulate(batching, replace(traffic, seed=seed), costs), workload, kept)
            for seed in range(_repetitions(traffic))
        ]
        return RequestTimes.pooled(times)

    def _traffic(
        self, workload: ServeWorkload, most: int, in_flight: float
    ) -> tuple[Traffic, int]:
        """Return the traffic and slots of the replica, both scaled down for many callers."""
        rate, variation = workload.request_rate_per_second, workload.length_variation or 0.0
        prompt = uncached_prompt(workload)
        cached = workload.input_tokens - prompt
        longest = (workload.max_request_tokens or math.inf) - cached
        if rate is not None:
            count = max(simulated_count(in_flight), UNEVEN_REQUESTS if variation else 0)
            calls = poisson_calls(rate / self.number, count)
            traffic = Traffic(prompt, workload.output_tokens, calls, 1, LENGTH_SPREAD)
            return replace(traffic, length_variation=variation, longest_tokens=longest), most
        callers = workload.callers
        callers_each = math.ceil(callers / self.number) if callers else most
        scale = min(1.0, MAX_CALLERS / callers_each)
        number = max(1, round(callers_each * scale))
        client = client_of_sweeps()
        calls_each, spread = int(client.calls), client.length_range / 2
        if workload.burst_requests is not None:
            calls_each, spread = 1, 0.0
        calls_each = min(calls_each, max(LEAST_CALLS, MAX_REQUESTS // number))
        traffic = Traffic(prompt, workload.output_tokens, [0.0] * number, calls_each, spread)
        traffic = replace(traffic, length_variation=variation, longest_tokens=longest)
        return traffic, max(1, round(min(most, callers_each) * scale))


def _repetitions(traffic: Traffic) -> int:
    """Return how often a load is simulated: until enough requests of uneven lengths are drawn."""
    requests = len(traffic.calls_s) * traffic.calls_per_caller
    if not traffic.length_variation or requests >= UNEVEN_REQUESTS:
        return 1
    return min(MOST_REPETITIONS, math.ceil(UNEVEN_REQUESTS / requests))


def _first_calls_kept(calls_each: int) -> int:
    """Return of how many first calls one counts, if a caller has fewer calls than in a sweep."""
    calls = int(client_of_sweeps().calls)
    return max(1, round((calls - 1) / (calls_each - 1))) if 1 < calls_each < calls else 1


def _after_warm_up(timeline: Timeline, workload: ServeWorkload, kept: int) -> RequestTimes:
    """Return the times of the requests that count: not an open loop's warm-up.

    Of the first calls of a closed loop one in ``kept`` counts.
    """
    count = np.arange(len(timeline.sent_s))
    counts = np.ones(len(count), dtype=bool)
    if workload.request_rate_per_second is not None:
        counts = count >= int(WARM_UP_RATIO * len(count))
    elif kept > 1:
        counts = (timeline.sent_s > 0) | (count % kept == 0)
    gaps = np.maximum(timeline.output_tokens - 1, 1)
    tpot = (timeline.done_s - timeline.first_s) / gaps
    return RequestTimes(timeline.ttft_s[counts], tpot[counts], timeline.latency_s[counts])


def same_for_all(name: str, admission: Admission) -> float:
    """Return the part of a time that every request waits before a step can read its prompt."""
    return 0.0 if name == "tpot" else admission.same_s


def percentiles(
    means: Performance,
    simulated: RequestTimes,
    ledger: Ledger,
    admission: Admission,
    names: Collection[str] = ALL_PERCENTILES,
) -> dict[str, float]:
    """Return the named percentiles of each time that has a mean, from the simulation."""
    values: dict[str, float] = {}
    waited = simulated.after_looks(admission.looks_s)
    for name in ("ttft", "tpot", "latency"):
        mean: float | None = getattr(means, f"{name}_seconds")
        times: Floats = getattr(waited, f"{name}_s")
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
                admission_s=same_for_all(name, admission),
            )
    return values


def attained_ratio(workload: ServeWorkload, means: Performance, served: RequestTimes) -> float:
    """Return the share of the requests that meet all given objectives."""
    met = np.ones(len(served.ttft_s), dtype=bool)
    for name in ("ttft", "tpot"):
        objective: float | None = getattr(workload, f"{name}_slo_seconds")
        times: Floats = getattr(served, f"{name}_s")
        if objective is not None and getattr(means, f"{name}_seconds") and times.mean() > 0:
            met &= times <= objective
    return float(met.mean())


def _within(value: float | None, limit: float | None) -> Flag:
    return True if value is None or limit is None else value <= limit


def served_means(setting: Setting, workload: ServeWorkload) -> Performance:
    """Return the mean performance of serving a load, or a column of loads."""
    return serve(setting, workload, NullLedger()).performance


def largest_load_within_objectives(
    means_of: Means, workload: ServeWorkload, limit: float
) -> dict[str, float | int]:
    """Return the largest request rate or concurrency whose means meet the objectives."""
    if workload.request_rate_per_second is not None:
        rate = _largest(means_of, workload, "request_rate_per_second", limit)
        return {"slo_max_requests_per_second": rate}
    return {"slo_max_concurrency": int(_largest(means_of, workload, "concurrency", None))}


def _largest(means_of: Means, workload: ServeWorkload, name: str, limit: float | None) -> float:
    """Return the largest load that meets the objectives; 0 if none does.

    Each round evaluates a vector of loads between the largest that meets the objectives and the
    smallest that misses them. Without a limit, loads are whole numbers of concurrent clients.
    """

    def count_good(loads: Floats) -> int:
        unset = {"concurrency": None, "burst_requests": None, "request_rate_per_second": None}
        load = workload.model_copy(update={**unset, name: loads})
        means = means_of(load)
        ttft = _within(means.ttft_seconds, workload.ttft_slo_seconds)
        met = both(ttft, _within(means.tpot_seconds, workload.tpot_slo_seconds))
        failures = np.flatnonzero(~np.broadcast_to(met, loads.shape))
        return int(failures[0]) if len(failures) else len(loads)

    low, high = 0.0, BELOW_SATURATION * (limit or 0.0)
    loads = _between(low, high)
    if limit is None:
        loads = np.asarray(2.0 ** np.arange(MAX_DOUBLINGS + 1), dtype=np.float64)
    for _ in range(ROUNDS if limit else MAX_DOUBLINGS):
        count = count_good(loads)
        low = float(loads[count - 1]) if count else low
        high = float(loads[count]) if count < len(loads) else max(high, low)
        loads = _between(low, high) if limit else np.unique(np.floor(_between(low, high)))
        loads = loads[(loads > low) & (loads < high)]
        if not len(loads):
            break
    return low


def _between(low: float, high: float) -> Floats:
    """Return evenly spaced loads between two others."""
    return np.asarray(low + (high - low) / PIECES * np.arange(1, PIECES), dtype=np.float64)


# Latency percentiles over replicas of different speed: those of the mixture.
#
# Each kind of replica is simulated with its share of the load, and the requests of all kinds are
# pooled, so slow replicas show in the high percentiles.


SAMPLES = 6000  # leaves 60 requests beyond the 99th percentile


def under_heterogeneous_load(
    setting: Setting, workload: ServeWorkload, outcome: Outcome, ledger: Ledger
) -> tuple[Performance, tuple[str, ...]]:
    """Return the means with percentiles, objectives and limits, and the warnings."""
    parts = replica_shares(setting, workload)
    if len(parts) == 1:
        return under_load(parts[0].setting, workload, outcome, ledger)
    most = [
        int(min(max_concurrency(part.setting, workload), batch_limit(part.setting, workload)))
        for part in parts
    ]
    if min(most) < 1:
        return outcome.performance, ()
    limit = float(sum(part.rate * part.dealt.replicas for part in parts))

    def served(load: ServeWorkload) -> Performance:
        return serve_replica_shares(parts, load, NullLedger()).performance

    simulate = partial(_pooled, parts, workload, most)
    return _with_limits(workload, outcome, ledger, limit, simulate, served)


def _pooled(
    parts: Sequence[ReplicaShare], workload: ServeWorkload, most: Sequence[int]
) -> RequestTimes:
    """Return simulated requests of all replicas, in proportion to the rate of each kind."""
    loads = [part.load(workload) for part in parts]
    outcomes = [
        serve(part.setting, load, NullLedger()) for part, load in zip(parts, loads, strict=True)
    ]
    rates = [cast("float", one.performance.requests_per_second) for one in outcomes]
    samples = []
    for part, load, outcome, slots, rate in zip(parts, loads, outcomes, most, rates, strict=True):
        rate_per_replica = (load.request_rate_per_second or 0.0) / part.setting.layout.data
        in_flight = rate_per_replica * (outcome.performance.latency_seconds or 0.0)
        simulated = simulated_requests(part.setting, load, slots, in_flight)
        count = max(1, round(SAMPLES * rate / sum(rates)))
        served = simulated.at_means(outcome.performance, outcome.admission)
        samples.append(_sampled(served, count))
    return RequestTimes.pooled(samples)


def _sampled(simulated: RequestTimes, count: int) -> RequestTimes:
    """Return ``count`` of the requests, at evenly spaced positions."""
    length = len(simulated.ttft_s)
    chosen = np.arange(count) * length // count
    return RequestTimes(
        simulated.ttft_s[chosen], simulated.tpot_s[chosen], simulated.latency_s[chosen]
    )
