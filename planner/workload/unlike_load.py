"""Percentiles of requests that replicas of unlike speed share: those of the mixture.

Each kind of replica is simulated with its own share of the load. Every request then counts once,
wherever it was served, so that a slow kind shows in the high percentiles.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from planner.cost.equation import Ledger, Unrecorded
from planner.specs.estimate import Performance
from planner.specs.workload import ServeWorkload
from planner.workload.arrivals import Floats
from planner.workload.capacity import max_concurrency
from planner.workload.serve import intake_seconds
from planner.workload.setting import Setting
from planner.workload.under_load import (
    Simulated,
    attained_ratio,
    before_steps,
    most_within_objectives,
    percentiles,
    served_means,
    simulated_requests,
    under_load,
)
from planner.workload.unlike_serving import Part, parts_of, serve_parts

SAMPLES = 6000  # of a percentile that one request in a hundred decides, sixty


def under_unlike_load(
    setting: Setting, workload: ServeWorkload, means: Performance, ledger: Ledger
) -> tuple[Performance, tuple[str, ...]]:
    """Return the means with percentiles, objectives and limits, and what to warn of."""
    parts = parts_of(setting, workload)
    if len(parts) == 1:
        return under_load(parts[0].setting, workload, means, ledger)
    most = [int(max_concurrency(part.setting, workload)) for part in parts]
    if min(most) < 1:
        return means, ()
    limit = float(sum(part.rate * part.dealt.replicas for part in parts))
    found: dict[str, float | int] = {"max_requests_per_second": limit}
    rate = workload.request_rate_per_second
    if rate is not None and rate >= limit:
        warning = f"{rate:g} requests a second cannot be served: the most is {limit:.3g}"
        return means.model_copy(update=found), (warning,)
    pooled = _pooled(parts, workload, most)
    found |= percentiles(means, pooled, ledger, 0.0)
    if workload.ttft_slo_seconds or workload.tpot_slo_seconds:
        found["slo_attainment_ratio"] = attained_ratio(workload, means, pooled, 0.0)

        def served(load: ServeWorkload) -> Performance:
            return serve_parts(parts, load, Unrecorded()).performance

        found |= most_within_objectives(served, workload, limit)
    return means.model_copy(update=found), ()


def _pooled(parts: Sequence[Part], workload: ServeWorkload, most: Sequence[int]) -> Simulated:
    """Return requests of all replicas, of each kind as many as it has of the requests."""
    loads = [part.load(workload) for part in parts]
    own = [served_means(part.setting, load) for part, load in zip(parts, loads, strict=True)]
    rates = [cast("float", one.requests_per_second) for one in own]
    found = []
    for part, load, means, places, rate in zip(parts, loads, own, most, rates, strict=True):
        asked = (load.request_rate_per_second or 0.0) / part.setting.layout.data
        in_flight = asked * (means.latency_seconds or 0.0)
        simulated = simulated_requests(part.setting, load, places, in_flight)
        count = max(1, round(SAMPLES * rate / sum(rates)))
        found.append(_counted(_scaled(part.setting, simulated, means), count))
    return Simulated(
        *(
            np.concatenate([getattr(one, f"{name}_s") for one in found])
            for name in ("ttft", "tpot", "latency")
        )
    )


def _scaled(setting: Setting, simulated: Simulated, means: Performance) -> Simulated:
    """Return simulated requests with the calibrated means of their replica."""

    def times(name: str) -> Floats:
        own: Floats = getattr(simulated, f"{name}_s")
        mean: float = getattr(means, f"{name}_seconds") or 0.0
        before = before_steps(name, intake_seconds(setting))
        return own if not own.mean() > 0 else before + own * ((mean - before) / own.mean())

    return replace(
        simulated, ttft_s=times("ttft"), tpot_s=times("tpot"), latency_s=times("latency")
    )


def _counted(simulated: Simulated, count: int) -> Simulated:
    """Return so many of the requests, evenly spread over all of them."""
    length = len(simulated.ttft_s)
    chosen = np.arange(count) * length // count
    return Simulated(
        simulated.ttft_s[chosen], simulated.tpot_s[chosen], simulated.latency_s[chosen]
    )
