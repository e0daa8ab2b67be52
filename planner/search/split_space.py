"""The strategy space of disaggregated serving with pinned pools: small, costed one by one.

The rate is found by bisection per layout, which columns cannot do.
"""

from collections.abc import Iterator
from itertools import product
from math import gcd

from planner.search.question import Question
from planner.search.space import MAX_TENSOR_RANKS, formats
from planner.search.training_space import MAX_STAGES, divisors
from planner.specs.base import JsonObject
from planner.specs.strategy import DisaggregatedSpec, Strategy
from planner.techniques.registry import get


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
    model, case, pinned = question.model, question.case, question.pinned
    common = gcd(split.prefill_devices, split.decode_devices)
    most_ranks = min(question.cluster.widest_node, MAX_TENSOR_RANKS)
    ranks = divisors(model.num_attention_heads, most_ranks)
    depths = divisors(common, min(model.num_hidden_layers, MAX_STAGES))
    open_ranks = [1] if get("tensor_parallel").reason_against(case) else ranks
    open_depths = [1] if get("pipeline_parallel").reason_against(case) else depths
    for tensor, depth in product(
        [pinned["tensor_parallel_size"]] if "tensor_parallel_size" in pinned else open_ranks,
        [pinned["pipeline_parallel_size"]] if "pipeline_parallel_size" in pinned else open_depths,
    ):
        if common % (tensor * depth) == 0:
            copies = (split.prefill_devices + split.decode_devices) // (tensor * depth)
            sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": depth}
            yield {**sizes, "data_parallel_size": copies}
