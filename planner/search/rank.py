"""Orders feasible estimates by an objective, and finds the ones that nothing else beats."""

import math
from collections.abc import Callable

from planner.specs.estimate import Estimate
from planner.specs.plan import Objective

# "Balanced" trades in logarithms: doubling the speed outweighs a 9 % higher perplexity, and a
# fourfold number of devices must bring more than 40 % of speed.
QUALITY_WEIGHT = 8.0
DEVICE_WEIGHT = 0.25
UNKNOWN_PERPLEXITY_RATIO = 1.01


def devices_of(estimate: Estimate) -> int:
    """Return how many devices the estimate's strategy takes."""
    strategy = estimate.strategy
    sizes = (
        strategy.data_parallel_size,
        strategy.tensor_parallel_size,
        strategy.pipeline_parallel_size,
        strategy.context_parallel_size,
        strategy.attention_data_parallel_size,
    )
    return math.prod(size or 1 for size in sizes)


def perplexity_ratio(estimate: Estimate) -> float:
    """Return the expected perplexity ratio, with a small penalty where no table exists."""
    quality = estimate.quality
    if quality is None:
        return 1.0
    loss = quality.loss_ratio
    return UNKNOWN_PERPLEXITY_RATIO if loss is None else 1 + loss


def speed(estimate: Estimate) -> float:
    """Return how much work is done per second: tokens, or whole compressions."""
    performance = estimate.performance
    if performance.tokens_per_second is not None:
        return performance.tokens_per_second
    return 1.0 / (performance.duration_seconds or math.inf)


def delay(estimate: Estimate) -> float:
    """Return the seconds that somebody waits: for a request, a step or a compression."""
    performance = estimate.performance
    waited = performance.latency_seconds or performance.step_seconds
    return waited or performance.duration_seconds or math.inf


def held_bytes(estimate: Estimate) -> float:
    """Return the bytes at the peak, over all devices in use."""
    return float(estimate.memory.per_device_peak_bytes * devices_of(estimate))


def penalty(estimate: Estimate, objective: Objective) -> tuple[float, float]:
    """Return what the objective minimises, with speed as the tie-breaker."""
    return PENALTIES[objective](estimate), -speed(estimate)


def device_seconds(estimate: Estimate) -> float:
    """Return the device-seconds per unit of work, which stand in for an unknown price."""
    return devices_of(estimate) / speed(estimate)


def imbalance(estimate: Estimate) -> float:
    """Return quality loss and devices against speed, in logarithms."""
    return (
        QUALITY_WEIGHT * math.log(perplexity_ratio(estimate))
        + DEVICE_WEIGHT * math.log(devices_of(estimate))
        - math.log(speed(estimate))
    )


PENALTIES: dict[Objective, Callable[[Estimate], float]] = {
    "throughput": lambda estimate: -speed(estimate),
    "latency": delay,
    "cost": lambda estimate: estimate.cost_usd_per_million_tokens or device_seconds(estimate),
    "energy": lambda estimate: estimate.energy_joules_per_token or device_seconds(estimate),
    "memory": held_bytes,
    "quality": perplexity_ratio,
    "balanced": imbalance,
}


def criteria(estimate: Estimate) -> tuple[float, float, float, float]:
    """Return what the frontier minimises: slowness, delay, memory and quality loss."""
    return (
        -speed(estimate),
        delay(estimate),
        held_bytes(estimate),
        perplexity_ratio(estimate),
    )


def frontier(estimates: list[Estimate]) -> list[Estimate]:
    """Return the estimates that no other one matches in everything and beats in something."""
    ordered = sorted(estimates, key=criteria)
    kept: list[Estimate] = []
    for candidate in ordered:
        own = criteria(candidate)
        if not any(
            all(theirs <= mine for theirs, mine in zip(criteria(other), own, strict=True))
            for other in kept
        ):
            kept.append(candidate)
    return kept
