"""Parallel layouts, one or columns of them: their rules, and a request's layout."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from typing import Literal

from planner.catalog.engines import (
    Engine,
    ServingEngine,
    kernel_block,
    serving_engine,
    serving_engines,
)
from planner.cost.column import Varying, VaryingField, single, varying
from planner.cost.quantity import (
    Flag,
    both,
    divides,
    either,
    is_column,
    maximum,
    minimum,
    negate,
    where,
)
from planner.cost.weights import RECIPES
from planner.specs.base import Dtype, NotPossibleError
from planner.specs.cluster import ClusterSpec, DeviceSpec
from planner.specs.estimate import EstimateRequest
from planner.specs.model import AttentionLayers, LatentLayers, ModelSpec, WeightPart
from planner.specs.workload import CompressWorkload, Strategy, TrainWorkload

# Parallel layouts: one layout, or columns of them.


ONE, NONE = varying(1), varying(0)  # defaults of fields that may be columns


@dataclass(frozen=True)
class Layout:
    """The parallel sizes, micro-batches and sharding of a strategy.

    Every field may be a column with one value per strategy of a block, ``pipeline`` only for
    inference. The product of data, tensor, pipeline, context and attention data sizes is the
    number of devices in use. In a replica, ``attention_data`` ranks run attention for different
    requests and share the experts. ``batch_tokens`` limits a serving step; ``chunked`` prompts are
    split to it. ``cache_element_bytes`` is 0 if the KV cache has the format of the strategy.
    """

    data: VaryingField = ONE
    tensor: VaryingField = ONE
    pipeline: VaryingField = ONE
    expert: VaryingField = ONE
    context: VaryingField = ONE
    micro_batch: VaryingField = ONE
    micro_batches: VaryingField = ONE
    chunks: VaryingField = ONE
    zero_stage: VaryingField = NONE
    sequence_parallel: Flag = False
    attention_data: VaryingField = ONE
    batch_tokens: VaryingField = NONE
    chunked: Flag = False
    cache_element_bytes: VaryingField = NONE
    shard: VaryingField = NONE

    @property
    def devices(self) -> Varying:
        """Return the number of devices of the layout."""
        return self.data * self.tensor * self.pipeline * self.context * self.attention_data

    @property
    def expert_group(self) -> Varying:
        """Return the ranks that hold all experts once, split by expert and then by column."""
        return maximum(self.tensor * self.attention_data, self.expert)

    @property
    def expert_ranks(self) -> Varying:
        """Return the ranks that split the experts of a layer in training."""
        return maximum(self.tensor, self.expert)

    @property
    def state_ranks(self) -> Varying:
        """Return the ranks with the same weights, which can shard the training states."""
        return self.data * self.context * self.attention_data

    @cached_property
    def shard_ranks(self) -> Varying:
        """Return the ranks that shard one copy of the states, by default all state ranks."""
        return where(self.shard > 0, self.shard, self.state_ranks)

    @property
    def replicas(self) -> Varying:
        """Return the number of copies of the sharded states (HSDP), by default 1."""
        return self.state_ranks / self.shard_ranks

    @property
    def sequence_ranks(self) -> Varying:
        """Return the number of ranks that split the residual stream."""
        return where(self.sequence_parallel, self.tensor, 1)


@dataclass(frozen=True)
class StagePlace:
    """The device of one stage of a heterogeneous pipeline and its link to the next stage.

    ``cluster`` contains only the stage's devices and states whether they share a node or NVLink
    domain; ``inside_domain`` whether the next stage is in that of this one.
    """

    device: DeviceSpec
    cluster: ClusterSpec
    inside_domain: bool


# Validity rules of parallel layouts, for one layout or for columns of them.
#
# An exact estimate raises on the first violated rule; the search masks all layouts that violate
# one. Both use the same rules.


NVFP4_GROUP = 16


@dataclass(frozen=True)
class WeightBlocks:
    """The weights per scale along a row of each part of the layers; 1 without blocks."""

    title: str
    size: int
    dtype: Dtype | None
    exempt: frozenset[str] = frozenset()

    def block(self, part: WeightPart) -> int:
        """Return the block of a part; parts that the checkpoint keeps wide have none."""
        return 1 if part in self.exempt else self.size


def weight_blocks(model: ModelSpec, strategy: Strategy) -> WeightBlocks:
    """Return the blocks of the weights as a strategy stores them."""
    dtype, published = strategy.weight_dtype, strategy.weight_dtype == model.weight_dtype
    exempt = frozenset(model.part_dtypes) if published else frozenset[str]()
    if dtype == "fp8" and published and model.weight_block_size:
        return WeightBlocks("FP8 block", model.weight_block_size, dtype, exempt)
    if dtype == "int4" and strategy.group_size and ":" not in (strategy.quantization or ""):
        return WeightBlocks("group of int4 weights", strategy.group_size, dtype, exempt)
    if dtype == "nvfp4":
        return WeightBlocks("NVFP4 group", NVFP4_GROUP, dtype, exempt)
    return WeightBlocks("", 1, dtype)


@dataclass(frozen=True)
class Rule:
    """A condition, with the field and the message of its violation."""

    holds: Flag
    field: str
    message: Callable[[], str]


def check_rules(rules: Iterable[Rule]) -> None:
    """Raise on the first violated rule.

    Raises:
        NotPossibleError: a rule is violated; the error has its field and message.
    """
    for rule in rules:
        if not rule.holds:
            raise NotPossibleError(rule.message(), rule.field)


def rules_mask(rules: Iterable[Rule]) -> Flag:
    """Return where every rule holds."""
    return reduce(both, (rule.holds for rule in rules))


def rank_rules(model: ModelSpec, available: int, layout: Layout) -> Iterator[Rule]:
    """Yield the rules for parallel sizes on ``available`` devices."""
    data, tensor, pipeline, context = layout.data, layout.tensor, layout.pipeline, layout.context
    attention = layout.attention_data
    yield Rule(
        layout.devices <= available,
        f"strategy.{_largest_degree(layout)}_parallel_size",
        lambda: (
            f"{data} data x {tensor} tensor x {pipeline} pipeline ranks"
            f"{f' x {context} context ranks' if context > 1 else ''}"
            f"{f' x {attention} attention ranks' if attention > 1 else ''} take {layout.devices} "
            f"devices, the cluster has {available}: pin smaller sizes, or choose hardware with "
            f"{layout.devices} devices"
        ),
    )
    yield from _division_rules(model, tensor, pipeline)
    if model.is_moe:
        yield from _expert_rules(model, layout)
        return
    yield Rule(
        layout.expert <= 1,
        "strategy.expert_parallel_size",
        lambda: (
            f"expert_parallel_size is {layout.expert}, but {model.id} is dense: it has no experts"
        ),
    )


def _largest_degree(layout: Layout) -> str:
    """Return the largest parallel size: the one to reduce if there are too many ranks.

    >>> _largest_degree(Layout(data=16, tensor=2))
    'data'
    """
    degrees = {
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "context": layout.context,
        "attention_data": layout.attention_data,
        "data": layout.data,
    }
    if is_column(*degrees.values()):
        return "tensor"  # a mask of columns names no field
    return max(degrees, key=lambda name: degrees[name])


def _division_rules(model: ModelSpec, tensor: int, pipeline: int) -> Iterator[Rule]:
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    yield Rule(
        divides(tensor, heads),
        "strategy.tensor_parallel_size",
        lambda: f"tensor_parallel_size is {tensor}: it must divide the {heads} attention heads",
    )
    yield Rule(
        divides(minimum(kv_heads, tensor), maximum(kv_heads, tensor)),
        "strategy.tensor_parallel_size",
        lambda: (
            f"tensor_parallel_size is {tensor}: it must divide, or be a multiple of, the "
            f"{kv_heads} key-value heads"
        ),
    )
    yield Rule(
        pipeline <= model.num_hidden_layers,
        "strategy.pipeline_parallel_size",
        lambda: (
            f"pipeline_parallel_size is {pipeline}, but the model has only "
            f"{model.num_hidden_layers} layers"
        ),
    )


def _expert_rules(model: ModelSpec, layout: Layout) -> Iterator[Rule]:
    most = layout.state_ranks * layout.tensor
    yield Rule(
        both(layout.expert <= most, divides(layout.expert, model.num_experts)),
        "strategy.expert_parallel_size",
        lambda: (
            f"expert_parallel_size is {layout.expert}: it must divide the {model.num_experts} "
            f"experts and be at most data x tensor = {most}"
        ),
    )


def serving_rules(model: ModelSpec, layout: Layout) -> Iterator[Rule]:
    """Yield the rules for expert parallelism within one replica."""
    if not model.is_moe:
        return
    ranks = layout.tensor * layout.attention_data * layout.context
    yield Rule(
        both(layout.expert <= ranks, divides(layout.expert, layout.expert_group)),
        "strategy.expert_parallel_size",
        lambda: (
            f"expert_parallel_size is {layout.expert}: it must divide the {ranks} ranks that "
            "share the experts (tensor x attention data x context), or be a multiple of them "
            "that divides the data ranks"
        ),
    )


def supported_size_rules(
    model: ModelSpec, engine: Engine, layout: Layout, *, separate: bool
) -> Iterator[Rule]:
    """Yield the rules for parallel sizes that a serving engine supports.

    With ``separate`` replicas are servers of their own: in pools, or on unlike nodes.
    """
    supported = serving_engines().get(engine.key)
    if supported is None:
        return
    title, field = engine.title, "strategy.{}_parallel_size".format
    yield Rule(
        either(layout.context <= 1, supported.context),
        field("context"),
        lambda: (
            f"context_parallel_size is {layout.context}, which {title} does not support: it "
            "splits a context inside the tensor ranks only; leave it out, or choose "
            f"{_engines_supporting('context')}"
        ),
    )
    yield Rule(
        either(layout.attention_data <= 1, supported.attention_data),
        field("attention_data"),
        lambda: (
            f"attention_data_parallel_size is {layout.attention_data}, which {title} does not "
            f"have; leave it out, or choose {_engines_supporting('attention_data')}"
        ),
    )
    yield Rule(
        either(layout.expert <= 1, supported.expert != "none"),
        field("expert"),
        lambda: (
            f"expert_parallel_size is {layout.expert}, which {title} does not have; leave it out, "
            f"or choose {_engines_supporting('expert')}"
        ),
    )
    yield Rule(
        either(layout.tensor <= 1, model.model_type not in supported.whole_model_types),
        field("tensor"),
        lambda: (
            f"tensor_parallel_size is {layout.tensor}, but {title} cuts no {model.model_type} "
            "model by tensor ranks; set pipeline_parallel_size instead"
        ),
    )
    yield Rule(
        either(either(layout.tensor <= 1, layout.pipeline <= 1), not supported.one_split),
        field("tensor"),
        lambda: (
            f"tensor_parallel_size is {layout.tensor} beside pipeline_parallel_size "
            f"{layout.pipeline}: {title} splits a model by tensor ranks or by layers, not by "
            "both; set one of them to 1"
        ),
    )
    if model.is_moe:
        yield from _expert_sharing_rules(supported, title, layout, separate=separate)


def _engines_supporting(degree: Literal["context", "attention_data", "expert"]) -> str:
    """Return the engines that support a parallel size."""
    rows = serving_engines().items()
    *others, last = (key for key, row in rows if getattr(row, degree) not in (False, "none"))
    return f"{', '.join(others)} or {last}" if others else last


def _expert_sharing_rules(
    supported: ServingEngine, title: str, layout: Layout, *, separate: bool
) -> Iterator[Rule]:
    """Yield the rules for ranks that share the experts of a sparse model."""
    field, ranks = "strategy.{}_parallel_size".format, layout.tensor * layout.attention_data
    if supported.expert == "all_ranks":
        yield Rule(
            either(layout.expert <= 1, layout.expert == ranks),
            field("expert"),
            lambda: (
                f"expert_parallel_size is {layout.expert}: {title} has no option for a degree: "
                f"--enable-expert-parallel spreads the experts over all {ranks} ranks (tensor x "
                f"data); set it to 1 or {ranks}"
            ),
        )
    if supported.attention_data_takes_all:
        yield Rule(
            either(layout.attention_data <= 1, layout.tensor <= 1),
            field("tensor"),
            lambda: (
                f"tensor_parallel_size is {layout.tensor} beside attention_data_parallel_size "
                f"{layout.attention_data}: {title}'s attention data parallelism takes all "
                "ranks; set one of them to 1"
            ),
        )
    if supported.data == "separate":
        return
    always = supported.data == "share_experts"
    joined = layout.data > 1 if always else both(layout.data > 1, layout.attention_data > 1)
    yield Rule(
        either(separate, negate(joined)),
        field("data"),
        lambda: (
            f"data_parallel_size is {layout.data}, but the data ranks of {title} share the "
            "experts of a sparse model: use attention_data_parallel_size, or a cluster for each "
            "replica"
        ),
    )


@dataclass(frozen=True)
class CutWidth:
    """A width that ranks cut, and the block of columns of which each must get whole ones."""

    name: str
    width: int
    ranks: float
    block: int
    title: str


def shard_width_rules(
    model: ModelSpec, engine: Engine, layout: Layout, stored: WeightBlocks, device: DeviceSpec
) -> Iterator[Rule]:
    """Yield the rules for widths that tensor parallelism cuts, by whole blocks of the weights.

    Sources: vllm/model_executor/layers/quantization/utils/fp8_utils.py
    validate_fp8_block_shape, awq.py and gptq.py create_weights, layers/linear.py divide; sglang
    0.5.23 has the same checks (issues vllm 17569, 13640; sglang 3571, 26107).
    """
    if not serving_engine(engine.key).checks_cuts:
        return
    for part, name, width in _cut_widths(model):
        own = kernel_block(engine, device, model, part, stored.dtype)
        if own and own.pads:
            continue
        block, title = stored.block(part), stored.title
        if own and own.most:
            block = min(block, own.most)
        if own and own.least > block:
            block, title = own.least, own.title
        ranks: float = layout.tensor
        if part == "experts":
            ranks = layout.expert_group / maximum(layout.expert, 1)
        whole = divides(ranks * block, width) if part != "attention" or block > 1 else True
        cut = CutWidth(name, width, ranks, block, title)
        yield Rule(
            either(ranks <= 1, whole),
            "strategy.tensor_parallel_size",
            partial(_cut_message, model, engine, layout, cut),
        )


def _cut_message(model: ModelSpec, engine: Engine, layout: Layout, cut: CutWidth) -> str:
    """Return why an engine refuses a cut, with the nearest size that works."""
    blocks = f"no multiple of the {cut.block}-wide {cut.title}, " if cut.block > 1 else ""
    return (
        f"tensor_parallel_size is {layout.tensor}: it cuts the {cut.name} of {cut.width} into "
        f"{cut.width / cut.ranks:g} per rank, {blocks}which {engine.title} refuses"
        + _nearest_size(model, layout, cut.width, cut.block, cut.name)
    )


def _cut_widths(model: ModelSpec) -> Iterator[tuple[WeightPart, str, int]]:
    """Yield the widths that tensor parallelism cuts, with their part of the layers and name."""
    outputs = {
        group.heads * group.value_dim
        for group in model.layers_by_attention
        if isinstance(group, AttentionLayers | LatentLayers)
    }
    for width in sorted(outputs):
        yield "attention", "attention output", width
    if model.num_feed_forward_layers:
        yield "feed_forward", "feed-forward width", model.intermediate_size
    if model.shared_intermediate_size:
        yield "feed_forward", "shared experts' width", model.shared_intermediate_size
    if model.is_moe:
        yield "experts", "expert width", model.moe_intermediate_size


def _nearest_size(model: ModelSpec, layout: Layout, width: int, block: int, name: str) -> str:
    """Return the nearest tensor size that works, or expert parallelism for experts."""
    works = [
        tensor
        for tensor in range(1, single(layout.tensor))
        if width % (tensor * block) == 0 and rules_mask(_division_rules(model, tensor, 1))
    ]
    fewer = f"; the nearest that works is {max(works)}" if works else ""
    if model.is_moe and name.startswith("expert"):
        ranks = layout.tensor * layout.attention_data
        return f"{fewer}, or set expert_parallel_size to {ranks} to keep experts whole"
    return fewer


def batch_rules(workload: TrainWorkload, data: int, micro: float) -> Iterator[Rule]:
    """Yield the rules for an even split of the global batch into micro-batches."""
    yield Rule(
        divides(data, workload.global_batch_size),
        "workload.global_batch_size",
        lambda: (
            f"global_batch_size is {workload.global_batch_size}: it must be a multiple of "
            f"data_parallel_size {data}"
        ),
    )
    each = workload.global_batch_size / data
    yield Rule(
        both(micro >= 1, divides(maximum(micro, 1), each)),
        "strategy.micro_batch_size",
        lambda: (
            f"micro_batch_size is {micro}: it must divide the {each:.0f} sequences of each "
            "data-parallel rank"
        ),
    )
    least = workload.least_micro_batch
    yield Rule(
        micro >= least,
        "strategy.micro_batch_size",
        lambda: (
            f"micro_batch_size is {micro}: {workload.objective} compares the answers of a "
            f"micro-batch; choose at least {least}, with as many sequences on each data-parallel "
            "rank"
        ),
    )


def training_rules(
    model: ModelSpec, workload: TrainWorkload, layout: Layout, schedule: str | None
) -> Iterator[Rule]:
    """Yield the other rules of a training layout."""
    yield Rule(
        divides(layout.context, workload.sequence_length),
        "strategy.context_parallel_size",
        lambda: (
            f"context_parallel_size is {layout.context}: it must divide the "
            f"{workload.sequence_length} tokens of a sequence"
        ),
    )
    yield Rule(
        either(layout.shard == 0, layout.zero_stage > 0),
        "strategy.zero_shard_size",
        lambda: (
            f"zero_shard_size is {layout.shard}, but zero_stage is 0: nothing is sharded; "
            "set zero_stage to 1, 2 or 3"
        ),
    )
    yield Rule(
        divides(layout.shard_ranks, layout.state_ranks),
        "strategy.zero_shard_size",
        lambda: (
            f"zero_shard_size is {layout.shard}: it must divide the {layout.state_ranks} ranks "
            "that hold the same weights"
        ),
    )
    yield from _chunk_rules(model, layout, schedule)


def attention_rules(
    attention: str | None, engine: Engine, device: DeviceSpec, layout: Layout, *, training: bool
) -> Iterator[Rule]:
    """Yield the rules for FlexAttention: Slipway's runner, GPUs and unsplit layers."""
    if attention != "flex":
        return
    field, way_out = "strategy.attention", "choose flash"
    yield Rule(
        training and engine.counted_by_operator,
        field,
        lambda: (
            f"attention is flex, with which our own runner trains: {engine.title} "
            f"{'does not train' if training else 'does not serve'} so; {way_out}"
        ),
    )
    yield Rule(
        device.runs_cuda,
        field,
        lambda: (
            f"attention is flex, and torch has no backward pass of FlexAttention on "
            f"{device.name or device.id}, which is not a GPU; {way_out}, or a host with a GPU"
        ),
    )
    whole = both(layout.devices == layout.data, layout.expert <= 1)
    yield Rule(
        whole,
        field,
        lambda: (
            "attention is flex, and layouts that divide layers, sequences or experts attend in "
            f"ways of their own; {way_out}, or leave tensor, pipeline, context and expert "
            "parallel sizes at 1"
        ),
    )


