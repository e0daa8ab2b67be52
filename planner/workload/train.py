"""Training: one step on like or unlike devices, and the whole run."""

from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from planner.cost.column import single
from planner.cost.communication import Pace, split_layers, stage_time
from planner.cost.memory import MemoryUse
from planner.cost.quantity import Ledger, NullLedger, Quantity, maximum, where
from planner.cost.roofline import memory_seconds, overhead_seconds
from planner.cost.training import (
    STATE_BYTES,
    reference_pass_seconds,
    step_seconds,
    zero_bubble_divisor,
    zero_shards,
)
from planner.cost.weights import element_bytes, stage_layers
from planner.specs.cluster import DeviceSpec
from planner.specs.workload import TrainWorkload
from planner.workload.device_groups import devices_of, slowest_device
from planner.workload.forward import LAYER_OPERATORS, LINEARS_PER_LAYER, further_operators
from planner.workload.inference_memory import usable_bytes
from planner.workload.offloading import OffloadTraffic, TrainingOffload, is_offloading
from planner.workload.outcome import Outcome, performance_of
from planner.workload.preference import (
    NO_FORWARDS,
    Forwards,
    forwards_before_steps,
    forwards_in_step,
)
from planner.workload.setting import Rates, Setting, compute_dtype_of, peak_of
from planner.workload.training_exchange import (
    ADAPTER_PASSES,
    FULL_SHARDING,
    GROUP,
    SHARDED_GRADIENTS,
    Exchange,
    Kernels,
    ShardTraffic,
    step_line,
)
from planner.workload.training_memory import (
    ADAPTER_METHODS,
    micro_batch_bytes,
    optimizer_of,
    stage_memory,
    state_bytes_each,
    trained_parameters,
    training_memory,
)

# An eager backward pass issues about twice the operators of the forward pass.
ISSUE_PASSES = 3
# The optimiser reads weight, gradient and states and writes weight and states.
UPDATE_READS_AND_WRITES = 2


@dataclass(frozen=True)
class _MicroBatch:
    """The seconds and FLOP of one micro-batch on one stage, forward and backward."""

    compute_s: float
    memory_s: float
    communication_s: float
    overhead_s: float
    model_flops: float
    window_s: float  # uncalibrated compute time that can overlap with communication

    @property
    def total_s(self) -> float:
        return self.compute_s + self.memory_s + self.communication_s + self.overhead_s


class _Work(NamedTuple):
    """The seconds and FLOP of the kernels of a micro-batch on one device."""

    compute_s: float
    memory_s: float
    model_flops: float
    window_s: float
    attention_window_s: float


def train(setting: Setting, workload: TrainWorkload, ledger: Ledger) -> Outcome:
    """Return the cost of one training step, and of the run if its tokens are given."""
    return at_pace(setting, workload, ledger, held_memory(setting, workload, ledger))


def held_memory(setting: Setting, workload: TrainWorkload, ledger: Ledger) -> MemoryUse:
    """Return the memory of every stage, cached for the setting's own workload.

    A search needs it twice per setting: to check the fit and to cost it.
    """
    if ledger.records or workload is not setting.workload:
        return training_memory(setting, ledger, workload)
    return setting.cached_cost("held_memory", lambda: training_memory(setting, ledger, workload))


def stage_seconds(setting: Setting, workload: TrainWorkload, pace: Pace) -> float:
    """Return the seconds of one micro-batch on a stage of the setting's device."""
    step = _Step(setting, workload, NullLedger(), pace)
    return step.with_forwards(step.with_offload_time(step.micro_batch_cost())).total_s


