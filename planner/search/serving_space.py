"""The strategy space of serving and generation, on like, split and unlike devices."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import product
from math import gcd
from typing import cast

import numpy as np

from planner.catalog.engines import Engine, get_engine, serving_engine
from planner.catalog.gguf import USUAL_TYPES
from planner.cost.quantity import both, divides, either
from planner.cost.weights import WIDE, element_bytes
from planner.search.question import Question
from planner.search.rank import PENALTIES
from planner.search.scoring import score
from planner.search.select import Table
from planner.search.space import (
    FRUGAL,
    Block,
    Flags,
    Numbers,
    axes,
    formats,
    scalars,
)
from planner.search.training_space import divisors, pipeline_sizes, tensor_sizes, training_blocks
from planner.specs.base import Dtype, JsonObject, NotCoveredError, NotPossibleError
from planner.specs.cluster import DeviceSpec
from planner.specs.workload import (
    DisaggregatedSpec,
    GenerateWorkload,
    ServeWorkload,
    Strategy,
    TrainWorkload,
)
from planner.workload.cluster import resolve_device
from planner.workload.layouts import (
    Layout,
    Rule,
    has_separate_replicas,
    rank_rules,
    rules_mask,
    serving_rules,
    shard_width_rules,
    supported_size_rules,
    weight_blocks,
)
from planner.workload.option_rules import option_rules
from planner.workload.resolve import default_group, resolve
from planner.workload.setting import Setting

# The strategy space of disaggregated serving with pinned pools: small, costed one by one.
#
# The rate is found by bisection per layout, which columns cannot do.


def split_strategies(question: Question, split: DisaggregatedSpec) -> tuple[Strategy, ...]:
    """Return the strategies in which both pools hold whole replicas; pins are kept."""
    strategies = tuple(
        Strategy.model_validate({**shared, **sizes, **question.pinned})
        for shared, sizes in product(_formats(question), _sizes(question, split))
    )
    return strategies or (question.request.pins,)  # the estimate refuses the pins with the reason


def _formats(question: Question) -> Iterator[JsonObject]:
    names = ("weight_dtype", "activation_dtype")
    pairs = [()] if "quantization" in question.pinned else formats(question)
    for pair in pairs:
        yield dict(zip(names, pair, strict=False))


def _sizes(question: Question, split: DisaggregatedSpec) -> Iterator[JsonObject]:
    """Yield open tensor and pipeline sizes whose product divides both pools."""
    pinned, common = question.pinned, gcd(split.prefill_devices, split.decode_devices)
    open_ranks = tensor_sizes(question, question.cluster.widest_domain)
    open_depths = pipeline_sizes(question, common)
    for tensor, depth in product(
        [pinned["tensor_parallel_size"]] if "tensor_parallel_size" in pinned else open_ranks,
        [pinned["pipeline_parallel_size"]] if "pipeline_parallel_size" in pinned else open_depths,
    ):
        if common % (tensor * depth) == 0:
            copies = (split.prefill_devices + split.decode_devices) // (tensor * depth)
            sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": depth}
            yield {**sizes, "data_parallel_size": copies}


# The strategy space of mixed clusters (nodes with different devices).
#
# In training, the layer split is computed per strategy, which columns cannot do. Columns therefore
# rank the strategies on a cluster of mean devices, which approximates an uneven split, and the
# first ones of that order are costed exactly. Serving strategies are all scored: strategies of one
# layout share their device groups, so each block holds one layout.


MAX_EXACT_ESTIMATES = 120  # a few milliseconds each
LAYOUT_SIZES = ("data", "tensor", "pipeline", "expert", "context", "attention_data")


def heterogeneous_strategies(question: Question, workload: TrainWorkload) -> tuple[Strategy, ...]:
    """Return the strategies to cost on mixed nodes, at most ``MAX_EXACT_ESTIMATES`` of them.

    Raises:
        PlannerError: no strategy of this request can be costed, for the reason given.
    """
    table = Table(
        [score(block) for block in training_blocks(_homogeneous_question(question), workload)], {}
    )
    if not len(table):
        return ()
    penalties = np.asarray(PENALTIES[question.request.objective](table.merit))
    order = np.lexsort((penalties, ~table.fits))[:MAX_EXACT_ESTIMATES]
    places = (table.part_of(int(row)) for row in order)
    return tuple(part.strategy(own) for part, own in places)


def by_layout(block: Block) -> Iterator[Block]:
    """Yield the strategies of a block, one block per layout."""
    rows = block.compact
    layout = rows.setting.layout
    of_layout = [
        (layout_field.name, getattr(layout, layout_field.name)) for layout_field in fields(layout)
    ]
    count = len(rows.cells)
    sizes = np.stack([np.broadcast_to(getattr(layout, name), count) for name in LAYOUT_SIZES])
    kinds, kind_of = np.unique(sizes, axis=1, return_inverse=True)
    for index, kind in enumerate(kinds.T):
        rows_of_kind = np.flatnonzero(kind_of.reshape(-1) == index)
        chosen: JsonObject = {
            name: value[rows_of_kind] if isinstance(value, np.ndarray) else value
            for name, value in of_layout
        }
        chosen |= {name: int(size) for name, size in zip(LAYOUT_SIZES, kind, strict=True)}
        yield replace(
            rows,
            sizes={name: values[rows_of_kind] for name, values in rows.sizes.items()},
            setting=replace(rows.setting, layout=Layout(**chosen)),
            keep=np.ones(len(rows_of_kind), dtype=bool),
        )


def _homogeneous_question(question: Question) -> Question:
    """Return the question for the same number of mean devices."""
    cluster, device = question.cluster, question.device
    devices = [device] * (cluster.devices_per_node * cluster.nodes)
    for group in cluster.other_nodes:
        devices += [resolve_device(group.device)] * group.num_devices
    mean = _mean_device(device, devices)
    nodes = max(1, len(devices) // cluster.devices_per_node)
    per_node = cluster.devices_per_node if len(devices) == nodes * cluster.devices_per_node else 1
    size = {"other_nodes": (), "devices_per_node": per_node, "nodes": len(devices) // per_node}
    return replace(
        question, device=mean, cluster=cluster.model_copy(update={"device": mean, **size})
    )


def _mean_device(device: DeviceSpec, devices: list[DeviceSpec]) -> DeviceSpec:
    """Return a device with the mean memory and mean rates of several."""
    names = ("peak_flops_per_second", "achieved_flops_per_second")
    rates = {
        name: {
            dtype: float(np.mean([getattr(each, name)[dtype] for each in devices]))
            for dtype in getattr(device, name)
            if all(dtype in getattr(each, name) for each in devices)
        }
        for name in names
    }
    memory = {
        "memory_bytes": round(float(np.mean([each.memory_bytes for each in devices]))),
        "memory_bandwidth_bytes_per_second": float(
            np.mean([each.memory_bandwidth_bytes_per_second for each in devices])
        ),
    }
    return device.model_copy(update={**rates, **memory})


MAX_CONTEXT_RANKS = 16
MAX_ATTENTION_RANKS = 64
# Shorter chunks per rank leave ring attention too little compute.
MIN_CONTEXT_TOKENS = 16_384
SPARSE = 0.5  # below this share of valid cells a grid costs more than a list
TOKEN_BUDGETS = (1024, 2048, 4096, 8192, 16_384)
SIZES = frozenset(
    {
        "data_parallel_size",
        "tensor_parallel_size",
        "context_parallel_size",
        "expert_parallel_size",
        "attention_data_parallel_size",
        "max_batch_tokens",
        "pipeline_parallel_size",
    }
)

MIXTURE_SIZES = frozenset({"expert_parallel_size", "attention_data_parallel_size"})


def serving_blocks(
    question: Question, workload: ServeWorkload | GenerateWorkload, *, last_resort: bool = False
) -> tuple[Block, ...]:
    """Return the blocks of all strategies; with idle devices only if there are no others.

    With ``last_resort``, return only those whose steps are smaller than the engine's default,
    which leave more memory to the cache.

    Raises:
        PlannerError: no strategy of this request can be costed, for the reason given.
    """
    space = ServingSpace(question, workload, last_resort=last_resort)
    if last_resort and not space.smaller_budgets:
        return ()
    full_blocks = tuple(space.blocks(idle=question.request.objective in FRUGAL))
    blocks = full_blocks or tuple(space.blocks(idle=True))
    if not question.cluster.other_nodes:
        return blocks
    return tuple(part for block in blocks for part in by_layout(block))


HOST_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)


DESKTOP_HOST_BYTES = 64 * 2**30
HOST_TO_DEVICE_MEMORY = 2


def usual_host_bytes(device_bytes: int) -> int:
    """Return the memory of a host that is not described, in bytes, by that of its devices.

    An assumption: twice the memory of the devices, and 64 GiB at least. ``host_memory_bytes`` of
    the cluster replaces it.
    """
    return max(DESKTOP_HOST_BYTES, HOST_TO_DEVICE_MEMORY * device_bytes)


def computes_on_host(question: Question) -> bool:
    """Return whether the engine may compute a share of the layers on the host's cores.

    That share is open on a GPU, unless the offload, a draft model or separate pools are pinned.
    """
    engine = get_engine(question.request.engine, question.device.kind)
    closed = {"offload", "disaggregated", "speculative"} & question.pinned.keys()
    like = question.device.kind == "gpu" and not question.cluster.other_nodes
    return engine.computes_on_host and like and not closed


def blocks_by_host_share(
    question: Question, workload: ServeWorkload | GenerateWorkload
) -> Iterator[tuple[Callable[[float], Block | None], ...]]:
    """Yield, per weight format, the blocks of each pipeline size as functions of the host's share.

    A function returns None if no layout of its block is valid.
    """
    space = ServingSpace(question, workload)
    for chosen in space.formats:
        yield tuple(
            partial(space.block_on_host, {**chosen, "pipeline_parallel_size": stages})
            for stages in space.pipeline_sizes
        )


def refused_layouts(
    question: Question, workload: ServeWorkload | GenerateWorkload
) -> Iterator[tuple[str, str]]:
    """Yield the families of layouts whose widths the engine cannot cut, with the reason."""
    space = ServingSpace(question, workload)
    engine = get_engine(question.request.engine, question.device.kind)
    for weight, activation in formats(question):
        strategy = Strategy(weight_dtype=weight, activation_dtype=activation)
        group = default_group(strategy, question.model, weight, engine)
        blocks = weight_blocks(question.model, strategy.model_copy(update={"group_size": group}))
        for size in space.tensor_sizes:
            layout = Layout(tensor=size)
            rules = shard_width_rules(question.model, engine, layout, blocks, question.device)
            broken = next((rule for rule in rules if not rule.holds), None)
            if broken is not None:
                yield f"{weight} weights, tensor parallel {size}", broken.message()


def in_gguf(offered: Sequence[JsonObject]) -> Iterator[JsonObject]:
    """Yield formats as GGUF files hold them: the 16-bit ones as they are, then the usual types.

    A checkpoint that is stored narrower is converted as it is.
    """
    wide = [pair for pair in offered if pair["weight_dtype"] in WIDE]
    yield from wide or offered
    if wide and len(wide) < len(offered):
        yield from ({"quantization": f"gguf:{kind}"} for kind in USUAL_TYPES)


@dataclass(frozen=True)
class ServingSpace:
    """The open choices of a serving request, each with its values."""

    question: Question
    workload: ServeWorkload | GenerateWorkload
    last_resort: bool = False

    def blocks(self, *, idle: bool) -> Iterator[Block]:
        """Yield the blocks that hold at least one strategy."""
        for shared in self._shared():
            block = self._block(shared, idle=idle)
            if block.keep.any():
                yield block

    @cached_property
    def _engine(self) -> Engine:
        return get_engine(self.question.request.engine, self.question.device.kind)

    def _shared(self) -> Iterator[JsonObject]:
        """Yield each combination of fields that changes the formulas."""
        pinned = self.question.pinned
        others = {name: value for name, value in pinned.items() if name not in SIZES}
        pins = self.question.request.pins
        by_stages = pins.offload is not None or pins.speculative is not None
        stage_counts = self.pipeline_sizes if by_stages else (None,)
        for formats_chosen, stages in product(self.formats, stage_counts):
            own = {"pipeline_parallel_size": stages} if stages else {}
            yield {**formats_chosen, **own, **others}

    @cached_property
    def formats(self) -> tuple[JsonObject, ...]:
        """Return the weight and activation formats; a named quantisation sets its own."""
        pinned = self.question.pinned
        if "quantization" in pinned:
            return ({},)
        names = ("weight_dtype", "activation_dtype")
        offered = [dict(zip(names, pair, strict=True)) for pair in formats(self.question)]
        if serving_engine(self._engine.key).loads_gguf_alone and not {*names} & pinned.keys():
            return tuple(in_gguf(offered))
        pinned_formats = {name: pinned[name] for name in names if name in pinned}
        matching = [
            format_pair
            for format_pair in offered
            if {**format_pair, **pinned_formats} == format_pair
        ]
        return tuple(matching) or (pinned_formats,)

    @cached_property
    def pipeline_sizes(self) -> tuple[int, ...]:
        """Return the pipeline sizes to try."""
        pinned = self.question.pinned.get("pipeline_parallel_size")
        if pinned:
            return (pinned,)
        return tuple(pipeline_sizes(self.question, self.question.cluster.num_devices))

    def _caches(self, default: Dtype | None) -> tuple[Dtype | None, ...]:
        """Return the cache formats: the engine's default, and FP8 if it runs."""
        pinned = "kv_cache_dtype" in self.question.pinned
        narrow = all("fp8" in device.peak_flops_per_second for device in self.question.devices)
        offered = narrow and self._engine.role == "serving" and default != "fp8"
        return (None, "fp8") if offered and not pinned else (None,)

    @cached_property
    def _budgets(self) -> list[tuple[bool, int]]:
        """Return pairs of chunked prefill and step budget in tokens; 0 is the default budget.

        Only long prompts are chunked, by an engine that schedules steps.
        """
        if self.last_resort:
            return [(False, size) for size in self.smaller_budgets]
        pinned = self.question.pinned
        long = self.workload.input_tokens > TOKEN_BUDGETS[0]
        serving = isinstance(self.workload, ServeWorkload) and self._engine.max_batch_tokens > 0
        chunking_choices = (False, True) if long and serving else (False,)
        cuts = (pinned["chunked_prefill"],) if "chunked_prefill" in pinned else chunking_choices
        longest = max(self.workload.input_tokens, TOKEN_BUDGETS[1])
        offered = [size for size in TOKEN_BUDGETS if size <= 2 * longest]
        pinned_budgets = [pinned["max_batch_tokens"]] if "max_batch_tokens" in pinned else None
        whole = self._whole_budgets
        return [
            (cut, size) for cut in cuts for size in pinned_budgets or (offered if cut else whole)
        ]

    @cached_property
    def _whole_budgets(self) -> list[int]:
        """Return the budgets of prompts that are not cut: the default, and what a load needs.

        Engines refuse a step that holds fewer tokens than requests or, with chunked prefill
        pinned off, than the longest request.
        """
        workload, default = self.workload, self._engine.max_batch_tokens
        needed = workload.concurrency or 0 if isinstance(workload, ServeWorkload) else 0
        if self.question.pinned.get("chunked_prefill") is False:
            needed = max(needed, workload.longest_tokens)
        return [0, needed] if needed > default > 0 else [0]

    @cached_property
    def smaller_budgets(self) -> tuple[int, ...]:
        """Return budgets below the default that hold a whole prompt and a token of each request.

        They leave memory to the cache of an engine that sets aside its largest step. The budgets
        of long prompts are open in any case.
        """
        engine, workload = self._engine, self.workload
        is_open = not {"max_batch_tokens", "chunked_prefill"} & self.question.pinned.keys()
        if not (engine.reserves_largest_step and is_open and isinstance(workload, ServeWorkload)):
            return ()
        requests = workload.concurrency or workload.burst_requests or 1
        least = max(workload.input_tokens, min(requests, engine.max_batch_tokens))
        if workload.input_tokens > TOKEN_BUDGETS[0]:
            return ()
        return tuple(size for size in TOKEN_BUDGETS if least <= size < engine.max_batch_tokens)

    def block_on_host(self, chosen: JsonObject, share: float) -> Block | None:
        """Return the block of a format and pipeline size with a share of the weights on the host.

        None if no layout of it is valid, or the engine refuses all of them.
        """
        pinned = self.question.pinned
        others = {name: value for name, value in pinned.items() if name not in SIZES}
        shared = {**chosen, **others, "offload": {"weights_cpu": share}}
        try:
            block = self._block(shared, idle=self.question.request.objective in FRUGAL)
        except (NotPossibleError, NotCoveredError):
            return None
        return block if block.keep.any() else None

    def _block(self, shared: JsonObject, *, idle: bool) -> Block:
        question = self.question
        single_replica = Strategy.model_validate({**shared, "data_parallel_size": 1})
        setting = resolve(question.estimate_request(single_replica), leaves_layout_open=True)
        caches = self._caches(setting.strategy.kv_cache_dtype)
        sizes = self._sizes(shared.get("pipeline_parallel_size"), len(caches))
        layout = self._layout(shared.get("pipeline_parallel_size"), sizes, setting.layout)
        if len(caches) > 1:
            element_sizes = [
                element_bytes(single_replica or setting.strategy.kv_cache_dtype or "bf16")
                for single_replica in caches
            ]
            cache_element_bytes = np.array(element_sizes)[sizes["kv_cache_dtype"].astype(np.int64)]
            layout = replace(layout, cache_element_bytes=cast("float", cache_element_bytes))
        shape = np.broadcast_shapes(*(values.shape for values in sizes.values()))
        available = question.cluster.num_devices
        keep = both(rules_mask(self._rules(layout, setting)), self._is_distinct(layout))
        if not idle:
            keep = both(keep, layout.devices == available)
        block = Block(
            question=question,
            shared=shared,
            sizes=sizes,
            setting=replace(setting, layout=layout),
            keep=cast("Flags", np.broadcast_to(keep, shape)),
            caches=caches,
        )
        return block.compact if block.keep.mean() < SPARSE else block

    def _rules(self, layout: Layout, setting: Setting) -> Iterator[Rule]:
        """Yield the rules that an exact estimate checks, for columns of layouts."""
        model, cluster, engine = self.question.model, self.question.cluster, setting.engine
        separate = has_separate_replicas(setting.strategy, cluster)
        yield from rank_rules(model, cluster.num_devices, layout)
        yield from serving_rules(model, layout)
        yield from supported_size_rules(model, engine, layout, separate=separate)
        yield from option_rules(model, self.workload, engine, setting.strategy, layout)
        for device in self.question.devices:
            blocks = weight_blocks(setting.model, setting.strategy)
            yield from shard_width_rules(model, engine, layout, blocks, device)

    def _is_distinct(self, layout: Layout) -> Flags:
        """Return which layouts are integral and not equivalent to another one."""
        is_integral = both(divides(1, layout.data), layout.data >= 1)
        has_experts = either(layout.attention_data == 1, layout.expert > 1)
        return cast("Flags", both(is_integral, has_experts))

    def _sizes(self, stages: int | None, caches: int) -> dict[str, Numbers]:
        """Return the values of each open choice, each along its own dimension."""
        model = self.question.model
        choices: dict[str, Sequence[int]] = {
            "used": self._device_counts,
            "tensor_parallel_size": self.tensor_sizes,
            "context_parallel_size": self._context_sizes,
            "max_batch_tokens": [size for _, size in self._budgets],
        }
        if caches > 1:
            choices["kv_cache_dtype"] = range(caches)
        if stages is None:
            choices["pipeline_parallel_size"] = self.pipeline_sizes
        pinned = self.question.pinned
        if model.is_moe:
            most = min(self.question.cluster.num_devices, MAX_ATTENTION_RANKS)
            choices["expert_parallel_size"] = divisors(model.num_experts, most)
            choices["attention_data_parallel_size"] = divisors(most, most)
        for name in MIXTURE_SIZES & pinned.keys():
            choices[name] = (pinned[name],)  # a dense model refuses it, with the reason
        fixed = pinned.keys() - {"max_batch_tokens"}
        sizes = axes(
            {
                name: np.array([pinned[name]] if name in fixed else values, dtype=np.float64)
                for name, values in choices.items()
            }
        )
        cuts = np.array([cut for cut, _ in self._budgets], dtype=np.float64)
        sizes["chunked_prefill"] = cuts.reshape(sizes["max_batch_tokens"].shape)
        return sizes

    def _layout(
        self, stages: int | None, sizes: dict[str, Numbers], default_layout: Layout
    ) -> Layout:
        """Return the layout of a grid; data parallelism uses the remaining devices."""
        tensor, context = sizes["tensor_parallel_size"], sizes["context_parallel_size"]
        attention = sizes.get("attention_data_parallel_size", np.ones(1))
        used, budgets = sizes.pop("used"), sizes["max_batch_tokens"]
        pipeline = stages or sizes["pipeline_parallel_size"]
        data = self.question.pinned.get("data_parallel_size") or used / (
            tensor * context * attention * pipeline
        )
        sizes["data_parallel_size"] = np.asarray(data, dtype=np.float64)
        columns: JsonObject = {
            "data": data,
            "tensor": tensor,
            "pipeline": pipeline,
            "expert": sizes.get("expert_parallel_size", 1),
            "context": context,
            "attention_data": attention,
            "batch_tokens": np.where(budgets > 0, budgets, default_layout.batch_tokens),
            "chunked": sizes["chunked_prefill"] > 0,
        }
        return Layout(**scalars(columns))

    @cached_property
    def _device_counts(self) -> list[int]:
        """Return the device counts to try: all, or fewer for a frugal objective."""
        available = self.question.cluster.num_devices
        frugal = self.question.request.objective in FRUGAL
        if "data_parallel_size" in self.question.pinned or not frugal:
            return [available]
        powers = [2**power for power in range(available.bit_length())]
        return sorted({*powers, available})

    @cached_property
    def tensor_sizes(self) -> list[int]:
        """Return the tensor parallel sizes to try."""
        return tensor_sizes(self.question, self.question.cluster.widest_domain)

    @cached_property
    def _context_sizes(self) -> list[int]:
        most = min(self.workload.input_tokens // MIN_CONTEXT_TOKENS, MAX_CONTEXT_RANKS)
        return divisors(self.question.cluster.num_devices, most) or [1]