def _chunk_rules(model: ModelSpec, layout: Layout, schedule: str | None) -> Iterator[Rule]:
    chunks, pipeline, layers = layout.chunks, layout.pipeline, model.num_hidden_layers
    plain = either(chunks <= 1, pipeline == 1)
    yield Rule(
        either(plain, chunks * pipeline <= layers),
        "strategy.virtual_pipeline_size",
        lambda: (
            f"virtual_pipeline_size is {chunks}: {pipeline} stages of {chunks} chunks need "
            f"{pipeline * chunks} layers, the model has {layers}"
        ),
    )
    yield Rule(
        either(plain, divides(pipeline, layout.micro_batches)),
        "strategy.virtual_pipeline_size",
        lambda: (
            f"an interleaved pipeline of {pipeline} stages needs a multiple of {pipeline} "
            f"micro-batches, here are {layout.micro_batches}"
        ),
    )
    yield Rule(
        either(chunks <= 1, negate(schedule == "zero_bubble")),
        "strategy.virtual_pipeline_size",
        lambda: (
            f"virtual_pipeline_size is {chunks}, but a zero_bubble schedule does not interleave: "
            "leave it out, or choose interleaved"
        ),
    )


# Parallel sizes that split a layer or a model between ranks.
SPLITS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
    "attention_data_parallel_size",
)


