"""Serving and batch generation on unlike nodes: unlike replicas, and pipelines over both kinds.

Each kind of replica is costed as if it were alone with its share of the requests; what callers see
is the mean over all requests, and rates add up. A batch is done when the last replica is.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import TypeVar, cast

from planner.catalog.engines import get_engine
from planner.cost.columns import Flag, both, is_column, largest, maximum, minimum
from planner.cost.equation import Ledger, Unrecorded
from planner.cost.memory import MemoryUse
from planner.cost.replicas import mean_over_requests, rate_of_both, request_share
from planner.errors import NotCoveredError
from planner.specs.estimate import Performance
from planner.specs.workload import GenerateWorkload, ServeWorkload
from planner.workload.capacity import max_concurrency
from planner.workload.dealing import Dealt, deal, plain_layout
from planner.workload.generate import batch_load, generate
from planner.workload.inference_memory import inference_memory
from planner.workload.outcome import Outcome, performance_of
from planner.workload.resolve import on_device
from planner.workload.serve import saturation_rate, serve
from planner.workload.serving_split import split_of
from planner.workload.setting import Setting
from planner.workload.staged import aside

GROUP = "serving"
TITLES = {"ttft": "Time to first token", "tpot": "Time per output token"}
Work = TypeVar("Work", bound=ServeWorkload | GenerateWorkload)
ROUNDS = 3  # of sharing a batch by lines through what the last shares took
NEARBY, FLAT = 1.1, 1e-9


@dataclass(frozen=True)
class Part:
    """Replicas that are alike, with their share of the work; ``rate`` is one replica's speed."""

    setting: Setting
    dealt: Dealt
    rate: float
    share: float = 1.0

    @property
    def title(self) -> str:
        """Return how many replicas there are and of what."""
        count = self.dealt.replicas
        return f"{count} replica{'s' if count > 1 else ''} on {self.dealt.title}"

    def load(self, workload: Work) -> Work:
        """Return the part of a workload that these replicas get."""
        names = ("concurrency", "burst_requests", "request_rate_per_second", "batch_size")
        asked = {name: getattr(workload, name, None) for name in names}
        own = {name: value * self.share for name, value in asked.items() if value is not None}
        return cast("Work", workload.model_copy(update=own))


def parts_of(setting: Setting, workload: ServeWorkload | GenerateWorkload) -> tuple[Part, ...]:
    """Return the replicas by kind, each with its share of the work.

    Raises:
        NotCoveredError: something is asked for that stages of unlike devices are not costed with.
    """
    _refuse(setting)
    setting = replace(setting, layout=plain_layout(setting.layout))
    parts = [_part(setting, dealt, workload) for dealt in deal(setting)]
    if isinstance(workload, GenerateWorkload) and len(parts) > 1:
        for _ in range(ROUNDS):
            parts = _ending_together(_shared(parts), workload)
    return _shared(parts)


def _ending_together(parts: Sequence[Part], workload: GenerateWorkload) -> list[Part]:
    """Return the replicas with the speeds at which all of them end a batch at once.

    Around its own share the time of a kind is a straight line in its sequences; a kind that would
    end last with a single one keeps that.
    """
    lines = [_line(part, workload) for part in parts]
    each = [1 / slope for _, slope in lines]
    ends = (workload.batch_size + sum(base / slope for base, slope in lines)) / sum(each)
    loads = [
        maximum((ends - base) / slope, float(part.dealt.replicas))
        for part, (base, slope) in zip(parts, lines, strict=True)
    ]
    held = _within_memory(loads, [_most_sequences(part, workload) for part in parts], workload)
    return [
        replace(part, rate=load / part.dealt.replicas / ends)
        for part, load in zip(parts, held, strict=True)
    ]


def _within_memory(
    loads: Sequence[float], most: Sequence[float], workload: GenerateWorkload
) -> list[float]:
    """Return the loads with what one kind has no room for on those that have some left."""
    kept = [minimum(load, room) for load, room in zip(loads, most, strict=True)]
    free = [room - load for load, room in zip(kept, most, strict=True)]
    left = maximum(0.0, workload.batch_size - sum(kept))
    ratio = left / maximum(sum(free), FLAT)
    return [load + ratio * room for load, room in zip(kept, free, strict=True)]


def _most_sequences(part: Part, workload: GenerateWorkload) -> float:
    """Return how many sequences all replicas of a kind have room for, one each at least.

    Around its own share memory is a straight line in them.
    """
    own = workload.batch_size * part.share
    here, more = (
        inference_memory(part.setting, Unrecorded(), batch_load(part.setting, load)).filled_ratio
        for load in (part.load(workload), replace(part, share=part.share * NEARBY).load(workload))
    )
    each = (more - here) / (own * (NEARBY - 1))
    room = own + (1 - FLAT - here) / maximum(each, FLAT * here / own)
    return maximum(room, float(part.dealt.replicas))


def _line(part: Part, workload: GenerateWorkload) -> tuple[float, float]:
    """Return the seconds that a kind's share takes as a base and the seconds per sequence."""
    here, more = (
        cast("float", generate(part.setting, load, Unrecorded()).performance.latency_seconds)
        for load in (part.load(workload), replace(part, share=part.share * NEARBY).load(workload))
    )
    own = workload.batch_size * part.share
    slope = maximum((more - here) / (own * (NEARBY - 1)), FLAT * here / own)
    return here - slope * own, slope


