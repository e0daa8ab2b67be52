"""Validity rules of parallel layouts, for one layout or for columns of them.

An exact estimate raises on the first violated rule; the search masks all layouts that violate
one. Both use the same rules.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import reduce

from planner.catalog.engines import Engine
from planner.cost.columns import Flag, both, divides, either, is_column, maximum, minimum, negate
from planner.errors import NotPossibleError
from planner.specs.cluster import DeviceSpec
from planner.specs.model import ModelSpec
from planner.specs.workload import TrainWorkload
from planner.workload.ranks import Layout


@dataclass(frozen=True)
class Rule:
    """A condition, with the field and the message of its violation."""

    holds: Flag
    field: str
    message: Callable[[], str]


def check(rules: Iterable[Rule]) -> None:
    """Raise on the first violated rule.

    Raises:
        NotPossibleError: with the field and the numbers of the rule.
    """
    for rule in rules:
        if not rule.holds:
            raise NotPossibleError(rule.message(), rule.field)


def mask(rules: Iterable[Rule]) -> Flag:
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
            f"devices, the cluster has {available}"
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
            f"{device.name or device.id}, which is no GPU; {way_out}, or a host with a GPU"
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