def at_pace(
    setting: Setting,
    workload: TrainWorkload,
    ledger: Ledger,
    memory: MemoryUse,
    pace: Pace | None = None,
) -> Outcome:
    """Return the cost of one step at the pace of its slowest stage, with the given memory."""
    step = _Step(setting, workload, ledger, pace)
    micro = step.with_forwards(step.with_offload_time(step.micro_batch_cost()))
    exposed, update = step.exchange(micro), step.update()
    layout = setting.layout
    count, chunks = layout.micro_batches, step.bubble_chunks
    seconds = ledger.term(
        step_seconds,
        setting.line(GROUP, "Training step", key="step"),
        micro_batches=count,
        stages=step.waiting_stages,
        micro_batch_s=micro.total_s,
        exposed_s=exposed,
        update_s=update,
        chunks=chunks,
    )
    rows = workload.global_batch_size * workload.sequences_per_record
    tokens = rows * workload.sequence_length * workload.text_ratio
    before_s = step.before_steps(count)
    per_device = micro.model_flops * count / seconds
    by_class = {
        "compute": count * micro.compute_s,
        "memory_bandwidth": count * micro.memory_s + update,
        "communication": count * micro.communication_s + exposed,
        "overhead": count * micro.overhead_s,
    }
    return Outcome(
        memory=memory,
        fits=memory.fits,
        seconds_by_class=by_class,
        phases={GROUP: by_class},
        energy_tokens_per_second=tokens / seconds,
        performance=performance_of(
            tokens_per_second=tokens / seconds,
            tokens_per_second_per_device=tokens / seconds / layout.devices,
            step_seconds=seconds,
            samples_per_second=workload.global_batch_size / seconds,
            model_flops_per_second_per_device=per_device,
            mfu=per_device / step.rates.peak_flops_per_s,
            bubble_ratio=step.idle_stages / chunks * micro.total_s * step.evenness / seconds,
            communication_ratio=by_class["communication"] / seconds,
            duration_seconds=workload.tokens / tokens * (seconds + before_s)
            if workload.tokens
            else None,
        ),
    )


def forward_seconds(
    setting: Setting,
    workload: TrainWorkload,
    ledger: Ledger,
    forwards: Forwards,
    *,
    gathers: bool = False,
) -> dict[str, float]:
    """Return the seconds of forward passes over all records of a step, by operator class.

    The micro-batches pass through the stages of a pipeline as those of a training step.
    ``gathers``: of a model of their own, whose weights are gathered for them if sharded.
    """
    step = _Step(setting, workload, ledger)
    each = step.forward_cost(forwards)
    if gathers:
        links_s = each.communication_s + step.gathered_cost(forwards, each)
        each = replace(each, communication_s=links_s)
    passes = setting.layout.micro_batches + (step.waiting_stages - 1) / step.bubble_chunks
    return {
        "compute": passes * each.compute_s,
        "memory_bandwidth": passes * each.memory_s,
        "communication": passes * each.communication_s,
        "overhead": passes * each.overhead_s,
    }


