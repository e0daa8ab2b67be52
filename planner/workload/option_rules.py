"""The pairs of options that an engine's own validation ties together, as rules of a layout."""

from collections.abc import Iterator, Mapping
from functools import partial

from planner.catalog.engines import Engine
from planner.catalog.option_pairs import pairs_of
from planner.cost.quantity import Quantity, ceil, maximum, where
from planner.cost.weights import WIDE
from planner.specs.model import ModelSpec
from planner.specs.workload import (
    GenerateWorkload,
    OffloadSpec,
    ServeWorkload,
    Strategy,
    TrainWorkload,
    Workload,
)
from planner.workload.layouts import Layout, Rule


def option_rules(
    model: ModelSpec, workload: Workload, engine: Engine, strategy: Strategy, layout: Layout
) -> Iterator[Rule]:
    """Yield the rules of an engine's option pairs, for one layout or for columns of them.

    ``strategy`` has the options that are the same in all rows of a layout with columns.
    """
    rows = pairs_of(engine.key, engine.release)
    if not rows or not isinstance(workload, ServeWorkload | GenerateWorkload | TrainWorkload):
        return
    quantities = {**_sizes(model, layout), **_switches(strategy, layout), **_lengths(workload)}
    quantities["requests"] = _requests(workload, layout)
    for row in rows:
        if row.names <= quantities.keys():
            message = partial(row.message, engine, quantities)
            yield Rule(row.holds(quantities), row.field, message)


def _sizes(model: ModelSpec, layout: Layout) -> dict[str, Quantity]:
    """Return the sizes of a layout."""
    return {
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "context": layout.context,
        "expert": layout.expert,
        "attention_data": layout.attention_data,
        "chunks": layout.chunks,
        "zero_stage": layout.zero_stage,
        "sequence_parallel": where(layout.sequence_parallel, 1.0, 0.0),
        "batch_tokens": layout.batch_tokens,
        "sparse": float(model.is_moe),
        "ranks": layout.state_ranks * layout.tensor,
        "expert_tensor": layout.expert_ranks / maximum(layout.expert, 1),
    }


def _switches(strategy: Strategy, layout: Layout) -> dict[str, Quantity]:
    """Return the options that are on or off, as 1 and 0."""
    offload = strategy.offload or OffloadSpec()
    is_off = strategy.chunked_prefill is False
    return {
        "unchunked": where(layout.chunked, 0.0, float(is_off)),
        "drafts": float(strategy.speculative is not None),
        "flash": float(strategy.attention != "eager"),
        "narrow_cache": float((strategy.kv_cache_dtype or "bf16") not in WIDE),
        "activations_away": float(offload.activations_cpu > 0),
        "recomputes": float((strategy.activation_recomputation or "none") != "none"),
    }


def _lengths(workload: ServeWorkload | GenerateWorkload | TrainWorkload) -> Mapping[str, Quantity]:
    """Return the tokens of a prompt and of the longest request, or of a sequence."""
    if isinstance(workload, TrainWorkload):
        return {"sequence_length": float(workload.sequence_length)}
    return {
        "input_tokens": float(workload.input_tokens),
        "longest_tokens": float(workload.longest_tokens),
    }


def _requests(
    workload: ServeWorkload | GenerateWorkload | TrainWorkload, layout: Layout
) -> Quantity:
    """Return the requests that one rank is told to run at once, 0 where it is told none.

    A batch and a burst queue: they are written with as many requests as a step takes.
    """
    told = workload.concurrency if isinstance(workload, ServeWorkload) else None
    return ceil((told or 0) / (layout.data * layout.attention_data))
