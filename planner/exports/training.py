"""Common parts of the training exports: batch, optimiser, methods, layout notes."""

from planner.exports.case import ExportCase
from planner.exports.export import Notes
from planner.specs.workload import TrainWorkload
from planner.workload.training_methods import DEFAULT_LORA_RANK

ADAPTERS = frozenset({"lora", "qlora", "alphatuning"})
FUSED_UPDATES = frozenset({"lomo", "adalomo", "qft"})


def train_workload(case: ExportCase) -> TrainWorkload:
    """Return the training workload of a case.

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
    """Return the optimiser steps of the run, None if its length is not given."""
    workload = train_workload(case)
    if workload.tokens is None:
        return None
    return -(-workload.tokens // (workload.global_batch_size * workload.sequence_length))


def method_notes(case: ExportCase) -> Notes:
    """Return what the training method needs beyond a launcher's or framework's settings."""
    method = train_workload(case).method
    if method in {"lora", "qlora"}:
        rank = train_workload(case).lora_rank or DEFAULT_LORA_RANK
        note = f"method {method}, rank {rank}: the torchrun export's train.py wraps the model"
        return (note,)
    if method in ADAPTERS:
        return (f"method {method}: wrap the model with its adapters in the training script",)
    if method in FUSED_UPDATES:
        return (f"method {method}: the training script must update inside the backward pass",)
    return ()


def layout_notes(case: ExportCase, said: frozenset[str], title: str) -> Notes:
    """Return notes on the parallel sizes that a format cannot express."""
    axes = ("tensor", "pipeline", "context", "expert")
    parallel_sizes = [f"{axis} parallel {case.size(axis)}" for axis in axes if case.size(axis) > 1]
    missing = [size for size in parallel_sizes if size.split()[0] not in said]
    notes = [f"{title} does not say {', '.join(missing)}: the script must"] if missing else []
    if is_uneven(case) and "layers" not in said:
        shown = ", ".join(str(layers) for layers in case.plan.memory.per_stage_layers or ())
        notes.append(f"the stages hold {shown} layers: {title} splits them evenly by default")
    return tuple(notes)


def is_uneven(case: ExportCase) -> bool:
    """Return whether stages differ by more than one layer."""
    layers = case.plan.memory.per_stage_layers
    return layers is not None and max(layers) - min(layers) > 1