class _Step:
    """The parts of one step on one device."""

    def __init__(
        self,
        setting: Setting,
        workload: TrainWorkload,
        ledger: Ledger,
        pace: Pace | None = None,
    ) -> None:
        self.setting, self.workload, self.ledger = setting, workload, ledger
        self.rates: Rates = setting.rates
        # A device does 1 / share of a replica's work.
        self.share = setting.layout.tensor * setting.layout.pipeline
        self.kernels = Kernels(setting, workload, ledger, self.rates, pace)
        self.pace = self.kernels.pace
        parts = 1 / self.kernels.layer_share if pace else None
        self.forwards = forwards_in_step(workload)
        tokens = self.kernels.tokens
        self.links = Exchange(setting, self.rates, ledger, tokens, parts, self.forwards.number)
        self.tiers = TrainingOffload(setting, ledger)

    @property
    def evenness(self) -> float:
        """Return the mean work of a stage divided by that of the busiest one."""
        work = self.pace.even_work or self.pace.even_stages
        return work / self.setting.layout.pipeline

    @property
    def _ranks_per_core(self) -> float:
        """Return the number of ranks that share a core; waiting ranks yield it to others."""
        return self.setting.cluster.ranks_per_core or 1.0

    @property
    def waiting_stages(self) -> float:
        """Return the effective number of stages for pipeline fill and drain.

        With ranks that share cores, only one stage per core leaves a core idle, and the working
        stages have a core each.
        """
        return (
            1
            + maximum(0.0, self.pace.even_stages / self._ranks_per_core - 1) / self._ranks_per_core
        )

    @property
    def idle_stages(self) -> float:
        """Return the idle time of fill and drain in units of evenly loaded stages."""
        return (
            maximum(0.0, self.setting.layout.pipeline / self._ranks_per_core - 1)
            / self._ranks_per_core
        )

    @property
    def _busy_core_share(self) -> float:
        """Return the share of the busiest stage's time for which its core is busy.

        With ranks that share cores, a busy stage uses the core while other stages are idle.
        """
        return maximum(self.evenness, 1 / self._ranks_per_core)

    @property
    def bubble_chunks(self) -> float:
        """Return the divisor of the pipeline bubble for the schedule."""
        if self.setting.on_shared_processor:
            return 1.0  # other ranks already use the cores during the bubble
        if self.setting.strategy.pipeline_schedule != "zero_bubble":
            return self.setting.layout.chunks
        weight_passes = self.kernels.passes - ADAPTER_PASSES
        return zero_bubble_divisor(self.kernels.passes + self.kernels.recomputed, weight_passes)

    def micro_batch_cost(self) -> _MicroBatch:
        """Return the seconds and FLOP of one micro-batch, forward and backward, on one device.

        Offload transfers are not included: ``with_offload_time`` adds them.
        """
        work = self.work_of(self.kernels)
        recomputed = self.kernels.recomputed
        links_s = self.links.micro_batch_seconds(work.attention_window_s, recomputed)
        overhead_s = self.overhead(work.compute_s + work.memory_s)
        return _MicroBatch(
            work.compute_s, work.memory_s, links_s, overhead_s, work.model_flops, work.window_s
        )

    def work_of(self, kernels: Kernels) -> "_Work":
        """Return the work of a micro-batch's kernels on one device."""
        products, attention = kernels.products(), kernels.attention_flops()
        memory = (
            kernels.elementwise_seconds()
            + kernels.operand_seconds()
            + kernels.score_seconds()
            + kernels.cast_seconds()
        )
        memory = memory + kernels.rounding_seconds()
        compute = products.seconds + attention.seconds
        if self.setting.on_shared_processor:
            compute, memory = (each * self._busy_core_share for each in (compute, memory))
        return _Work(
            compute,
            memory,
            (products.model_flops + attention.model_flops) * self.evenness,
            products.window_s + attention.window_s,
            attention.window_s,
        )

    def with_offload_time(self, micro: _MicroBatch) -> _MicroBatch:
        """Return a micro-batch with the exposed time of offload transfers."""
        setting, layout = self.setting, self.setting.layout
        if not is_offloading(setting.offload):
            return micro
        dtype = setting.strategy.gradient_dtype or "bf16"
        gathered = zero_shards(layout.zero_stage, FULL_SHARDING, layout.shard_ranks)
        reduced = zero_shards(layout.zero_stage, SHARDED_GRADIENTS, layout.shard_ranks)
        whole = OffloadTraffic(
            weights=setting.counts.total / self.share * setting.weight_element_bytes / gathered,
            gradients=sum(self._trained()) * element_bytes(dtype) / reduced,
            activations=micro_batch_bytes(setting, self.workload),
        )
        forward = 1 / (self.kernels.passes + self.kernels.recomputed)
        added = self.tiers.exposed_seconds(micro.total_s, forward, whole)
        return replace(micro, communication_s=micro.communication_s + added)

    def with_forwards(self, micro: _MicroBatch) -> _MicroBatch:
        """Return a micro-batch with the forward passes of its objective's reference."""
        if not self.forwards.number:
            return micro
        added = self.forward_cost(self.forwards)
        return _MicroBatch(
            micro.compute_s + added.compute_s,
            micro.memory_s + added.memory_s,
            micro.communication_s + added.communication_s,
            micro.overhead_s + added.overhead_s,
            micro.model_flops + added.model_flops,
            micro.window_s,
        )

    def before_steps(self, micro_batches: float) -> float:
        """Return the seconds of a pass before the first step over the records of one step."""
        forwards = forwards_before_steps(self.workload)
        if not forwards.number:
            return 0.0
        return self.ledger.term(
            reference_pass_seconds,
            self.setting.line(GROUP, "Reference pass before the steps, of a step's records"),
            micro_batches=micro_batches,
            forward_s=self.forward_cost(forwards, NullLedger()).total_s,
        )

    def forward_cost(self, forwards: Forwards, ledger: Ledger | None = None) -> _MicroBatch:
        """Return the seconds and FLOP of forward passes without gradients over a micro-batch."""
        setting, pace = self.setting, self.kernels.pace
        own = self if ledger is None else _Step(setting, self.workload, ledger, pace)
        kernels = Kernels(setting, self.workload, own.ledger, self.rates, pace, forwards)
        work = own.work_of(kernels)
        return _MicroBatch(
            work.compute_s,
            work.memory_s,
            own.links.forward_seconds(work.attention_window_s, forwards.number),
            own.overhead(work.compute_s + work.memory_s, forwards),
            work.model_flops,
            window_s=0.0,
        )

    def gathered_cost(self, forwards: Forwards, each: _MicroBatch) -> float:
        """Return the seconds of gathering sharded weights beside forward passes."""
        whole = self.setting.counts.total / self.share * self.setting.weight_element_bytes
        work_s = each.compute_s + each.memory_s
        return self.links.gathered_forward_seconds(forwards, whole, work_s)

    def overhead(self, work_s: float, forwards: Forwards = NO_FORWARDS) -> float:
        """Return the exposed seconds of kernel launches beside this work."""
        engine = self.setting.engine
        # Eager engines issue single operators; training engines have gaps between kernels.
        part = "issue" if engine.ops_per_layer else "layer_overhead"
        name = f"{forwards.title}: kernel launches" if forwards.number else "Kernel launches"
        further = further_operators(self.setting.model) / LAYER_OPERATORS  # in units of layers
        unpacking = LINEARS_PER_LAYER * engine.dequantise_ops.get(self.setting.weight_dtype, 0.0)
        issue = self.ledger.term(
            overhead_seconds,
            step_line(self.setting, name, part, "overhead"),
            num_layers=self.pace.layers + further * self.kernels.layer_share,
            ops_per_layer=engine.ops_per_layer + unpacking,
            op_overhead_s=self.rates.op_overhead_s,
            layer_overhead_s=engine.layer_overhead_s,
            passes=forwards.number or ISSUE_PASSES,
        )
        runs_ahead = engine.role == "runner" and self.setting.device.kind != "cpu"
        return maximum(0.0, issue - work_s) if runs_ahead else issue

    def _trained(self) -> tuple[float, float]:
        """Return the trained parameters per device: dense and expert."""
        setting, counts = self.setting, self.setting.counts
        routed = 0.0 if self.workload.method in ADAPTER_METHODS else counts.experts / counts.total
        trained = trained_parameters(setting, self.workload)
        split = setting.layout.pipeline * setting.layout.expert_ranks
        return trained * (1 - routed) / self.share, trained * routed / split

    def exchange(self, micro: _MicroBatch) -> float:
        """Return the seconds of the exposed communication of gradients and shards."""
        setting, layout = self.setting, self.setting.layout
        dtype = setting.strategy.gradient_dtype or "bf16"
        # Whole gradients are reduced once, during the last micro-batch; shards in each.
        windows = where(layout.zero_stage >= SHARDED_GRADIENTS, layout.micro_batches, 1)
        interval = setting.strategy.synchronization_interval_steps or 1
        reduction = interval * (setting.strategy.gradient_compression_ratio or 1.0)
        each = element_bytes(dtype) / reduction
        dense, experts = self._trained()
        counts, width = setting.counts, setting.weight_element_bytes
        split = layout.pipeline * layout.expert_ranks
        return self.links.step_seconds(
            ShardTraffic(dense * each, (counts.total - counts.experts) / self.share * width),
            ShardTraffic(experts * each, counts.experts / split * width),
            window_s=micro.window_s * windows,
        )

    def update(self) -> float:
        """Return the seconds of the memory traffic of the optimiser update."""
        setting, layout = self.setting, self.setting.layout
        shards = zero_shards(layout.zero_stage, 1, layout.shard_ranks)
        dense, experts = self._trained()
        # Each expert's states are sharded over the ranks that hold a copy of it.
        copies = maximum(1.0, shards * self.share / (layout.pipeline * layout.expert_ranks))
        parameters = dense / shards + experts / copies
        gradient = element_bytes(setting.strategy.gradient_dtype or "bf16")
        states = STATE_BYTES[optimizer_of(self.workload)]
        each = UPDATE_READS_AND_WRITES * (states + setting.plain_element_bytes) + gradient
        if setting.offload.optimizer != "none":
            return self.tiers.update(parameters, state_bytes_each(setting, self.workload))
        return self.ledger.term(
            memory_seconds,
            step_line(self.setting, "Optimiser update", "update", "memory_bandwidth", "update"),
            moved_bytes=parameters * each,
            memory_bytes_per_s=self.rates.memory_bytes_per_s,
            memory_efficiency=self.rates.stream_efficiency,
        )


