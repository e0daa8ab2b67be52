"""The strategy space of training, and which layouts a trainer or an export runs."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import cast

import numpy as np

from planner.catalog.engines import (
    DEFAULT_ENGINE,
    Engine,
    engine_name,
    get_engine,
    sixteen_bit_dtype,
    training_engine,
)
from planner.cost.quantity import Flag, NullLedger, both, divides, either
from planner.exports.export import OWN_METHODS, WHOLE_WEIGHTS
from planner.search.question import Question
from planner.search.rollouts import refuse_undivided, rollout_choices, training_devices
from planner.search.space import MAX_TENSOR_RANKS, Block, Flags, Numbers, axes, scalars
from planner.specs.base import Dtype, JsonObject
from planner.specs.cluster import ClusterSpec
from planner.specs.on_policy import RolloutSpec
from planner.specs.workload import Strategy, TrainWorkload
from planner.techniques.registry import get
from planner.workload.layouts import (
    Layout,
    Rule,
    attention_rules,
    batch_rules,
    rank_rules,
    rules_mask,
    training_rules,
)
from planner.workload.on_policy import shared_held_memory
from planner.workload.option_rules import option_rules
from planner.workload.resolve import resolve
from planner.workload.setting import Setting
from planner.workload.train import held_memory
from planner.workload.training_exchange import FULL_SHARDING, SHARDED_GRADIENTS
from planner.workload.training_memory import ADAPTER_METHODS, OWN_STATES, optimizer_of

# Which training layouts run: in Slipway's trainer, or in a tool to which plans are exported.
#
# Sources: DeepSpeed, runtime/pipe/engine.py (its pipeline refuses ZeRO 2 and 3, and takes a
# PipelineModule, which quantised or adapted Transformers models are not); PEFT's documentation on
# DeepSpeed and FSDP (LoRA and QLoRA run under ZeRO 1, 2 and 3).


SPLITS = ("tensor", "pipeline", "context", "expert")
MEGATRON_OPTIMIZERS = frozenset({"adamw", "sgd", "lion"})
ON_HOST: JsonObject = {"optimizer": "cpu", "weights_cpu": 1.0}
ON_DISK: JsonObject = {"optimizer": "nvme", "weights_disk": 1.0}
KEPT_AWAY: JsonObject = {"activations_cpu": 1.0}
# Offload choices of training engines: optimiser states and gradients with any pipeline, weights
# (layer by layer) and activations only with a single stage.
STATES_AWAY: tuple[JsonObject, ...] = ({}, {"optimizer": "cpu"}, {"optimizer": "nvme"})
LAYERS_AWAY = (ON_HOST, ON_DISK, KEPT_AWAY, {**ON_HOST, **KEPT_AWAY}, {**ON_DISK, **KEPT_AWAY})


@dataclass(frozen=True)
class TrainingSupport:
    """What runs a training's layouts; a pinned size is the user's own choice and is kept."""

    question: Question
    workload: TrainWorkload

    @cached_property
    def engine(self) -> Engine:
        """Return the training engine that the request names, or the default of its devices."""
        kind = self.question.device.kind
        named = training_engine(self.question.request.engine, compares=self.workload.compares)
        return get_engine(named, kind, training=True)

    def offloads(self, stages: int, *, last_resort: bool) -> tuple[JsonObject, ...]:
        """Return the offload choices of a pipeline of some stages.

        Slipway's trainer moves AdamW's moments alone, from GPUs, on whole copies of the model, and
        copies them in turn with the update: only as a last resort, where nothing fits otherwise.
        """
        if self.question.request.pins.offload:
            return () if last_resort else ({},)
        if self.engine.role != "runner":
            choices = STATES_AWAY if stages > 1 else (*STATES_AWAY, *LAYERS_AWAY)
            return () if last_resort else choices
        if not last_resort:
            return ({},)
        moves = self._has_trainer and self._on_gpu and optimizer_of(self.workload) == "adamw"
        return STATES_AWAY[1:] if moves and stages == 1 else ()

    def runs(self, layout: Layout, *, offloads: bool) -> Flag:
        """Return which layouts the engine, or an export of the plan, runs."""
        if self.workload.compares and self.engine.compares_answers:
            return self._in_preference_trainer(layout)
        if self.engine.key == "deepspeed":
            return self._in_deepspeed(layout)
        if self.engine.role != "runner":
            return True
        if not self._has_trainer:
            return self._in_exports(layout)
        own = self._in_trainer(layout, offloads=offloads)
        # Who names Slipway's trainer means to launch the plan, not to export it.
        is_named = self.question.request.engine is not None
        return own if is_named or offloads else either(own, self._in_exports(layout))

    @property
    def _has_trainer(self) -> bool:
        return self.engine.key == DEFAULT_ENGINE

    @property
    def has_fused_update(self) -> bool:
        """Return whether Slipway's trainer updates each weight as its gradient comes.

        No gradient is kept for another micro-batch or rank: a step is one batch on one device.
        """
        return self._has_trainer and self.workload.method in OWN_STATES

    @property
    def _on_gpu(self) -> bool:
        return self.question.device.kind == "gpu"

    @property
    def _trains_weights(self) -> bool:
        return self.workload.method in WHOLE_WEIGHTS

    def _is_one(self, layout: Layout, *axes: str) -> Flag:
        """Return whether layouts have a size of 1 along axes that are not pinned."""
        found: Flag = True
        for axis in axes:
            if f"{axis}_parallel_size" not in self.question.pinned:
                found = both(found, getattr(layout, axis) == 1)
        return found

    def _is_below(self, layout: Layout, stage: int) -> Flag:
        """Return whether layouts have a lower ZeRO stage, or a pinned one."""
        return True if "zero_stage" in self.question.pinned else layout.zero_stage < stage

    def _in_trainer(self, layout: Layout, *, offloads: bool) -> Flag:
        """Return which layouts Slipway's trainer runs (``runners/jobspec/train.py``).

        Adapters, optimisers other than AdamW and offloaded states need whole copies.
        """
        can_split = self._trains_weights and optimizer_of(self.workload) == "adamw"
        if offloads or not can_split:
            return both(self._is_one(layout, *SPLITS), self._is_below(layout, 1))
        unsharded = self._is_below(layout, 1)
        summed = either(
            self._is_one(layout, "pipeline"),
            either(
                self._is_below(layout, SHARDED_GRADIENTS), layout.zero_stage > SHARDED_GRADIENTS
            ),
        )
        divided = both(unsharded, self._is_one(layout, "tensor"))
        whole_experts = both(divided, divides(layout.expert, layout.data))
        experts = either(self._is_one(layout, "expert"), whole_experts)
        sequence = either(self._is_one(layout, "context"), layout.sequence_parallel == 0)
        return both(both(summed, experts), sequence)

    def _in_preference_trainer(self, layout: Layout) -> Flag:
        """Return which layouts TRL runs by Accelerate's launcher: copies, by ZeRO on GPUs.

        Source: huggingface/trl 1.16.0, trl/accelerate_configs.
        """
        whole = self._is_one(layout, *SPLITS)
        return whole if self._on_gpu else both(whole, self._is_below(layout, 1))

    def _in_exports(self, layout: Layout) -> Flag:
        """Return which layouts an exported configuration runs, as ``formats_for`` decides."""
        method, optimizer = self.workload.method, optimizer_of(self.workload)
        if method in OWN_METHODS:
            return False
        if self._on_gpu and self._trains_weights and optimizer in MEGATRON_OPTIMIZERS:
            return True
        plain = self._is_one(layout, *SPLITS)
        if self._on_gpu:
            return either(plain, self._in_deepspeed(layout))
        return both(plain, self._is_below(layout, 1)) if method == "qlora" else plain

    def _in_deepspeed(self, layout: Layout) -> Flag:
        """Return which layouts DeepSpeed runs: adapters under ZeRO alone."""
        if self.workload.method in ADAPTER_METHODS:
            return self._is_one(layout, *SPLITS)
        staged = self._is_one(layout, "pipeline")
        return either(staged, self._is_below(layout, SHARDED_GRADIENTS))


MAX_STAGES = 64
MAX_CONTEXT_RANKS = 64
MAX_MICRO_BATCH = 64
MAX_CHUNKS = 16
# Shorter chunks per rank leave ring attention too little compute.
MIN_CONTEXT_TOKENS = 1024
# ZeRO stages; HYBRID is stage 3 within a node or NVLink domain and replicas across (HSDP).
ZERO_STAGES = (0, 1, 2, 3)
HYBRID = 4
RECOMPUTATIONS = ("none", "selective", "full")
# GPipe has the bubble of 1F1B and holds more activations, so it is costed only if pinned.
SCHEDULES = ("1f1b", "interleaved", "zero_bubble")
# Megatron-LM and its derivatives support only 1F1B and interleaved schedules.
NO_ZERO_BUBBLE = frozenset({"megatron", "megatron_deepspeed", "nemo", "nemo_rl", "verl"})
SIZES = frozenset(
    {
        "data_parallel_size",
        "tensor_parallel_size",
        "context_parallel_size",
        "expert_parallel_size",
        "micro_batch_size",
        "gradient_accumulation_steps",
        "zero_stage",
        "zero_shard_size",
        "sequence_parallel",
        "virtual_pipeline_size",
    }
)


def training_blocks(
    question: Question, workload: TrainWorkload, *, last_resort: bool = False
) -> tuple[Block, ...]:
    """Return the blocks of all strategies; with idle devices only if there are no others.

    With ``last_resort``, return only those that a runner has where nothing else fits: offload.

    Raises:
        PlannerError: no strategy of this request can be costed, for the reason given.
    """
    space = TrainingSpace(question, workload, last_resort=last_resort)
    full_blocks = tuple(space.blocks(idle=False))
    blocks = full_blocks or tuple(space.blocks(idle=True))
    is_open = question.pinned.keys().isdisjoint({*SIZES, "pipeline_parallel_size"})
    if not blocks and workload.generates and is_open and not last_resort:
        refuse_undivided(question, workload, space.rollouts)
    return blocks


@dataclass(frozen=True)
class _Grid:
    """The open sizes of a block, their layout, and the mask of valid strategies."""

    sizes: dict[str, Numbers]
    layout: Layout
    keep: Flags


@dataclass(frozen=True)
class TrainingSpace:
    """The open choices of a training question, each with its values."""

    question: Question
    workload: TrainWorkload
    last_resort: bool = False

    def blocks(self, *, idle: bool) -> Iterator[Block]:
        """Yield the blocks that hold at least one strategy."""
        for shared in self._shared():
            block = self._block(shared, idle=idle)
            if block is not None and block.keep.any():
                yield block

    def _shared(self) -> Iterator[JsonObject]:
        """Yield each combination of fields that changes the formulas."""
        pinned = self.question.pinned
        if self.last_resort and not self._support.offloads(1, last_resort=True):
            return
        others = {name: value for name, value in pinned.items() if name not in {*SIZES, "rollout"}}
        # Checkpointing of transformers' layers is whole or none.
        whole_layers = self.workload.compares and self._support.engine.compares_answers
        recomputations = RECOMPUTATIONS[::2] if whole_layers else RECOMPUTATIONS
        places = [
            (rollout, stages)
            for rollout in self.rollouts
            for stages in self._pipeline_sizes(training_devices(self.question, rollout))
        ]
        for compute, (rollout, stages), recomputation in product(
            self._computes, places, recomputations
        ):
            for schedule, offload in product(
                self._schedules(stages),
                self._support.offloads(stages, last_resort=self.last_resort),
            ):
                chosen = {
                    "pipeline_parallel_size": stages,
                    "activation_recomputation": recomputation,
                    "compute_dtype": compute,
                }
                if rollout:
                    chosen["rollout"] = rollout
                if schedule:
                    chosen["pipeline_schedule"] = schedule
                if offload:
                    chosen["offload"] = offload
                if all(others.get(name, value) == value for name, value in chosen.items()):
                    yield {**chosen, **others}

    @cached_property
    def _computes(self) -> tuple[Dtype, ...]:
        device, pinned = self.question.device, self.question.pinned.get("compute_dtype")
        if pinned:
            return (cast("Dtype", pinned),)
        if device.kind != "cpu":
            return (sixteen_bit_dtype(device),)
        return ("fp32", "bf16") if "bf16" in device.peak_flops_per_second else ("fp32",)

    @cached_property
    def rollouts(self) -> tuple[RolloutSpec | None, ...]:
        """Return where completions may be generated; None alone for a training without any."""
        return (
            rollout_choices(self.question, self.workload) if self.workload.generates else (None,)
        )

    def _pipeline_sizes(self, devices: int) -> tuple[int, ...]:
        pinned = self.question.pinned.get("pipeline_parallel_size")
        if pinned:
            return (pinned,)
        if self.question.pinned.get("attention") == "flex":
            return (1,)
        return tuple(pipeline_sizes(self.question, devices))

    @cached_property
    def _support(self) -> TrainingSupport:
        return TrainingSupport(self.question, self.workload)

    def _schedules(self, stages: int) -> tuple[str | None, ...]:
        pinned = self.question.request.pins.pipeline_schedule
        if pinned:
            return (pinned,)
        engine = engine_name(self.question.request.engine)
        own = SCHEDULES[:2] if engine in NO_ZERO_BUBBLE else SCHEDULES
        return own if stages > 1 else (None,)

    def _block(self, shared: JsonObject, *, idle: bool) -> Block | None:
        """Return the block of shared fields; None if no layout is valid, whatever its memory."""
        question, stages = self.question, shared["pipeline_parallel_size"]
        schedule = shared.get("pipeline_schedule")
        setting = self._setting(shared)
        fetched = setting.offload.weights_share > 0
        offloads = bool(setting.offload.places)
        devices = training_devices(question, shared.get("rollout"))
        grid_key = (stages, schedule, fetched, offloads, idle, devices)
        if grid_key not in self._grids:
            self._grids[grid_key] = self._grid(
                stages, schedule, fetched=fetched, offloads=offloads, idle=idle, devices=devices
            )
        grid = self._grids[grid_key]
        if not grid.keep.any():
            return None
        setting = replace(setting, layout=grid.layout)
        keep = np.logical_and(grid.keep, self._held_by_host(setting))
        engine, strategy = setting.engine, setting.strategy
        pairs = option_rules(question.model, self.workload, engine, strategy, grid.layout)
        for rule in pairs:
            keep = np.logical_and(keep, rule.holds)
        return Block(
            question=question,
            shared=shared,
            sizes=grid.sizes,
            setting=setting,
            keep=cast("Flags", keep),
        )

    def _held_by_host(self, setting: Setting) -> Flags:
        """Return which layouts leave no more to host memory and disk than these have, if known."""
        cluster = self.question.cluster
        held: Flags = np.ones((), dtype=np.bool_)
        if not setting.strategy.offload or self.question.request.pins.offload:
            return held
        if self.workload.generates:
            memory = shared_held_memory(setting, self.workload)
        else:
            memory = held_memory(setting, self.workload, NullLedger())
        for needed, per_node in (
            (memory.host_bytes, cluster.host_memory_bytes),
            (memory.disk_bytes, cluster.disk_capacity_bytes),
        ):
            if per_node:
                held = np.logical_and(held, needed <= per_node * cluster.nodes)
        return held

    def _setting(self, shared: JsonObject) -> Setting:
        """Return the setting of shared fields, cached without recomputation."""
        recomputation = {"activation_recomputation": shared["activation_recomputation"]}
        single = {"data_parallel_size": 1, "micro_batch_size": 1}
        setting_key = str(sorted({**shared, **dict.fromkeys(recomputation)}.items()))
        if setting_key not in self._settings:
            strategy = Strategy.model_validate({**shared, **single})
            resolved = resolve(self.question.estimate_request(strategy), leaves_layout_open=True)
            self._settings[setting_key] = replace(resolved, shared=self._shared_costs)
        setting = self._settings[setting_key]
        return replace(setting, strategy=setting.strategy.model_copy(update=recomputation))

    @cached_property
    def _settings(self) -> dict[str, Setting]:
        """Return the cache of resolved settings."""
        return {}

    @cached_property
    def _shared_costs(self) -> dict[object, object]:
        """Return what strategies that only generate elsewhere cost alike."""
        return {}

    @cached_property
    def _grids(self) -> dict[tuple[object, ...], "_Grid"]:
        """Return the cache of grids, which do not depend on recomputation."""
        return {}

    def _grid(
        self,
        stages: int,
        schedule: str | None,
        *,
        fetched: bool,
        offloads: bool,
        idle: bool,
        devices: int,
    ) -> "_Grid":
        sizes = self._sizes(stages, schedule, [FULL_SHARDING] if fetched else self._zero_stages)
        layout = self._layout(stages, sizes, devices)
        shape = np.broadcast_shapes(*(values.shape for values in sizes.values()))
        rules = self.rules(layout, schedule, devices)
        keep = both(rules_mask(rules), self._is_distinct(layout, fetched=fetched))
        steps = self.question.request.pins.gradient_accumulation_steps
        if steps is not None:
            keep = both(keep, layout.micro_batches == steps)
        keep = both(keep, self._support.runs(layout, offloads=offloads))
        if not idle:
            keep = both(keep, layout.devices == devices)
        flags = cast("Flags", np.broadcast_to(keep, shape))
        return _Grid(self._named_sizes(sizes), layout, flags)

    def rules(
        self, layout: Layout, schedule: str | None, devices: int | None = None
    ) -> Iterable[Rule]:
        """Yield the layout rules that an exact estimate checks, on all devices or some."""
        model, workload = self.question.model, self.workload
        yield from rank_rules(model, devices or self.question.cluster.num_devices, layout)
        yield from batch_rules(workload, layout.data, layout.micro_batch)
        yield from training_rules(model, workload, layout, schedule)
        device, attention = self.question.device, self.question.pinned.get("attention")
        yield from attention_rules(attention, self._support.engine, device, layout, training=True)

    def _is_distinct(self, layout: Layout, *, fetched: bool) -> Flags:
        """Return which layouts are integral and not equivalent to another one."""
        spread = either(fetched, either(layout.zero_stage == 0, layout.state_ranks > 1))
        split = either(layout.sequence_parallel == 0, layout.tensor > 1)
        hybrid = both(layout.shard > 1, layout.shard < layout.state_ranks)
        hybrid = either(layout.shard == 0, hybrid)
        is_integral = divides(1, layout.data)
        return cast("Flags", both(both(spread, split), both(hybrid, is_integral)))

    def _sizes(
        self, stages: int, schedule: str | None, zero_stages: list[int]
    ) -> dict[str, Numbers]:
        """Return the values of each open choice, each along its own dimension."""
        chunks = self._chunks(stages) if schedule == "interleaved" else [1]
        open_choices = {
            "tensor_parallel_size": self._tensor_sizes,
            "context_parallel_size": self._context_sizes,
            "expert_parallel_size": self._expert_sizes,
            "virtual_pipeline_size": chunks,
            "zero_stage": zero_stages,
            "sequence_parallel": [0, 1] if len(self._tensor_sizes) > 1 else [0],
            "micro_batch_size": [self.workload.global_batch_size]
            if self._support.has_fused_update
            else divisors(self.workload.global_batch_size, MAX_MICRO_BATCH),
        }
        pinned = self.question.pinned
        return axes(
            {
                name: np.array([pinned[name]] if name in pinned else values, dtype=np.float64)
                for name, values in open_choices.items()
            }
        )

    def _layout(self, stages: int, sizes: dict[str, Numbers], devices: int) -> Layout:
        """Return the layout of a grid; data parallelism uses the remaining devices."""
        tensor, context = sizes["tensor_parallel_size"], sizes["context_parallel_size"]
        replicas = 1.0 if self._support.has_fused_update else devices / (tensor * context * stages)
        data = self.question.pinned.get("data_parallel_size") or replicas
        stage, shard = sizes["zero_stage"], self.question.pinned.get("zero_shard_size") or 0
        per_group = np.floor(_even_domain(self.question.cluster) / tensor)
        shard = np.where(stage == HYBRID, per_group, shard)
        sizes |= {
            "data_parallel_size": np.asarray(data, dtype=np.float64),
            "zero_stage": np.minimum(stage, 3),
            "zero_shard_size": shard,
        }
        micro = sizes["micro_batch_size"]
        columns: JsonObject = {
            "data": data,
            "tensor": tensor,
            "expert": sizes["expert_parallel_size"],
            "context": context,
            "micro_batch": micro,
            "micro_batches": self.workload.global_batch_size / data / micro,
            "chunks": sizes["virtual_pipeline_size"],
            "zero_stage": sizes["zero_stage"],
            "sequence_parallel": sizes["sequence_parallel"] > 0,
            "shard": shard,
        }
        return Layout(pipeline=stages, **scalars(columns))

    def _named_sizes(self, sizes: dict[str, Numbers]) -> dict[str, Numbers]:
        """Return the sizes that a strategy names; dense models have no expert ranks."""
        dense = not self.question.model.is_moe
        return {
            name: values
            for name, values in sizes.items()
            if not (dense and name == "expert_parallel_size")
        }

    @cached_property
    def _tensor_sizes(self) -> list[int]:
        return tensor_sizes(self.question, self.question.cluster.domain_devices)

    @cached_property
    def _context_sizes(self) -> list[int]:
        most = min(self.workload.sequence_length // MIN_CONTEXT_TOKENS, MAX_CONTEXT_RANKS)
        sizes = divisors(self.question.cluster.num_devices, most)
        return [size for size in sizes if self.workload.sequence_length % size == 0] or [1]

    @cached_property
    def _expert_sizes(self) -> list[int]:
        model = self.question.model
        if not model.is_moe or get("expert_parallel").reason_against(self.question.case):
            return [1]
        sizes = divisors(model.num_experts, self.question.cluster.num_devices)
        cluster = self.question.cluster
        # One rank, the two largest sizes within a node and within its domain, the largest size.
        choices = {1, sizes[-1]}
        for inside in (cluster.devices_per_node, cluster.domain_devices):
            choices |= {*[size for size in sizes if size <= inside][-2:]}
        return sorted(choices)

    @cached_property
    def _zero_stages(self) -> list[int]:
        hybrid = self.question.cluster.nodes > 1 and "zero_shard_size" not in self.question.pinned
        return [*ZERO_STAGES, HYBRID] if hybrid else [*ZERO_STAGES]

    def _chunks(self, stages: int) -> list[int]:
        """Return the interleaved chunk counts: even splits, otherwise powers of two."""
        layers = self.question.model.num_hidden_layers
        most = min(layers // stages, MAX_CHUNKS)
        even = [size for size in range(2, most + 1) if layers % (stages * size) == 0]
        return even or [size for size in (2, 4, 8, 16) if size <= most] or [2]


def _even_domain(cluster: ClusterSpec) -> int:
    """Return the devices of the largest equal parts of a cluster that lie in one NVLink domain."""
    devices, each = cluster.num_devices, cluster.devices_per_node
    sizes = range(cluster.domain_devices // each * each, each, -each)
    return next((size for size in sizes if devices % size == 0), each)


def tensor_sizes(question: Question, domain_devices: int) -> list[int]:
    """Return the tensor parallel sizes to try within a node or its NVLink domain."""
    if get("tensor_parallel").reason_against(question.case):
        return [1]
    most = min(domain_devices, MAX_TENSOR_RANKS)
    return divisors(question.model.num_attention_heads, most)


def pipeline_sizes(question: Question, devices: int) -> list[int]:
    """Return the pipeline parallel sizes to try, which divide a number of devices."""
    if get("pipeline_parallel").reason_against(question.case):
        return [1]
    return divisors(devices, min(question.model.num_hidden_layers, MAX_STAGES))


def divisors(number: int, most: int) -> list[int]:
    """Return the divisors of a number up to a limit, 1 among them.

    >>> divisors(12, 6)
    [1, 2, 3, 4, 6]
    """
    return [size for size in range(1, min(number, max(most, 1)) + 1) if number % size == 0]