def layout_of(request: EstimateRequest, model: ModelSpec, engine: Engine) -> Layout:
    """Return the requested parallel layout; data parallelism defaults to the remaining devices.

    Raises:
        NotPossibleError: the layout needs too many devices or does not divide the model.
    """
    available = request.cluster.num_devices
    if request.strategy.rollout is not None:
        available -= request.strategy.rollout.devices
    if isinstance(request.workload, CompressWorkload):
        layout = _compression_layout(request.strategy, request.workload)
        check_rules(rank_rules(model, available, layout))
        return layout
    layout = requested_layout(request.strategy, available)
    if isinstance(request.workload, TrainWorkload):
        check_rules(rank_rules(model, available, layout))
        return layout
    layout = _with_tensor_as_all_ranks(layout, available)
    separate = has_separate_replicas(request.strategy, request.cluster)
    shares_experts = serving_engine(engine.key).data == "share_experts"
    if shares_experts and model.is_moe and not separate:
        layout = _merge_all_data_ranks(layout, request.strategy, model.num_experts)
    layout = _merge_expert_parallel_data_ranks(layout)
    check_rules(rank_rules(model, available, layout))
    check_rules(serving_rules(model, layout))
    check_rules(supported_size_rules(model, engine, layout, separate=separate))
    return layout