# Training on heterogeneous nodes: layers per pipeline stage and the resulting step time.
#
# Stages are assigned to the nodes in the cluster's order. A stage that spans two kinds of device
# has the speed of the slower and the memory of the smaller one. The layer split minimises the time
# of the slowest stage within the memory of every stage.


PIPELINE_GROUP = "pipeline"
Table = npt.NDArray[np.float64]


def stage_devices(setting: Setting) -> tuple[DeviceSpec, ...]:
    """Return the device of each stage; a mixed stage has its slowest speed and least memory."""
    line, layout = devices_of(setting), setting.layout
    stages = single(layout.pipeline)
    width = single(layout.devices) // stages
    return tuple(
        slowest_device(setting, line[stage * width : (stage + 1) * width])
        for stage in range(stages)
    )


def train_heterogeneous(setting: Setting, workload: TrainWorkload, ledger: Ledger) -> Outcome:
    """Return the cost of a step with the layers split over heterogeneous stages."""
    split = _LayerSplit(setting, workload)
    layers, slowest = split.layers, split.slowest
    for stage, count in enumerate(layers):
        first, *_, last = split.seconds[stage, 1:]
        layer_s = (last - first) / max(1, len(split.seconds[stage]) - 2)
        title = f"Stage {stage + 1}: {count} layers on {split.devices[stage].id}"
        ledger.term(
            stage_time,
            setting.line(PIPELINE_GROUP, title, key="stage"),
            layers=count,
            layer_s=float(layer_s),
            rest_s=float(split.seconds[stage, count] - count * layer_s),
        )
    split_setting = replace(setting, device=split.devices[slowest], split=layers)
    outcome = at_pace(split_setting, workload, ledger, split.memory(), split.pace)
    peaks = [peak_of(device, compute_dtype_of(setting))[0] for device in split.devices]
    flops_per_s = outcome.performance.model_flops_per_second_per_device or 0.0
    performance = outcome.performance.model_copy(
        update={"mfu": flops_per_s / float(np.mean(peaks))}
    )
    names = tuple(device.id for device in split.devices)
    return replace(outcome, performance=performance, stage_layers=layers, stage_devices=names)


