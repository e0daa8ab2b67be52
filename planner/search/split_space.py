"""Every way to serve with a pinned pool of devices for each phase: few, so each is costed exactly.

The rate is found by bisection, layout by layout, which columns cannot do.
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
    """Return the strategies in which both pools are whole replicas; the pins are kept."""
    found = tuple(
        Strategy.model_validate({**shared, **sizes, **question.pinned})
        for shared, sizes in product(_formats(question), _sizes(question, split))
    )
    return found or (question.request.pins,)  # which is refused by its own reason


def _formats(question: Question) -> Iterator[JsonObject]:
    names = ("weight_dtype", "activation_dtype")
    pairs = [()] if "quantization" in question.pinned else formats(question)
    for pair in pairs:
        yield dict(zip(names, pair, strict=False))


def _sizes(question: Question, split: DisaggregatedSpec) -> Iterator[JsonObject]:
    """Yield tensor ranks and stages whose product divides both pools, as far as left open."""
    model, case, pinned = question.model, question.case, question.pinned
    both = gcd(split.prefill_devices, split.decode_devices)
    most_ranks = min(question.cluster.widest_node, MAX_TENSOR_RANKS)
    ranks = divisors(model.num_attention_heads, most_ranks)
    depths = divisors(both, min(model.num_hidden_layers, MAX_STAGES))
    open_ranks = [1] if get("tensor_parallel").reason_against(case) else ranks
    open_depths = [1] if get("pipeline_parallel").reason_against(case) else depths
    for tensor, depth in product(
        [pinned["tensor_parallel_size"]] if "tensor_parallel_size" in pinned else open_ranks,
        [pinned["pipeline_parallel_size"]] if "pipeline_parallel_size" in pinned else open_depths,
    ):
        if both % (tensor * depth) == 0:
            copies = (split.prefill_devices + split.decode_devices) // (tensor * depth)
            sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": depth}
            yield {**sizes, "data_parallel_size": copies}
