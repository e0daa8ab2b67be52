"""Latency percentiles over replicas of different speed: those of the mixture.

Each kind of replica is simulated with its share of the load, and the requests of all kinds are
pooled, so slow replicas show in the high percentiles.
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
from planner.workload.heterogeneous_serving import Part, parts_of, serve_parts
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