class _LayerSplit:
    """The split of the layers of one training strategy."""

    def __init__(self, setting: Setting, workload: TrainWorkload) -> None:
        self.setting, self.workload = setting, workload
        self.devices = stage_devices(setting)
        self.total = setting.model.num_hidden_layers
        self.seconds = np.array([self._seconds(stage) for stage in range(len(self.devices))])
        bounded = np.where(self._fits(), self.seconds, np.inf)
        # If no split fits, the fastest one shows how much memory is missing.
        best = split_layers(bounded) or split_layers(self.seconds)
        self.layers = best or stage_layers(self.total, len(self.devices))
        times = [self.seconds[stage, layers] for stage, layers in enumerate(self.layers)]
        self.slowest = int(np.argmax(times))
        self.evenness = float(np.sum(times) / np.max(times))

    def _on_device_of(self, stage: int) -> Setting:
        return replace(self.setting, device=self.devices[stage])

    def _head_count(self, stage: int) -> float:
        return float(stage == len(self.devices) - 1)

    def _seconds(self, stage: int) -> Table:
        """Return the seconds of a micro-batch on a stage for 0 to all layers."""
        counts = np.arange(1.0, self.total + 1)
        pace = Pace(cast("float", counts), self._head_count(stage), 1.0)
        seconds = stage_seconds(self._on_device_of(stage), self.workload, pace)
        return np.concatenate([[0.0], np.broadcast_to(seconds, counts.shape)])

    def _fits(self) -> npt.NDArray[np.bool_]:
        """Return whether each stage has memory for 0 to all layers."""
        even = stage_layers(self.total, len(self.devices))
        rows = []
        for stage in range(len(self.devices)):
            counts = np.arange(1.0, self.total + 1)
            split: tuple[Quantity, ...] = (*even[:stage], counts, *even[stage + 1 :])
            stage_setting = replace(self._on_device_of(stage), split=split)
            peak_bytes = stage_memory(stage_setting, NullLedger(), self.workload, stage).peak_bytes
            fits = np.broadcast_to(peak_bytes, counts.shape) <= usable_bytes(stage_setting)
            rows.append(np.concatenate([[False], fits]))
        return np.array(rows)

    @property
    def pace(self) -> Pace:
        """Return the pace of the slowest stage, which limits the pipeline."""
        model, counts = self.setting.model, self.setting.counts
        linear = counts.attention_weights + counts.feed_forward + counts.experts_active
        head = model.vocab_size * model.hidden_size * self.total / linear
        own = self.layers[self.slowest] + head * self._head_count(self.slowest)
        return Pace(
            self.layers[self.slowest],
            self._head_count(self.slowest),
            self.evenness,
            (self.total + head) / own,
        )

    def memory(self) -> MemoryUse:
        """Return the memory use of each stage, with the limits of its own devices."""
        places = [
            replace(self._on_device_of(stage), split=self.layers)
            for stage in range(len(self.devices))
        ]
        stages = tuple(
            stage_memory(place, NullLedger(), self.workload, stage)
            for stage, place in enumerate(places)
        )
        limits = tuple((place.device.memory_bytes, usable_bytes(place)) for place in places)
        return MemoryUse(stages, *limits[0], limits=limits)


