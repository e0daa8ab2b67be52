"""Serving and batch generation on heterogeneous nodes: mixed replicas and mixed pipelines.

Each kind of replica is costed separately with its share of the requests. Latencies are means over
all requests, rates are summed, and a batch ends with its slowest replica.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import TypeVar, cast

from planner.catalog.engines import get_engine
from planner.cost.memory import MemoryUse
from planner.cost.quantity import (
    Flag,
    Ledger,
    Unrecorded,
    both,
    is_column,
    largest,
    maximum,
    minimum,
)
from planner.cost.queueing import mean_over_requests, rate_of_both, request_share
from planner.errors import NotCoveredError
from planner.specs.estimate import Performance
from planner.specs.workload import GenerateWorkload, ServeWorkload
from planner.workload.capacity import max_concurrency
from planner.workload.device_groups import ReplicaGroup, group_replicas, plain_layout, split_of
from planner.workload.forward import aside
from planner.workload.generate import batch_load, generate
from planner.workload.inference_memory import inference_memory
from planner.workload.outcome import Outcome, performance_of
from planner.workload.resolve import on_device
from planner.workload.serve import saturation_rate, serve
from planner.workload.setting import Setting

GROUP = "serving"
TITLES = {"ttft": "Time to first token", "tpot": "Time per output token"}
Work = TypeVar("Work", bound=ServeWorkload | GenerateWorkload)
ROUNDS = 3  # iterations that rebalance a batch by the times of the previous shares
NEARBY, FLAT = 1.1, 1e-9


@dataclass(frozen=True)
class Part:
    """Identical replicas and their share of the workload; ``rate`` is the speed of one."""

    setting: Setting
    dealt: ReplicaGroup
    rate: float
    share: float = 1.0

    @property
    def title(self) -> str:
        """Return a label with the number of replicas and their devices."""
        count = self.dealt.replicas
        return f"{count} replica{'s' if count > 1 else ''} on {self.dealt.title}"

    def load(self, workload: Work) -> Work:
        """Return the workload scaled to the share of these replicas."""
        names = ("concurrency", "burst_requests", "request_rate_per_second", "batch_size")
        totals = {name: getattr(workload, name, None) for name in names}
        scaled = {name: value * self.share for name, value in totals.items() if value is not None}
        return cast("Work", workload.model_copy(update=scaled))


def parts_of(setting: Setting, workload: ServeWorkload | GenerateWorkload) -> tuple[Part, ...]:
    """Return the kinds of replicas, each with its share of the workload.

    Raises:
        NotCoveredError: the strategy uses a feature without a model for heterogeneous stages.
    """
    _refuse_disaggregated(setting)
    setting = replace(setting, layout=plain_layout(setting.layout))
    parts = [_part(setting, dealt, workload) for dealt in group_replicas(setting)]
    if isinstance(workload, GenerateWorkload) and len(parts) > 1:
        for _ in range(ROUNDS):
            parts = _balanced(_shared(parts), workload)
    return _shared(parts)


def _balanced(parts: Sequence[Part], workload: GenerateWorkload) -> list[Part]:
    """Return the replicas with rates that make all of them finish a batch together.

    The time of each kind is linearised in its sequences around its current share. Each replica
    keeps at least one sequence.
    """
    lines = [_line(part, workload) for part in parts]
    rates = [1 / slope for _, slope in lines]
    end_s = (workload.batch_size + sum(base / slope for base, slope in lines)) / sum(rates)
    loads = [
        maximum((end_s - base) / slope, float(part.dealt.replicas))
        for part, (base, slope) in zip(parts, lines, strict=True)
    ]
    final = _within_memory(loads, [_most_sequences(part, workload) for part in parts], workload)
    return [
        replace(part, rate=load / part.dealt.replicas / end_s)
        for part, load in zip(parts, final, strict=True)
    ]


def _within_memory(
    loads: Sequence[float], most: Sequence[float], workload: GenerateWorkload
) -> list[float]:
    """Return the loads, with the excess of full kinds moved to kinds with free memory."""
    clipped = [minimum(load, limit) for load, limit in zip(loads, most, strict=True)]
    free = [limit - load for load, limit in zip(clipped, most, strict=True)]
    excess = maximum(0.0, workload.batch_size - sum(clipped))
    ratio = excess / maximum(sum(free), FLAT)
    return [load + ratio * room for load, room in zip(clipped, free, strict=True)]


def _most_sequences(part: Part, workload: GenerateWorkload) -> float:
    """Return the sequences that fit in memory over all replicas of a kind, at least one each.

    Memory is linearised in the sequences around the current share.
    """
    sequences = workload.batch_size * part.share
    filled, filled_more = (
        inference_memory(part.setting, Unrecorded(), batch_load(part.setting, load)).filled_ratio
        for load in (part.load(workload), replace(part, share=part.share * NEARBY).load(workload))
    )
    slope = (filled_more - filled) / (sequences * (NEARBY - 1))
    limit = sequences + (1 - FLAT - filled) / maximum(slope, FLAT * filled / sequences)
    return maximum(limit, float(part.dealt.replicas))


def _line(part: Part, workload: GenerateWorkload) -> tuple[float, float]:
    """Return the linear time of a kind: base seconds and seconds per sequence."""
    base, more = (
        cast("float", generate(part.setting, load, Unrecorded()).performance.latency_seconds)
        for load in (part.load(workload), replace(part, share=part.share * NEARBY).load(workload))
    )
    sequences = workload.batch_size * part.share
    slope = maximum((more - base) / (sequences * (NEARBY - 1)), FLAT * base / sequences)
    return base - slope * sequences, slope


def _shared(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Return the replicas with shares of the workload proportional to their rates."""
    total = sum(part.dealt.replicas * part.rate for part in parts)
    return tuple(replace(part, share=part.dealt.replicas * part.rate / total) for part in parts)