def has_separate_replicas(strategy: Strategy, cluster: ClusterSpec) -> bool:
    """Return whether replicas are servers of their own: in pools, or on unlike nodes."""
    return strategy.disaggregated is not None or bool(cluster.other_nodes)


def _compression_layout(strategy: Strategy, workload: CompressWorkload) -> Layout:
    """Return the layout of a compression job: copies share the calibration text.

    Raises:
        NotPossibleError: the strategy splits the model, or copies a job without calibration.
    """
    for name in SPLITS:
        size = getattr(strategy, name) or 1
        if size > 1:
            raise NotPossibleError(
                f"{name} is {size}: a compression job works on one layer at a time and does not "
                "shard it; leave it out, or split the calibration data by data_parallel_size",
                f"strategy.{name}",
            )
    copies = strategy.data_parallel_size or 1
    if copies > 1 and not RECIPES[workload.method].is_calibrated:
        raise NotPossibleError(
            f"data_parallel_size is {copies}: method {workload.method} uses no calibration "
            "data that ranks could split; leave it out",
            "strategy.data_parallel_size",
        )
    return Layout(data=copies)


def requested_layout(strategy: Strategy, available: int) -> Layout:
    """Return the parallel sizes that a strategy states; replicas fill the available devices."""
    tensor = strategy.tensor_parallel_size or 1
    pipeline = strategy.pipeline_parallel_size or 1
    context = strategy.context_parallel_size or 1
    attention = strategy.attention_data_parallel_size or 1
    replica = tensor * pipeline * context * attention
    split = strategy.disaggregated
    pools = (split.prefill_devices + split.decode_devices) // replica if split else 0
    return Layout(
        data=strategy.data_parallel_size or max(1, pools or available // replica),
        tensor=tensor,
        pipeline=pipeline,
        expert=strategy.expert_parallel_size or 1,
        context=context,
        attention_data=attention,
    )


def _with_tensor_as_all_ranks(layout: Layout, available: int) -> Layout:
    """Return the layout if the tensor size counts all ranks of a replica, as in SGLang.

    There, tensor parallel size 8 with 8 data-parallel attention ranks is 8 devices.
    """
    tensor, ranks = single(layout.tensor), single(layout.attention_data)
    if layout.devices <= available or tensor % ranks:
        return layout
    inner = replace(layout, tensor=tensor // ranks)
    return inner if inner.devices <= available else layout


def _merge_all_data_ranks(layout: Layout, strategy: Strategy, experts: int) -> Layout:
    """Return the layout with the data ranks of a sparse model as attention ranks, as in vLLM.

    There, data-parallel ranks always share the experts: whole ones with expert parallelism, else
    all of them cut by columns. A layout that states neither size spreads the experts over as many
    ranks as divide them.
    """
    tensor, ranks = single(layout.tensor), single(layout.attention_data * layout.data)
    if strategy.data_parallel_size or strategy.expert_parallel_size or layout.data == 1:
        return replace(layout, data=1, attention_data=ranks)
    spread = math.gcd(tensor * ranks, experts)
    if spread % tensor:
        return replace(layout, data=1)
    return replace(layout, data=1, attention_data=spread // tensor, expert=spread)


def _merge_expert_parallel_data_ranks(layout: Layout) -> Layout:
    """Return the layout with data ranks that share experts as one replica, as in vLLM.

    There, data parallel size 8 with expert parallel size 8 is data-parallel attention.
    """
    ranks = single(layout.tensor * layout.attention_data * layout.context)
    data, expert = single(layout.data), single(layout.expert)
    joined = expert // ranks
    if joined <= 1 or expert % ranks or data % joined:
        return layout
    return replace(layout, data=data // joined, attention_data=layout.attention_data * joined)