# A whole training run: length schedules and time budgets.


def train_run(setting: Setting, workload: TrainWorkload, ledger: Ledger) -> Outcome:
    """Return the cost of a training run: its longest step and the scheduled run."""
    outcome = _step(setting, workload, ledger)
    if not workload.length_schedule and not workload.time_budget_seconds:
        return outcome
    rate = _mean_rate(setting, workload, outcome)
    rate = rate / (1 + _ratio_before_steps(setting, workload, outcome))
    budget = workload.time_budget_seconds
    figures: dict[str, float] = {}
    if budget:
        figures = {"duration_seconds": budget, "trained_tokens": rate * budget}
    elif workload.tokens:
        figures = {"duration_seconds": workload.tokens / rate}
    return replace(outcome, performance=outcome.performance.model_copy(update=figures))


def _ratio_before_steps(setting: Setting, workload: TrainWorkload, outcome: Outcome) -> float:
    """Return the time of a pass before the steps, relative to that of the steps."""
    seconds = outcome.performance.step_seconds
    if seconds is None or not workload.precompute_reference:
        return 0.0
    step = _Step(setting, workload, NullLedger())
    return step.before_steps(setting.layout.micro_batches) / seconds


def _step(setting: Setting, workload: TrainWorkload, ledger: Ledger) -> Outcome:
    """Return the cost of one step; heterogeneous devices get an uneven layer split."""
    is_mixed = bool(setting.cluster.other_nodes)
    return (train_heterogeneous if is_mixed else train)(setting, workload, ledger)


def _mean_rate(setting: Setting, workload: TrainWorkload, outcome: Outcome) -> float:
    """Return the tokens per second over the whole schedule."""
    longest = _rate_of(outcome)
    if not workload.length_schedule:
        return longest
    per_token = sum(
        share / _rate_at(setting, workload, length) for length, share in workload.length_schedule
    )
    return 1.0 / per_token


def _rate_at(setting: Setting, workload: TrainWorkload, length: int) -> float:
    """Return the tokens per second at a shorter length with equal tokens per step."""
    ratio = workload.sequence_length / length
    shorter = workload.model_copy(update={"sequence_length": length})
    rows = replace(setting.layout, micro_batch=setting.layout.micro_batch * ratio)
    outcome = _step(replace(setting, workload=shorter, layout=rows), shorter, NullLedger())
    return _rate_of(outcome) * ratio


def _rate_of(outcome: Outcome) -> float:
    rate = outcome.performance.tokens_per_second
    return 0.0 if rate is None else rate