def _refuse_disaggregated(setting: Setting) -> None:
    if setting.strategy.disaggregated:
        raise NotCoveredError(
            "pools for prefill and decode are costed on nodes of one kind: leave disaggregated "
            "out, or ask for one kind of node",
            "strategy.disaggregated",
        )


def _part(
    setting: Setting, dealt: ReplicaGroup, workload: ServeWorkload | GenerateWorkload
) -> Part:
    own = _setting_of(setting, dealt)
    even = _even_load(setting, dealt, workload)
    if dealt.is_uneven:
        if setting.strategy.offload:
            raise NotCoveredError(
                "offload is costed on pipelines of one kind of device: leave it out, or ask for "
                "one kind of node",
                "strategy.offload",
            )
        own = replace(own, split=split_of(own, even))
    return Part(own, dealt, _speed(own, even))


def _even_load(setting: Setting, dealt: ReplicaGroup, workload: Work) -> Work:
    """Return the workload of a kind of replica when it is split evenly over all replicas."""
    return Part(setting, dealt, 0.0, dealt.replicas / setting.layout.data).load(workload)


def _setting_of(setting: Setting, dealt: ReplicaGroup) -> Setting:
    """Return a setting with only the replicas of one kind."""
    slowest = min(dealt.places, key=lambda place: place.device.memory_bandwidth_bytes_per_second)
    widest = max(dealt.places, key=lambda place: place.cluster.devices_per_node)
    engine = get_engine(setting.engine.key, slowest.device.kind)
    return replace(
        setting,
        device=slowest.device,
        cluster=slowest.cluster if dealt.is_uneven else widest.cluster,
        engine=on_device(engine, slowest.device, training=False),
        layout=replace(setting.layout, data=dealt.replicas),
        places=dealt.places if dealt.is_uneven else (),
        split=(),
    )


def _speed(setting: Setting, workload: ServeWorkload | GenerateWorkload) -> float:
    """Return one replica's maximum requests per second, or sequences per second of a batch."""
    if isinstance(workload, ServeWorkload):
        most = max_concurrency(setting, workload)
        return saturation_rate(setting, workload, most) / setting.layout.data
    latency = generate(setting, workload, Unrecorded()).performance.latency_seconds
    return workload.batch_size / cast("float", latency) / setting.layout.data


