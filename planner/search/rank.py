"""Rank strategies by an objective, as single estimates or columns, and compute the frontier."""

from collections.abc import Callable
from dataclasses import dataclass

from planner.cost.quantity import log, where
from planner.search.question import figure
from planner.specs.estimate import Estimate, Objective
from planner.specs.workload import Strategy
from planner.workload.layouts import Layout

# "Balanced" trades in logarithms: doubling the speed outweighs a 9 % higher perplexity, and four
# times the devices must add more than 40 % of speed.
QUALITY_WEIGHT = 8.0
DEVICE_WEIGHT = 0.25
UNKNOWN_PERPLEXITY_RATIO = 1.01
# Digits compared: smaller differences are rounding, and ties prefer the simpler strategy.
DIGITS = 10
DEVICE_SIZES = (
    "data_parallel_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "attention_data_parallel_size",
)
PLAIN_FIELDS = (
    "pipeline_parallel_size",
    "context_parallel_size",
    "tensor_parallel_size",
    "expert_parallel_size",
    "zero_stage",
    "zero_shard_size",
    "virtual_pipeline_size",
)
RECOMPUTATIONS = (None, "none", "selective", "full")


@dataclass(frozen=True)
class Merit:
    """The figures that objectives use, scalar or column; unknown prices are NaN."""

    speed: float
    delay: float
    peak_bytes: float
    devices: float
    perplexity_ratio: float
    joules_per_token: float
    usd_per_million_tokens: float

    @property
    def held_bytes(self) -> float:
        """Return the peak bytes over all devices in use."""
        return self.peak_bytes * self.devices

    @property
    def device_seconds(self) -> float:
        """Return the device-seconds per unit of work, a substitute for an unknown price."""
        return self.devices / self.speed

    @property
    def imbalance(self) -> float:
        """Return quality loss and device count minus speed, in logarithms."""
        quality = QUALITY_WEIGHT * log(self.perplexity_ratio)
        return quality + DEVICE_WEIGHT * log(self.devices) - log(self.speed)

    @property
    def criteria(self) -> tuple[float, float, float, float]:
        """Return the figures that the frontier minimises: minus speed, delay, memory, quality."""
        return -self.speed, self.delay, self.held_bytes, self.perplexity_ratio


def merit_from(
    read: Callable[[str], float | None], devices: float, perplexity_ratio: float
) -> Merit:
    """Return the merit from the figures that ``read`` returns by name, None where inapplicable.

    Speed is in tokens per second, or compressions per second. Delay is the time of a request, a
    step or a compression.
    """
    tokens, duration = read("tokens_per_second"), read("duration_seconds")
    waits = (read("latency_seconds"), read("step_seconds"), duration)
    energy, cost = read("energy_joules_per_token"), read("cost_usd_per_million_tokens")
    peak = read("per_device_peak_bytes")
    if duration is None:
        duration = float("inf")
    return Merit(
        speed=1.0 / duration if tokens is None else tokens,
        delay=next((wait for wait in waits if wait is not None), float("inf")),
        peak_bytes=float("nan") if peak is None else peak,
        devices=devices,
        perplexity_ratio=perplexity_ratio,
        joules_per_token=float("nan") if energy is None else energy,
        usd_per_million_tokens=float("nan") if cost is None else cost,
    )


def merit_of(estimate: Estimate) -> Merit:
    """Return the merit of one estimate."""
    return merit_from(
        lambda name: figure(estimate, name), devices_of(estimate), perplexity_ratio(estimate)
    )


def devices_of(estimate: Estimate) -> int:
    """Return the number of devices of the estimate's strategy."""
    devices = 1
    for name in DEVICE_SIZES:
        devices *= getattr(estimate.strategy, name) or 1
    return devices


def perplexity_ratio(estimate: Estimate) -> float:
    """Return the expected perplexity ratio, slightly penalised if no table exists."""
    quality = estimate.quality
    if quality is None:
        return 1.0
    loss = quality.loss_ratio
    return UNKNOWN_PERPLEXITY_RATIO if loss is None else 1 + loss


PENALTIES: dict[Objective, Callable[[Merit], float]] = {
    "throughput": lambda merit: -merit.speed,
    "latency": lambda merit: merit.delay,
    "cost": lambda merit: where(
        merit.usd_per_million_tokens > 0, merit.usd_per_million_tokens, merit.device_seconds
    ),
    "energy": lambda merit: where(
        merit.joules_per_token > 0, merit.joules_per_token, merit.device_seconds
    ),
    "memory": lambda merit: merit.held_bytes,
    "quality": lambda merit: merit.perplexity_ratio,
    "balanced": lambda merit: merit.imbalance,
}


def order_of(
    estimate: Estimate, objective: Objective
) -> tuple[float, float, tuple[int, ...], str]:
    """Return the sort key of plans: the objective, then speed, then simplicity."""
    merit = merit_of(estimate)
    penalty = PENALTIES[objective](merit)
    return _rounded(penalty), _rounded(-merit.speed), *plainness(estimate.strategy)


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def plainness(strategy: Strategy) -> tuple[tuple[int, ...], str]:
    """Return the complexity of a strategy, a tie-breaker that prefers simpler ones."""
    sizes = tuple(getattr(strategy, name) or 0 for name in PLAIN_FIELDS)
    return (*sizes, *_plain_choices(strategy)), strategy.model_dump_json()


def plainness_columns(strategy: Strategy, layout: Layout) -> tuple[float, ...]:
    """Return the numbers of ``plainness`` for a layout of columns, one row each."""
    sizes = (
        layout.pipeline,
        layout.context,
        layout.tensor,
        layout.expert,
        layout.zero_stage,
        layout.shard,
        layout.chunks,
    )
    return (*sizes, *_plain_choices(strategy))


def _plain_choices(strategy: Strategy) -> tuple[int, int]:
    recomputation = RECOMPUTATIONS.index(strategy.activation_recomputation)
    return recomputation, len(strategy.offload_places)


def criteria(estimate: Estimate) -> tuple[float, float, float, float]:
    """Return the figures that the frontier minimises: minus speed, delay, memory, quality."""
    return merit_of(estimate).criteria


def frontier(estimates: list[Estimate]) -> list[Estimate]:
    """Return the Pareto frontier: the estimates that no other estimate dominates."""
    by_criteria = sorted(
        ((criteria(each), plainness(each.strategy), each) for each in estimates),
        key=lambda item: item[:2],
    )
    nondominated: list[tuple[tuple[float, ...], Estimate]] = []
    for own, _, candidate in by_criteria:
        if not any(
            all(theirs <= mine for theirs, mine in zip(other, own, strict=True))
            for other, _ in nondominated
        ):
            nondominated.append((own, candidate))
    return [estimate for _, estimate in nondominated]