def _shared(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Return replicas with their share of the work: in proportion to their speed."""
    total = sum(part.dealt.replicas * part.rate for part in parts)
    return tuple(replace(part, share=part.dealt.replicas * part.rate / total) for part in parts)


def _refuse(setting: Setting) -> None:
    if setting.strategy.disaggregated:
        raise NotCoveredError(
            "pools for prefill and decode are costed on nodes of one kind: leave disaggregated "
            "out, or ask for one kind of node",
            "strategy.disaggregated",
        )


def _part(setting: Setting, dealt: Dealt, workload: ServeWorkload | GenerateWorkload) -> Part:
    own = _setting_of(setting, dealt)
    alone = _even_load(setting, dealt, workload)
    if dealt.is_uneven:
        if setting.strategy.offload:
            raise NotCoveredError(
                "offload is costed on pipelines of one kind of device: leave it out, or ask for "
                "one kind of node",
                "strategy.offload",
            )
        own = replace(own, split=split_of(own, alone))
    return Part(own, dealt, _speed(own, alone))


def _even_load(setting: Setting, dealt: Dealt, workload: Work) -> Work:
    """Return the part of a workload that replicas get before it is known which are faster."""
    return Part(setting, dealt, 0.0, dealt.replicas / setting.layout.data).load(workload)


def _setting_of(setting: Setting, dealt: Dealt) -> Setting:
    """Return the replicas of one kind as a setting of their own."""
    main = min(dealt.places, key=lambda place: place.device.memory_bandwidth_bytes_per_second)
    widest = max(dealt.places, key=lambda place: place.cluster.devices_per_node)
    engine = get_engine(setting.engine.key, main.device.kind)
    return replace(
        setting,
        device=main.device,
        cluster=main.cluster if dealt.is_uneven else widest.cluster,
        engine=on_device(engine, main.device, training=False),
        layout=replace(setting.layout, data=dealt.replicas),
        places=dealt.places if dealt.is_uneven else (),
        split=(),
    )


def _speed(setting: Setting, workload: ServeWorkload | GenerateWorkload) -> float:
    """Return the most requests, or the sequences of an even share, per second of one replica."""
    if isinstance(workload, ServeWorkload):
        most = max_concurrency(setting, workload)
        return saturation_rate(setting, workload, most) / setting.layout.data
    latency = generate(setting, workload, Unrecorded()).performance.latency_seconds
    return workload.batch_size / cast("float", latency) / setting.layout.data


def serve_unlike(setting: Setting, workload: ServeWorkload, ledger: Ledger) -> Outcome:
    """Return what serving costs on replicas of unlike speed, or over stages of unlike devices."""
    return serve_parts(parts_of(setting, workload), workload, ledger)


def serve_parts(parts: tuple[Part, ...], workload: ServeWorkload, ledger: Ledger) -> Outcome:
    """Return what serving costs on replicas whose shares are known."""
    return _together(parts, workload, ledger, serve)


def generate_unlike(setting: Setting, workload: GenerateWorkload, ledger: Ledger) -> Outcome:
    """Return what a batch costs on replicas of unlike speed, or over stages of unlike devices."""
    return _together(parts_of(setting, workload), workload, ledger, generate)


def _together(
    parts: tuple[Part, ...],
    workload: Work,
    ledger: Ledger,
    run: Callable[[Setting, Work, Ledger], Outcome],
) -> Outcome:
    if len(parts) == 1:
        return _in_stages(run(parts[0].setting, workload, ledger), parts)
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
    return _in_stages(whole, parts)


def _all_fit(outcomes: Sequence[Outcome]) -> bool:
    flags: list[Flag] = [one.fits for one in outcomes]
    return cast("bool", reduce(both, flags))


def _in_stages(outcome: Outcome, parts: Iterable[Part]) -> Outcome:
    """Return an outcome with the layers and the device of each stage, a replica of each kind."""
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
    """Return what the stages of one replica of each kind hold, beside what each one has."""
    limits: list[tuple[int, float]] = []
    for outcome in outcomes:
        own = outcome.memory
        limits += own.limits or [(own.capacity_bytes, own.usable_bytes)] * len(own.stages)
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
    """What callers see of replicas that share their requests."""

    parts: tuple[Part, ...]
    outcomes: Sequence[Outcome]
    ledger: Ledger

    def figures(self, name: str) -> list[float]:
        """Return a figure of each kind of replica, where it has one."""
        found = [getattr(one.performance, name) for one in self.outcomes]
        return [value for value in found if value is not None]

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
        """Return the mean of seconds by class over all requests."""
        return {
            name: sum(w * one[name] for w, one in zip(self.weights, found, strict=True))
            for name in found[0]
        }

    def mean_time(self, name: str) -> float:
        """Return the mean of a time over all requests, recorded."""
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
        """Return the requests per second of all replicas, recorded."""
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
        """Return the figures of all replicas together."""
        if isinstance(workload, ServeWorkload):
            return self.served(workload)
        return self.generated(workload)

    def served(self, workload: ServeWorkload) -> Performance:
        """Return the figures of served requests: a burst ends with its last replica."""
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
        """Return the figures of a batch: it is done when the last replica is."""
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

    def _common(self, produced: float, rate: float) -> dict[str, float | None]:
        devices = sum(part.setting.layout.devices for part in self.parts)
        decoded = self.figures("decode_tokens_per_second")
        return {
            "tokens_per_second": produced,
            "output_tokens_per_second": produced,
            "tokens_per_second_per_device": produced / devices,
            "requests_per_second": rate,
            "decode_tokens_per_second": sum(decoded) if len(decoded) == len(self.parts) else None,
            "prefill_seconds": self.mean("prefill_seconds"),
            "communication_ratio": self.mean("communication_ratio"),
        }