def serve_unlike(setting: Setting, workload: ServeWorkload, ledger: Ledger) -> Outcome:
    """Return the cost of serving on heterogeneous replicas or pipeline stages."""
    return serve_parts(parts_of(setting, workload), workload, ledger)


def serve_parts(parts: tuple[Part, ...], workload: ServeWorkload, ledger: Ledger) -> Outcome:
    """Return the cost of serving on replicas with known shares."""
    return _combined(parts, workload, ledger, serve)


def generate_unlike(setting: Setting, workload: GenerateWorkload, ledger: Ledger) -> Outcome:
    """Return the cost of a batch on heterogeneous replicas or pipeline stages."""
    return _combined(parts_of(setting, workload), workload, ledger, generate)


def _combined(
    parts: tuple[Part, ...],
    workload: Work,
    ledger: Ledger,
    run: Callable[[Setting, Work, Ledger], Outcome],
) -> Outcome:
    if len(parts) == 1:
        return _with_stages(run(parts[0].setting, workload, ledger), parts)
    _record_shares(parts, ledger)
    outcomes = [
        run(part.setting, part.load(workload), aside(ledger, part.dealt.title)) for part in parts
    ]
    shared = Shared(parts, outcomes, ledger)
    performance = shared.performance(workload)
    whole = Outcome(
        memory=_memory(outcomes),
        fits=_all_fit(outcomes),
        seconds_by_class=shared.by_class([one.seconds_by_class for one in outcomes]),
        phases={
            phase: shared.by_class([one.phases[phase] for one in outcomes])
            for phase in outcomes[0].phases
        },
        energy_tokens_per_second=performance.tokens_per_second,
        performance=performance,
        warnings=_warnings(parts, outcomes),
    )
    return _with_stages(whole, parts)


def _all_fit(outcomes: Sequence[Outcome]) -> bool:
    flags: list[Flag] = [one.fits for one in outcomes]
    return cast("bool", reduce(both, flags))


def _with_stages(outcome: Outcome, parts: Iterable[Part]) -> Outcome:
    """Return an outcome with the layers and device of each stage of one replica per kind."""
    layers = [cast("int", share.layers) for part in parts for share in part.setting.shares]
    devices = [place.device.id for part in parts for place in part.dealt.places]
    return replace(outcome, stage_layers=tuple(layers), stage_devices=tuple(devices))


def _record_shares(parts: tuple[Part, ...], ledger: Ledger) -> None:
    total = sum(part.dealt.replicas * part.rate for part in parts)
    for part in parts:
        ledger.term(
            request_share,
            part.setting.line(GROUP, f"Share of the requests for {part.title}", key="share"),
            replicas=part.dealt.replicas,
            own_rate=part.rate,
            total_rate=total,
        )


def _memory(outcomes: list[Outcome]) -> MemoryUse:
    """Return the memory use of the stages of one replica per kind, with each stage's limits."""
    limits: list[tuple[int, float]] = []
    for outcome in outcomes:
        use = outcome.memory
        limits += use.limits or [(use.capacity_bytes, use.usable_bytes)] * len(use.stages)
    return MemoryUse(
        stages=tuple(stage for one in outcomes for stage in one.memory.stages),
        capacity_bytes=min(capacity for capacity, _ in limits),
        usable_bytes=min(usable for _, usable in limits),
        host_bytes=largest(one.memory.host_bytes for one in outcomes),
        disk_bytes=largest(one.memory.disk_bytes for one in outcomes),
        limits=tuple(limits),
    )


def _warnings(parts: tuple[Part, ...], outcomes: list[Outcome]) -> tuple[str, ...]:
    if is_column(*(part.share for part in parts)):
        return ()
    shares = ", ".join(f"{part.share:.0%} to {part.title}" for part in parts)
    own = (
        f"{part.title}: {warning}"
        for part, one in zip(parts, outcomes, strict=True)
        for warning in one.warnings
    )
    return (f"a router must share the requests: {shares}", *own)


