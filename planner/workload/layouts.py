"""The parallel layout of a request, checked against the model and the cluster."""

import math
from dataclasses import replace

from planner.catalog.engine_limits import serving_engine
from planner.catalog.engines import Engine
from planner.cost.compression import RECIPES
from planner.errors import NotPossibleError
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import EstimateRequest
from planner.specs.model import ModelSpec
from planner.specs.strategy import Strategy
from planner.specs.workload import CompressWorkload, TrainWorkload
from planner.workload.ranks import Layout
from planner.workload.validity import check, degree_rules, rank_rules, serving_rules

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
    if isinstance(request.workload, CompressWorkload):
        layout = _compression_layout(request.strategy, request.workload)
        check(rank_rules(model, available, layout))
        return layout
    layout = requested_layout(request.strategy, available)
    if isinstance(request.workload, TrainWorkload):
        check(rank_rules(model, available, layout))
        return layout
    layout = _with_tensor_as_all_ranks(layout, available)
    separate = has_separate_replicas(request.strategy, request.cluster)
    shares_experts = serving_engine(engine.key).data == "share_experts"
    if shares_experts and model.is_moe and not separate:
        layout = _with_all_data_ranks_joined(layout, request.strategy, model.num_experts)
    layout = _with_data_ranks_joined(layout)
    check(rank_rules(model, available, layout))
    check(serving_rules(model, layout))
    check(degree_rules(model, engine, layout, separate=separate))
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
                f"{name} is {size}: a compression job works on one layer at a time, which no "
                "group of ranks splits; leave it out, or share the text by data_parallel_size",
                f"strategy.{name}",
            )
    copies = strategy.data_parallel_size or 1
    if copies > 1 and not RECIPES[workload.method].is_calibrated:
        raise NotPossibleError(
            f"data_parallel_size is {copies}: method {workload.method} looks at no calibration "
            "text that devices could share; leave it out",
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
    ranks = layout.attention_data
    if layout.devices <= available or layout.tensor % ranks:
        return layout
    inner = replace(layout, tensor=layout.tensor // ranks)
    return inner if inner.devices <= available else layout


def _with_all_data_ranks_joined(layout: Layout, strategy: Strategy, experts: int) -> Layout:
    """Return the layout with the data ranks of a sparse model as attention ranks, as in vLLM.

    There, data-parallel ranks always share the experts: whole ones with expert parallelism, else
    all of them cut by columns. A layout that states neither size spreads the experts over as many
    ranks as divide them.
    """
    ranks = layout.attention_data * layout.data
    if strategy.data_parallel_size or strategy.expert_parallel_size or layout.data == 1:
        return replace(layout, data=1, attention_data=ranks)
    spread = math.gcd(layout.tensor * ranks, experts)
    if spread % layout.tensor:
        return replace(layout, data=1)
    return replace(layout, data=1, attention_data=spread // layout.tensor, expert=spread)


def _with_data_ranks_joined(layout: Layout) -> Layout:
    """Return the layout with data ranks that share experts as one replica, as in vLLM.

    There, data parallel size 8 with expert parallel size 8 is data-parallel attention.
    """
    ranks = layout.tensor * layout.attention_data * layout.context
    joined = layout.expert // ranks
    if joined <= 1 or layout.expert % ranks or layout.data % joined:
        return layout
    return replace(
        layout, data=layout.data // joined, attention_data=layout.attention_data * joined
    )
