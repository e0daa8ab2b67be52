"""What several training exports say alike: the batch, the optimiser, the precision."""

from planner.exports.case import ExportCase
from planner.exports.export import Notes
from planner.specs.workload import TrainWorkload

ADAPTERS = frozenset({"lora", "qlora", "alphatuning"})
FUSED_UPDATES = frozenset({"lomo", "adalomo", "qft"})


def train_workload(case: ExportCase) -> TrainWorkload:
    """Return the workload, which the registry lets through only when it trains.

    Raises:
        TypeError: the case does not train.
    """
    if not isinstance(case.workload, TrainWorkload):
        raise TypeError(f"workload.kind is {case.workload.kind!r}: only train has a batch")
    return case.workload


def optimizer_of(case: ExportCase) -> str:
    """Return the optimiser of the plan: the workload's, or AdamW."""
    workload = train_workload(case)
    return workload.optimizer or (workload.method if workload.method == "lomo" else "adamw")


def steps_of(case: ExportCase) -> int | None:
    """Return the optimiser steps of the run, where its length is given."""
    workload = train_workload(case)
    if workload.tokens is None:
        return None
    return -(-workload.tokens // (workload.global_batch_size * workload.sequence_length))


def method_notes(case: ExportCase) -> Notes:
    """Return what the way of training needs beyond a launcher's or a framework's settings."""
    method = train_workload(case).method
    if method in ADAPTERS:
        return (f"method {method}: wrap the model with its adapters in the training script",)
    if method in FUSED_UPDATES:
        return (f"method {method}: the training script must update inside the backward pass",)
    return ()


def layout_notes(case: ExportCase, said: frozenset[str], title: str) -> Notes:
    """Return the parallel sizes that a format has no word for."""
    axes = ("tensor", "pipeline", "context", "expert")
    lost = [f"{axis} parallel {case.size(axis)}" for axis in axes if case.size(axis) > 1]
    unsaid = [words for words in lost if words.split()[0] not in said]
    notes = [f"{title} does not say {', '.join(unsaid)}: the script must"] if unsaid else []
    if is_uneven(case) and "layers" not in said:
        shown = ", ".join(str(held) for held in case.plan.memory.per_stage_layers or ())
        notes.append(f"the stages hold {shown} layers: {title} splits them evenly unless told")
    return tuple(notes)


def is_uneven(case: ExportCase) -> bool:
    """Return whether stages differ by more than the one layer that a remainder leaves."""
    layers = case.plan.memory.per_stage_layers
    return layers is not None and max(layers) - min(layers) > 1