@dataclass(frozen=True)
class Shared:
    """The combined performance of replicas that share the requests."""

    parts: tuple[Part, ...]
    outcomes: Sequence[Outcome]
    ledger: Ledger

    def figures(self, name: str) -> list[float]:
        """Return a performance figure of each kind of replica that has it."""
        values = [getattr(one.performance, name) for one in self.outcomes]
        return [value for value in values if value is not None]

    @cached_property
    def weights(self) -> list[float]:
        """Return the share of all requests that each kind of replica serves."""
        rates = self.figures("requests_per_second")
        return [rate / sum(rates) for rate in rates]

    def mean(self, name: str) -> float:
        """Return the mean of a figure over all requests."""
        pairs = zip(self.weights, self.figures(name), strict=True)
        return sum(weight * value for weight, value in pairs)

    def by_class(self, found: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Return the seconds by operator class, averaged over all requests."""
        return {
            name: sum(w * one[name] for w, one in zip(self.weights, found, strict=True))
            for name in found[0]
        }

    def mean_time(self, name: str) -> float:
        """Return the mean of a time over all requests and record it."""
        whole, weight = self.figures(f"{name}_seconds")[0], self.weights[0]
        for at, part in enumerate(self.parts[1:], start=1):
            before, weight = weight, weight + self.weights[at]
            key = name if at == len(self.parts) - 1 else f"{name}_so_far"
            whole = self.ledger.term(
                mean_over_requests,
                part.setting.line(GROUP, f"{TITLES[name]}, of all replicas", key=key),
                first_s=whole,
                second_s=self.figures(f"{name}_seconds")[at],
                first_ratio=before / weight,
            )
        return whole

    def rate(self) -> float:
        """Return the requests per second of all replicas and record them."""
        rates = self.figures("requests_per_second")
        whole = rates[0]
        for at, part in enumerate(self.parts[1:], start=1):
            key = "all_requests" if at == len(self.parts) - 1 else "requests_so_far"
            whole = self.ledger.term(
                rate_of_both,
                part.setting.line(GROUP, "Requests per second of all replicas", key=key),
                first_rate=whole,
                second_rate=rates[at],
            )
        return whole

    def performance(self, workload: ServeWorkload | GenerateWorkload) -> Performance:
        """Return the performance of all replicas combined."""
        if isinstance(workload, ServeWorkload):
            return self.served(workload)
        return self.generated(workload)

    def served(self, workload: ServeWorkload) -> Performance:
        """Return the performance of serving; a burst ends with its slowest replica."""
        rate = self.rate()
        if workload.burst_requests is not None:
            pairs = zip(self.parts, self.figures("requests_per_second"), strict=True)
            rate = 1 / largest(part.share / own for part, own in pairs)
        ttft, tpot = self.mean_time("ttft"), self.mean_time("tpot")
        produced = rate * workload.output_tokens
        return performance_of(
            **self._common(produced, rate),
            prefill_tokens_per_second=workload.input_tokens / self.mean("prefill_seconds"),
            ttft_seconds=ttft,
            tpot_seconds=tpot,
            latency_seconds=self.mean("latency_seconds"),
            queue_seconds=self.mean("queue_seconds"),
            max_concurrency=sum(self.figures("max_concurrency")),
        )

    def generated(self, workload: GenerateWorkload) -> Performance:
        """Return the performance of a batch, which ends with its slowest replica."""
        latency = largest(self.figures("latency_seconds"))
        rate = workload.batch_size / latency
        steps = workload.output_tokens > 1
        return performance_of(
            **self._common(rate * workload.output_tokens, rate),
            prefill_tokens_per_second=sum(self.figures("prefill_tokens_per_second")),
            ttft_seconds=self.mean_time("ttft"),
            tpot_seconds=self.mean_time("tpot") if steps else None,
            latency_seconds=latency,
        )

    def _common(self, token_rate: float, rate: float) -> dict[str, float | None]:
        devices = sum(part.setting.layout.devices for part in self.parts)
        decode = self.figures("decode_tokens_per_second")
        return {
            "tokens_per_second": token_rate,
            "output_tokens_per_second": token_rate,
            "tokens_per_second_per_device": token_rate / devices,
            "requests_per_second": rate,
            "decode_tokens_per_second": sum(decode) if len(decode) == len(self.parts) else None,
            "prefill_seconds": self.mean("prefill_seconds"),
            "communication_ratio": self.mean("communication_ratio"),
        }
